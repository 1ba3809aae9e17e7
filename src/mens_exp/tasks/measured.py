"""Predictions for a run and its measurements, kept side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.manifest import utc_now
from mens_exp.errors import MensError
from mens_exp.plan.defaults import differences
from mens_exp.plan.estimate import make_plan
from mens_exp.plan.ledger import Entry, append, ledger_path

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.config.root import RunConfig

__all__ = ["keep_measurement", "note_plan", "planned", "step_s"]


def keep_measurement(manifest: Manifest, plan: dict[str, Any], cache: Path) -> None:
    """Add a run to the ledger; one that cannot be kept is a note, never a failed run.

    A run of several processes says nothing of what one takes, and is left out.
    """
    if (plan.get("processes") or {}).get("processes", 1) > 1:
        return
    results, contract = manifest.results, manifest.contract or {}
    measured = step_s(results)
    on_cpu = plan["device"]["kind"] == "cpu"
    rate = plan["time_s"].get("flop_per_step")
    entry = Entry(
        utc=utc_now(),
        device=plan["device"]["name"],
        family=str((contract.get("provenance") or {}).get("base_family")),
        backend=plan["backend"],
        run_id=manifest.run_id,
        contract=str(contract.get("digest")),
        parameters=plan["parameters"],
        tokens_per_step=plan["tokens_per_step"],
        predicted_peak_bytes=plan["memory_bytes"]["formula"],
        measured_peak_bytes=results.get("peak_rss_bytes" if on_cpu else "peak_cuda_bytes"),
        flop_per_step=rate,
        predicted_step_s=plan["time_s"]["step_s"],
        measured_step_s=measured,
    )
    try:
        append(ledger_path(cache), entry)
    except (MensError, OSError) as error:
        manifest.notes.append(f"the ledger was not written: {error}")


def planned(config: RunConfig, manifest: Manifest, cache: Path) -> dict[str, Any]:
    """Make the plan of a run; it and the manifest say where the run differs from our defaults."""
    # A resumed run's overrides are not all that made its configuration.
    overrides = manifest.overrides if len(manifest.attempts) == 1 else None
    changed = {"differs_from_default": differences(config, overrides)}
    plan = make_plan(config, cache)
    manifest.facts |= changed | {"comparison": plan["comparison"]}
    return plan | changed


def note_plan(manifest: Manifest, plan: dict[str, Any]) -> None:
    """Keep the plan's notes (what is left to the operator, what may go wrong), each once."""
    said = [*plan["notes"], *plan["warnings"]]
    manifest.notes += [note for note in said if note not in manifest.notes]


def step_s(results: dict[str, Any]) -> float | None:
    """Return the mean seconds of an optimizer step after the first, None where none was timed."""
    rate, tokens, steps = (results.get(key) for key in ("tokens_per_s", "tokens", "steps"))
    return tokens / steps / rate if rate and tokens and steps else None
