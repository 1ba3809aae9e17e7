"""Flags that the planner refuses are reported by the config rules of their groups.

`planning/preflight.py` leaves out `Gate.FLAGS`, because a rule reports the same problem by the
setting's path. Each such refusal is checked on a command here.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mens_exp.config.compose import compose, typed
from mens_exp.config.validate import problems_of
from mens_exp.planning.contract import contract_of
from mens_exp.planning.planner import Gate, environment_of, refusals
from mens_exp.planning.preflight import preflight

USUAL = ["model=tiny_llama", "logger=none", "trainer=cpu"]
PROXY = ["backend=proxy"]
FLAGS = {
    "full stack, head alone": (
        [*PROXY, "backend.require_full_stack=true", "backend.lm_head_only=true"],
        "backend.require_full_stack",
    ),
    "head alone, two layers": (
        [*PROXY, "backend.lm_head_only=true", "backend.max_layers=2"],
        "backend.max_layers",
    ),
    "more targets than 64": ([*PROXY, "objective.k=65"], "objective.k"),
    "more targets than tokens": (
        [*PROXY, "objective.k=9", "data.seq_len=8"],
        "objective.k",
    ),
}


def of(overrides):
    by_key = {text.partition("=")[0]: text for text in [*USUAL, *overrides]}
    return typed(compose([list(by_key.values())])[0].values)


def flags(config):
    found = refusals(contract_of(config), environment_of(config))
    return [str(error) for gate, error in found if gate is Gate.FLAGS]


@pytest.mark.parametrize(("overrides", "where"), FLAGS.values(), ids=FLAGS)
def test_refusal_of_flags_is_raised_for_the_command(overrides, where):
    """The rule reports the dotted path as typed, and `preflight` does not repeat it."""
    config = of(overrides)
    assert len(flags(config)) == 1
    assert [problem.where for problem in problems_of(config)] == [where]
    assert not any(problem.where == where for problem in preflight(config))


def test_incomplete_stack_is_raised_for_the_command(tiny_base, tmp_path):
    """This flag depends on files, so the backend's check reports it in `preflight`."""
    base = Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, base / "model.safetensors")
    overrides = [*PROXY, "model=hf", f"model.id={base}", "backend.require_full_stack=true"]
    config = of(overrides)
    (said,) = flags(config)
    assert "1 of 2: model.layers.1.self_attn.o_proj.weight" in said
    assert problems_of(config) == []
    assert [problem.where for problem in preflight(config)] == ["backend.require_full_stack"]


@pytest.mark.parametrize("found", [-0.1, 1.5])
def test_skip_rate_is_no_setting_of_ours(found):
    """Only another program's contract can have a skip rate; no command sets it."""
    contract = contract_of(of([]))
    assert contract.exec.max_skip_rate is None
    run = dataclasses.replace(contract.exec, max_skip_rate=found)
    theirs = dataclasses.replace(contract, exec=run)
    (gate,) = [gate for gate, _ in refusals(theirs, environment_of(of([])))]
    assert gate is Gate.FLAGS
