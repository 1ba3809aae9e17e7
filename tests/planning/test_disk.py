from __future__ import annotations

from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import adapter_parameters
from mens_exp.planning.forecast import disk


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
