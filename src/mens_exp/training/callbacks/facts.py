"""Facts about the built model and the first batch, as the run actually used them."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning import Callback

from mens_exp.config.schedule import warmup_steps
from mens_exp.planning.kernels import described, reasons
from mens_exp.training.hosted_module import promises

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.backends.protocol import Backend
    from mens_exp.data.batch import Batch
    from mens_exp.training.module import RunRecord, TrainingModule


_CHANGED = "up to step {}, steps were computed in other forms, which round otherwise: {}"


class ManifestFacts(Callback):
    """Records facts about the first batch and the built model in the manifest, once."""

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``."""
        self.run = run
        self._done = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Batch, batch_idx: int
    ) -> None:
        """Collect the facts before the first step of this process."""
        del batch_idx
        if self._done:
            return
        self._done = True
        facts = {
            **(_batch_facts(batch) if batch.index == 0 else {}),  # a resumed run has them already
            "kernels": described(reasons(pl_module.config, on_gpu=pl_module.device.type == "cuda")),
            **pl_module.backend.facts(),
            "artifact": _artifact(pl_module.backend),
            "accumulate_grad_batches": trainer.accumulate_grad_batches * trainer.world_size,
            "processes": trainer.world_size,
            "strategy": pl_module.config.trainer.sharing.value,
            "warmup_steps": warmup_steps(pl_module.config.schedule, pl_module.total_steps),
            "device": str(pl_module.device),
            "deterministic": _deterministic(),
        }
        if (of_module := promises(pl_module)) is not None:
            facts["module"] = of_module
            words = "; ".join(f"“{one}” ({why})" for one, why in of_module["unproven"].items())
            facts["notes"] = [*facts.get("notes", []), f"unproven by the module: {words}"]
        if facts["warmup_steps"] is None:
            why = "the schedule is a class that does not report it"
            self.run.manifest.unknown["facts.warmup_steps"] = why
        notes = facts.pop("notes", [])
        was = self.run.manifest.facts.get("numerics")
        if trainer.global_step and was != facts.get("numerics"):
            notes.append(_CHANGED.format(trainer.global_step, was or "as earlier releases do"))
        known = self.run.manifest.notes
        known += [note for note in notes if note not in known]
        self.run.manifest.facts.update(facts)
        self.run.save()
        self.run.telemetry.emit("facts", facts)


def _batch_facts(batch: Batch) -> dict[str, Any]:
    packed = batch.documents is not None
    documents = len(batch.documents or ()) if packed else batch.input_ids_BT.shape[0]
    return {
        "packing": packed,
        "micro_batch_shape": list(batch.input_ids_BT.shape),
        "documents_in_first_batch": documents,
        "longest_document_in_first_batch": int(batch.host.position_ids_BT.max()) + 1,
        "tokens_in_first_batch": batch.tokens,
        "supervised_tokens_in_first_batch": int(batch.targets_M.numel()),
    }


def _artifact(backend: Backend) -> str:
    """Return the kind of artifact that the run will write; the model card and loaders use it."""
    if not backend.has_adapter:
        return "weights"
    return "adapter and PEFT view" if backend.has_peft_view else "adapter"


def _deterministic() -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled()
