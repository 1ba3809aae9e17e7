"""Parts of a run that Liger-Kernel would compute, and the refusal if it can compute none."""

from __future__ import annotations

import pytest

from mens_exp.errors import MissingExtra, SetupError
from mens_exp.planning import kernels, machine
from mens_exp.planning.checks.machine import check_kernels
from mens_exp.planning.kernels import Part, reasons
from mens_exp.report import plan_view

GPU = machine.Machine(kind="cuda", name="GPU", total_bytes=1 << 34, free_bytes=1 << 34)


def shown(found):
    """Return the kernel section of a plan's page, by label."""
    (section,) = plan_view.document({"kernels": found}).parts
    return {cell.label: cell.text for facts in section.parts for cell in facts.cells}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that both packages are installed."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)


@pytest.fixture
def gpu(monkeypatch):
    """Plan for a GPU."""
    monkeypatch.setattr("mens_exp.planning.forecast.machine.look", lambda _: GPU)


@pytest.mark.usefixtures("installed")
def test_auto_asks_for_all_kernels_on_a_gpu_and_for_none_on_a_cpu(tiny_config):
    """model.kernels=auto is the default; on the CPU, torch computes everything."""
    config = tiny_config()
    assert reasons(config, on_gpu=True) == dict.fromkeys(Part)
    assert reasons(config, on_gpu=False) == dict.fromkeys(Part, "the device is not a CUDA GPU")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["lora=lm_head"], "the head has an adapter"),
        (["objective.dft=true"], "objective.dft weighs tokens by probabilities"),
        (["objective=distillation"], "objective=distillation needs logits"),
        (
            ["trainer=fsdp", "quant.storage_dtype=bf16", "trainer.devices=2"],
            "the base is in parts",
        ),
    ],
)
def test_the_head_alone_stays_with_torch(tiny_config, overrides, reason):
    """The reason is named, and the other kernels are used."""
    found = reasons(tiny_config(*overrides), on_gpu=True)
    assert found[Part.HEAD].startswith(reason)
    assert [part for part, why in found.items() if why is None] == [*Part][1:]


@pytest.mark.usefixtures("installed")
def test_a_plan_names_what_computes_each_part(tiny_config, monkeypatch):
    """With versions and reasons; the page shows it only if a kernel is not torch's."""
    monkeypatch.setattr(kernels.metadata, "version", lambda _: "0.8.5")
    found = kernels.described(reasons(tiny_config("lora=lm_head"), on_gpu=True))
    assert found == {
        "head and loss": "torch: the head has an adapter",
        **dict.fromkeys(("RoPE", "RMSNorm", "SwiGLU"), "liger-kernel 0.8.5"),
    }
    lines = ["head and loss: torch: the head has an adapter"]
    lines.append("RoPE, RMSNorm, SwiGLU: liger-kernel 0.8.5")
    assert shown(found)["kernels"] == "\n".join(lines)
    assert "kernels" not in shown(kernels.described(reasons(tiny_config(), on_gpu=False)))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.label_smoothing=0.1", "objective.z_loss=1e-4"],
        ["objective=dpo"],
        ["objective=grpo"],
        ["objective.weight_field=weight"],
    ],
)
def test_losses_of_tokens_have_the_fused_head(tiny_config, overrides):
    """Sums over tokens, and losses whose tokens are weighted or summed by answer."""
    assert reasons(tiny_config(*overrides), on_gpu=True)[Part.HEAD] is None


@pytest.mark.usefixtures("installed", "gpu")
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.kernels=torch"], "model.kernels=torch"),
        (["backend=full"], "backend=full has its own training step"),
        (["backend=proxy"], "backend=proxy has its own training step"),
    ],
)
def test_torch_computes_the_whole_step(tiny_config, overrides, reason):
    """By request, or because the backend has its own step, where kernels=liger is refused."""
    config = tiny_config(*overrides)
    assert reasons(config, on_gpu=True) == dict.fromkeys(Part, reason)
    assert [*check_kernels(config)] == []
    if "model.kernels=torch" not in overrides:
        (error,) = check_kernels(tiny_config(*overrides, "model.kernels=liger"))
        assert reason in str(error)


def test_liger_is_refused_where_it_cannot_run(tiny_config, monkeypatch):
    """Without a GPU or without the package; each has its own remedy."""
    asked = tiny_config("model.kernels=liger")
    (error,) = check_kernels(asked)
    assert isinstance(error, SetupError)
    assert "liger, but the device is not a CUDA GPU" in str(error)
    assert "model.kernels=auto" in error.remedy
    monkeypatch.setattr("mens_exp.planning.forecast.machine.look", lambda _: GPU)
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    (error,) = check_kernels(asked)
    assert isinstance(error, MissingExtra)
    assert error.remedy.startswith("pip install 'mens-exp[liger]'")
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    assert [*check_kernels(asked)] == []
