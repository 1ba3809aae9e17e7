from __future__ import annotations

import dataclasses
import functools
import random

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser

from mens_exp.config.data import JsonlData
from mens_exp.config.option_files import config_directory, group_options
from mens_exp.config.overrides import check, spelled_out
from mens_exp.config.schedule import ScheduleKind
from mens_exp.errors import ConfigError, MensError

# Override, place of the message, and further parts of the message.
REFUSED = [
    (
        "quant.duble_quant=true",
        "quant.duble_quant",
        ["unknown key", "found quant.duble_quant=true", "the nearest is quant.double_quant"],
    ),
    ("+lora.foo=1", "lora.foo", ["unknown key", "found +lora.foo=1", "one of lora.name, "]),
    ("++lora.rr=1", "lora.rr", ["unknown key", "the nearest is lora.r"]),
    ("backend=qlra", "backend", ["unknown option", "found qlra", "the nearest is qlora"]),
    ("quant=null", "quant", ["unknown option", "found null", "one of codebook, fp4, hqq2"]),
    (
        "data.path=missing.jsonl",
        "data.path",
        ["is not a key of the chosen data", "data=jsonl, which has it", "add data=jsonl"],
    ),
    ("model.id=here", "model.id", ["is not a key of the chosen model", "model=hf"]),
    ("lr=1e-4", "lr", ["unknown key", "the whole path, optim.lr"]),
    ("sede=1", "sede", ["unknown key", "the nearest is seed"]),
    (
        "lora.rank_pattern=8",
        "lora.rank_pattern",
        ["found 8", "a mapping of names to whole numbers"],
    ),
    ("lora.rank_pattern={mlp:x}", "lora.rank_pattern", ["wrong type", "whole numbers"]),
    (
        "lora.variant=drora",
        "lora.variant",
        ["unknown value", "loha, lokr", "write lora.variant=dora"],
    ),
    ("lora.x.y=1", "lora.x.y", ["unknown key", "one of lora.name, "]),
    (
        "callbacks.progres.plain_every_n_steps=1",
        "callbacks.progres.plain_every_n_steps",
        ["the nearest is callbacks.progress.plain_every_n_steps"],
    ),
    ("lora.alpha=many", "lora.alpha", ["wrong type", "found many", "a whole number"]),
    ("trainer.max_steps=8.5", "trainer.max_steps", ["found 8.5", "a whole number"]),
    ("data.seq_len=true", "data.seq_len", ["found true", "a whole number"]),
    ("data.micro_batch_size=", "data.micro_batch_size", ["found ''", "a whole number"]),
    ("suite.items='a: b'", "suite.items", ["found a: b", "a whole number"]),
    ("optim.lr=[1]", "optim.lr", ["found [1]", "a number"]),
    ("lora.dropout=null", "lora.dropout", ["found null", "a number"]),
    ("data.packing=perhaps", "data.packing", ["found perhaps", "true or false"]),
    (
        "trainer.precison=bf16",
        "trainer.precison",
        ["unknown key", "one of trainer.accelerator, ", "the nearest is trainer.precision"],
    ),
    (
        "+trainer.fast_dev_run=true",
        "trainer.fast_dev_run",
        ["the promise “Nothing is lost”", "checkpoints", "trainer.max_steps=1"],
    ),
    (
        "quant.compute_dtype=bf17",
        "quant.compute_dtype",
        ["one of bf16, f32", "write quant.compute_dtype=bf16"],
    ),
    ("optim.betas=[0.9,x]", "optim.betas", ["found [0.9, 'x']", "a list of numbers"]),
    ("logger.tags=one", "logger.tags", ["found one", "a list of texts"]),
    ("logger.project=[a]", "logger.project", ["found ['a']", "text"]),
    ("callbacks.progress=3", "callbacks.progress", ["a mapping with _target_, plain_every"]),
    ("trainer={max_stps:3}", "trainer.max_stps", ["unknown key", "trainer.max_steps"]),
    ("trainer={max_epochs:x}", "trainer.max_epochs", ["wrong type", "found x"]),
    ("+optim.eps=1", "optim.eps", ["already exists", "write optim.eps="]),
    ("+trainer=cpu", "trainer", ["already exists", "write trainer="]),
    ("++tokenizer=hf", "tokenizer", ["already exists", "write tokenizer="]),
    ("optim@here=adamw", "optim", ["already exists", "write optim="]),
    ("~objective", "objective", ["every run needs this group", "found ~objective"]),
    ("~seed", "seed", ["cannot be removed"]),
    ("~checkpoint.keep", "checkpoint.keep", ["cannot be removed"]),
    (
        "task.name=plan",
        "task.name",
        [
            "is set by the option",
            "task=<attribute|chat|compare|corpus|doctor|evaluate|export|inspect|merge|plan|promote|",
            "push|rejection_sampling|serve|sync|train>",
        ],
    ),
    ("suite.name=none", "suite.name", ["is set by the option", "suite=<"]),
    ("model.default_lr=1e-4", "model.default_lr", ["is set by the option", "set optim.lr"]),
    ("schedule.warmup_steps=1,2", "schedule.warmup_steps", ["several values need", "add -m"]),
    (
        "lora.rank_pattern={'*.layers.1.*':4}",
        None,
        ["not an override", "leave the keys of a mapping unquoted", "{*.layers.1.*:4}'"],
    ),
    ("no equals sign", None, ["not an override", "found no equals sign", "key=value"]),
    (
        "hydra.runn.dir=x",
        "hydra.runn",
        ["hydra.runn: is not a setting of Hydra", "write hydra.run"],
    ),
]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("hydra.run.dri=x", ["expected one of dir; the nearest is dir", "write hydra.run.dir"]),
        ("hydra.job.chdir=maybe", ["hydra.job.chdir: Value 'maybe' is not a valid bool"]),
    ],
)
def test_setting_that_hydra_refuses_is_named(override, parts):
    """Hydra would say `Key 'dri' not in 'RunDir'`."""
    (problem,) = checked(override).problems
    assert all(part in str(problem) for part in parts)


@functools.cache
def checked(*texts, multirun=False):
    return check(texts, multirun=multirun)


def config(*texts):
    result = checked(*texts)
    assert result.problems == ()
    (cell,) = result.cells
    return cell.config


def problem(*texts, multirun=False):
    (only,) = checked(*texts, multirun=multirun).problems
    return only


@pytest.mark.parametrize(("text", "where", "parts"), REFUSED)
def test_refused_override_is_told_among_all_others(text, where, parts):
    """A command with all of these faults gives a complete message for each."""
    problems = checked(*(text for text, _, _ in REFUSED)).problems
    assert len(problems) == len(REFUSED)
    mine = problems[[other for other, _, _ in REFUSED].index(text)]
    assert mine.where == where
    assert all(part in str(mine) for part in parts)
    assert mine.exit_code == 2


@pytest.mark.parametrize(
    ("text", "where", "parts"),
    [
        ("eval=${seed}", "eval", ["wrong type", "found ${seed}", "a mapping with engine"]),
        ("++adapter=${seed}", "adapter", ["wrong type", "a mapping with file"]),
        ("optim.betas=${seed}", "optim.betas", ["wrong type", "a list of numbers"]),
        ("quant.type_pattern=${seed}", "quant.type_pattern", ["wrong type", "a mapping"]),
        ("quant.skip=[[1]]", "quant.skip", ["wrong type", "found [[1]]", "a list of texts"]),
        ("lora.alpha_pattern={a:{b:1}}", "lora.alpha_pattern", ["wrong type", "whole numbers"]),
        ("quant.type_pattern={a:{b:1}}", "quant.type_pattern.a", ["unknown value"]),
        ("trainer.deterministic=[[1]]", "trainer.deterministic", ["is not a valid value"]),
        ("hydra/help=1_000", "hydra/help", ["unknown option", "found 1000"]),
        ("study={a:1}", "study", ["no option is chosen", "expected study=<name of an option>"]),
    ],
)
def test_a_value_of_another_shape_is_refused(text, where, parts):
    """OmegaConf accepts these values, and reading the setting would fail."""
    mine = problem(text)
    assert mine.where == where
    assert all(part in str(mine) for part in parts)


def test_a_range_without_a_step_is_refused():
    """Hydra would raise while it expands the sweep, also for a group's options."""
    for text in ("seed=range(0,4,0)", "trainer=range(0,1,0)"):
        assert "a range needs a step other than 0" in str(problem(text, multirun=True))


def test_whole_lists_may_be_interpolated():
    """The interpolated list has the type of the setting."""
    told = config("lora.targets=[q_proj,v_proj]", "quant.skip=${lora.targets}")
    assert told.quant.skip == ["q_proj", "v_proj"]


VALUES = (
    *("null", "0", "-1", "1", "1e30", "nan", "inf", "true", "''", "' '", "[]", "{}", "[1,2]"),
    *("[a]", "{a:1}", "{a:{b:c}}", "x", "../x", "/", "~", "${seed}", "${x}", "1_000", "1.5"),
    *("'a,b'", "a=b", "[null]", "{a:null}", "[[1]]", "99999999999999999999", "é", "1,2", "???"),
    *("choice(1,2)", "range(1,3)", "range(0,1,0)", "range(1,0)", "interval(0,1)", "glob(*)"),
    *("\\,", "[1,", "'", "choice()", "tag(a,1)", "int(1)", "float(x)", "json_str({a:1})"),
)


@functools.cache
def settings():
    """List every setting and group of a run."""

    def inside(values, prefix=""):
        for name, value in values.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from inside(value, f"{prefix}{name}.")

    return [one for one in inside(dataclasses.asdict(config())) if "_target_" not in one]


def drawn(seed):
    """Draw a few overrides, most of them wrong, and whether to sweep."""
    draw = random.Random(seed)

    def one():
        if draw.random() < 0.3:
            group = draw.choice(sorted(group_options()))
            options = sorted(group_options()[group]) if draw.random() < 0.8 else VALUES
            return f"{group}={draw.choice(options)}"
        key = draw.choice(settings())
        if draw.random() < 0.1:
            key += draw.choice((".x", ".0", ".a-b", "._target_"))
        key = draw.choice(("+", "++", "~")) + key if draw.random() < 0.06 else key
        return key if draw.random() < 0.02 else f"{key}={draw.choice(VALUES)}"

    return [one() for _ in range(draw.randint(1, 4))], draw.random() < 0.4


@pytest.mark.parametrize(
    "seeds",
    [range(40), pytest.param(range(40, 1000), marks=pytest.mark.soak)],
    ids=["a few", "a thousand"],
)
def test_random_overrides_compose_or_are_refused(seeds):
    """None raises an error of Hydra or OmegaConf, or fails in a rule that expects another type."""
    refused = 0
    for seed in seeds:
        texts, multirun = drawn(seed)
        try:
            refused += bool([str(one) for one in check(texts, multirun=multirun).problems])
        except MensError as error:
            refused += bool(str(error))
        except Exception as error:
            raise AssertionError(f"{seed}: check({texts}, {multirun=})") from error
    assert refused > len(seeds) / 2


def test_refused_overrides_leave_the_others_in_force():
    """The remaining overrides compose, so that their values and files are checked too."""
    result = checked("seed=7", "lora.rr=1", "lora.r=0")
    assert [problem.where for problem in result.problems] == ["lora.rr", "lora.r"]
    assert (result.cells[0].config.seed, result.cells[0].config.lora.r) == (7, 0)


ACCEPTED = [
    "optim.lr=1e-4",
    "++lora.r=8",
    "lora={alpha:4}",
    "data.seq_len='256'",
    "model=tiny_llama",
    "suite.items=${lora.r}",
    "trainer.deterministic=null",
    "schedule=linear",
    "quant.compute_dtype=f32",
    "~callbacks.progress",
    "checkpoint.keep=3",
    "logger.tags=[a,1]",
    "~experiment",
    "hydra.job.name=other",
]


def test_accepted_overrides_take_effect():
    """Every kind of override in Hydra that has a meaning here."""
    run = config(*ACCEPTED)
    assert (run.optim.lr, run.lora.r, run.lora.alpha) == (1e-4, 8, 4)
    assert (run.data.seq_len, run.model.name, run.suite.items) == (256, "tiny_llama", 8)
    assert (run.trainer.deterministic, run.schedule.kind) == (None, ScheduleKind.linear)
    assert (run.quant.compute_dtype.value, run.logger.tags) == ("f32", ["a", "1"])
    assert "progress" not in run.callbacks
    assert run.checkpoint.keep == 3


def test_overrides_are_recorded_as_typed():
    """The record can repeat the command."""
    assert checked(*ACCEPTED).cells[0].composed.overrides == tuple(ACCEPTED)


def test_no_override_is_the_default_run():
    """The defaults have no problem."""
    assert config().task.name == "train"


def test_list_of_callbacks_composes_them():
    """In Hydra a group may have several options; an unknown one is named."""
    assert list(config("callbacks=[facts,telemetry]").callbacks) == ["facts", "telemetry"]
    refused = problem("callbacks=[facts,telemetri]")
    assert (refused.where, refused.found) == ("callbacks", "telemetri")


def test_last_of_two_values_wins():
    """A repeated key takes the last value, as in Hydra."""
    assert config("seed=1", "seed=2").seed == 2


def test_key_of_a_misspelt_option_is_let_be():
    """Only the option is reported: the key is valid for the intended option."""
    assert problem("data=jsnl", "data.path=rows.jsonl").where == "data"


def test_wrong_key_of_a_misspelt_option_is_told():
    """No option of the group has such a key."""
    problems = checked("data=jsnl", "data.pth=rows.jsonl").problems
    assert [problem.where for problem in problems] == ["data", "data.pth"]


def test_a_callbacks_class_on_the_command_line_is_told_its_file():
    """A user of Hydra adds an object this way; a file gives it a name for records and sweeps."""
    told = problem("+callbacks.mine._target_=pkg.Mine")
    assert "conf/callbacks/mine.yaml" in told.expected
    assert "callbacks=[default,mine]" in told.remedy


def test_required_value_is_asked_for():
    """The message names the key and says how to set it."""
    asked = problem("data=jsonl")
    assert (asked.where, asked.remedy) == ("data.path", "add data.path=…")
    assert checked("data=jsonl").cells == ()


def test_required_value_given_wrongly_is_not_asked_for_again():
    """One fault gives one message."""
    assert "several values" in str(problem("data=jsonl", "data.path=a.jsonl,b.jsonl"))
    told = problem("task=merge", "path=a,b")  # no message about a missing path
    assert "'path=\"a,b\"'" in str(told)


def test_value_that_does_not_resolve_is_told():
    """An interpolation is checked when it is resolved."""
    assert "nowhere" in str(problem("seed=${nowhere}"))


def test_files_and_columns_are_written_as_a_user_writes_them():
    """A list, a glob and column names are accepted; a misspelt field gets a suggestion."""
    rows = config(
        "data=jsonl", "data.path=[a.jsonl,b/*.jsonl]", "data.columns={prompt:q,response:a}"
    )
    assert isinstance(rows.data, JsonlData)
    assert rows.data.path == ["a.jsonl", "b/*.jsonl"]
    assert (rows.data.columns.prompt, rows.data.columns.response) == ("q", "a")
    given = ("data=jsonl", "data.path=rows/*.jsonl", "data.columns={promt:q}")
    assert "the nearest is data.columns.prompt" in str(problem(*given))


def test_turns_are_no_setting_of_an_objective_that_learns_everything():
    """The causal objective trains on every token, so the setting would have no effect."""
    refused = problem("objective=causal", "objective.turns=last")
    assert refused.where == "objective.turns"
    assert "objective=assistant or distillation, which have it" in str(refused)


def test_setting_that_another_one_undoes_is_refused():
    """The message names the other setting; without that one, it is accepted."""
    given = ("data=jsonl", "data.path=a.jsonl", "data.val_frac=0.1")
    assert config(*given).data.val_frac == 0.1
    assert problem(*given, "data.val_path=b.jsonl").where == "data.val_frac"


def test_task_tells_what_it_does_not_read():
    """Every explicit override without effect is reported."""
    problems = checked("task=evaluate", "path=latest", "seed=3", "lora=qv").problems
    assert [problem.where for problem in problems] == ["seed", "lora"]
    assert config("task=evaluate", "path=latest", "trainer=cpu").trainer.accelerator == "cpu"


SWEEPS = [
    ("seed=1,2", "lora=qv,mlp"),
    ("quant.double_quant=true,false", "lora.r=choice(4,8)", "seed=range(1,3)"),
    ("~callbacks.progress", "lora=glob(*v*)", "optim.betas=[0.9,0.99]"),
    ("data.path='a,b'", "data=jsonl", "seed=2,1"),
    ("seed=1,2", "seed=3"),
]


@pytest.mark.parametrize("texts", SWEEPS, ids=" ".join)
def test_sweep_makes_the_cells_that_hydra_runs(texts):
    """The cells are in Hydra's order, because a cell is found by Hydra's job number."""
    loader = ConfigLoaderImpl(create_config_search_path(str(config_directory())))
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(texts))
    hydras = BasicSweeper.split_arguments(parsed, None)[0]
    result = checked(*texts, multirun=True)
    assert result.problems == ()
    ours = [list(cell.composed.overrides) for cell in result.cells]
    # Hydra's sweeper writes ~key=null for ~key, which means the same.
    assert ours == [[text.replace("progress=null", "progress") for text in cell] for cell in hydras]


def test_cells_of_a_sweep_hold_its_values():
    """Two factors with two values each give four runs."""
    cells = checked("seed=1,2", "lora=qv,mlp", multirun=True).cells
    assert [(cell.config.seed, cell.config.lora.name) for cell in cells] == [
        (1, "qv"),
        (1, "mlp"),
        (2, "qv"),
        (2, "mlp"),
    ]


def test_sweep_tells_the_one_wrong_value():
    """A wrong key, a wrong option, or a value out of range."""
    texts = ("lora.r=8,abc", "lora=qv,qvv", "trainer.max_steps=4,60")
    problems = checked(*texts, multirun=True).problems
    assert [(p.where, p.found) for p in problems] == [("lora.r", "abc"), ("lora", "qvv")]
    low = problem("lora.r=8,0", multirun=True)
    assert (low.where, low.found) == ("lora.r", 0)


def test_key_must_fit_every_option_of_a_sweep():
    """`data.path` would have no effect in half of the runs."""
    refused = problem("data=jsonl,stdlib", "data.path=rows.jsonl", multirun=True)
    assert (refused.where, "data=jsonl" in str(refused)) == ("data.path", True)


@pytest.mark.parametrize("text", ["lora.r=interval(1,8)", "seed=shuffle(1,2,3)"])
def test_sweep_without_a_fixed_list_is_refused(text):
    """Unknown cells could not be checked before the sweep."""
    assert "must list its values, in order" in str(problem(text, multirun=True))


def test_a_mapping_of_patterns_takes_any_keys():
    """Groups, layer names and globs are keys; each run of a sweep may have other keys."""
    checked = check(["lora.rank_pattern={mlp:4,*.layers.1.*.q_proj:8}"])
    assert checked.problems == ()
    assert checked.cells[0].config.lora.rank_pattern == {"mlp": 4, "*.layers.1.*.q_proj": 8}
    swept = check(["lora.rank_pattern={mlp:4},{mlp:8}"], multirun=True)
    assert [cell.config.lora.rank_pattern for cell in swept.cells] == [{"mlp": 4}, {"mlp": 8}]


def test_an_empty_mapping_is_refused_where_it_cannot_empty_another():
    """Mappings are merged, so it would have no effect; a mapping that is empty may be set to {}."""
    told = ["task=promote", "ledger=l", "path=p", "policy=burn_production", "policy.floors={}"]
    found = str(problem(*told))
    assert "policy.floors: an empty mapping changes nothing" in found
    assert "write policy.floors={strictness:…}" in found
    assert config("lora.rank_pattern={}").lora.rank_pattern == {}


def test_options_that_do_not_go_together_are_told(tmp_path, monkeypatch):
    """An experiment that overrides a group the command overrides too is no traceback."""
    experiment = tmp_path / "conf" / "experiment" / "torn.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(
        "# @package _global_\n# Torn?\ndefaults: [override /suite: no_such_suite, _self_]\n",
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the chosen options do not go together") as caught:
        check(["experiment=torn"])
    assert "no_such_suite" in str(caught.value)
    assert caught.value.remedy is not None


def test_an_adapter_s_file_may_be_named_in_short():
    """A mapping with keys of the section stays as it is."""
    given = ["adapter=a.safetensors", "adapter={select:best}", "adapter.select=best", "seed=1"]
    assert spelled_out(given) == ["adapter.file=a.safetensors", *given[1:]]


@pytest.mark.parametrize(
    "question",
    ["Is 1,2 a list? [yes] (no) {maybe}!", "It's a \\ test: 100 %, $HOME", "true", "two words"],
)
def test_a_prompt_may_have_any_characters(question):
    """The prompt arrives as the shell passed it, even if normalized twice; null means no prompt."""
    texts = spelled_out(spelled_out(["task=chat", "path=base", f"chat.prompt={question}"]))
    (cell,) = check(texts).cells
    assert cell.config.chat.prompt == question
    assert spelled_out(["chat.prompt=null", "chat.prompt='quoted, already'"]) == [
        "chat.prompt=null",
        "chat.prompt='quoted, already'",
    ]


@pytest.mark.parametrize(
    ("texts", "multirun", "expected"),
    [
        (["task=compare", "path=a,b/*"], False, "path='a,b/*'"),
        (["path=a,b", "task=sync"], False, "path='a,b'"),
        (["task=compare", "path=[a,b]"], False, "path='a,b'"),
        (["task=compare", 'path="a,b"'], False, 'path="a,b"'),
        (["task=compare", "path=a,b"], True, "path=a,b"),
        (["task=evaluate", "path=a,b"], False, "path=a,b"),
    ],
)
def test_paths_need_no_quotes_where_a_task_reads_several(texts, multirun, expected):
    """With -m, or if a task reads one path, a comma separates sweep values."""
    assert expected in spelled_out(texts, multirun=multirun)


def test_an_integer_beyond_all_floats_is_a_wrong_value():
    """Python has such integers, and OmegaConf raises OverflowError for them."""
    (problem,) = check(["optim.lr=1" + "0" * 400]).problems
    assert str(problem).startswith("optim.lr: wrong type")
