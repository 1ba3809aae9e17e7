"""Attention within the documents of a packed sequence, and activation checkpointing.

Each document attends only to itself. No mask is built and no scores between documents are
computed, so documents cannot leak into each other, and the cost of a short document is quadratic in
its own length rather than the block's. Activation checkpointing recomputes activations in the
backward pass, layer by layer (arXiv:1604.06174).
Shapes: H query heads, G key and value heads, T tokens, K head width, N tokens of one document.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mens_exp.errors import ModelFileError

IMPLEMENTATION = "mens_documents"
_BUCKET = 32  # tokens; measured: experiments/LOG.md

# Arguments that models pass to attention but that have no effect here: positions are already
# encoded in queries and keys, a frozen base has no dropout, and no caller asks for weights. Any
# other argument is refused, because ignoring it (a sink, a distance bias, a head mask) would
# compute a different model.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def register() -> None:
    """Register the implementation with transformers; idempotent.

    Without document bounds (generation, padded batches) it is SDPA with SDPA's own masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def no_mask(like: torch.Tensor) -> torch.Tensor:
    """Return a stand-in that prevents transformers from building a mask for a packed sequence."""
    return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=like.device)


def _attention(  # noqa: PLR0913  # the arguments that transformers passes
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: tuple[tuple[int, int], ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; query ``[B, H, T, K]``, key and value ``[B, G, T, K]``, result ``[B, T, H, K]``.

    With documents, B is 1. Without, the mask defines the visible positions, including windows.

    Raises:
        ModelFileError: the model requests a kind of attention that is not implemented here.
    """
    _refuse_others(module, is_causal, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if documents is None:
        _refuse_stand_in(module, query, attention_mask)
        if softcap is not None:
            return _capped_batch(query, key, value, attention_mask, scale, softcap), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=0.0, scaling=scale
        )
        return output, None
    training_on_cpu = query.device.type == "cpu" and torch.is_grad_enabled()
    one = _matmul_document if training_on_cpu else _sdpa_document
    if softcap is not None:
        one = functools.partial(_capped_document, softcap=softcap)
    tokens = query.shape[2]
    parts = []
    for start, end in documents:
        stop = min(start + _bucket(end - start), tokens)
        window = slice(start, stop)
        bias = _bias(stop - start, sliding_window, query.dtype, query.device)
        attended = one(query[0, :, window], key[0, :, window], value[0, :, window], bias, scale)
        parts.append(attended[:, : end - start])
    beyond = tokens - documents[-1][1]
    if beyond:  # padding belongs to no document
        parts.append(query.new_zeros((query.shape[1], beyond, value.shape[-1])))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _refuse_stand_in(
    module: torch.nn.Module, query: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Refuse a packed sequence without document bounds, because the stand-in masks everything."""
    if mask is not None and mask.shape == (1, 1, 1, 1) and query.shape[2] > 1:
        raise ModelFileError(
            "the model's code cannot keep packed documents apart",
            where=type(module).__name__,
            found="no bounds of documents",
            expected="arguments handed on to transformers' attention interface",
            remedy="set data.packing=false",
        )


def _refuse_others(module: torch.nn.Module, is_causal: bool | None, others: dict[str, Any]) -> None:
    unknown = sorted(
        name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT
    )
    if is_causal is False or not getattr(module, "is_causal", True):
        unknown.append("attention to later tokens")
    if unknown:
        raise ModelFileError(
            "the model's attention is of a kind that is not computed here",
            where=type(module).__name__,
            found=", ".join(unknown),
            expected="causal attention, with windows or capped scores at most",
        )


def _bucket(tokens: int) -> int:
    """Round a document's length up, so that the kernels are called with few different shapes.

    oneDNN builds and caches a kernel for each new shape (measured: 7 MB more with every
    micro-batch). The rows past the end belong to the next document and are discarded; no row of
    this document can attend to them, because they are in its future.
    """
    return -(-tokens // _BUCKET) * _BUCKET


def _bias(
    tokens: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the bias added to scores, ``[N, N]``: the lowest number at masked positions.

    A position attends neither to the future nor to positions ``window`` or more tokens back.
    """
    size = 1 << max(tokens - 1, 0).bit_length()  # few sizes, each created once and sliced
    return _whole_bias(size, window, dtype, device)[:tokens, :tokens]


@functools.lru_cache(maxsize=16)
def _whole_bias(
    size: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # an inference tensor cannot be trained on later
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
    """Attend with plain matrix products (measured: faster than flash up to 512 tokens).

    The softmax kernel computes in f32 whatever the dtype of its input and output.
    """
    heads, tokens, width = query_HNK.shape
    groups = key_GNK.shape[0]
    query = (query_HNK * scale).reshape(groups, -1, width)
    scores_HNN = (query @ key_GNK.transpose(1, 2)).view(heads, tokens, tokens)
    weights_HNN = torch.softmax(scores_HNN + bias_NN, -1)
    return (weights_HNN.view(groups, -1, tokens) @ value_GNK).view(heads, tokens, -1)


def _sdpa_document(
    query_HNK: torch.Tensor,
    key_GNK: torch.Tensor,
    value_GNK: torch.Tensor,
    bias_NN: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with torch's fused kernel: on accelerators, and wherever no gradient is needed.

    It keeps scores in f32, so that a validation loss matches the forward pass of any other program
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


def _capped_document(
    query_HNK: torch.Tensor,
    key_GNK: torch.Tensor,
    value_GNK: torch.Tensor,
    bias_NN: torch.Tensor,
    scale: float,
    *,
    softcap: float,
) -> torch.Tensor:
    """Attend with scores soft-capped to ``±softcap`` (Gemma 2, arXiv:2408.00118, section 2).

    No fused kernel of torch supports this. The capping and the softmax are in f32.
    """
    heads, tokens, width = query_HNK.shape
    groups = key_GNK.shape[0]
    query = (query_HNK * scale).reshape(groups, -1, width)
    scores_HNN = (query @ key_GNK.transpose(1, 2)).view(heads, tokens, tokens).float()
    capped = softcap * torch.tanh(scores_HNN / softcap) + bias_NN
    weights_HNN = torch.softmax(capped, -1).to(value_GNK.dtype)
    return (weights_HNN.view(groups, -1, tokens) @ value_GNK).view(heads, tokens, -1)


def _capped_batch(
    query_BHTK: torch.Tensor,
    key_BGSK: torch.Tensor,
    value_BGSK: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attend with capped scores in padded batches and generation; result ``[B, T, H, K]``.

    S is the number of keys so far. As in SDPA, no mask means causal attention aligned to the first
    key; a boolean mask selects visible positions, and any other mask is added.
    """
    tokens, keys = query_BHTK.shape[2], key_BGSK.shape[2]
    repeats = query_BHTK.shape[1] // key_BGSK.shape[1]
    key_BHSK, value_BHSK = (x.repeat_interleave(repeats, 1) for x in (key_BGSK, value_BGSK))
    scores_BHTS = ((query_BHTK * scale) @ key_BHSK.transpose(2, 3)).float()
    scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    if mask is None and tokens > 1:
        mask = torch.ones((tokens, keys), dtype=torch.bool, device=query_BHTK.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(scores_BHTS.dtype).min)
    elif mask is not None:
        scores_BHTS = scores_BHTS + mask
    weights_BHTS = torch.softmax(scores_BHTS, -1).to(value_BGSK.dtype)
    return (weights_BHTS @ value_BHSK).transpose(1, 2).contiguous()


def enable_checkpointing(model: Any) -> None:
    """Enable activation checkpointing in every decoder layer of a transformers model.

    Uses the non-reentrant variant: the frozen embedding's output then need not require a gradient,
    and PEFT's own preparation, which would cast embedding and head to f32, is not needed.
    """
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
