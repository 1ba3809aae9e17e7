"""The parts of a run that can be sharded."""

from __future__ import annotations

import pytest

from mens_exp.config.rules.base import sharded_problems

FSDP = ("trainer=fsdp", "trainer.accelerator=cpu")
BLOCKS = "quant.block_size_pattern={down_proj:128}"
BF16, F32 = "quant.storage_dtype=bf16", "quant.storage_dtype=f32"


@pytest.mark.parametrize(
    "overrides",
    [
        [BF16],
        [F32, "quant.compute_dtype=f32"],
        [BF16, "quant.quant_type=fp4", "quant.block_size=128"],
        [BF16, "lora.variant=dora"],
        [BF16, "lora.init=loftq"],
        ["backend=lora", "quant=none"],
    ],
)
def test_a_frozen_base_is_held_in_parts(tiny_config, overrides):
    """A base in 4 bits or unquantized can be sharded, if its adapter does not change it."""
    assert list(sharded_problems(tiny_config(*FSDP, *overrides))) == []


@pytest.mark.parametrize(
    ("overrides", "where", "found", "remedy"),
    [
        (["backend=full", "quant=none"], "backend", "full", "trainer=ddp"),
        (["backend=proxy"], "backend", "proxy", "trainer=ddp"),
        (["backend=burn", "quant=none"], "backend", "burn", "trainer=ddp"),
        (["quant=int8"], "quant.quant_type", "int8", "trainer=ddp"),
        ([], "quant.storage_dtype", "u8", "quant.storage_dtype=bf16"),
        ([F32], "quant.storage_dtype", "f32", "quant.storage_dtype=bf16"),
        ([BF16, "lora=vera"], "lora.variant", "vera", "trainer=ddp"),
        ([BF16, "lora.init=pissa"], "lora.init", "pissa", "trainer=ddp"),
        ([BF16, "lora.init=loftq", "lora.loftq_iters=2"], "lora.init", "loftq", "trainer=ddp"),
        (
            [BF16, "suite=mini_python", "callbacks.scorecard.every_n_steps=2"],
            "callbacks.scorecard.every_n_steps",
            "2",
            "every_n_steps=null",
        ),
        ([BF16, "quant.type_pattern={mlp:nf2}"], "quant.type_pattern", "mlp", "trainer=ddp"),
        ([BF16, BLOCKS], "quant.block_size_pattern", "down_proj", "trainer=ddp"),
        ([BF16, "lora=randlora"], "lora.variant", "randlora", "trainer=ddp"),
        ([BF16, "lora=prompt_tuning"], "lora.variant", "prompt_tuning", "trainer=ddp"),
        ([BF16, "lora=adalora"], "lora.variant", "adalora", "trainer=ddp"),
    ],
)
def test_what_cannot_be_is_refused(
    tiny_config,
    overrides,
    where,
    found,
    remedy,
):
    """Each setting is named, with an alternative."""
    (problem,) = sharded_problems(tiny_config(*FSDP, *overrides))
    assert (problem.where, str(problem.found)) == (where, found)
    assert remedy in str(problem.remedy)


def test_other_strategies_ask_for_nothing(tiny_config):
    """Without FSDP, codes may be stored as bytes and every weight may be trained."""
    assert list(sharded_problems(tiny_config("trainer=ddp", "trainer.accelerator=cpu"))) == []
    assert list(sharded_problems(tiny_config("backend=full", "quant=none"))) == []
