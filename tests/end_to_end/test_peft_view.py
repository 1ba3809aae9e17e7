"""The PEFT directory is the validated model when loaded with PEFT alone."""

from __future__ import annotations

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.layout.families import FAMILIES
from mens_exp.planning.machine import look

pytestmark = pytest.mark.probes


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_peft_reproduces_the_tuned_validation_loss(
    train_in,
    peft_loss,
    tmp_path,
    compute,
):
    """The loss agrees to 1e-3, and the adapter changed it by far more."""
    run = train_in(
        tmp_path / "run",
        f"quant.compute_dtype={compute}",
        "optim.lr=5e-3",
        "trainer.max_steps=12",
        "data.val_max_tokens=100000",
    )
    results = Manifest.read(run.manifest).results
    assert results["tuned_val_loss"] < 0.95 * results["base_val_loss"]
    loss = peft_loss(run)
    assert loss == pytest.approx(results["tuned_val_loss"], rel=1e-3)
    assert results["peft_view_difference_f32"] <= 1e-6
    assert results["peft_view_difference"] <= 1e-3
    card = (run.path / "MODEL_CARD.md").read_text("utf-8")
    assert f"{results['peft_view_difference']:.1e}" in card
    assert ("in f32" in card.partition("How to load it")[2]) is (compute == "bf16")


# In bf16 rounding is noise, which averages out over more tokens. A CPU that emulates bf16 takes
# more than fifteen minutes in it; the tiny model above is computed in it on any.
BF16 = [] if look("cpu").has_bf16 else [pytest.mark.skip("this CPU emulates bf16; it takes hours")]
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("model", "compute", "val_frac", "rel"),
    [
        ("cut", "f32", 0.06, 1e-4),
        pytest.param("whole", "f32", 0.4, 1e-4, marks=SOAK),
        pytest.param("whole", "bf16", 0.4, 1e-3, marks=[SOAK, *BF16]),
    ],
)
def test_peft_reproduces_the_loss_of_a_real_model(
    train_in,
    peft_loss,
    smollm2,
    smollm2_cut,
    code_rows,
    tmp_path,
    model,
    compute,
    val_frac,
    rel,
):
    """SmolLM2 with its own chat template, and a few steps on real code."""
    run = train_in(
        tmp_path / "run",
        *(["model=hf", f"model.id={smollm2_cut}"] if model == "cut" else ["model=smollm2_135m"]),
        f"quant.compute_dtype={compute}",
        "optim.lr=2e-3",
        "trainer.max_steps=3",
        "trainer.accumulate_grad_batches=2",
        f"data.path={code_rows}",
        "data.seq_len=256",
        "data.val_max_tokens=100000",
        f"data.val_frac={val_frac}",
    )
    results = Manifest.read(run.manifest).results
    assert results["tuned_val_loss"] < 0.97 * results["base_val_loss"]
    loss = peft_loss(run)
    assert loss == pytest.approx(results["tuned_val_loss"], rel=rel)


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_reproduces_the_loss_of_every_family(
    name,
    train_in,
    family_base,
    peft_loss,
    tmp_path,
):
    """A user's own directory of each family, trained, saved and loaded by PEFT on NF4."""
    run = train_in(
        tmp_path / "run",
        "model=hf",
        f"model.id={family_base(name).directory}",
        "quant.compute_dtype=f32",
        "optim.lr=5e-3",
        "trainer.max_steps=8",
        "data.val_max_tokens=100000",
    )
    results = Manifest.read(run.manifest).results
    assert results["tuned_val_loss"] < 0.97 * results["base_val_loss"]
    assert peft_loss(run) == pytest.approx(results["tuned_val_loss"], rel=1e-3)


def test_another_adapter_does_not(
    train_in,
    peft_loss,
    finished,
    tmp_path,
):
    """The comparison can fail: a shorter run's adapter gives another loss."""
    run = train_in(tmp_path / "run", "optim.lr=5e-3", "data.val_max_tokens=100000")
    loss = peft_loss(run, adapter_of=finished)
    assert loss != pytest.approx(Manifest.read(run.manifest).results["tuned_val_loss"], rel=1e-3)


def test_no_difference_is_measured_where_there_is_no_view_or_no_probe(finished_with):
    """The proxy has no PEFT directory; without the probe, the record has the reason."""
    proxy = Manifest.read(finished_with("backend=proxy").manifest)
    assert not any("peft_view" in name for name in [*proxy.results, *proxy.unknown])
    unprobed = Manifest.read(finished_with("data.contract.probe=false").manifest)
    assert "peft_view_difference" not in unprobed.results
    assert unprobed.unknown["results.peft_view_difference"] == "data.contract.probe=false"
