"""Memory of each of several processes, and what fits: a 70B model on eight devices of 80 GB."""

from __future__ import annotations

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.config.validate import problems_of
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.memory import BUCKETS, WHOLE
from mens_exp.planning.throughput_model import Throughput
from mens_exp.report import plan_view, terminal

# The published dimensions of Llama 3 70B.
MODEL_70B = (
    "model=random",
    "model.family=llama",
    "model.hidden_size=8192",
    "model.intermediate_size=28672",
    "model.num_hidden_layers=80",
    "model.num_attention_heads=64",
    "model.num_key_value_heads=8",
    "model.vocab_size=128256",
    "model.tie_word_embeddings=false",
)
EIGHT = ("trainer=ddp", "trainer.accelerator=gpu", "trainer.devices=8", "trainer.device_gib=74.5")
GB = 10**9


@pytest.fixture
def planned(rows, cache):
    """Plan a run of eight processes; 80 GB are 74.5 GiB."""

    def made(*overrides):
        usual = ["task=plan", "logger=none", "suite=none", "data=jsonl", f"data.path={rows}"]
        sizes = ["data.seq_len=2048", "data.micro_batch_size=1"]
        steps = ["trainer.accumulate_grad_batches=8", "model=tiny_llama"]
        by_key = {t.partition("=")[0]: t for t in [*usual, *sizes, *steps, *overrides]}
        return make_plan(typed(compose([list(by_key.values())])[0].values), cache)

    return made


def test_a_quantized_70b_model_fits_eight_devices_of_80_gb(
    planned,
):
    """Each process holds 35 GB of codes and scales, and 4.2 GB of embedding and head."""
    plan = planned(*MODEL_70B, *EIGHT)
    parts = plan["memory_bytes"]["components"]
    assert parts["base weights"] == pytest.approx(68.45e9 * 4.127 / 8, rel=1e-2)
    assert parts["embedding and head"] == 2 * 2 * 128256 * 8192
    assert parts[BUCKETS] == 4 * plan["trainable_parameters"]
    shared = plan["processes"]
    assert shared["processes"] == shared["on_each_machine"] == 8
    assert shared["fits"] == {"one": True, "ddp": True, "fsdp": True}
    assert 40 * GB < shared["bytes_of_each"]["estimate"] < 60 * GB
    assert not any("memory" in problem for problem in plan["problems"])


def test_an_unquantized_one_does_not(planned):
    """Every process of DDP holds all 137 GB of weights; FSDP would fit."""
    plan = planned(*MODEL_70B, *EIGHT, "backend=lora", "quant=none")
    assert plan["processes"]["fits"] == {"one": False, "ddp": False, "fsdp": True}
    assert plan["processes"]["bytes_of_each"]["low"] > 80 * GB
    (problem,) = (one for one in plan["problems"] if "memory" in one)
    assert "GPU with 74.5 GiB" in problem


def test_in_parts_it_fits_and_each_takes_an_eighth(planned):
    """17 GB of weights each and three gathered layers; everything else is held whole."""
    lora = (*MODEL_70B, *EIGHT, "trainer=fsdp", "backend=lora", "quant=none")
    plan = planned(*lora)
    parts = plan["memory_bytes"]["components"]
    assert parts["base weights"] == pytest.approx(68.45e9 * 2 / 8, rel=1e-2)
    assert parts["gathered layers"] == pytest.approx(3 * 68.45e9 * 2 / 80, rel=1e-2)
    assert parts["embedding and head"] == 2 * 2 * 128256 * 8192
    assert parts[WHOLE] == 0
    assert plan["processes"]["strategy"] == "fsdp"
    assert plan["processes"]["fits"] == {"one": False, "ddp": False, "fsdp": True}
    assert not any("memory" in problem for problem in plan["problems"])


def test_of_codes_and_scales_the_codes_are_shared_out(
    planned,
):
    """Two GPUs of 24 GB: 17 GB of codes each, 1.1 GB of scales, 4.2 GB of embedding and head."""
    two = ("trainer=fsdp", "trainer.accelerator=gpu", "trainer.device_gib=24")
    plan = planned(*MODEL_70B, *two, "quant.storage_dtype=bf16", "data.seq_len=512")
    parts = plan["memory_bytes"]["components"]
    assert parts["base weights"] == pytest.approx(68.45e9 * (4 / 2 + 0.127) / 8, rel=1e-2)
    assert plan["processes"]["fits"]["ddp"] is False


def test_who_scores_holds_the_whole_base(planned):
    """That copy does not fit, so the suggested remedy is suite=none."""
    scored = (*MODEL_70B, *EIGHT, "trainer=fsdp", "backend=lora", "quant=none", "suite=mini_python")
    plan = planned(*scored)
    assert plan["memory_bytes"]["components"][WHOLE] > 90 * GB
    (problem,) = (one for one in plan["problems"] if "memory" in one)
    assert "suite=none" in problem
    assert plan["processes"]["fits"]["fsdp"] is False


def test_processes_of_a_cpu_load_one_after_the_other(
    planned,
):
    """Together they need at least one whole base and three shards, not four whole bases."""
    usual = ("backend=lora", "quant=none", "trainer.accelerator=cpu", "trainer.devices=4")
    wide = ("model=random", "model.hidden_size=2304", "model.intermediate_size=8192")
    large = (*wide, "model.num_hidden_layers=24")
    ddp, fsdp = (
        planned(*large, *usual, f"trainer={one}")["memory_bytes"]["components"]
        for one in ("ddp", "fsdp")
    )
    whole, part = ddp["base weights"], fsdp["base weights"]
    assert part == pytest.approx(whole / 4, rel=1e-6)
    assert 4 * part < whole + 3 * part <= 4 * (sum(fsdp.values()) - fsdp["framework"])
    assert sum(fsdp.values()) < sum(ddp.values())


@pytest.mark.parametrize(
    "overrides", [("backend=full", "quant=none"), ("quant=int8",), ("lora.init=pissa",)]
)
def test_what_cannot_be_in_parts_does_not_fit_so(planned, overrides):
    """The strategy is missing from the plan's `fits`."""
    plan = planned("trainer=ddp", "trainer.accelerator=cpu", *overrides)
    assert plan["processes"]["fits"].keys() == {"one", "ddp"}


def test_too_small_without_scoring_too_it_is_the_run_that_is_too_large(
    planned,
):
    """suite=none would not help, because even one shard is too large."""
    small = ("trainer.device_gib=20", "suite=mini_python", "backend=lora", "quant=none")
    plan = planned(*MODEL_70B, *EIGHT, "trainer=fsdp", *small)
    (problem,) = (one for one in plan["problems"] if "memory" in one)
    assert "suite=none" not in problem
    assert "data.seq_len" in problem


def test_the_table_says_what_fits(planned):
    """The page says it in words."""
    parts = plan_view.document(planned(*MODEL_70B, *EIGHT)).parts
    shown = "\n".join(line.plain for line in terminal.lines(parts, 100, is_plain=False))
    assert "8, ddp" in shown
    assert "ddp fits in" in shown


def test_processes_of_a_cpu_share_its_memory(planned):
    """One process fits; four may not."""
    cpu = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=4", "trainer.device_gib=1")
    plan = planned(*cpu)
    assert plan["processes"]["fits"] == {"one": True, "ddp": False, "fsdp": False}
    assert any("memory" in one for one in plan["problems"])


def test_one_process_shares_nothing(planned):
    """The plan has no section about processes, and no gradient buckets."""
    plan = planned("trainer=cpu")
    assert plan["processes"] is None
    assert BUCKETS not in plan["memory_bytes"]["components"]


def test_a_device_of_another_size_is_for_planning(tiny_config):
    """A training run uses the real size of the device."""
    assert problems_of(tiny_config("task=plan", "trainer.device_gib=80")) == []
    (found,) = problems_of(tiny_config("trainer.device_gib=80"))
    assert found.where == "trainer.device_gib"


def test_gpus_add_up_and_processes_of_a_cpu_do_not():
    """Two GPUs double the rate and its interval; an unknown rate stays unknown."""
    one = Throughput(rate=10.0, low=5.0, high=20.0, runs=1, basis="measured")
    two = one.of_several(2, "cuda")
    assert (two.rate, two.low, two.high) == (20.0, 10.0, 40.0)
    assert "2 times over" in two.basis
    assert one.of_several(2, "cpu") is one
    unknown = Throughput(rate=None, low=None, high=None, runs=0, basis="unknown")
    assert unknown.of_several(2, "cuda") is unknown
