"""Settings of task=compare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mens_exp.config.fields import setting

__all__ = ["CompareConfig", "CompareTarget", "CompareTest", "Sequential"]


class CompareTest(Enum):
    """The test behind a verdict."""

    t = "t"
    sign_flip = "sign_flip"


class CompareTarget(Enum):
    """The items that a verdict is about."""

    these_items = "these_items"
    items_like_these = "items_like_these"


class Sequential(Enum):
    """Whether a verdict allows for several looks at the same arms."""

    none = "none"
    always_valid = "always_valid"


@dataclass(kw_only=True, slots=True)
class CompareConfig:
    """The basis of a verdict, declared before the verdict is seen."""

    primary: str | None = setting(
        None,
        "The one KPI that verdicts are given on, all others are secondary; null is task_success, "
        "parse_rate or val_loss, the first that every arm has.",
    )
    reference: str | None = setting(
        None,
        "The arm that others are held against: its name, or its value of a factor; null is that "
        "of the first run.",
    )
    condition: str = setting("tuned", "The scorecards' condition that arms are compared on.")
    alpha: float = setting(
        0.05, "Two-sided error rate, shared by all arms (Holm).", ge=1e-9, lt=0.5
    )  # the field's convention
    power: float = setting(
        0.8, "Chance at which the minimum detectable effect is stated.", ge=0.5, lt=1
    )
    test: CompareTest = setting(
        CompareTest.t,
        "t: Student's t on the seeds' differences (measured: benchmarks/calibration.py); "
        "sign_flip: their signs alone, which five seeds can never bring under 0.05.",
    )
    target: CompareTarget = setting(
        CompareTarget.these_items,
        "these_items: other seeds on exactly these items; items_like_these: other items of their "
        "kind too, of which these are a sample (needs test=t; measured: benchmarks/items.py).",
    )
    sequential: Sequential = setting(
        Sequential.none,
        "none: the p-value of one look, after a number of seeds that was fixed before; "
        "always_valid: one that may be read after every seed, at the price of wider intervals "
        "(measured: benchmarks/looks.py).",
    )

    def record(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {
            "primary": self.primary,
            "reference": self.reference,
            "condition": self.condition,
            "alpha": self.alpha,
            "power": self.power,
            "test": self.test.value,
            "target": self.target.value,
            "sequential": self.sequential.value,
        }
