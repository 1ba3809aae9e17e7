"""By what arms may be compared: losses in nats a token, bits a byte, or KPIs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.objective import CrossEntropyConfig
from mens_exp.tokenizer.text_bytes import bits_per_byte

if TYPE_CHECKING:
    from mens_exp.config.objective import ObjectiveConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.tasks.run import Run

__all__ = ["note_bits_per_byte"]

_CONDITIONS = ("base", "tuned")


def note_bits_per_byte(objective: ObjectiveConfig, run: Run, data: RowsDataModule) -> None:
    """Write base and tuned validation loss in bits a byte, or null with the reason."""
    total, reason = data.validated_bytes
    if not isinstance(objective, CrossEntropyConfig):
        total, reason = None, "the objective is not ours, so its loss may be no likelihood"
    for condition in _CONDITIONS:
        name, results = f"{condition}_val_bits_per_byte", run.manifest.results
        loss = results[f"{condition}_val_loss"]
        results[name] = (
            None if total is None else bits_per_byte(loss, len(data.validated_ids), total)
        )
        if reason is not None:
            run.unknown(f"results.{name}", reason)
    run.manifest.results["val_text_bytes"] = total
    if reason is not None:
        run.unknown("results.val_text_bytes", reason)
