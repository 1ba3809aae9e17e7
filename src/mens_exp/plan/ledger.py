"""Predicted beside measured, run after run: a local file that only grows.

Each line is one finished run. A prediction is corrected by the runs of like size on the same device
and backend: by how far the formula was off for them, and by the rate that they computed at.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.wait_lock import waiting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Entry", "Residuals", "append", "entries", "is_alike", "ledger_path", "residuals"]

_FORMAT, _VERSION = "mens_exp_ledger", 2  # 1 had no sizes
_FEWEST = 3  # runs under which a spread says nothing
# Student's t, two-sided 90 %, by degrees of freedom (any table); beyond it, the normal's 1.645.
_T90 = {2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833, 10: 1.812}
_T90_MANY = 1.75
_LIKE_SIZE = 2.0  # unverified guess
_LEAST_SPREAD = 0.02  # of the log ratio: allocators differ by that much between equal runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run's predictions and measurements; None where either is unknown.

    Attributes:
        utc: when it was written.
        device: as :func:`mens_exp.plan.machine.look` names it.
        family: model type of the base.
        backend: what computed it.
        run_id: the run.
        contract: digest of its contract.
        parameters: of the base, embedding included.
        tokens_per_step: of an optimizer step.
        predicted_peak_bytes: by formula, uncorrected.
        measured_peak_bytes: the highest resident (CPU) or allocated (GPU) memory.
        flop_per_step: floating-point operations in an optimizer step, by formula.
        predicted_step_s: None where no rate was known.
        measured_step_s: mean over the steps after the first.
    """

    utc: str
    device: str
    family: str
    backend: str
    run_id: str
    contract: str
    parameters: int
    tokens_per_step: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    flop_per_step: float | None
    predicted_step_s: float | None
    measured_step_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Residuals:
    """Factors on a prediction from earlier runs, and the number of those runs."""

    runs: int
    centre: float
    low: float
    high: float


def is_alike(one: Entry, *, parameters: int, tokens_per_step: int) -> bool:
    """Tell whether a run is of like size: within a factor of two, in both respects.

    What is off in a small run is its framework and its kernels, of which a large one knows nothing.

    Args:
        one: the run.
        parameters: of the base to plan for.
        tokens_per_step: likewise.
    """
    pairs = ((one.parameters, parameters), (one.tokens_per_step, tokens_per_step))
    return all(max(a, b) <= _LIKE_SIZE * min(a, b) for a, b in pairs)


def ledger_path(cache: Path) -> Path:
    """Return the ledger's place in the cache folder."""
    return cache / "ledger.jsonl"


def append(path: Path, entry: Entry) -> None:
    """Add one line; concurrent runs wait for each other.

    Raises:
        OSError: the disk refused.
    """
    line = json_line({"format": _FORMAT, "version": _VERSION, **asdict(entry)}, str(path))
    with waiting(path.with_suffix(".lock")), path.open("ab") as file:
        if file.tell() and not _ends_whole(path):
            line = b"\n" + line  # a writer died in the middle of its line; leave it behind
        file.write(line)


def entries(path: Path) -> list[Entry]:
    """Read every whole line of today's version; a damaged one is passed over.

    The ledger only widens or narrows an interval, so a line that cannot be read is no error.
    """
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := _read(line)) is not None]


def residuals(ratios: Sequence[float]) -> Residuals | None:
    """Return centre and 90 % prediction interval of the next ratio, None with too few.

    Log ratios are taken as normal: centre their mean m, half-width t · s · sqrt(1 + 1/n).
    """
    n = len(ratios)
    if n < _FEWEST:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / n
    spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / (n - 1))
    half = _T90.get(n - 1, _T90_MANY) * max(spread, _LEAST_SPREAD) * math.sqrt(1 + 1 / n)
    return Residuals(
        runs=n, centre=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half)
    )


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _read(line: str) -> Entry | None:
    try:
        value: dict[str, Any] = json.loads(line)
        if (value.pop("format"), value.pop("version")) != (_FORMAT, _VERSION):
            return None
        return Entry(**value)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
