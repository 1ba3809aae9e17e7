from __future__ import annotations

import numpy as np
import torch

from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.trainer import CheckpointConfig
from mens_exp.training.callbacks.checkpoint import Checkpoint
from mens_exp.training.callbacks.telemetry import TelemetryWriter


def saving(fit, *, every_n_steps, keep=2):
    fit.config.checkpoint = CheckpointConfig(every_n_steps=every_n_steps, keep=keep)
    return Checkpoint(fit.record)


def names(fit):
    return sorted(path.name for path in fit.record.dir.checkpoints.glob("*.ckpt"))


def events(fit, *kinds):
    read = read_events(fit.record.dir.telemetry)
    return [(e["event"], e["payload"]["step"]) for e in read if e["event"] in kinds]


def stored(fit, step):
    return torch.load(fit.record.dir.checkpoint(step), weights_only=True)


def test_saves_every_so_many_steps_and_at_the_end(fit):
    """With five steps and a checkpoint every two, steps 2, 4 and 5 are saved."""
    fit.run(fit.trainer(saving(fit, every_n_steps=2, keep=9), max_steps=5))
    assert names(fit) == ["step_00000002.ckpt", "step_00000004.ckpt", "step_00000005.ckpt"]


def test_keeps_only_the_newest(fit):
    """Only the last two checkpoints are kept."""
    fit.run(fit.trainer(saving(fit, every_n_steps=1, keep=2), max_steps=4))
    assert names(fit) == ["step_00000003.ckpt", "step_00000004.ckpt"]


def test_holds_the_adapter_and_its_moments_but_never_the_base(fit):
    """The size is three float32 numbers per trained parameter and little else."""
    fit.run(fit.trainer(saving(fit, every_n_steps=2)))
    trained = sum(p.numel() for p in fit.module.backend.trainable().values())
    size = fit.record.dir.checkpoint(2).stat().st_size
    assert 3 * 4 * trained < size < 3 * 4 * trained + 80_000
    checkpoint = stored(fit, 2)
    assert checkpoint["state_dict"] == {}
    assert set(checkpoint["adapter"]) == set(fit.module.backend.trainable())


def test_holds_the_position_of_the_next_micro_batch(fit):
    """Two steps of two micro-batches have consumed numbers 0 to 3."""
    fit.run(fit.trainer(saving(fit, every_n_steps=1, keep=9)))
    loops = [stored(fit, step)["loops"]["fit_loop"]["state_dict"] for step in (1, 2)]
    assert [loop["combined_loader"] for loop in loops] == [[{"position": 2}], [{"position": 4}]]


def test_says_what_it_saved(fit):
    """The event gives the step, the path relative to the run, and the size."""
    fit.run(fit.trainer(saving(fit, every_n_steps=2)))
    saved = [e["payload"] for e in read_events(fit.record.dir.telemetry)]
    assert saved == [
        {
            "step": 2,
            "path": "checkpoints/step_00000002.ckpt",
            "bytes": fit.record.dir.checkpoint(2).stat().st_size,
        }
    ]


def test_a_step_is_saved_after_the_validation_that_belongs_to_it(fit):
    """A resumed run then neither misses nor repeats a validation."""
    callbacks = saving(fit, every_n_steps=1), TelemetryWriter(fit.record)
    fit.run(fit.trainer(*callbacks, val_check_interval=4, max_steps=3))
    assert events(fit, "step", "validation", "checkpoint_saved") == [
        ("step", 1),
        ("checkpoint_saved", 1),
        ("step", 2),
        ("validation", 2),
        ("checkpoint_saved", 2),
        ("step", 3),
        ("validation", 3),
        ("checkpoint_saved", 3),
    ]


def test_a_validation_in_mid_accumulation_saves_nothing(fit):
    """Checkpoints are written at optimizer steps only."""
    callbacks = saving(fit, every_n_steps=1), TelemetryWriter(fit.record)
    fit.run(fit.trainer(*callbacks, val_check_interval=3))
    assert events(fit, "validation", "checkpoint_saved") == [
        ("checkpoint_saved", 1),
        ("validation", 1),
        ("validation", 2),
        ("checkpoint_saved", 2),
    ]


def test_a_validation_outside_of_training_saves_nothing(fit):
    """The base model is validated before there is anything to save."""
    fit.validate(fit.trainer(saving(fit, every_n_steps=1)))
    assert not fit.record.dir.checkpoints.exists()


def test_global_generators_go_on_where_they_were(fit):
    """After loading, torch and numpy draw the same numbers again."""
    before = torch.get_rng_state(), np.random.get_state()
    try:
        np.random.standard_normal()  # leaves a second Gaussian cached
        state = Checkpoint(fit.record).state_dict()
        drawn = [(float(torch.rand(())), np.random.standard_normal()) for _ in range(3)]
        Checkpoint(fit.record).load_state_dict(state)
        again = [(float(torch.rand(())), np.random.standard_normal()) for _ in range(3)]
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
    assert again == drawn
