from __future__ import annotations

import logging
import signal
import warnings

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from mens_exp.errors import SetupError
from mens_exp.training.build import device_of, lightning_quiet
from mens_exp.training.loggers import RecordLogger


def names(trainer):
    return [type(callback).__name__ for callback in trainer.callbacks]


@pytest.mark.parametrize(
    ("accelerator", "has_gpu", "chosen"),
    [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu"), ("gpu", True, "cuda")],
)
def test_the_device_is_the_one_asked_for_or_the_best(monkeypatch, accelerator, has_gpu, chosen):
    """With auto a GPU is used if there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_of(accelerator).type == chosen


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    """Training on the CPU instead would be another run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SetupError, match="no CUDA device is usable"):
        device_of("gpu")


def test_the_default_callbacks_are_there_and_the_checkpoint_is_last(
    built,
):
    """The checkpoint is written last, after all other callbacks of its step."""
    assert names(built()) == [
        "LoggerFeed",
        "ManifestFacts",
        "Digests",
        "Throughput",
        "MemoryWatch",
        "FiniteGuard",
        "TelemetryWriter",
        "Progress",
        "AdapterWriter",
        "StopsAfterWholeSteps",
        "Checkpoint",
    ]


def test_callbacks_can_be_chosen(built):
    """Lightning adds no default callback in place of one left out."""
    minimal = built("callbacks=minimal")
    assert names(minimal)[1:-1] == ["ManifestFacts", "Digests", "TelemetryWriter", "AdapterWriter"]
    assert "Progress" not in names(built("~callbacks.progress"))


def test_the_best_adapter_is_put_back_before_it_is_written(built):
    """BestAdapter comes first after the record, and only if requested."""
    found = names(built("adapter.select=best", "trainer.val_check_interval=4"))
    assert found[1] == "BestAdapter"
    assert "BestAdapter" not in names(built())


def test_settings_reach_the_callback(built):
    """Each YAML key is an argument of the class."""
    trainer = built("callbacks.memory.trim_every_n_steps=7")
    (memory,) = (one for one in trainer.callbacks if type(one).__name__ == "MemoryWatch")
    assert memory.trim_every_n_steps == 7


def test_the_record_is_told_before_the_users_loggers(built):
    """`trainer.logger`, Lightning's first, is the user's logger if there is one."""
    bare, both = built(), built("logger=[csv,wandb]")
    assert [type(one).__name__ for one in bare.loggers] == ["RecordLogger"]
    assert bare.logger is bare.loggers[0]
    kinds = [RecordLogger, CSVLogger, WandbLogger]
    assert all(isinstance(one, kind) for one, kind in zip(both.loggers, kinds, strict=True))
    assert isinstance(both.logger, CSVLogger)
    assert both.logger.experiment is both.loggers[1].experiment


def test_cpu_runs_are_deterministic_unless_told_otherwise(built):
    """The same command gives the same bytes."""
    built()
    assert torch.are_deterministic_algorithms_enabled()
    built("trainer.deterministic=false")
    assert not torch.are_deterministic_algorithms_enabled()


def test_trainer_settings_are_lightnings_own(built):
    """Clipping, accumulation and validation every n micro-batches, or never, are passed on."""
    trainer = built(
        "trainer.gradient_clip_val=0.5",
        "trainer.accumulate_grad_batches=3",
        "trainer.val_check_interval=5",
    )
    assert trainer.gradient_clip_val == 0.5
    for off in ("0", "null"):
        assert built(f"trainer.gradient_clip_val={off}").gradient_clip_val is None
    assert trainer.accumulate_grad_batches == 3
    assert trainer.val_check_interval == 5
    assert trainer.max_steps == 10
    assert built().val_check_interval > 10 * 4


def test_quiet_hides_lightnings_notices_and_ends_with_its_block():
    """Errors and other warnings are still shown."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with lightning_quiet():
        assert not logger.isEnabledFor(logging.WARNING)
        assert logger.isEnabledFor(logging.ERROR)
        warnings.warn("Found 3 module(s) in eval mode at the start of training.", stacklevel=1)
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert logger.level == level


def test_a_trainer_leaves_signals_to_the_run(built):
    """Lightning's SIGTERM handler would broadcast inside the handler and hang."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        built()._signal_connector.register_signal_handlers()  # as `fit` calls it
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
