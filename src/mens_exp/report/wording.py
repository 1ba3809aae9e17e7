"""Formatting of numbers and texts, shared by every rendering.

A text that comes from a model, a data file or an exception passes through :func:`visible`
before it is shown, so that it can neither steer a terminal nor break a file's encoding.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.override_values import override_of
from mens_exp.config.schemas import labels

if TYPE_CHECKING:
    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.config.objective_spec import ObjectiveSpec

MINUS = "\N{MINUS SIGN}"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline
_LARGE = 1e4  # from here on, a number is written in full
_MINUTE_S, _HOUR_S = 60, 3600
_DECIMALS_UNDER = 100  # a rate or a size below this has one decimal

# Labels of record keys; labels of settings are in their declarations.
_LABELS = {
    "base_weights_sha256": "base weights SHA-256",
    "batches_sha256": "micro-batches SHA-256",
    "chat_template_sha256": "chat template SHA-256",
    "completed": "ended with the end marker",
    "cpu": "CPU",
    "diff_sha256": "uncommitted diff SHA-256",
    "dirty": "uncommitted changes",
    "heldout_rows": "held-out rows",
    "lora_init_sha256": "first adapter SHA-256",
    "memory_bytes": "memory",
    "peak_cuda_bytes": "peak GPU memory",
    "peak_rss_bytes": "peak resident memory",
    "python": "Python",
    "rows_sha256": "rows SHA-256",
    "tokenizer_sha256": "tokenizer SHA-256",
    "tokens_out_mean": "tokens per completion",
    "compile_at_1": "compile@1",
    "compile_at_n": "compile@n",
    "pass_at_1": "pass@1",
    "pass_at_k": "pass@k",
    "train_rows": "training rows",
    "train_sha256": "training tokens SHA-256",
    "val_rows": "validation rows",
    "val_sha256": "validation tokens SHA-256",
}


def command(*words: str | tuple[str, str]) -> str:
    """Return a command of this program, quoted for a shell, on one line.

    Args:
        words: overrides as typed, or pairs of a key and a text to quote for Hydra.
    """
    typed = [word if isinstance(word, str) else override_of(*word) for word in words]
    return visible(shlex.join(["python", "-m", "mens_exp", *typed])).replace("\n", " ")


def path(place: Path) -> str:
    """Return a path for a command, relative if it is below the working directory."""
    whole = place.absolute()
    return str(whole.relative_to(Path.cwd())) if whole.is_relative_to(Path.cwd()) else str(place)


def visible(text: str) -> str:
    r"""Return `text` with control characters made visible.

    Newlines and tabs stay; any other control character becomes its escape (``\x1b``), and a
    lone surrogate becomes U+FFFD, since neither UTF-8 nor a browser can carry it.
    """
    whole = text.replace("\r\n", "\n").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", whole)


def label(key: str) -> str:
    """Return the label of a record key: ``sequence length`` for ``seq_len``."""
    found = _LABELS.get(key) or labels().get(key)
    return found or visible(key).replace("_", " ")


def count(value: float) -> str:
    """Format a count: ``122,880``."""
    return f"{round(value):,}".replace("-", MINUS)


def loss(value: float) -> str:
    """Format a loss with four decimals."""
    return f"{value:.4f}".replace("-", MINUS)


def objective_of(manifest: Manifest) -> ObjectiveSpec | None:
    """Return the objective of a run, if it is available here."""
    settings = (manifest.contract or {}).get("settings") or {}
    return OBJECTIVES.known(str(settings.get("objective.name")))


def loss_unit(manifest: Manifest) -> str:
    """Return the unit of a run's loss."""
    spec = objective_of(manifest)
    learned = (manifest.contract or {}).get("settings") or {}
    return "nats per token" if spec is None else spec.loss_unit(learned)


def rate(value: float) -> str:
    """Format a rate per second; small ones have one decimal."""
    return f"{value:.1f}" if abs(value) < _DECIMALS_UNDER else count(value)


def figure(value: float | None, *, signed: bool = False) -> str:
    """Format a number with four digits, or in full if large; None is unknown."""
    if value is None:
        return "unknown"
    form = ",.0f" if abs(value) >= _LARGE else ".4g"
    return f"{value:{'+' if signed else ''}{form}}".replace("-", MINUS)


def percent(frac: float, *, signed: bool = False) -> str:
    """Format a fraction in percent with one decimal: ``87.5%`` for 0.875."""
    return f"{frac * 100:{'+' if signed else ''}.1f}%".replace("-", MINUS)


def epochs(passes: float) -> str:
    """Format passes over the training data: ``11.5% of an epoch``, ``3 epochs``."""
    if passes < 1:
        return f"{percent(passes)} of an epoch"
    return "1 epoch" if passes == 1 else f"{passes:.4g} epochs"


def level(frac: float) -> str:
    """Format a level of confidence or power with as many decimals as needed: ``95%``, ``99.9%``."""
    return f"{100 * frac:.6g}%"


def points(frac: float) -> str:
    """Format a difference of two rates in percentage points: ``+25.0 points`` for 0.25."""
    return f"{frac * 100:+.1f} points".replace("-", MINUS)


def size(value_bytes: float) -> str:
    """Format a number of bytes in binary units: ``2.08 GiB``."""
    scaled, unit = float(value_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1024:  # noqa: PLR2004 - the step between binary units
            break
        scaled, unit = scaled / 1024, larger
    if unit == "B":
        return f"{scaled:.0f} B".replace("-", MINUS)
    return f"{scaled:.{2 if unit in ('GiB', 'TiB') else 0}f} {unit}".replace("-", MINUS)


def duration(value_s: float) -> str:
    """Format a number of seconds: ``42.1 s``, ``3 min 52 s``, ``2 h 05 min``."""
    if value_s < _MINUTE_S:
        shown = f"{value_s:.1f} s"
        return shown if shown != "60.0 s" else "1 min 00 s"
    whole = round(value_s)
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S:02d} s"
    minutes = round(value_s / _MINUTE_S)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment(utc: str) -> str:
    """Format a UTC timestamp to the second: ``2026-11-20 05:58:01 UTC``."""
    return f"{visible(utc)[:19].replace('T', ' ')} UTC"


def as_text(value: object, key: str = "") -> str:
    """Format any JSON value in one line; `key` identifies bytes and seconds.

    Nested mappings become ``name value · name value``; null becomes the empty string.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value, key)
    if isinstance(value, Mapping):
        return " · ".join(f"{label(str(k))} {as_text(v, str(k))}".strip() for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(as_text(item) for item in value)
    return visible(str(value))


def typed(value: object) -> str:
    """Format a setting's value as typed in a command."""
    return visible(value if isinstance(value, str) else json.dumps(value))


def _number(value: float, key: str) -> str:
    if not math.isfinite(value):
        return str(value)
    if key == "bytes" or key.endswith("_bytes"):
        return size(value)
    if key.endswith("_per_s"):
        return rate(value)
    if key.endswith("_s"):
        return duration(value)
    if key.endswith(("_rate", "_frac")):
        return percent(value)
    return count(value) if isinstance(value, int) else f"{value:.6g}".replace("-", MINUS)
