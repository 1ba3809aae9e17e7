"""Loggers: mirrors of the JSON record, several of them if the command lists several."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting


class WandbMode(Enum):
    """Whether the W&B client connects to a server."""

    offline = "offline"
    online = "online"


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """Settings common to all loggers."""

    sink: str = setting(MISSING, "Name of the sink; set by the option.")


@dataclass(kw_only=True, slots=True)
class OwnLogger(LoggerConfig):
    """Any logger of Lightning's form, by its class; its other keys are the class's arguments."""

    _target_: str = setting(MISSING, "Class of the logger; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoLogger(LoggerConfig):
    """No logger other than the JSON record."""

    sink: str = "none"


@dataclass(kw_only=True, slots=True)
class WandbLogger(LoggerConfig):
    """Weights & Biases, offline by default."""

    sink: str = "wandb"
    mode: WandbMode = setting(
        WandbMode.offline,
        "Both write into the run directory; with online, a process of its own uploads as it runs.",
    )
    project: str = setting("mens_exp", "W&B project.", aliases={"wandb_project": "Axolotl"})
    entity: str | None = setting(None, "W&B entity; null is the account's default.")
    group: str | None = setting(None, "W&B group; null is the sweep, or the experiment.")
    name: str | None = setting(
        None,
        "W&B run name; null is made from what varies. Jobs of a sweep add their number to it.",
        aliases={"run_name": "Transformers and TRL"},
    )
    tags: list[str] = setting([], "Tags beside those made from the overrides.")
    notes: str | None = setting(None, "Text on the run's page, such as what it is to show.")
    system_metrics: bool = setting(
        False,
        "Let W&B sample the machine too, every 15 s, for its System panels. The record has a "
        "sample of each step whatever the logger (system/…, from callbacks.memory).",
    )
    git: bool = setting(
        False,
        "Let W&B read commit and remote of the repository, and with them the command line, the "
        "interpreter and the system.",
    )
    requirements: bool = setting(
        False, "Let W&B list the installed packages; the manifest has those that matter."
    )
    console: bool = setting(False, "Let W&B keep what the command prints.")
    wait_s: float = setting(
        60.0,
        "Seconds to wait for the upload once the run's record is closed (unverified guess); what "
        "is not sent by then goes on in the background, or later by task=sync.",
        ge=0,
    )


@dataclass(kw_only=True, slots=True)
class CsvLogger(LoggerConfig):
    """lightning.pytorch.loggers.CSVLogger."""

    sink: str = "csv"
    flush_every_n_steps: int = setting(
        10, "Optimizer steps whose metrics a kill may lose; Lightning's own default is 100.", ge=1
    )


@dataclass(kw_only=True, slots=True)
class TensorboardLogger(LoggerConfig):
    """lightning.pytorch.loggers.TensorBoardLogger."""

    sink: str = "tensorboard"
