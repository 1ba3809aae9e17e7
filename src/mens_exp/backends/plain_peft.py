"""The trained model and its PEFT directory as transformers and PEFT alone compute it.

PEFT's layers and bitsandbytes' weights are in the graph already. What is ours is put aside inside a
block: the attention, the packing, and a base that a start has changed.

Shapes: B = 1 sequence, T tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.leak_trial import OF_FOREIGN_CODE
from mens_exp.errors import ModelFileError
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.data.batch import Batch
    from mens_exp.rows.encode import Encoded

__all__ = ["Losses", "losses"]

_CHUNK = 64  # tokens of the head at a time
_KERNELS = ("sdpa", "eager")  # transformers' own: the default, and the one without fused kernels


@dataclass(frozen=True, slots=True)
class Losses:
    """Sums of cross entropies over the same documents.

    Attributes:
        trained: of the model that was trained.
        sdpa: of its PEFT directory under transformers' SDPA attention.
        eager: of its PEFT directory under transformers' eager attention.
    """

    trained: float
    sdpa: float
    eager: float

    @property
    def difference(self) -> float:
        """Distance of the PEFT directory from the trained model, relative."""
        return abs(self.sdpa - self.trained) / max(abs(self.trained), 1e-12)

    @property
    def kernels(self) -> float:
        """Distance of transformers' two attention kernels from each other, relative: rounding."""
        return abs(self.eager - self.sdpa) / max(abs(self.trained), 1e-12)


def losses(backend: QloraBackend, batch: Batch, documents: Encoded) -> Losses:
    """Compute the loss of documents as the run validates, and as PEFT alone would.

    Args:
        backend: the trained graph, on one device and not in parts.
        batch: the documents as validation passes them.
        documents: the same documents, one by one.

    Raises:
        ModelFileError: the model's code does not run without our attention, or memory is short.
    """
    device = next(backend.parameters()).device
    there = batch.to(device)
    with torch.no_grad():
        try:
            ours = CrossEntropy("plain_peft", _CHUNK)(backend(there), there.targets_M, backend.head)
            with backend.as_peft_view():
                sdpa, eager = (_plain(backend, documents, kernel, device) for kernel in _KERNELS)
        except OF_FOREIGN_CODE as error:
            raise ModelFileError(
                "the model's own forward pass cannot be compared with",
                where=type(backend.causal_lm).__name__,
                found=f"{type(error).__name__}: {error}",
            ) from error
    return Losses(trained=float(ours.total), sdpa=sdpa, eager=eager)


def _plain(backend: QloraBackend, documents: Encoded, kernel: str, device: torch.device) -> float:
    """Pass each document alone through PEFT's model."""
    for module in backend.layers.values():
        module.cast_input_dtype_enabled = True  # PEFT's default; a pass that learns has it off
    total = 0.0
    with _attending(backend.causal_lm, kernel):
        for start, end in pairwise(documents.offsets.tolist()):
            ids_BT = torch.from_numpy(documents.ids[None, start:end]).long().to(device)
            learned = torch.from_numpy(documents.supervised[start:end]).to(device)
            logits_BTV = backend.model(input_ids=ids_BT, use_cache=False).logits
            predicted = logits_BTV[0, :-1][learned[1:]].float()
            total += float(
                torch.nn.functional.cross_entropy(
                    predicted, ids_BT[0, 1:][learned[1:]], reduction="sum"
                )
            )
    return total


@contextmanager
def _attending(causal_lm: Any, kernel: str) -> Iterator[None]:
    """Let a model attend by one of transformers' kernels inside the block."""
    own = causal_lm.config._attn_implementation  # noqa: SLF001  # transformers has no other getter
    with quiet():
        causal_lm.set_attn_implementation(kernel)
    try:
        yield
    finally:
        with quiet():
            causal_lm.set_attn_implementation(own)
