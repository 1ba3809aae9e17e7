"""The difference between a trained model and its PEFT directory, and the part that is rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mens_exp.backends.plain_peft import losses
from mens_exp.backends.qlora import QloraBackend
from mens_exp.backends.reference import f32_bytes, in_f32
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.errors import ModelFileError
from mens_exp.training.contract_probe import free_bytes, is_in_parts, short_documents
from mens_exp.training.untouched import untouched

if TYPE_CHECKING:
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.training.module import TrainingModule

__all__ = ["view_differences"]


def view_differences(
    module: TrainingModule, data: RowsDataModule
) -> tuple[dict[str, float], str | None]:
    """Compare on short documents of the first micro-batch that is validated.

    Args:
        module: what was trained; it is left as it was.
        data: the rows.

    Returns:
        Relative differences of the loss by name of result, and why some are not there:
        ``peft_view_difference`` in the run's own format and ``peft_view_difference_f32``;
        ``peft_view_kernels`` and ``peft_view_kernels_f32`` are those between the PEFT directory
        under two attention kernels of transformers, which nothing but rounding makes.
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
        with untouched(module):
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
