"""Compare the trained model with its PEFT directory as plain transformers and PEFT compute it.

The model already consists of PEFT's layers and bitsandbytes' weights. A context manager removes our
additions: the attention, the packing, and base weights that an initialisation has changed. Two of
transformers' attention kernels show which part of the difference is rounding.

Shapes: B = 1 sequence, T tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.forward import MODEL_CODE_ERRORS
from mens_exp.backends.qlora import QloraBackend
from mens_exp.backends.reference import f32_bytes, in_f32
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.data.batch_documents import short_documents
from mens_exp.errors import ModelFileError
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.training.contract_probe import free_bytes, is_in_parts, preserve_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.data.batch import Batch
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.rows.documents import Encoded
    from mens_exp.training.module import TrainingModule

_CHUNK = 64  # tokens that the head processes at a time
_KERNELS = ("sdpa", "eager")  # transformers' own: the default, and the one without fused kernels


@dataclass(frozen=True, slots=True)
class Losses:
    """Summed cross entropies over the same documents.

    Attributes:
        trained: of the trained model.
        sdpa: of its PEFT directory with transformers' SDPA attention.
        eager: of its PEFT directory with transformers' eager attention.
    """

    trained: float
    sdpa: float
    eager: float

    @property
    def difference(self) -> float:
        """Relative difference between the PEFT directory and the trained model."""
        return abs(self.sdpa - self.trained) / max(abs(self.trained), 1e-12)

    @property
    def kernels(self) -> float:
        """Relative difference between transformers' two attention kernels, which is rounding."""
        return abs(self.eager - self.sdpa) / max(abs(self.trained), 1e-12)


def losses(backend: QloraBackend, batch: Batch, documents: Encoded) -> Losses:
    """Compute the loss of documents as in the run's validation, and with plain PEFT.

    Args:
        backend: the trained model, on one device and not sharded.
        batch: the documents as validation passes them.
        documents: the same documents, one by one.

    Raises:
        ModelFileError: the model's code does not run without our attention, or memory is too small.
    """
    device = next(backend.parameters()).device
    there = batch.to(device)
    with torch.no_grad():
        try:
            ours = CrossEntropy("plain_peft", _CHUNK)(backend(there), there.targets_M, backend.head)
            with quiet(), backend.as_peft_view():
                sdpa, eager = (_plain(backend, documents, kernel, device) for kernel in _KERNELS)
        except MODEL_CODE_ERRORS as error:
            raise ModelFileError(
                "the model's own forward pass cannot be compared",
                where=type(backend.causal_lm).__name__,
                found=f"{type(error).__name__}: {error}",
            ) from error
    return Losses(trained=float(ours.total), sdpa=sdpa, eager=eager)


def _plain(backend: QloraBackend, documents: Encoded, kernel: str, device: torch.device) -> float:
    """Run each document alone through PEFT's model."""
    backend.method.accumulate_in_f32(backend.layers.values(), learns=False)  # PEFT's default
    total = 0.0
    with _attending(backend.causal_lm, kernel):
        for start, end in pairwise(documents.offsets.tolist()):
            ids_BT = torch.from_numpy(documents.ids[None, start:end]).long().to(device)
            learned = torch.from_numpy(documents.supervised[start:end]).to(device)
            virtual_BK = torch.tensor([backend.virtual_ids], device=device, dtype=ids_BT.dtype)
            every_BT = torch.cat([virtual_BK, ids_BT], dim=1)
            logits_BTV = backend.model(input_ids=every_BT, use_cache=False).logits
            logits_BTV = logits_BTV[:, virtual_BK.shape[1] :]
            predicted = logits_BTV[0, :-1][learned[1:]].float()
            total += float(
                torch.nn.functional.cross_entropy(
                    predicted, ids_BT[0, 1:][learned[1:]], reduction="sum"
                )
            )
    return total


@contextmanager
def _attending(causal_lm: Any, kernel: str) -> Iterator[None]:
    """Use one of transformers' attention kernels inside the block."""
    own = causal_lm.config._attn_implementation  # noqa: SLF001  # transformers has no other getter
    causal_lm.set_attn_implementation(kernel)
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(own)


def view_differences(
    module: TrainingModule, data: RowsDataModule
) -> tuple[dict[str, float], str | None]:
    """Compare on short documents of the first validation micro-batch.

    Args:
        module: the trained module; it is left unchanged.
        data: the rows.

    Returns:
        Relative differences of the loss by result name, and the reasons for missing ones.
        ``peft_view_difference`` is computed in the run's own dtype, ``peft_view_difference_f32`` in
        f32. ``peft_view_kernels`` and ``peft_view_kernels_f32`` compare the PEFT directory under
        two attention kernels of transformers, which differ only by rounding.
    """
    backend = module.backend
    if not isinstance(backend, QloraBackend) or not backend.has_peft_view:
        return {}, "the graph has no PEFT directory"
    if any(map(is_in_parts, backend.parameters())):
        return {}, "the base is in parts"
    documents = short_documents([data.val_dataloader().batch(0)])
    every, pad_id = range(len(documents)), data.tokenizer.pad_id
    batch = (
        packed_batch(documents, [every], 0, multiple=32, pad_id=pad_id)
        if data.config.data.packing
        else padded_batch(documents, [[one] for one in every], 0, pad_id=pad_id)
    )
    try:
        with preserve_state(module):
            module.eval()
            own = losses(backend, batch, documents)
            found = {"peft_view_difference": own.difference, "peft_view_kernels": own.kernels}
            free = free_bytes(next(backend.parameters()).device)
            if free is not None and f32_bytes(backend) > free:
                return found, "not enough memory for f32 weights"
            if backend.compute_dtype != torch.float32:
                with in_f32(backend):
                    own = losses(backend, batch, documents)
    except ModelFileError as error:
        return {}, str(error)
    return found | {
        "peft_view_difference_f32": own.difference,
        "peft_view_kernels_f32": own.kernels,
    }, None
