"""Starts of adapters other than plain LoRA, and the exactness of PEFT directories, recorded."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from mens_exp.config.quant import QuantType

if TYPE_CHECKING:
    from rich.console import Console

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.tasks.run import Run
    from mens_exp.training.module import TrainingModule

__all__ = ["note_peft_view", "note_view_differences", "report_start"]


def report_start(run: Run, backend: Backend, console: Console) -> None:
    """Print and record the quantization error before and after the start, layer by layer."""
    errors = backend.quantization_errors()
    if not errors:
        return
    before, after = (mean(error[side] for error in errors.values()) for side in (0, 1))
    layers = {name: {"before": b, "after": a} for name, (b, a) in errors.items()}
    run.telemetry.emit("initialisation", {"before": before, "after": after, "layers": layers})
    kind = backend.facts()["lora_init"]
    console.print(
        f"{kind}: quantization error {before:.4f} before, {after:.4f} after "
        f"(relative, mean of {len(errors)} modules; each in {run.dir.telemetry.name})"
    )


def note_peft_view(run: Run) -> None:
    """Say in the manifest what the PEFT directory is worth on the plainly quantized base."""
    results, quant = run.manifest.results, run.manifest.facts.get("quant")
    why = (
        "evaluated elsewhere, 8-bit layers quantize their inputs, which on CPU they do not here"
        if quant == QuantType.int8.value
        else "the base of this run was changed by its initialisation"
    )
    losses = (results["peft_view_val_loss"], results["tuned_val_loss"])
    note = (
        f"{why}: adapter/peft on the plainly quantized base has a validation loss of "
        f"{losses[0]:.4f}, the trained model of {losses[1]:.4f}"
    )
    if note not in run.manifest.notes:  # a resumed run measures again
        run.manifest.notes.append(note)


def note_view_differences(
    config: RunConfig, run: Run, module: TrainingModule, data: RowsDataModule
) -> None:
    """Record how far the PEFT directory is from the trained model, and how far rounding goes."""
    if not module.backend.has_peft_view:
        return
    if not config.data.contract.probe:
        run.unknown("results.peft_view_difference", "data.contract.probe=false")
        return
    from mens_exp.training.view_probe import view_differences

    found, why_not = view_differences(module, data)
    run.manifest.results.update(found)
    if why_not is not None:
        missing = "peft_view_difference_f32" if found else "peft_view_difference"
        run.unknown(f"results.{missing}", why_not)
