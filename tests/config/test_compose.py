from __future__ import annotations

import dataclasses
import hashlib
import time
from enum import Enum
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from mens_exp.artifacts.digest import digest
from mens_exp.config.compose import (
    begin_command,
    compose,
    config_digest,
    from_yaml,
    stored_digest,
    to_yaml,
    typed,
)
from mens_exp.config.evaluation import NoSandbox
from mens_exp.config.model import HfModel
from mens_exp.config.option_files import group_options
from mens_exp.config.validate import problems_of
from mens_exp.errors import ConfigError
from mens_exp.planning.learned_settings import learned_settings

STORED = Path(__file__).parents[1] / "golden" / "stored"


def values(*overrides):
    return compose([list(overrides)])[0].values


def stored(path, text):
    file = path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def leaves(config, prefix=""):
    if not isinstance(config, DictConfig):
        return [prefix.removesuffix(".")]
    return [leaf for name in config for leaf in leaves(config[name], f"{prefix}{name}.")]


def changed(value):
    """Return a different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(other for other in type(value) if other is not value)
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if value and isinstance(value[0], Enum):
        return [*value, changed(value[0])]
    more = {float: 0.5, int: 7}.get(type(value[0]) if value else str, "x")
    return [*value, more]


def test_stored_configurations_read_back_the_same(combined, tmp_path):
    """Values, types and digest survive config.yaml, for every option."""
    for cell in combined:
        assert_it_reads_back(cell.values, tmp_path)


@pytest.mark.parametrize("path", sorted(STORED.glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_that_earlier_commits_stored_are_read(path):
    """Each file is named after its commit, and every class that it names still exists."""
    config = typed(from_yaml(path))
    nodes = [config.backend, config.objective, config.optim, *config.callbacks.values()]
    assert all(get_class(node._target_) for node in nodes)
    assert problems_of(config) == []


@pytest.mark.parametrize(
    ("name", "literal"),
    [
        ("smoke", "625fca65868307460a3583e9ca52bca924395301bafefe970019a135c2557e44"),
        ("default", "dcef2086882b1a14bffb1a5e0e94b2d1b1ab9fb4efd5f1b184c7264cb348b62c"),
    ],
)
def test_stored_configurations_mean_what_they_meant(name, literal):
    """The expected digests were computed by commit 73c5f0d from these files."""
    stored = from_yaml(STORED / f"{name}_73c5f0d.yaml")
    assert digest(learned_settings(typed(stored))) == literal


@pytest.mark.parametrize("group", ["backend", "callbacks", "experiment", "preset"])
def test_stored_options_read_back_the_same(group, option, tmp_path):
    """The same round trip, for options that set values of other groups or go with few of them."""
    names = group_options()[group]
    if group == "callbacks":
        names = [f"[{','.join(names)}]"]
    for name in names:
        assert_it_reads_back(option(f"{group}={name}").values, tmp_path)


def assert_it_reads_back(before, place):
    file = stored(place, to_yaml(before))
    after = from_yaml(file)
    assert typed(after) == typed(before)
    assert config_digest(after) == stored_digest(file) == config_digest(before)


def test_digest_of_a_stored_configuration_is_that_of_its_values(tmp_path):
    """The digest covers the stored values, not keys that later schemas added."""
    file = stored(tmp_path, "task: {name: promote}\nopen: c # a name\nrate: 3.0e-05\n")
    canonical = b'{"open":"c","rate":3e-05,"task":{"name":"promote"}}'
    assert stored_digest(file) == hashlib.sha256(canonical).hexdigest()
    file.write_text("task: {name: promote}\nopen: d\nrate: 3.0e-05\n", "utf-8")
    assert stored_digest(file) != hashlib.sha256(canonical).hexdigest()


def test_changed_values_read_back_too(tmp_path):
    """Enums, lists, nulls and numbers other than the defaults."""
    before = values(
        "quant.compute_dtype=f32",
        "optim.betas=[0.8,0.9]",
        "trainer.deterministic=false",
        "logger.tags=[a,'1']",
        "optim.lr=3e-5",
        "checkpoint.keep=7",
    )
    after = typed(from_yaml(stored(tmp_path, to_yaml(before))))
    assert after == typed(before)
    assert after.logger.tags == ["a", "1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lora: {rank: 3}\ndata: {source: stdlib}", "rank"),
        ("data: {source: parquet}", "parquet"),
        ("data: {}", "source"),
        ("lora: {r: many}", "many"),
        ("flavour: {sweet: true}", "flavour"),
        ("flavour: 1", "flavour"),
        ("- a list", "not contain a mapping"),
        ("lora: [", "flow node"),
        ("callbacks: {progress: [1]}", "mapping"),
        (
            "trainer: {gradient_clip_val: 1" + "0" * 400 + "}",
            "a whole number of more than 20 digits",
        ),
    ],
)
def test_stored_configuration_of_other_schemas_is_refused(tmp_path, text, reason):
    """The message names the file and the value found in it."""
    file = stored(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        from_yaml(file)
    assert caught.value.where == str(file)
    assert reason in str(caught.value.found)


def test_absent_configuration_is_refused(tmp_path):
    """The message names the run directory; there is no traceback."""
    with pytest.raises(ConfigError, match=r"config\.yaml: .* cannot be read"):
        from_yaml(tmp_path / "config.yaml")


def test_every_value_enters_the_digest():
    """Changing any leaf changes the digest, each to a different one."""
    chosen = ["trainer.deterministic=true", "trainer.val_check_interval=3", "path=p"]
    base = values(*chosen, "policy=burn_production", "study=double_quant")
    base.study.grid = {"seed": [1]}
    base.lora.init_from, base.schedule.warmup_steps, base.schedule.warmup_frac = "i", 1, 0.5
    told = base.trainer
    told.precision, told.gradient_clip_algorithm, told.max_time = "32", "norm", "00:00:01:00"
    told.min_steps, told.benchmark, told.sync_batchnorm = 1, True, True
    told.limit_val_batches, told.profiler, told.plugins = 2, "simple", ["p"]
    base.resume, base.logger.entity, base.logger.group, base.logger.name = "r", "e", "g", "n"
    base.logger.notes = "n"
    base.tokenizer.chat_template = "c"
    base.data.truncation, base.quant.block_size = "left", 64
    base.quant.levels = [-1.0, 1.0]
    base.objective.chunk_tokens, base.objective.weight_field = 64, "w"
    base.optim.loraplus_lr_ratio = 4.0
    base.compare.primary, base.compare.reference = "k", "a"
    base.ledger, base.promote.open_cycle, base.promote.seeds = "l", "c", [1]
    base.promote.parity, base.promote.suite_digest, base.promote.factor = "p", "s", "f"
    base.callbacks.scorecard.every_n_steps = 2
    rounds = base.rejection_sampling
    rounds.output, rounds.hours, rounds.sample = "o", 1.0, ["s"]
    base.chat.prompt, base.push.repo, base.push.message, base.out = "p", "me/x", "m", "o"
    base.base, base.merge.meta, base.adapter.file = "b", "j", "s"
    base.sweep.resume, base.trainer.device_gib, base.trainer.class_gib = "d", 80.0, 24.0
    base.sync.project, base.sync.entity = "p", "e"
    base.merge.mode, base.merge.dtype, base.merge.base = "full", "bf16", "original"
    base.export.base_quant, base.export.double_quant = "nf4", True
    base.attribute.bits, base.attribute.quant_types, base.attribute.rank = 4.0, ["nf2"], 4
    base.data.filter.min_rating, base.data.filter.min_chars, base.data.filter.max_chars = 3, 1, 9
    for name in ("category", "exclude_category", "language"):
        base.data.filter[name] = "f"
    base.corpus.input, base.corpus.output, base.corpus.extract.commit = "i", "o", "c"
    base.corpus.extract.project, base.corpus.mix.budget_tokens = "p", 1
    base.sandbox.workers = 2
    base.eval.base_url, base.eval.model, base.eval.api_key_env = "u", "m", "k"
    base.eval.keep_passing = "r"
    base.parity.text, base.parity.budget.max_kl, base.parity.budget.hidden_error = "t", 1.0, 1.0
    digests = {config_digest(base)}
    paths = leaves(base)
    for path in paths:
        other = base.copy()
        OmegaConf.update(other, path, changed(OmegaConf.select(base, path)))
        digests.add(config_digest(other))
    assert len(paths) > 50
    assert len(digests) == len(paths) + 1


def test_null_and_absent_callback_enter_the_digest():
    """A value set to null, or a removed callback, changes the digest."""
    texts = ["trainer.val_check_interval=3", "~callbacks.memory", "seed=42"]
    digests = [config_digest(values(text)) for text in texts]
    assert len(set(digests)) == 3
    assert digests[2] == config_digest(values())


def test_order_does_not_enter_the_digest():
    """The digest ignores the order of overrides and of keys."""
    one = values("lora.r=8", "seed=3", "callbacks=[facts,telemetry]")
    two = values("callbacks=[telemetry,facts]", "seed=3", "lora.r=8")
    assert list(one.callbacks) != list(two.callbacks)
    assert config_digest(one) == config_digest(two)


def test_earlier_run_s_model_directory_is_read(tmp_path):
    """Its `source` is called "directory", and it lacks `revision` and `trust_remote_code`."""
    text = to_yaml(values("model=hf", "model.id=/models/mine"))
    for line in ("  revision: null\n", "  trust_remote_code: false\n"):
        assert line in text
        text = text.replace(line, "")
    assert "  source: hf\n" in text
    text = text.replace("  source: hf\n", "  source: directory\n")
    model = typed(from_yaml(stored(tmp_path, text))).model
    assert isinstance(model, HfModel)
    assert (model.id, model.revision, model.trust_remote_code) == ("/models/mine", None, False)


def test_earlier_run_without_a_sandbox_is_read(tmp_path):
    """Nothing was executed then, so it is read as sandbox=none."""
    text = to_yaml(values())
    begin = text.index("sandbox:\n")
    end = begin + len("sandbox:\n")
    while text[end : end + 2] == "  ":
        end = text.index("\n", end) + 1
    earlier = text[:begin] + text[end:]
    assert "memory_mib" not in earlier
    assert typed(from_yaml(stored(tmp_path, earlier))).sandbox == NoSandbox()


def test_interpolation_is_resolved_in_digest_and_file():
    """A value given by reference is stored and digested as the resolved value."""
    config = values("model=tiny_llama", "data.seq_len=${model.max_position_embeddings}")
    same = values("model=tiny_llama", "data.seq_len=2048")
    assert config_digest(config) == config_digest(same)
    assert "seq_len: 2048" in to_yaml(config)


def test_typed_configuration_holds_no_omegaconf_container():
    """Nodes are dataclasses of their schemas; lists and mappings are plain Python."""
    config = typed(values("model=tiny_llama"))
    assert type(config.model).__name__ == "RandomModel"
    assert type(config.lora.targets) is list
    assert type(config.callbacks) is dict
    assert all(dataclasses.is_dataclass(callback) for callback in config.callbacks.values())


def test_choices_name_the_option_of_each_group():
    """Choices made by an experiment count; without an experiment it is None."""
    smoke, none = compose([["experiment=smoke", "lora=qv"], []])
    assert (smoke.choices["model"], smoke.choices["lora"]) == ("tiny_llama", "qv")
    assert (smoke.choices["experiment"], none.choices["experiment"]) == ("smoke", None)


def test_command_beats_experiment_beats_defaults():
    """An experiment overrides the defaults, and the command overrides the experiment."""
    smoke = values("experiment=smoke", "trainer.max_steps=7")
    assert (smoke.trainer.max_steps, smoke.data.seq_len, smoke.lora.r) == (7, 256, 16)


def test_a_list_of_options_is_on_record():
    """Hydra's own record of choices leaves such a list out."""
    (composed,) = compose([["callbacks=[facts,telemetry]"]])
    assert composed.choices["callbacks"] == "facts,telemetry"
    assert composed.choices["lora"] == "all_linear"


def test_a_run_directory_is_known_before_hydra_makes_it():
    """For a single run and for each job of a sweep."""
    cells = compose([["seed=1", "hydra.sweep.dir=s"], ["seed=2", "hydra.sweep.dir=s"]])
    digests = [config_digest(cell.values)[:8] for cell in cells]
    assert [cell.sweep_dir for cell in cells] == [f"s/{n}_{digests[n]}" for n in (0, 1)]
    assert [str(cell.run_dir).rpartition("_")[2] for cell in cells] == digests
    (fixed,) = compose([["hydra.run.dir=mine"]])
    assert fixed.run_dir == "mine"


def test_each_command_has_its_own_time():
    """Run directories of two commands differ, and within one command they agree."""
    begin_command()
    first, again = (one.run_dir for one in compose([[], []]))
    time.sleep(0.002)  # run directories are named by time, to the millisecond
    begin_command()
    (second,) = compose([[]])
    assert first == again
    assert first != second.run_dir


@pytest.mark.parametrize("name", ["vox", "hf"])
def test_earlier_run_of_vox_on_pretrained_weights_is_read(name, tmp_path):
    """A stored run from before the permission existed can be resumed; a new one is refused."""
    before = values("backend=burn", f"tokenizer={name}", "trainer=cpu", "logger=none")
    permission = "  allow_unrelated_rows: false\n"
    text = to_yaml(before)
    assert permission in text
    after = typed(from_yaml(stored(tmp_path, text.replace(permission, ""))))
    assert (after.tokenizer.name, problems_of(after)) == (name, [])
    assert bool(problems_of(typed(from_yaml(stored(tmp_path, text))))) is (name == "vox")


@pytest.mark.parametrize(
    ("overrides", "bounds"),
    [
        ((), (60, -1)),
        (("trainer.max_epochs=3",), (-1, 3)),
        (("trainer.max_epochs=3", "trainer.max_steps=60"), (60, 3)),
        (("trainer=cpu", "trainer.max_epochs=3"), (-1, 3)),
        (("experiment=smoke", "trainer.max_epochs=3"), (4, 3)),
    ],
)
def test_naming_epochs_lifts_the_default_steps(overrides, bounds):
    """An explicit `max_steps`, in an experiment or on the command line, is kept."""
    trainer = typed(values(*overrides)).trainer
    assert (trainer.max_steps, trainer.max_epochs) == bounds
    assert "mens.steps" not in to_yaml(values(*overrides))


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ([], 2e-3),
        (["optim=lion"], 2e-4),
        (["model=tiny_llama"], 2e-3),
        (["model=hf", "model.id=here"], 2e-3),
        (["model=gpt2", "optim=adamw_8bit"], 2e-3),
        (["model=llama3_8b"], 2e-4),
        (["model=mistral_7b", "optim=paged_adamw_8bit"], 2e-4),
        (["model=qwen2_5_7b", "optim=adamw_8bit"], 2e-4),
        (["model=llama3_8b", "optim=lion"], 2e-5),
        (["model=llama3_8b", "optim.lr=1e-3"], 1e-3),
        (["model=llama3_8b", "preset=tiny"], 1e-4),
        (["model=llama3_8b", "preset=trl_like"], 2e-5),
        (["preset=sigilderg_phase1"], 1e-4),
    ],
)
def test_the_rate_is_the_model_s_unless_it_is_set(overrides, rate):
    """2e-4 for 7B and 13B (QLoRA, table 9), a tenth for Lion; an explicit value is kept."""
    found = values(*overrides)
    assert typed(found).optim.lr == rate
    assert "mens.lr" not in to_yaml(found)


def test_earlier_run_keeps_the_rate_that_it_was_made_with(tmp_path):
    """An 8B run at the demo's rate; its stored configuration has no `default_lr`."""
    text = to_yaml(values("model=llama3_8b", "optim.lr=0.002"))
    line = "  default_lr: 0.0002\n"
    assert line in text
    after = typed(from_yaml(stored(tmp_path, text.replace(line, ""))))
    assert (after.optim.lr, after.model.default_lr) == (2e-3, None)
