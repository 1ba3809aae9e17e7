"""run_summary.json and training_skip_stats.json: a manifest under the mens trainer's keys.

The keys are theirs; what is ours is under the one key ``mens_exp``. Both are functions of the
manifest alone: a value that it does not have is null, and ``mens_exp.unknown`` says why.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.manifest import Manifest

__all__ = ["run_summary", "training_skip_stats"]

_ADAPTER = ("adapter/adapter.safetensors", "weights/model.safetensors")


def run_summary(manifest: Manifest) -> dict[str, Any]:
    """Return the figures that a run ended with; paths are relative to its directory."""
    results, contract = manifest.results, manifest.contract or {}
    weights = next((name for name in _ADAPTER if name in manifest.outputs), None)
    view = {
        "schema": "vox_mens_run_summary_v1",
        "run_id": manifest.run_id,
        "base_model": manifest.inputs.get("base_model"),
        "adapter_tag": None,
        "global_step": results.get("micro_batches"),
        "optimizer_step_count": results.get("steps"),
        "avg_train_loss": None,
        "avg_val_loss_last_epoch": results.get("tuned_val_loss"),
        "total_tokens": results.get("tokens"),
    }
    unknown = _unknown(manifest, view) | {
        "adapter_tag": "a run has no tag; its run_id is unique",
        "avg_train_loss": "telemetry.jsonl has the loss of each step; the manifest has no mean",
    }
    if weights is None:
        unknown["artifacts.final_adapter"] = _not_reached(manifest)
    return view | {
        "artifacts": {
            "final_adapter": weights,
            "training_skip_stats": "training_skip_stats.json",
            "telemetry_jsonl": "telemetry.jsonl",
            "model_card": "MODEL_CARD.md",
        },
        "mens_exp": {
            "status": str(manifest.status),
            "experiment": manifest.experiment,
            "started_utc": manifest.started_utc,
            "ended_utc": manifest.ended_utc,
            "config_digest": manifest.config_digest,
            "contract_digest": contract.get("digest"),
            "base_val_loss": results.get("base_val_loss"),
            "supervised_tokens": results.get("supervised_tokens"),
            "wall_s": results.get("wall_s"),
            "unknown": dict(sorted(unknown.items())),
        },
    }


def training_skip_stats(manifest: Manifest) -> dict[str, Any]:
    """Return how many training rows were not learned from, by reason.

    ``no_supervised_skip_rate`` is a share of the encoded documents, each counted once; over the
    epochs of a run none is skipped again. Filters and the quarantine act before rows are encoded,
    on all sides of the split; a quarantined row counts for each of its reasons.
    """
    data: Mapping[str, Any] = manifest.inputs.get("data") or {}
    counts = _counts(data, manifest.results.get("streamed"))
    dropped, short, kept = counts["dropped"], counts["short"], counts["documents"]
    no_supervision = None if dropped is None or short is None else dropped - short
    encoded = None if kept is None or dropped is None else kept + dropped
    view = {
        "schema": "vox_mens_training_skip_stats_v1",
        "optimizer_steps_executed": manifest.results.get("steps"),
        "micro_steps_executed": manifest.results.get("micro_batches"),
        "skip_no_supervised_positions": no_supervision,
        "skip_short_seq": short,
        "skip_curriculum": 0,
        "skip_token_id_oob": 0,  # an id without an embedding is refused before training
        "no_supervised_skip_rate": None
        if no_supervision is None or encoded is None
        else no_supervision / max(encoded, 1),
    }
    return view | {
        "mens_exp": {
            "run_id": manifest.run_id,
            "documents": kept,
            "truncated": counts["truncated"],
            "skips": {
                "bad_vocab": 0,
                "short_seq": short,
                "no_supervision": no_supervision,
                "quarantined": counts["quarantined"],
                "filtered": counts["filtered"],
            },
            "unknown": _unknown(manifest, view),
        }
    }


def _counts(data: Mapping[str, Any], streamed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the counts of encoded documents, and of rows that were left out before, by reason."""
    if streamed is not None:  # what was read until training ended; reasons are not kept apart
        rows = streamed.get("rows") or {}
        names = ("documents", "truncated", "dropped", "short")
        before = {"quarantined": rows.get("bad"), "filtered": rows.get("filtered")}
        return {name: streamed.get(name) for name in names} | before
    return {
        "documents": data.get("train_rows"),
        "truncated": data.get("train_truncated"),
        "dropped": data.get("train_dropped"),
        "short": data.get("train_short"),
        "quarantined": dict((data.get("quarantined") or {}).get("reasons") or {}),
        "filtered": _filtered(data),
    }


def _filtered(data: Mapping[str, Any]) -> dict[str, int]:
    """Add up what the filters of all rows refused, and in a mix those of each source."""
    of_mix = ((data.get("mixed") or {}).get("sources") or {}).values()
    refused: Counter[str] = Counter()
    for part in (data.get("filtered") or {}, *of_mix):
        refused.update(part.get("refused") or {})
    return dict(refused)


def _unknown(manifest: Manifest, view: Mapping[str, Any]) -> dict[str, str]:
    return {name: _not_reached(manifest) for name, value in view.items() if value is None}


def _not_reached(manifest: Manifest) -> str:
    if manifest.status == "succeeded":
        return "not recorded by the version that trained"
    return f"not reached: the run {manifest.status}"
