from __future__ import annotations

import shutil

import pytest

from mens_exp.layout.shape import shape_of
from mens_exp.planning.checks import machine
from mens_exp.planning.checks.machine import check_optimizer, rate_warnings
from mens_exp.planning.preflight import preflight

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
    """Exit code 2 before anything is loaded, with the optimizers that do work."""
    has_gpu(monkeypatch, there=there)
    problems = preflight(tiny_config(PAGED, f"trainer={trainer}"))
    (problem,) = [one for one in problems if one.where == "optim"]
    assert problem.exit_code == 2
    assert f"trainer={trainer}" in str(problem.found)
    assert "adamw, adamw_8bit or lion" in (problem.expected or "")


@pytest.mark.parametrize("trainer", ["gpu", "auto"])
def test_paged_memory_with_a_gpu_is_accepted(monkeypatch, tiny_config, trainer):
    """trainer=auto is accepted if the machine has a GPU."""
    has_gpu(monkeypatch, there=True)
    assert list(check_optimizer(tiny_config(PAGED, f"trainer={trainer}"))) == []


@pytest.mark.parametrize("option", ["adamw", "adamw_8bit", "lion"])
def test_other_optimizers_run_anywhere(monkeypatch, tiny_config, option):
    """Bitsandbytes has CPU kernels for 8-bit moments too."""
    has_gpu(monkeypatch, there=False)
    assert list(check_optimizer(tiny_config(f"optim={option}"))) == []


def test_muon_needs_a_torch_that_has_it(monkeypatch, tiny_config):
    """Of the supported versions, torch 2.9 and later have Muon."""
    monkeypatch.setattr(machine, "version", lambda name: "2.8.1+cpu")
    (problem,) = check_optimizer(tiny_config("optim=muon"))
    assert (problem.exit_code, problem.found) == (3, "torch 2.8.1+cpu")
    monkeypatch.setattr(machine, "version", lambda name: "2.9.0")
    assert list(check_optimizer(tiny_config("optim=muon"))) == []


@pytest.mark.parametrize(
    ("option", "extra"),
    [
        ("schedule_free", "schedule-free"),
        ("prodigy", "prodigy"),
        ("galore", "galore"),
        ("apollo", "apollo"),
    ],
)
def test_an_optimizer_of_another_package_needs_it(monkeypatch, tiny_config, option, extra):
    """The message names the extra to install."""
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    more = ("schedule=constant", *(("optim.rank=8",) if option == "galore" else ()))
    (problem,) = check_optimizer(tiny_config(f"optim={option}", *more))
    assert f"mens-exp[{extra}]" in (problem.remedy or "")


@pytest.mark.parametrize(("rank", "count"), [(63, 0), (64, 1)])
def test_a_rank_that_projects_nothing_is_refused(tiny_config, rank, count):
    """tiny_llama's matrices are at most 64 on their shorter side, so AdamW would train them all."""
    found = list(check_optimizer(tiny_config("backend=full", "optim=galore", f"optim.rank={rank}")))
    assert len(found) == count
    assert all("less than 64" in (one.expected or "") for one in found)


OF_8B = ("model.hidden_size=4096", "model.intermediate_size=14336", "model.num_hidden_layers=32")
OF_30B = ("model.hidden_size=6656", "model.intermediate_size=17920", "model.num_hidden_layers=60")


@pytest.mark.parametrize(
    ("size", "overrides", "usual"),
    [
        (OF_8B, ("optim.lr=2e-3",), "0.0002"),
        (OF_8B, ("optim.lr=4e-5",), "0.0002"),
        (OF_30B, ("optim.lr=5e-4",), "0.0001"),
        (OF_8B, ("optim=lion",), "2e-05"),
        (OF_8B, ("optim.lr=7e-4",), None),
        (OF_8B, ("optim.lr=6e-5",), None),
        (OF_30B, ("optim.lr=1e-4",), None),
        ((), ("optim.lr=2e-3",), None),
    ],
)
def test_a_rate_far_from_published_ones_is_warned_of(tiny_config, size, overrides, usual):
    """Over four times above or below QLoRA's; small models have no published rate."""
    config = tiny_config("model=random", *size, *overrides)
    said = list(rate_warnings(config, shape_of(config.model)))
    assert len(said) == (usual is not None)
    assert all(f"set optim.lr={usual}," in one for one in said)


@pytest.mark.parametrize(("rate", "count"), [(1.0, 0), (0.5, 0), (2e-4, 1), (10.0, 1)])
def test_a_rate_carried_over_to_prodigy_is_warned_of(tiny_config, rate, count):
    """Prodigy multiplies its own estimate by the rate, so AdamW's rate would make it vanish."""
    config = tiny_config("optim=prodigy", f"optim.lr={rate}")
    said = list(rate_warnings(config, shape_of(config.model)))
    assert len(said) == count
    assert all("leave optim.lr at 1" in one for one in said)
