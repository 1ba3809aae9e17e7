from __future__ import annotations

import pytest

from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import adapter_parameters
from mens_exp.planning.forecast import disk
from mens_exp.planning.memory import trained_parameters


def of(config, cache, steps=60):
    return disk(config, shape_of(config.model), cache, steps)


def test_sizes_follow_from_the_shapes(tiny_config, tmp_path):
    """The adapter takes 4 bytes a parameter, twice; a checkpoint 12; the base is not there yet."""
    config = tiny_config("checkpoint.every_n_steps=25", "checkpoint.keep=2")
    shape = shape_of(config.model)
    parameters = adapter_parameters(config.lora, shape)
    found = of(config, tmp_path)
    assert (found.adapter, found.peft, found.checkpoint) == (
        4 * parameters,
        4 * parameters,
        12 * parameters,
    )
    # After steps 25, 50 and 60; two are kept, and a third exists while it is written.
    assert (found.checkpoints_saved, found.checkpoints_kept) == (3, 2)
    assert found.in_run == 8 * parameters + 3 * 12 * parameters + 20_000_000
    weights = shape.linear_parameters + shape.embedding_parameters
    assert (found.base, found.merged) == (4 * weights, 2 * weights)


def test_base_that_is_there_takes_nothing(tiny_config, tiny_base, cache):
    """An earlier run has written it."""
    del tiny_base
    assert of(tiny_config(), cache).base == 0


def test_run_without_checkpoints_keeps_none(tiny_config, tmp_path):
    """With callbacks=minimal only the adapter is written."""
    found = of(tiny_config("callbacks=minimal"), tmp_path)
    assert (found.checkpoints_saved, found.checkpoints_kept) == (0, 0)
    assert found.in_run == found.adapter + found.peft + 20_000_000


def test_unknown_steps_leave_the_number_of_checkpoints_open(tiny_config, tmp_path):
    """The largest number that may be kept is counted."""
    found = of(tiny_config(), tmp_path, None)
    assert (found.checkpoints_saved, found.checkpoints_kept) == (None, 2)


def test_adapter_of_the_default_job_is_as_large_as_written(tiny_config, tmp_path):
    """4,884,480 parameters in float32 take 19.5 MB."""
    config = tiny_config("model=smollm2_135m")
    assert of(config, tmp_path).adapter == 19_537_920


COPIES = [  # of the trained values: in the adapter, in PEFT's form, in a checkpoint with Adam's two
    ((), (1, 1, 3)),
    (("adapter.select=best", "trainer.val_check_interval=4"), (1, 1, 4)),
    (("lora.init=pissa",), (2, 2, 4)),
    (("lora.init=loftq", "lora.loftq_iters=1"), (1, 1, 3)),
    (("lora.variant=dora",), (1, 1, 3)),
    (("lora=ln_tuning",), (1, 1, 3)),
    (("lora=prompt_tuning",), (1, 1, 3)),
    *(((f"lora={name}",), (1, 0, 3)) for name in ("vera", "randlora", "lokr", "loha", "ia3")),
    (("lora=adalora", "adapter.select=best", "trainer.val_check_interval=4"), (1, 0, 6)),
    (("backend=full", "quant=none"), (1, 0, 3)),
    (("backend=proxy",), (1, 0, 3)),
    (("backend=burn", "tokenizer=vox"), (1, 0, 3)),  # from scratch: it trains every weight
]


@pytest.mark.parametrize(("overrides", "copies"), COPIES, ids=str)
def test_copies_of_the_trained_values_are_counted(tiny_config, tmp_path, overrides, copies):
    """Runs have written as many; test_plan.py compares some with the files of runs."""
    config = tiny_config(*overrides)
    size = 4 * trained_parameters(config, shape_of(config.model))
    found = of(config, tmp_path)
    assert (found.adapter, found.peft, found.checkpoint) == tuple(many * size for many in copies)
