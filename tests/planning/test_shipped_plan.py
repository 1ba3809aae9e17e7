from __future__ import annotations

import pytest

from mens_exp.errors import SetupError
from mens_exp.layout import hub
from mens_exp.planning.checks import model
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.preflight import preflight

LLAMA = ("model=llama3_8b",)


@pytest.fixture
def offline(monkeypatch):
    """Make the hub unreachable."""

    def away(model_id, revision):
        raise SetupError(f"the hub cannot be reached for {model_id} at {revision}")

    monkeypatch.setattr(hub, "commit_of", away)


@pytest.mark.usefixtures("offline")
def test_model_that_is_not_here_is_planned_from_its_dimensions(tiny_config, rows, tmp_path):
    """An 8B model: layers, adapter size, weights and the size of the download."""
    data = ("data=jsonl", f"data.path={rows}", "data.val_frac=0.2", "data.heldout_frac=0.2")
    config = tiny_config(*LLAMA, "task=plan", *data)
    assert preflight(config) == []
    plan = make_plan(config, tmp_path)
    assert "by the dimensions that mens_exp ships" in plan["model"]
    assert (plan["layers"], plan["trainable_parameters"]) == (32, 41_943_040)
    weights = 6_979_321_856 + 2 * 525_336_576
    assert plan["disk_bytes"]["base"] == 2 * weights
    assert not plan["data"]["exact"]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("rate", "warned"), [((), False), (("optim.lr=2e-3",), True)])
def test_a_large_model_is_planned_at_a_rate_of_its_size(tiny_config, rows, tmp_path, rate, warned):
    """Its own rate by default; the demo's is ten times as high, and gives a warning."""
    data = ("data=jsonl", f"data.path={rows}", "data.val_frac=0.2", "data.heldout_frac=0.2")
    plan = make_plan(tiny_config(*LLAMA, "task=plan", *data, *rate), tmp_path)
    assert any("times the rate that published" in one for one in plan["warnings"]) == warned


ONE_AT_A_TIME = ("data.micro_batch_size=1", "trainer.accumulate_grad_batches=64")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (("preset=sigilderg_phase1",), True),
        (("preset=sigilderg_phase1", *ONE_AT_A_TIME), False),
        (("preset=sigilderg_phase1", "trainer.device_gib=80"), False),
        (("preset=rtx4080", "model=llama3_8b", "data.micro_batch_size=64"), True),
        (("preset=rtx4080",), False),
        (("preset=a100", "model=llama3_8b", "data.micro_batch_size=64"), False),
    ],
)
def test_a_preset_s_own_class_of_gpus_is_held_to(tiny_config, rows, tmp_path, overrides, warned):
    """The plan's upper bound is compared with the preset's GiB; other presets have none."""
    of_preset = "model=llama3_8b" if "sigilderg" in overrides[0] else "model=smollm2_135m"
    data = ("data=jsonl", f"data.path={rows}", "data.val_frac=0.2", "data.heldout_frac=0.2")
    config = tiny_config(of_preset, "task=plan", "trainer=gpu", *data, *overrides)
    plan = make_plan(config, tmp_path)
    said = [one for one in plan["warnings"] if "the preset is for GPUs of" in one]
    assert bool(said) == warned
    if warned:
        gib = 24 if "sigilderg" in overrides[0] else 16
        assert plan["memory_bytes"]["high"] > gib << 30
        assert f"of {gib} GiB" in said[0]
        assert "data.micro_batch_size=1 trainer.accumulate_grad_batches=" in said[0]


@pytest.mark.usefixtures("offline")
def test_model_that_is_not_here_is_not_trained(tiny_config):
    """The run's error says that the hub cannot be reached."""
    with pytest.raises(SetupError, match="cannot be reached"):
        list(model.check_model(tiny_config(*LLAMA)))


@pytest.mark.usefixtures("offline")
def test_model_that_nobody_ships_is_not_planned_either(
    tiny_config,
):
    """Its dimensions are unknown."""
    config = tiny_config("model=hf", "model.id=someone/else", "task=plan")
    assert any("cannot be reached" in str(problem) for problem in preflight(config))


def test_mobile_edge_refuses_what_a_phone_does_not_take(
    tiny_config,
):
    """`preflight` reports the setting; the preset itself passes."""
    problems = preflight(tiny_config("deployment_target=mobile_edge", "data.seq_len=600"))
    assert [problem.where for problem in problems] == ["data.seq_len"]
    assert "mobile_edge" in str(problems[0])
    assert preflight(tiny_config("preset=mobile_edge")) == []


def test_presets_are_those_of_the_reference(tiny_config):
    """rank/alpha/seq/batch/accumulation/epochs/warm-up/rate, from REFERENCE section 2."""
    expected = {
        "tiny": (4, 8, 128, 1, 1, 1, 10, 1e-4),
        "safe": (8, 16, 256, 2, 8, 3, 50, 2e-4),
        "rtx4080": (16, 32, 384, 1, 8, 3, 80, 1.5e-4),
        "a100": (32, 64, 1024, 8, 2, 3, 200, 2e-4),
        "distributed": (16, 32, 512, 4, 8, 3, 150, 1.5e-4),
        "mobile_edge": (8, 16, 256, 1, 8, 3, 40, 1.5e-4),
    }
    for name, values in expected.items():
        config = tiny_config(f"preset={name}")
        assert values == (
            config.lora.r,
            config.lora.alpha,
            config.data.seq_len,
            config.data.micro_batch_size,
            config.trainer.accumulate_grad_batches,
            config.trainer.max_epochs,
            config.schedule.warmup_steps,
            config.optim.lr,
        )
        assert config.trainer.max_steps == -1
