"""The seeds' research lane: f32 LoRA on an unquantized base, from scratch or warm-started.

Results count as research until they are promoted, and every record states this.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.frozen_base import frozen_weights, load_base
from mens_exp.backends.lora import ADAPTER, LoraBackend
from mens_exp.backends.saved_model import write_model
from mens_exp.config.backend import trains_base

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.config.objective import ObjectiveConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.model.sources import BaseModel

LANE = "research"
_NOTE = "lane: research; promotion needs its own evidence (burn against qlora, two cycles)"
_SCRATCH = "base weights were trained with the adapter; weights/ contains both, merged"


def objective_note(objective: ObjectiveConfig, *, is_chatml: bool) -> str:
    """Return the seeds' ``training_objective_note`` of this lane for the actual objective.

    The seeds had a single objective, ``burn_lora_masked_chatml_ce``: answer tokens only, in ChatML.

    Args:
        objective: the supervised tokens and the loss.
        is_chatml: whether the chat template in force is ChatML.
    """
    learned = objective.spec.learned(objective, is_chatml=is_chatml)
    loss = "ce" if objective.spec.is_likelihood else objective.name
    return f"burn_lora_{learned}_{loss}"


class BurnBackend(LoraBackend):
    """The model of ``backend=lora`` in f32; when trained from scratch, its base is trained too."""

    def __init__(self, config: RunConfig, base: BaseModel, device: torch.device) -> None:
        """Load the base in f32 and put an adapter on it.

        Raises:
            SetupError: the device cannot hold the model.
        """
        super().__init__(config, base, device)
        self.config = config
        self.train_base = trains_base(config.backend, config.model.source)
        self.of_base = {
            name.replace(".base_layer", ""): parameter
            for name, parameter in self.causal_lm.named_parameters()
            if ".lora_" not in name
        }
        if self.train_base:
            for parameter in self.of_base.values():
                parameter.requires_grad_(requires_grad=True)

    @property
    def has_adapter(self) -> bool:
        """False if the base was trained too: the adapter would be useless on its own."""
        return not self.train_base

    @property
    def has_peft_view(self) -> bool:
        """Whether there is an adapter."""
        return self.has_adapter

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name: the adapter's and, from scratch, the base's."""
        base = self.of_base if self.train_base else {}
        return {**super().trainable(), **{f"base.{name}": p for name, p in base.items()}}

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Restore the initial base inside the block: no adapter, initial weights."""
        tuned = {}
        if self.train_base:
            tuned = {name: p.detach().clone() for name, p in self.of_base.items()}
            found = load_base(self.config, self.base, torch.device("cpu"))
            self._put(dict(found.named_parameters()))
        try:
            with super().base_only():
                yield
        finally:
            self._put(tuned)

    def _put(self, values: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.of_base[name].copy_(value)

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Return the adapter's manifest, which names the lane, and its f32 tensors."""
        manifest, tensors = super().adapter(config)
        manifest.mens_exp = {**(manifest.mens_exp or {}), "lane": LANE}
        return manifest, tensors

    def write_weights(self, directory: Path) -> None:
        """Write base and adapter, merged in f32, as a Hugging Face directory.

        Raises:
            SetupError: the base was frozen.
        """
        if not self.train_base:
            raise frozen_weights(directory)
        merged = {name: p.detach().clone() for name, p in self.of_base.items()}
        for one in self.modules_chosen:
            layer = self.layers[one.logical]
            delta_OI = layer.get_delta_weight(ADAPTER)  # in the layer's own orientation
            merged[f"{one.path}.weight"] += delta_OI.to(merged[f"{one.path}.weight"])
        own_ids = self.config.tokenizer.name == "hf"
        tokenizer = self.base.directory if own_ids else None
        write_model(self.causal_lm, merged, tokenizer, directory)

    def facts(self) -> dict[str, Any]:
        """Report what was built and its lane."""
        notes = [_NOTE, *([_SCRATCH] if self.train_base else [])]
        return {**super().facts(), "lane": LANE, "train_base": self.train_base, "notes": notes}
