"""Lightning's own loggers, writing into the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.logger import CsvLogger, LoggerConfig, TensorboardLogger

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from mens_exp.training.record import RunRecord

__all__ = ["lightning_logger"]


def lightning_logger(config: LoggerConfig, run: RunRecord) -> Logger | None:
    """Make the logger that the configuration names, or None where it is none of Lightning's.

    Each attempt of a run writes below its own name: Lightning's CSV logger would overwrite what
    the attempt before has left.
    """
    attempt = f"attempt_{max(1, len(run.manifest.attempts))}"
    if isinstance(config, CsvLogger):
        from lightning.pytorch.loggers import CSVLogger

        return CSVLogger(
            run.dir.path,
            name=run.dir.csv.name,
            version=attempt,
            flush_logs_every_n_steps=config.flush_every_n_steps,
        )
    if isinstance(config, TensorboardLogger):
        from lightning.pytorch.loggers import TensorBoardLogger

        return TensorBoardLogger(
            run.dir.path, name=run.dir.tensorboard.name, version=attempt, default_hp_metric=False
        )
    return None
