from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.config.fields import range_problems
from mens_exp.config.lora import LoraInit
from mens_exp.config.option_files import group_options
from mens_exp.config.suite import HeldoutSyntaxSuite, LmEvalSuite, MiniPythonSuite, NoSuite
from mens_exp.config.trainer import EarlyStoppingConfig, ScorecardConfig, Selection
from mens_exp.config.validate import (
    TASK_READS,
    ineffective_overrides,
    overrides_not_read,
    problems_of,
)

Changed = dict[str, Any]


@pytest.fixture(scope="session")
def make():
    """Return a valid tiny_llama configuration with some values changed, by dotted path."""
    valid = typed(compose([["model=tiny_llama", "data=jsonl", "data.path=rows.jsonl"]])[0].values)

    def changed(values):
        config = copy.deepcopy(valid)
        for path, value in values.items():
            *groups, name = path.split(".")
            node = config
            for group in groups:
                node = node[group] if isinstance(node, dict) else getattr(node, group)
            setattr(node, name, value)
        return config

    return changed


def places(config):
    return [problem.where for problem in problems_of(config)]


STOPPING = {"early_stopping": EarlyStoppingConfig(_target_="x")}


def scoring(every_n_steps, **settings):
    return {"scorecard": ScorecardConfig(_target_="x", every_n_steps=every_n_steps, **settings)}


# Four micro-batches a step: a validation and a scorecard after every second step.
BY_KPI = {
    "adapter.select": Selection.best,
    "adapter.metric": "parse_rate",
    "trainer.val_check_interval": 8,
    "callbacks": scoring(2),
}
GOOD = [
    {},
    {"lora.r": 1, "lora.dropout": 0.0},
    {"trainer.max_steps": -1, "trainer.max_epochs": 2},
    {"trainer.max_steps": 4, "schedule.warmup_steps": 3},
    {"trainer.max_steps": -1, "trainer.max_epochs": 1, "schedule.warmup_steps": 9},
    {"optim.betas": [0.0, 0.999]},
    {"trainer.accelerator": "gpu"},
    {"data.val_frac": 0.4, "data.heldout_frac": 0.5},
    {"data.path": ["a.jsonl", "b.jsonl"], "data.val_path": "val/*.jsonl"},
    {"data.columns.prompt": "q", "data.columns.response": "a"},
    {"data.columns.messages": "dialog", "data.group_column": "source"},
    {"lora.targets": ["q_proj"]},
    {"lora.init": LoraInit.loftq, "lora.loftq_iters": 3},
    {"lora.rank_pattern": {"q_proj": 4}, "lora.alpha_pattern": {"q_proj": 16, "mlp": 4}},
    {"model.hidden_size": 128, "model.num_attention_heads": 64, "model.num_key_value_heads": 32},
    {"task.name": "evaluate", "path": "latest"},
    {"schedule.warmup_frac": 0.5},
    {"lora.dropout": 2e-5},
    {"schedule.warmup_frac": 0.9, "trainer.max_steps": 2},
    {"trainer.gradient_clip_val": None},
    {"trainer.gradient_clip_val": 0.0},
    {"model.gradient_checkpointing": "on"},
    {"model.gradient_checkpointing": "False"},
    {"adapter.select": Selection.best, "trainer.val_check_interval": 8},
    {"adapter.select": Selection.best, "trainer.val_check_interval": 4},
    {"callbacks": STOPPING, "trainer.val_check_interval": 4},
    {"callbacks": {}},
    {"callbacks": scoring(2), "suite": MiniPythonSuite()},
    {"callbacks": scoring(None)},
    {"callbacks": scoring(9), "trainer.max_steps": -1, "trainer.max_epochs": 1},
    BY_KPI,
    BY_KPI | {"suite": MiniPythonSuite(), "adapter.metric": "task_success"},
    BY_KPI | {"adapter.metric": "repair_depth", "eval.max_retries": 1},
    BY_KPI | {"callbacks": scoring(4)},
]

BAD = [
    ({"lora.r": 0}, "lora.r", "found 0", "a value >= 1"),
    ({"lora.dropout": 1.0}, "lora.dropout", "found 1.0", ">= 0 and < 1"),
    ({"optim.lr": float("nan")}, "optim.lr", "found nan", "a finite value > 0"),
    ({"optim.lr": float("inf")}, "optim.lr", "found inf", "a finite value > 0"),
    ({"seed": -1}, "seed", "found -1", ">= 0"),
    (
        {"checkpoint.every_n_steps": 0},
        "checkpoint.every_n_steps",
        "found 0",
        "a value >= 1",
    ),
    ({"trainer.val_check_interval": 0}, "trainer.val_check_interval", "found 0", ">= 1"),
    ({"trainer.max_steps": -1}, "trainer.max_steps", "the run has no end", "at least 1 step"),
    ({"trainer.max_steps": 0}, "trainer.max_steps", "the run has no end", "at least 1 step"),
    (
        {"trainer.max_epochs": 0},
        "trainer.max_epochs",
        "must not be 0",
        "-1 or at least 1",
    ),
    (
        {"trainer.max_steps": 3, "schedule.warmup_steps": 3},
        "schedule.warmup_steps",
        "found 3",
        "less than trainer.max_steps (3)",
    ),
    ({"optim.betas": [0.9]}, "optim.betas", "found [0.9]", "two numbers"),
    ({"optim.betas": [0.9, 1.0]}, "optim.betas", "found [0.9, 1.0]", "< 1"),
    ({"optim.betas": [float("nan"), 0.9]}, "optim.betas", "nan", "two numbers"),
    ({"trainer.accelerator": "cpuu"}, "trainer.accelerator", "cpuu", "the nearest is cpu"),
    (
        {"data.val_frac": 0.5, "data.heldout_frac": 0.5},
        "data.val_frac",
        "0.5 + heldout_frac 0.5",
        "a sum under 1",
    ),
    ({"data.path": ""}, "data.path", "no file given", "a list such as [a.jsonl,b.jsonl]"),
    ({"data.path": []}, "data.path", "no file given", "a glob such as rows/*.jsonl"),
    ({"data.path": [3]}, "data.path", "found [3]", "the path"),
    ({"data.val_path": ["a", ""]}, "data.val_path", "no file given", "the path of a file"),
    (
        {"data.columns.prompt": "q"},
        "data.columns",
        "found prompt:q",
        "prompt and response or messages or conversations",
    ),
    (
        {"data.columns.prompt": "q", "data.columns.response": "q"},
        "data.columns",
        "q for prompt, response",
        "each column for one field",
    ),
    (
        {"data.columns.messages": "m", "data.columns.group": "g", "data.group_column": "g"},
        "data.group_column",
        "g and data.columns.group=g",
        "one of the two",
    ),
    ({"lora.targets": []}, "lora.targets", "found []", "at least one group or module name"),
    (
        {"lora.targets": ["q_proj", "q_proj"]},
        "lora.targets",
        "found q_proj, q_proj",
        "each module once",
    ),
    (
        {"lora.init": LoraInit.pissa, "lora.loftq_iters": 2},
        "lora.loftq_iters",
        "no effect with lora.init=pissa",
        "lora.init=loftq",
    ),
    ({"lora.rank_pattern": {"q_proj": 0}}, "lora.rank_pattern", "q_proj: 0", "a value >= 1"),
    (
        {"lora.alpha_pattern": {"q_proj": 16}},
        "lora.alpha_pattern",
        "changes nothing",
        "another value than 16",
    ),
    ({"objective.labels": "casual"}, "objective.labels", "casual", "the nearest is causal"),
    ({"model.hidden_size": 96}, "model.hidden_size", "found 96", "a multiple of 64"),
    ({"model.intermediate_size": 65}, "model.intermediate_size", "found 65", "a multiple of 64"),
    (
        {"model.num_attention_heads": 64, "model.num_key_value_heads": 2},
        "model.num_attention_heads",
        "64 heads for a width of 64",
        "divisible by twice the heads",
    ),
    (
        {"model.num_key_value_heads": 3},
        "model.num_key_value_heads",
        "3 for 4 query heads",
        "a divisor",
    ),
    (
        {"schedule.warmup_steps": 2, "schedule.warmup_frac": 0.1},
        "schedule.warmup_frac",
        "0.1 and warmup_steps 2",
        "one of the two",
    ),
    ({"schedule.warmup_frac": 1.0}, "schedule.warmup_frac", "found 1.0", "< 1"),
    ({"lora.dropout": 1e-5}, "lora.dropout", "drops nothing", "0, or at least 2e-5"),
    ({"trainer.gradient_clip_val": -1.0}, "trainer.gradient_clip_val", "found -1.0", ">= 0"),
    (
        {"model.gradient_checkpointing": "onn"},
        "model.gradient_checkpointing",
        "found onn",
        "the nearest is on",
    ),
    ({"adapter.select": Selection.best}, "adapter.select", "best", "trainer.val_check_interval"),
    (
        {"adapter.select": Selection.best, "trainer.val_check_interval": 6},
        "trainer.val_check_interval",
        "found 6",
        "a multiple of trainer.accumulate_grad_batches (4), which adapter.select",
    ),
    (
        {"callbacks": scoring(1), "suite": NoSuite()},
        "callbacks.scorecard.every_n_steps",
        "1 with suite=none",
        "suite=mini_python",
    ),
    (
        {"callbacks": scoring(5), "trainer.max_steps": 4},
        "callbacks.scorecard.every_n_steps",
        "ends before its first scorecard · found 5",
        "at most trainer.max_steps (4)",
    ),
    ({"callbacks": scoring(0)}, "callbacks.scorecard.every_n_steps", "found 0", ">= 1"),
    (
        {"callbacks": scoring(2), "suite": LmEvalSuite(path="tasks")},
        "callbacks.scorecard.every_n_steps",
        "2 with suite=lm_eval",
        "a built-in suite",
    ),
    (
        {"callbacks": scoring(None, items=3)},
        "callbacks.scorecard.items",
        "found 3",
        "callbacks.scorecard.every_n_steps",
    ),
    (
        {"adapter.metric": "parse_rate", "callbacks": scoring(2)},
        "adapter.metric",
        "no effect with adapter.select=last",
        "adapter.select=best",
    ),
    (
        BY_KPI | {"adapter.metric": "parse_rat"},
        "adapter.metric",
        "is not a KPI · found parse_rat",
        "the nearest is parse_rate",
    ),
    (
        BY_KPI | {"adapter.metric": "tokens_out"},
        "adapter.metric",
        "has no better direction · found tokens_out",
        "task_success, time_to_first_valid_ms",
    ),
    (
        BY_KPI | {"callbacks": scoring(None)},
        "adapter.metric",
        "not measured while training",
        "callbacks.scorecard.every_n_steps to be set",
    ),
    (
        BY_KPI | {"callbacks": {}},
        "adapter.metric",
        "not measured while training",
        "callbacks.scorecard.every_n_steps to be set",
    ),
    (
        BY_KPI | {"adapter.metric": "task_success", "suite": HeldoutSyntaxSuite()},
        "adapter.metric",
        "never measured · found task_success",
        "suite=mini_python",
    ),
    (
        BY_KPI | {"adapter.metric": "pass_at_k", "suite": MiniPythonSuite()},
        "adapter.metric",
        "found pass_at_k",
        "eval.samples above 1",
    ),
    (
        BY_KPI | {"adapter.metric": "repair_stalled"},
        "adapter.metric",
        "found repair_stalled",
        "eval.max_retries above 0",
    ),
    (
        BY_KPI | {"callbacks": scoring(3)},
        "callbacks.scorecard.every_n_steps",
        "between two validations",
        "a multiple of trainer.val_check_interval (8)",
    ),
    ({"callbacks": STOPPING}, "callbacks.early_stopping", "validations while", "to be set"),
    (
        {"callbacks": {}, "checkpoint.keep": 7},
        "checkpoint.keep",
        "no effect without the checkpoint callback",
        "callbacks=default",
    ),
    ({"task.name": "evaluate"}, "path", "no run to evaluate", "latest"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_sound_values_raise_no_problem(make, values):
    """The limits themselves are accepted."""
    assert problems_of(make(values)) == []


@pytest.mark.parametrize(("values", "where", "found", "expected"), BAD)
def test_wrong_value_is_named_with_what_is_accepted(make, values, where, found, expected):
    """There is one problem, at the dotted path."""
    (problem,) = problems_of(make(values))
    assert problem.where == where
    assert found in str(problem)
    assert expected in (problem.expected or "")
    assert problem.exit_code == 2


def test_all_problems_come_together(make):
    """A range error hides neither another one nor a violated rule between values."""
    config = make(
        {
            "lora.r": 0,
            "optim.lr": -1.0,
            "data.val_frac": 1.5,
            "lora.targets": [],
            "model.num_attention_heads": 0,
            "trainer.max_steps": 2,
            "schedule.warmup_steps": 3,
        }
    )
    assert places(config) == [
        "model.num_attention_heads",
        "lora.r",
        "data.val_frac",
        "optim.lr",
        "schedule.warmup_steps",
        "data.val_frac",
        "lora.targets",
    ]


def test_evaluating_with_no_suite_is_refused(make):
    """There would be nothing to do."""
    config = make({"task.name": "evaluate", "path": "latest", "suite.name": "none"})
    assert places(config) == ["suite"]


def test_ranges_of_one_group_can_be_asked_for(make):
    """The prefix completes the dotted path; other groups are not checked."""
    config = make({"model.vocab_size": 0, "lora.r": 0})
    assert [p.where for p in range_problems(config.model, "model.")] == ["model.vocab_size"]


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("train", "path"),
        ("plan", "path"),
        ("plan", "resume"),
        ("evaluate", "seed"),
        ("evaluate", "lora.r"),
        ("evaluate", "model"),
        ("evaluate", "experiment"),
        ("evaluate", "trainer.max_steps"),
        ("export", "logger.mode"),
    ],
)
def test_override_that_the_task_never_reads_is_refused(task, key):
    """It would have no effect, and the message names the task."""
    (problem,) = overrides_not_read(task, [key])
    assert problem.where == key
    assert f"has no effect with task={task}" in str(problem)


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("train", "lora.r"),
        ("train", "experiment"),
        ("train", "task"),
        ("train", "hydra.run.dir"),
        ("plan", "logger.mode"),
        ("evaluate", "path"),
        ("evaluate", "suite"),
        ("evaluate", "suite.items"),
        ("evaluate", "logger.mode"),
        ("merge", "logger.mode"),
        ("attribute", "logger.mode"),
        ("evaluate", "trainer"),
        ("evaluate", "trainer.accelerator"),
        ("evaluate", "hydra"),
    ],
)
def test_override_that_the_task_reads_is_accepted(task, key):
    """`plan` reads the settings of the planned run; `evaluate` reads trainer=cpu."""
    assert overrides_not_read(task, [key]) == []


def test_what_tasks_read_exists(make):
    """Every name in the table is a field of the configuration or a group."""
    config = make({})
    for path in set().union(*TASK_READS.values()):
        group, _, field = path.partition(".")
        assert group in {*group_options(), *type(config).__dataclass_fields__}
        if field:
            assert field in {f.name for f in dataclasses.fields(getattr(config, group))}


@pytest.mark.parametrize(
    ("values", "key", "told"),
    [
        ({}, "data.show", "has no effect with task=train"),
        ({"data.val_path": "v.jsonl"}, "data.val_frac", "has no effect with data.val_path"),
    ],
)
def test_override_that_other_values_undo_is_refused(make, values, key, told):
    """It would have no effect, and the message says because of which value."""
    (problem,) = ineffective_overrides(make(values), [key, "seed"])
    assert (problem.where, told in str(problem)) == (key, True)
    assert ineffective_overrides(make(values), ["seed"]) == []


@pytest.mark.parametrize(
    ("values", "key"), [({"task.name": "plan"}, "data.show"), ({}, "data.val_frac")]
)
def test_override_that_has_its_effect_is_accepted(make, values, key):
    """`plan` shows rows; without a validation file, val_frac has an effect."""
    assert ineffective_overrides(make(values), [key]) == []


@pytest.mark.parametrize("key", ["sandbox", "sandbox.memory_mib"])
def test_sandbox_of_a_suite_that_executes_nothing_is_refused(make, key):
    """Without a suite that executes code, the sandbox has no effect."""
    config = make({})
    assert [problem.where for problem in ineffective_overrides(config, [key, "lora.r"])] == [key]


def test_sandbox_of_a_suite_that_executes_is_accepted(make):
    """The sandbox's settings have an effect."""
    config = make({})
    config.suite = MiniPythonSuite()
    assert ineffective_overrides(config, ["sandbox.memory_mib"]) == []
