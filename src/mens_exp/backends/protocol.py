"""The interface of a backend for training, evaluation and export.

Shapes: M supervised positions, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    import torch

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.backends.tracing import Trace
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch

__all__ = ["Backend"]


class Backend(Protocol):
    """A trained graph: base model, quantizer and adapter. Also a ``torch.nn.Module``."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return hidden states at the batch's supervised positions, ``[M, D]``."""

    def head(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return logits ``[M, V]``."""

    def begin(self, micro_batch: int) -> None:
        """Say which micro-batch of the stream comes next; dropout masks depend on it."""

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return every trained parameter by name; nothing else has a gradient."""

    def base_only(self) -> AbstractContextManager[None]:
        """Switch the adapter off inside the block."""

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        """Continue prompts; `greedy` tells the options."""

    def next_logits(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits ``[V]`` that follow ids, and the cache grown by these."""

    def trace(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits, of one document."""

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Return the adapter under logical names, with its manifest."""

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Put an adapter's tensors, under logical names, into the graph."""

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint's base depends on, beside the published weights."""

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Rebuild the base of a checkpoint from its :meth:`start_state`."""

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return, by layer, the quantization error before and after the adapter's start.

        Empty where the start does not depend on it. An error is ``|W − Ŵ| / |W|``, Frobenius.
        """

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained; without one the weights are, see `write_weights`."""

    def write_weights(self, directory: Path) -> None:
        """Write the trained weights as a Hugging Face directory."""

    @property
    def has_peft_view(self) -> bool:
        """Whether PEFT knows such a graph; without one there is nothing for `write_peft`."""

    def write_peft(self, directory: Path) -> None:
        """Write the adapter as a PEFT directory."""

    @property
    def peft_view_is_exact(self) -> bool:
        """Whether the PEFT directory, loaded on the plainly quantized base, is this very model."""

    def as_peft_view(self) -> AbstractContextManager[None]:
        """Make it, inside the block, what loading the PEFT directory on the base gives."""

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for, in tokens."""

    def facts(self) -> dict[str, Any]:
        """Return what was really built, read back from the graph."""
