"""Loggers: mirrors of the JSON record, several of them if the command lists several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from omegaconf import MISSING

from mens_exp.config.fields import setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hydra.core.default_element import ResultDefault


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
        "Both write into the run directory; with online, a separate process uploads during the "
        "run.",
    )
    project: str = setting(
        "mens_exp", "W&B project.", aliases={"wandb_project": "Axolotl"}, example="qlora-study"
    )
    entity: str | None = setting(
        None, "W&B entity; null is the account's default.", example="my-team"
    )
    group: str | None = setting(
        None, "W&B group; null is the sweep, or the experiment.", example="first-study"
    )
    name: str | None = setting(
        None,
        "W&B run name; null is made from what varies. Jobs of a sweep add their number to it.",
        aliases={"run_name": "Transformers and TRL"},
        example="nf4-r16",
    )
    tags: list[str] = setting(
        [],
        "Tags in addition to those made from the overrides and the study.",
        example="[nf4,pilot]",
    )
    notes: str | None = setting(
        None,
        "Text on the run's page, such as its purpose; a study adds its hypothesis.",
        example="rank",
    )
    system_metrics: bool = setting(
        False,
        "Let W&B sample the machine too, every 15 s, for its System panels. The record has a "
        "sample of each step with any logger (system/…, from callbacks.memory).",
    )
    git: bool = setting(
        False,
        "Let W&B read commit and remote of the repository, and with them the command line, the "
        "interpreter and the system.",
    )
    requirements: bool = setting(
        False, "Let W&B list the installed packages; the manifest has the relevant ones."
    )
    console: bool = setting(False, "Let W&B keep the command's output.")
    wait_s: float = setting(
        60.0,
        "Seconds to wait for the upload once the run's record is closed (a rough choice); what is "
        "not sent by then is sent in the background, or later by task=sync.",
        ge=0,
    )


@dataclass(kw_only=True, slots=True)
class CsvLogger(LoggerConfig):
    """lightning.pytorch.loggers.CSVLogger."""

    sink: str = "csv"
    flush_every_n_steps: int = setting(
        10,
        "Optimizer steps between flushes, whose metrics a kill may lose; Lightning's own default "
        "is 100.",
        ge=1,
    )


@dataclass(kw_only=True, slots=True)
class TensorboardLogger(LoggerConfig):
    """lightning.pytorch.loggers.TensorBoardLogger."""

    sink: str = "tensorboard"


_LOGGER = "logger"


def apart(defaults: list[ResultDefault]) -> list[ResultDefault]:
    """Move each of several loggers to its own package, `logger.<option>` instead of `logger`.

    Unlike other groups, a run may have several loggers. A single logger keeps its keys directly
    under `logger`, and so does an option that only lists others.
    """
    parents = {str(one.config_path): str(one.parent) for one in defaults if _is_logger(one)}
    typed = {str(one.parent) for one in defaults if one.package == _LOGGER} & parents.keys()
    typed -= set(parents.values())
    if len(typed) < 2:  # noqa: PLR2004
        return defaults
    below = Counter(above for one in typed for above in _above(one, parents))
    apart: dict[str, str] = {}
    for one in typed:
        line = [one, *(above for above in _above(one, parents) if below[above] == 1)]
        apart |= dict.fromkeys(line, f"{_LOGGER}.{line[-1].rpartition('/')[2]}")
    return [
        replace(one, package=apart[place]) if (place := _of_logger(one, parents)) in apart else one
        for one in defaults
    ]


def _is_logger(one: ResultDefault) -> bool:
    return one.package == _LOGGER and str(one.config_path).startswith(f"{_LOGGER}/")


def _above(option: str, parents: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that list an option, innermost first."""
    while (option := parents[option]) in parents:
        yield option


def _of_logger(one: ResultDefault, parents: Mapping[str, str]) -> str:
    """Return the logger option of an entry, which is the option or its schema."""
    is_option = str(one.config_path) in parents
    return str(one.config_path if is_option else one.parent) if one.package == _LOGGER else ""
