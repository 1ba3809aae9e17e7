"""A study from its sweep to its verdict: two arms of a tiny model, really trained."""

from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.comparison import Comparison, Verdict


@pytest.fixture(scope="module")
def sweep(tiny_run, tmp_path_factory):
    """Three seeds with and without double quantization, two steps each."""
    directory = tmp_path_factory.mktemp("study") / "sweep"
    factors = ["seed=1,2,3", "quant.double_quant=true,false", "trainer.max_steps=2"]
    kept = [text for text in tiny_run if not text.startswith("trainer.max_steps")]
    assert cli.main(["-m", *kept, *factors, f"hydra.sweep.dir={directory}"]) == 0
    return directory


def test_a_sweep_is_compared_by_its_directory(sweep, tmp_path, capsys):
    """Arms, factor and seeds are found, nothing confounds, and pairing narrows the interval."""
    command = ["task=compare", f"path={sweep}", "logger=none", f"hydra.run.dir={tmp_path / 'c'}"]
    assert cli.main(command) == 0
    record = Comparison.read(tmp_path / "c" / "compare.json")
    assert record.factors == ["quant.double_quant"]
    assert [arm["seeds"] for arm in record.arms] == [[1, 2, 3], [1, 2, 3]]
    (contrast,) = record.contrasts
    assert contrast["confounded_by"] == []
    assert contrast["environment"] == []
    found = contrast["kpis"]["val_loss"]
    assert record.primary == "val_loss"
    assert found["width_ratio"] is not None
    print(f"paired interval over unpaired: {found['width_ratio']:.3f}")  # a figure
    assert found["width_ratio"] < 1
    assert contrast["kpis"]["tokens"]["estimate"] == 0
    assert set(record.curves["quant.double_quant=true"]) == {"train/loss"}
    assert "val_loss on these items: each arm minus" in capsys.readouterr().out


def test_an_undeclared_setting_of_a_real_run_confounds(sweep, tiny_run, tmp_path):
    """A run with another rank is a separate arm, and its contrast is confounded."""
    further = [text for text in tiny_run if not text.startswith("trainer.max_steps")]
    further += ["seed=1", "trainer.max_steps=2", "quant.double_quant=false", "lora.r=8"]
    assert cli.main([*further, f"hydra.run.dir={tmp_path / 'other'}"]) == 0
    path = f"path='{sweep},{tmp_path / 'other'}'"
    declared = "compare.factors=[quant.double_quant]"
    command = ["task=compare", path, declared, "logger=none", f"hydra.run.dir={tmp_path / 'c'}"]
    assert cli.main(command) == 0
    record = Comparison.read(tmp_path / "c" / "compare.json")
    clean, other = record.contrasts
    assert (clean["confounded_by"], other["confounded_by"]) == ([], ["lora.r"])
    assert other["kpis"]["val_loss"]["verdict"] == Verdict.NOT_REACHABLE
