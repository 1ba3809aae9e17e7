"""Overrides of a sweep as a whole: given once, and only where there is a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from hydra.core.override_parser.types import Override

from mens_exp.config.launcher import EARLIER, LAUNCHERS
from mens_exp.config.search import OPTUNA
from mens_exp.config.sweep import LOCAL_LAUNCHER, LocalLauncher
from mens_exp.errors import ConfigError, MensError, NoEffectError

__all__ = ["IN_PROCESS", "launcher_of", "sweep_override_problems", "without_joblib"]

IN_PROCESS = "basic"
_JOBLIB = "joblib"  # a launcher of earlier releases
_PLUGINS = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
_PREFIXES = ("sweep.", "hydra.launcher.", "hydra.sweeper.")
_OF_LOCAL = {field.name for field in fields(LocalLauncher)}


def launcher_of(texts: Sequence[str], *, multirun: bool) -> str | None:
    """Return the launcher that the overrides choose; None is a single run."""
    if not multirun:
        return None
    chosen = [text.partition("=")[2] for text in texts if text.startswith("hydra/launcher=")]
    return EARLIER.get(chosen[-1], chosen[-1]) if chosen else LOCAL_LAUNCHER


def without_joblib(texts: Sequence[str], *, multirun: bool) -> tuple[list[str], list[MensError]]:
    """Refuse the launcher `joblib`, and write the command for `local`, which does the same.

    Returns:
        The overrides for `local`, so that the rest of the command is judged too, and the refusal.
    """
    if launcher_of(texts, multirun=multirun) != _JOBLIB:
        return list(texts), []
    keys = {text: text.lstrip("+").partition("=")[0] for text in texts}
    settings = [text for text in texts if keys[text].startswith("hydra.launcher.")]
    kept = [text for text in settings if keys[text].rpartition(".")[2] in _OF_LOCAL]
    if not any(keys[text] == "hydra.launcher.n_jobs" for text in kept):
        kept.insert(0, "hydra.launcher.n_jobs=-1")  # joblib's default
    gone = [text for text in settings if text not in kept]
    ours = [f"hydra/launcher={LOCAL_LAUNCHER}", *kept]
    rest = [text for text in texts if keys[text] != "hydra/launcher" and text not in settings]
    refusal = ConfigError(
        "there is no launcher joblib any more; local runs the same jobs without it",
        where="hydra/launcher",
        found=_JOBLIB,
        remedy=f"write {' '.join(ours)}" + (f", and drop {', '.join(gone)}" if gone else ""),
    )
    return [*rest, *ours], [refusal]


def sweep_override_problems(override: Override, *, launcher: str | None) -> Iterator[ConfigError]:
    """Yield what is wrong with an override that is meant for a whole sweep.

    Args:
        override: any override of the command.
        launcher: of the sweep; None where there is none.
    """
    key, line = override.key_or_group, str(override.input_line)
    if key == "hydra.mode":
        yield ConfigError("is told by -m", where=key, found=line, remedy=f"drop {key}")
        return
    if not key.startswith(_PREFIXES) and key not in {"sweep", *_PLUGINS}:
        return
    if launcher is None:
        yield NoEffectError(
            "on a single run",
            where=key,
            found=line,
            expected="-m, which makes a sweep",
            remedy=f"add -m, or drop {key}",
        )
    elif override.is_sweep_override():
        yield ConfigError(
            "holds for the whole sweep, and takes one value",
            where=key,
            found=line,
            remedy="start one sweep for each value",
        )
    elif key == "hydra/launcher" and launcher not in {*LAUNCHERS, IN_PROCESS}:
        yield ConfigError(
            "is no launcher that starts jobs here",
            where=key,
            found=launcher,
            expected=f"{', '.join(LAUNCHERS)}, a process for each job; or {IN_PROCESS}, which runs "
            "them one after the other in the launcher's own process",
        )
    elif launcher == IN_PROCESS and line == f"hydra/sweeper={OPTUNA}":
        yield NoEffectError(
            f"with hydra/launcher={IN_PROCESS}, which takes the cells as they stand",
            where=key,
            found=line,
            remedy=f"drop hydra/launcher={IN_PROCESS}: {', '.join(LAUNCHERS)} take trials as they "
            "come",
        )
    elif launcher == IN_PROCESS and key.startswith("sweep"):
        yield NoEffectError(
            f"with hydra/launcher={IN_PROCESS}, which keeps no record of a sweep",
            where=key,
            found=line,
            remedy=f"drop {key}, or hydra/launcher={IN_PROCESS}",
        )
