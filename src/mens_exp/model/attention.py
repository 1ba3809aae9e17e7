"""Attention inside documents: each document of a packed sequence attends to itself alone.

No mask is built and no score between documents is ever computed, so nothing can leak and short
documents cost the square of their own length, not of the block's.
Shapes: H query heads, G key and value heads, T tokens, K head width, N tokens of one document.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["IMPLEMENTATION", "no_mask", "register"]

IMPLEMENTATION = "mens_documents"
_BUCKET = 32  # tokens; measured: experiments/LOG.md


def register() -> None:
    """Make the implementation known to transformers; doing so again changes nothing.

    Without document bounds (generation, padded batches) it is SDPA under SDPA's own masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def no_mask(like: torch.Tensor) -> torch.Tensor:
    """Return a stand-in that keeps transformers from building a mask for a packed sequence."""
    return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=like.device)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: tuple[tuple[int, int], ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; query ``[1, H, T, K]``, key and value ``[1, G, T, K]``, result ``[1, T, H, K]``."""
    if documents is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs["dropout"] = 0.0  # as in packed batches: a frozen base drops nothing of its own
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    training_on_cpu = query.device.type == "cpu" and torch.is_grad_enabled()
    one = _matmul_document if training_on_cpu else _sdpa_document
    tokens = query.shape[2]
    parts = []
    for start, end in documents:
        stop = min(start + _bucket(end - start), tokens)
        window = slice(start, stop)
        bias = _bias(stop - start, sliding_window, query.dtype, query.device)
        attended = one(query[0, :, window], key[0, :, window], value[0, :, window], bias, scale)
        parts.append(attended[:, : end - start])
    beyond = tokens - documents[-1][1]
    if beyond:  # what fills a sequence up belongs to no document
        parts.append(torch.zeros_like(query[0, :, :beyond]))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _bucket(tokens: int) -> int:
    """Round a document's length up, so that few shapes meet the kernels.

    Each new shape costs a kernel built and kept by oneDNN (measured: 7 MB more of them with every
    micro-batch). The rows over the end are the next document's and are thrown away; no row of
    this document can see them, because they lie in its future.
    """
    return -(-tokens // _BUCKET) * _BUCKET


def _bias(
    tokens: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return what is added to scores, ``[N, N]``: the lowest number where nothing may be seen.

    A position sees neither the future nor what lies ``window`` or more tokens back.
    """
    size = 1 << max(tokens - 1, 0).bit_length()  # few sizes, each made once, sliced to fit
    return _whole_bias(size, window, dtype, device)[:tokens, :tokens]


@functools.lru_cache(maxsize=16)
def _whole_bias(
    size: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # an inference tensor could not serve training later
        ones = torch.ones((size, size), dtype=torch.bool, device=device)
        hidden = ones.triu(1) if window is None else ones.triu(1) | ones.tril(-window)
        return torch.zeros((size, size), dtype=dtype, device=device).masked_fill_(
            hidden, torch.finfo(dtype).min
        )


def _matmul_document(
    query_HNK: torch.Tensor,
    key_GNK: torch.Tensor,
    value_GNK: torch.Tensor,
    bias_NN: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with plain products (measured: faster than flash up to 512 tokens).

    The softmax kernel works in f32 whatever the format of its input and output.
    """
    heads, tokens, width = query_HNK.shape
    groups = key_GNK.shape[0]
    query = (query_HNK * scale).reshape(groups, -1, width)
    scores_HNN = (query @ key_GNK.transpose(1, 2)).view(heads, tokens, tokens)
    weights_HNN = torch.softmax(scores_HNN + bias_NN, -1)
    return (weights_HNN.view(groups, -1, tokens) @ value_GNK).view(heads, tokens, width)


def _sdpa_document(
    query_HNK: torch.Tensor,
    key_GNK: torch.Tensor,
    value_GNK: torch.Tensor,
    bias_NN: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with torch's fused kernel: on accelerators, and wherever nothing is learned.

    It keeps scores in f32, so that a validation loss is that of any other program's forward pass
    (measured: bf16 scores raised SmolLM2's by 0.1 %).
    """
    output = torch.nn.functional.scaled_dot_product_attention(
        query_HNK[None],
        key_GNK[None],
        value_GNK[None],
        attn_mask=bias_NN,
        scale=scale,
        enable_gqa=query_HNK.shape[0] != key_GNK.shape[0],
    )
    return output[0]
