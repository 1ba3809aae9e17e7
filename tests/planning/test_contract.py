from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from enum import Enum
from pathlib import Path

import pytest
from hydra.utils import get_class

from mens_exp.artifacts.digest import digest
from mens_exp.config.compose import compose, typed
from mens_exp.config.fields import Effect
from mens_exp.config.option_files import group_options
from mens_exp.config.root import RunConfig
from mens_exp.config.schemas import SCHEMAS, declarations, effect_of
from mens_exp.corpus import synthetic
from mens_exp.planning.contract import contract_of
from mens_exp.planning.learned_settings import RECORDING_CALLBACKS, learned_settings

# One command for each schema, on which each field of the schema can be changed.
COMMANDS = {
    "model.bundled": ["model=smollm2_135m"],
    "model.hf": ["model=hf", "model.id=somewhere/absent"],
    "model.directory": ["model=hf", "model.id=somewhere/absent"],
    "objective.causal": ["objective=causal"],
    "objective.last_k": ["objective=last_k"],
    "objective.fim": ["objective=fim"],
    "objective.distillation": ["objective=distillation", "objective.teacher=somewhere/absent"],
    **{f"objective.{one}": [f"objective={one}"] for one in ("dpo", "cpo", "simpo", "orpo", "kto")},
    "objective.grpo": ["objective=grpo"],
    "lora.prompt_tuning": ["lora=prompt_tuning"],
    "lora.passthrough": ["lora=peft", "lora.config.peft_type=OFT"],
    "backend.proxy": ["backend=proxy"],
    "backend.lora": ["backend=lora"],
    "backend.full": ["backend=full"],
    "backend.burn": ["backend=burn"],
    "optim.adamw_8bit": ["optim=adamw_8bit"],
    "optim.paged_adamw_8bit": ["optim=paged_adamw_8bit"],
    **{f"optim.{one}": [f"optim={one}"] for one in ("lion", "muon", "prodigy", "adafactor", "sgd")},
    "optim.galore": ["optim=galore", "backend=full"],
    "optim.apollo": ["optim=apollo", "backend=full"],
    "optim.schedule_free": ["optim=schedule_free", "schedule=constant"],
    **{
        f"schedule.{one}": [f"schedule={one}"]
        for one in ("linear", "constant", "wsd", "one_cycle", "lr_range")
    },
    "logger.csv": ["logger=csv"],
    "logger.tensorboard": ["logger=tensorboard"],
    "data.jsonl": ["data=jsonl", "data.path=rows.jsonl"],
    "data.synthetic": ["data=synthetic"],
    "data.hub": ["data=hub", "data.id=lab/rows"],
    "data.mix": ["data=mix", "data.sources=[{path:a.jsonl,weight:0.7},{source:stdlib,weight:1}]"],
    "logger.wandb": ["logger=wandb"],
    "suite.heldout_syntax": ["suite=heldout_syntax"],
    "suite.mini_python": ["suite=mini_python"],
    "suite.humaneval": ["suite=humaneval"],
    "suite.rust": ["suite=rust", "suite.path=tasks.jsonl"],
    "suite.jsonl": ["suite=jsonl", "suite.path=rows.jsonl"],
    "suite.lm_eval": ["suite=lm_eval", "suite.path=tasks"],
    "suite.scorecard_spec": ["suite=scorecard_spec", "suite.path=spec.json"],
    "sandbox.bubblewrap": ["sandbox=bubblewrap"],
    "sandbox.unsafe": ["sandbox=unsafe"],
    "policy.burn_production": ["policy=burn_production"],
    "policy.qlora_plateau": ["policy=qlora_plateau"],
    "policy.burn_rnd": ["policy=burn_rnd"],
    "policy.eval_gate": ["policy=eval_gate"],
    "study.study": ["study=double_quant"],
}
# The other value of settings for which number + 1 or a longer text is not valid.
OTHER = {
    "data.path": "other.jsonl",
    "data.val_path": "validation.jsonl",
    "model.id": "elsewhere/absent",
    "lora.init_from": "a run",
    "lora.config": {"peft_type": "OFT", "oft_block_size": 16},
    "tokenizer.chat_template": "template.jinja",
}


def leaves():
    """List every leaf of every schema: the command that has it, and its dotted path."""
    root = dataclasses.fields(RunConfig)
    found = {("", path) for field in root if field.name not in SCHEMAS for path in inside(field)}
    for group, schemas in SCHEMAS.items():
        if group == "callbacks":
            continue  # distinguished by class, below
        for name, schema in schemas.items():
            fields = [path for field in dataclasses.fields(schema) for path in inside(field)]
            found |= {(f"{group}.{name}", f"{group}.{path}") for path in fields}
    return sorted(found)


def inside(field):
    """Return the leaf of a field, or the leaves of the section that it holds."""
    if not dataclasses.is_dataclass(field.default_factory):
        return [field.name]
    section = dataclasses.fields(field.default_factory)
    return [f"{field.name}.{path}" for one in section for path in inside(one)]


LEAVES = leaves()
# Settings with only one value so far.
SINGLE = {"format"}


@functools.cache  # Hydra takes a third of a second each time
def composed(command):
    ours = ["model=tiny_llama", "logger=none", "suite=none", *COMMANDS.get(command, [])]
    by_group = {text.partition("=")[0]: text for text in ours}
    return typed(compose([list(by_group.values())])[0].values)


def base(command):
    return copy.deepcopy(composed(command if command in COMMANDS else ""))


def other(path, value):
    """Return a different value of the same type."""
    if path in OTHER:
        return OTHER[path]
    if isinstance(value, Enum):
        return next(one for one in type(value) if one is not value)
    others = {
        bool: lambda is_so: not is_so,
        int: lambda number: number + 1,
        float: lambda number: number + 1,
        dict: lambda mapping: {**mapping, "q_proj": 3},
        list: lambda entries: [*entries, "another"],
    }
    return others.get(type(value), lambda text: f"{text}, another")(value)


def flipped(config, path):
    parent = config
    *groups, name = path.split(".")
    for group in groups:
        parent = getattr(parent, group)
    setattr(parent, name, other(path, getattr(parent, name)))
    return config


def test_every_setting_is_declared():
    """The table has exactly the leaves of all schemas."""
    paths = {path for _, path in LEAVES}
    sections = {path.rpartition(".")[0] for path in paths} - {""}
    declared = {path for path in declarations() if not path.startswith("callbacks.")}
    assert declared - SCHEMAS.keys() - sections == paths


def test_every_key_of_the_root_says_whether_it_changes_what_is_learned():
    """Sections and groups too; their settings inherit the effect unless they declare another."""
    root = [declarations()[field.name] for field in dataclasses.fields(RunConfig)]
    assert all(one.changes is not None for several in root for one in several)


def test_schemas_of_a_group_agree_on_the_effect_of_a_setting():
    """A path has the same effect, whichever option is chosen."""
    for path, several in declarations().items():
        assert len({one.changes for one in several} - {None}) <= 1, path


FLIPPED = [leaf for leaf in LEAVES if leaf[1] not in SINGLE]


@pytest.mark.parametrize(("command", "path"), FLIPPED, ids=lambda value: str(value) or "root")
def test_digest_moves_exactly_with_what_changes_what_is_learned(command, path):
    """One field is changed at a time."""
    before = contract_of(base(command)).digest
    after = contract_of(flipped(base(command), path)).digest
    assert (before != after) == (effect_of(path) is Effect.TRAINING)


@pytest.mark.parametrize(
    ("command", "literal"),
    [
        ([], "dcef2086882b1a14bffb1a5e0e94b2d1b1ab9fb4efd5f1b184c7264cb348b62c"),
        (["preset=trl_like"], "c0e61628523be43bc714fd725b60cb3580ea42ad46c077c11fcce1990b10aefb"),
        (["backend=proxy"], "11ab9cf405720c4f8fbf3e708b3227ee02cf7fecca4c9500db58bc5528e57e40"),
    ],
    ids=["default", "trl_like", "proxy"],
)
def test_what_changes_learning_is_as_it_was_when_records_were_made(command, literal):
    """With another digest, earlier records can no longer be compared: that needs a new version.

    A changed default also changes the contract; only then may the literal change.
    """
    assert digest(learned_settings(typed(compose([command])[0].values))) == literal


@pytest.mark.parametrize("option", group_options()["callbacks"])
def test_our_callbacks_only_record(option):
    """Without them the digest is the same, except for early stopping, which can end a run."""
    bare, with_it = (
        contract_of(typed(compose([["model=tiny_llama", f"callbacks={name}"]])[0].values))
        for name in ("minimal", option)
    )
    assert (bare.digest == with_it.digest) == (option != "early_stopping")


@pytest.mark.parametrize("chooser", ["callbacks=[default,early_stopping]", "adapter.select=best"])
@pytest.mark.parametrize("more", ["trainer.val_check_interval=7", "data.val_max_tokens=77"])
def test_validation_counts_where_it_chooses(tiny_config, chooser, more):
    """Its frequency and size affect the kept adapter only if something selects by validation."""
    assert contract_of(tiny_config()).digest == contract_of(tiny_config(more)).digest
    chosen = contract_of(tiny_config(chooser))
    assert chosen.digest != contract_of(tiny_config(chooser, more)).digest


LOOKING = ("suite=mini_python", "callbacks.scorecard.every_n_steps=2")
BY_KPI = (*LOOKING, "adapter.select=best", "adapter.metric=parse_rate")


@pytest.mark.parametrize(
    "more",
    ["callbacks.scorecard.every_n_steps=1", "callbacks.scorecard.items=3", "suite.items=7"],
)
def test_a_scorecard_counts_where_it_chooses(tiny_config, more):
    """Its items and frequency affect the contract only if adapters are selected by its score."""
    looking = contract_of(tiny_config(*LOOKING)).digest
    assert looking == contract_of(tiny_config()).digest
    assert looking == contract_of(tiny_config(*LOOKING, more)).digest
    chosen = contract_of(tiny_config(*BY_KPI)).digest
    assert chosen != contract_of(tiny_config(*BY_KPI, more)).digest
    assert chosen != contract_of(tiny_config(*LOOKING, "adapter.select=best")).digest


def test_files_that_a_glob_finds_are_those_that_are_named(tiny_config, rows):
    """Both describe the same rows."""
    one, two = (
        contract_of(tiny_config("data=jsonl", f"data.path={path}")).digest
        for path in (rows, rows.with_name("r*.jsonl"))
    )
    assert one == two


def test_recording_callbacks_exist():
    """The table names classes by path; after a move, a class would count as training."""
    assert all(get_class(path) for path in RECORDING_CALLBACKS)


def test_callback_of_the_users_own_is_part_of_the_contract(
    tiny_config,
):
    """Two runs are distinguished rather than wrongly taken to be the same."""
    config = tiny_config()
    before = contract_of(config).digest
    config.callbacks = {**config.callbacks, "mine": dataclasses.replace(config.callbacks["facts"])}
    config.callbacks["mine"]._target_ = "my_callbacks.Mine"  # Hydra's own key
    assert learned_settings(config)["callbacks.mine._target_"] == "my_callbacks.Mine"
    assert contract_of(config).digest != before


def test_rows_are_their_content_not_their_name(tiny_config, rows, tmp_path):
    """A copy gives the same digest; one changed letter gives another."""
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(rows.read_bytes())
    digests = [
        contract_of(tiny_config("data=jsonl", f"data.path={path}")).digest for path in (rows, copy)
    ]
    assert digests[0] == digests[1]
    copy.write_bytes(rows.read_bytes().replace(b"x", b"y", 1))
    assert contract_of(tiny_config("data=jsonl", f"data.path={copy}")).digest != digests[0]


def test_generated_rows_are_what_makes_them(tiny_config, monkeypatch):
    """The same settings with another version of the generator give another digest."""
    contract = contract_of(tiny_config("data=synthetic"))
    assert str(contract.data.generated_from).startswith("generator ")
    monkeypatch.setattr(synthetic, "generator_sha256", lambda: "0" * 64)
    other = contract_of(tiny_config("data=synthetic"))
    assert "generator 000000000000, Python 3" in str(other.data.generated_from)
    assert other.digest != contract.digest


def test_order_of_targets_means_nothing(tiny_config):
    """Targets are a set."""
    one, two = (
        contract_of(tiny_config(f"lora.targets=[{names}]")).digest
        for names in ("q_proj,v_proj", "v_proj,q_proj")
    )
    assert one == two


@pytest.mark.parametrize(
    ("setting", "wide", "narrow"),
    [
        ("quant.type_pattern", "mlp:nf2", "down_proj:nf8"),
        ("quant.block_size_pattern", "mlp:64", "down_proj:128"),
        ("quant.double_quant_pattern", "mlp:false", "down_proj:true"),
        ("lora.rank_pattern", "self_attn.q_proj:2", "q_proj:4"),
        ("lora.alpha_pattern", "self_attn.q_proj:2", "q_proj:4"),
    ],
)
def test_order_of_patterns_counts(tiny_config, setting, wide, narrow):
    """The last matching pattern applies, so another order is another run."""
    one, two = (
        contract_of(tiny_config(f"{setting}={{{listed}}}"))
        for listed in (f"{wide},{narrow}", f"{narrow},{wide}")
    )
    assert one.digest != two.digest
    assert one.settings[setting] != two.settings[setting]


def test_contract_carries_the_names_that_decide_the_kernel(
    tiny_config,
):
    """The typed parts of the contract are frozen."""
    contract = contract_of(tiny_config("lora.r=4", "quant=fp4", "trainer.max_steps=7"))
    assert (contract.adapter.method, contract.adapter.rank) == ("qlora", 4)
    assert (contract.quant.base, contract.quant.double_quant) == ("fp4", True)
    assert (contract.exec.max_steps, contract.exec.epochs) == (7, None)
    assert contract.data.tokenizer_mode == "hf"
    assert contract.provenance.base_family == "llama"
    with pytest.raises(dataclasses.FrozenInstanceError):
        contract.quant = contract.quant


def test_digest_covers_the_parts(tiny_config):
    """A handmade contract with other parts differs; provenance and target do not count."""
    contract = contract_of(tiny_config())

    def changed(part, **values):
        return dataclasses.replace(
            contract, **{part: dataclasses.replace(getattr(contract, part), **values)}
        )

    assert changed("exec", ce_last_k=1).digest != contract.digest
    assert changed("quant", base="none").digest != contract.digest
    assert changed("artifact", deployment_target="mobile_edge").digest == contract.digest
    assert changed("provenance", license_class="MIT").digest == contract.digest


def test_record_is_plain_json(tiny_config):
    """The record is written to the manifest unchanged."""
    record = contract_of(tiny_config()).record()
    assert json.loads(json.dumps(record)) == record
    assert record["digest"] == contract_of(tiny_config()).digest


def card(directory, licence):
    (directory / "README.md").write_text(f"---\nlicense: {licence}\n---\n", "utf-8")
    return directory


@pytest.mark.parametrize(
    ("licence", "required"), [("mit", True), ("cc0-1.0", False), ("own-terms", None)]
)
def test_origin_is_what_the_model_card_states(
    tiny_base,
    tiny_config,
    tmp_path,
    licence,
    required,
):
    """The licence's requirements are stated if known, else null with the reason."""
    directory = card(Path(shutil.copytree(tiny_base.directory, tmp_path / "base")), licence)
    contract = contract_of(tiny_config("model=hf", f"model.id={directory}"))
    assert contract.record()["provenance"] == {
        "base_family": "llama",
        "upstream_model_id": str(directory),
        "license_class": licence,
        "attribution_required": required,
    }
    place = "contract.provenance.attribution_required"
    reason = {place: "what own-terms asks is not known here"}
    assert contract.unknown == (reason if required is None else {})


def test_origin_of_a_bundled_model_is_the_configuration_s(
    tiny_config,
):
    """SmolLM2's licence, Apache-2.0, requires attribution."""
    part = contract_of(tiny_config("model=smollm2_135m")).provenance
    assert (part.license_class, part.attribution_required) == ("Apache-2.0", True)
    assert part.unknown == {}


def test_origin_that_nobody_states_is_null_with_its_reason(
    tiny_config,
):
    """Random weights have no publisher; a missing directory has no known family either."""
    random = contract_of(tiny_config())
    assert random.provenance.attribution_required is None
    assert [path.rpartition(".")[2] for path in random.unknown] == [
        "license_class",
        "attribution_required",
    ]
    absent = contract_of(tiny_config("model=hf", "model.id=somewhere/absent/at/all"))
    assert "contract.provenance.base_family" in absent.unknown


def test_sources_of_a_mix_are_their_content_and_weight(tiny_config, tmp_path):
    """A file's path and a source's name do not count; its weight, filter and rows do."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p", "response": "r"}\n', "utf-8")
    copy_ = tmp_path / "copy.jsonl"
    shutil.copy(rows, copy_)

    def of(entry):
        return contract_of(tiny_config("data=mix", f"data.sources=[{entry}]")).digest

    first = of(f"{{path:{rows},weight:1}}")
    assert of(f"{{path:{copy_},weight:1,name:other}}") == first
    assert of(f"{{path:{rows},weight:2}}") != first
    assert of(f"{{path:{rows},weight:1,filter:{{min_rating:2}}}}") != first
    copy_.write_text('{"prompt": "p", "response": "s"}\n', "utf-8")
    assert of(f"{{path:{copy_},weight:1}}") != first
