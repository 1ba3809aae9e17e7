"""A config-driven laboratory for trustworthy QLoRA experiments.

The names below are those of :mod:`mens_exp.api`, which is imported when one of them is first used;
``import mens_exp`` alone loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mens_exp.api import (
        Comparison,
        Composition,
        Plan,
        Run,
        compare,
        compose,
        evaluate,
        load_run,
        plan,
        train,
    )
    from mens_exp.errors import MensError

__all__ = [
    "Comparison",
    "Composition",
    "MensError",
    "Plan",
    "Run",
    "compare",
    "compose",
    "evaluate",
    "load_run",
    "plan",
    "train",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module("mens_exp.errors" if name == "MensError" else "mens_exp.api")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
