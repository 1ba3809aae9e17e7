"""Writing of the trained adapter or weights at the end of training."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning import Callback

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_v3 import write_adapter
from mens_exp.backends.saved_model import copy_tokenizer

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule


class AdapterWriter(Callback):
    """Writes the training result at the end: the adapter in its formats, or the weights."""

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``."""
        self.run = run

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Write the same tensors in every available format.

        This hook also runs if a resumed run has no steps left; Lightning skips ``on_train_end``
        then.
        """
        del trainer
        if not pl_module.backend.has_adapter:
            pl_module.backend.write_weights(self.run.dir.weights)
            return
        manifest, tensors = pl_module.backend.adapter(pl_module.config)
        write_adapter(self.run.dir.adapter, manifest, tensors)
        if not pl_module.backend.has_peft_view:
            return
        pl_module.backend.write_peft(self.run.dir.peft)
        base = getattr(pl_module.backend, "base", None)  # a user's own backend may have none
        if base is not None and pl_module.config.tokenizer.name == "hf":  # vox has no such files
            copy_tokenizer(base.directory, self.run.dir.peft)
        template = self.run.dir.chat_template
        if template.is_file():  # needed to load the adapter elsewhere
            atomic.write_text(self.run.dir.peft / template.name, template.read_text("utf-8"))
