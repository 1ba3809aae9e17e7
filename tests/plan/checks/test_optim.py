from __future__ import annotations

import shutil

import pytest

from mens_exp.plan.checks.optim import check
from mens_exp.plan.preflight import preflight

PAGED = "optim=paged_adamw_8bit"


def has_gpu(monkeypatch, *, there):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if there else None)


@pytest.mark.parametrize(("trainer", "there"), [("cpu", True), ("auto", False)])
def test_paged_memory_without_a_gpu_is_refused_by_the_plan(
    monkeypatch,
    tiny_config,
    trainer,
    *,
    there,
):
    """Before anything is loaded, with exit code 2 and what does work."""
    has_gpu(monkeypatch, there=there)
    problems = preflight(tiny_config(PAGED, f"trainer={trainer}"))
    (problem,) = [one for one in problems if one.where == "optim"]
    assert problem.exit_code == 2
    assert f"trainer={trainer}" in str(problem.found)
    assert "adamw, adamw_8bit or lion" in (problem.expected or "")


@pytest.mark.parametrize("trainer", ["gpu", "auto"])
def test_paged_memory_with_a_gpu_is_accepted(monkeypatch, tiny_config, trainer):
    """Where there may be one."""
    has_gpu(monkeypatch, there=True)
    assert list(check(tiny_config(PAGED, f"trainer={trainer}"))) == []


@pytest.mark.parametrize("option", ["adamw", "adamw_8bit", "lion"])
def test_other_optimizers_run_anywhere(monkeypatch, tiny_config, option):
    """The CPU kernels of bitsandbytes hold 8-bit moments too."""
    has_gpu(monkeypatch, there=False)
    assert list(check(tiny_config(f"optim={option}"))) == []
