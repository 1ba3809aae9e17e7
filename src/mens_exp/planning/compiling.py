"""The decision whether the decoder layers of a run are compiled."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig

COMPILED, EAGER = "compiled", "eager"
_LEAST_FRAC = 0.05  # of a step; less is within the noise of a shared machine
_COMPILERS = ("g++", "clang++", "c++")  # torch's own candidates (torch/_inductor/config.py)


@dataclass(frozen=True, slots=True)
class Rate:
    """The gain and the cost of compiling on a kind of device.

    Attributes:
        saved_frac: fraction of a step's time that compiled layers save.
        compile_s: seconds until all graphs are made.
    """

    saved_frac: float
    compile_s: float


# Measured: benchmarks/results/compiled.json, on a busy machine. A GPU is still to be measured.
RATES: Final[dict[str, Rate]] = {"cpu": Rate(saved_frac=0.014, compile_s=92.0)}


def why_not(config: RunConfig, *, kind: str) -> str | None:
    """Return why the layers of a run cannot be compiled; None if they may be.

    Args:
        config: the run.
        kind: type of its device, such as ``cpu``.
    """
    if not config.backend.spec.is_transformers:
        return f"backend={config.backend.name} has no decoder layers of transformers"
    if not config.data.packing:
        return "data.packing=false pads each micro-batch to a length of its own"
    if config.trainer.world_size > 1:
        return "several processes share the run"
    if kind == "cpu" and not has_compiler():
        return "this machine has no C++ compiler, which torch needs"
    if kind != "cpu" and find_spec("triton") is None:
        return "Triton is not installed, which torch needs on a GPU"
    return None


def has_compiler() -> bool:
    """Return whether torch finds a C++ compiler."""
    named = os.environ.get("CXX")
    return any(shutil.which(one) for one in ((named,) if named else _COMPILERS))


def why_eager(config: RunConfig, *, kind: str, seconds: float | None) -> str | None:
    """Return why the layers of a new run are not compiled; None if they are.

    Args:
        config: the run.
        kind: type of its device.
        seconds: estimated training time without compiling; None if unknown.
    """
    if config.trainer.compile is False:
        return "trainer.compile=false"
    reason = why_not(config, kind=kind)
    if reason is not None or config.trainer.compile is True:
        return reason
    return why_not_worth(kind, seconds)


def why_compiled(config: RunConfig) -> str:
    """Return why the layers of a run are compiled."""
    is_asked = config.trainer.compile is True
    return "trainer.compile=true" if is_asked else "it pays, by the measured rates"


def why_not_worth(kind: str, seconds_left: float | None) -> str | None:
    """Return why compiling would not pay back its time; None if it would.

    Args:
        kind: type of the device.
        seconds_left: estimated training time without compiling; None if unknown.
    """
    rate = RATES.get(kind)
    if rate is None:
        return f"what it saves has not been measured on {kind}"
    if rate.saved_frac < _LEAST_FRAC:
        return (
            f"it saves {rate.saved_frac:.1%} of a step on {kind}, as measured; less than "
            f"{_LEAST_FRAC:.0%} does not count"
        )
    if seconds_left is None:
        return "the time of the run is unknown"
    saved = seconds_left * rate.saved_frac
    if saved <= rate.compile_s:
        return (
            f"it would save {saved:.0f} s of the {seconds_left:.0f} s left, and take "
            f"{rate.compile_s:.0f} s"
        )
    return None
