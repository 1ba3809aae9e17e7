"""Attention within the documents of a packed sequence, and activation checkpointing.

Each document attends only to itself. No mask is built and no scores between documents are
computed, so documents cannot leak into each other, and the cost of a short document is quadratic in
its own length rather than the block's. A document may continue a prefix, the first tokens of an
earlier document: it attends to these too. Activation checkpointing recomputes activations in the
backward pass, layer by layer (arXiv:1604.06174).

Shapes: H query heads, G key and value heads, R query heads for each of these, T tokens, K head
width, N tokens of one document or keys of a block, P keys of a prefix, S queries of a block in R
heads.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import ModelFileError
from mens_exp.model.fused_attention import Prefixes, Request, attend, kernel_for, machine_of
from mens_exp.model.kernels import add_product, product, products_dtype
from mens_exp.planning.activations import BUCKET, ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

IMPLEMENTATION = "mens_documents"

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

    AttentionInterface.register(IMPLEMENTATION, _registered)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def stay_outside_graphs() -> None:
    """Keep torch.compile from tracing the attention of any model in this process."""
    global _registered  # noqa: PLW0603  # transformers' table of implementations is global too
    if _registered is _attention:
        _registered = outside_graphs(_attention)
    register()


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that code compiled by torch.compile calls, but does not contain.

    Code that the function compiles is compiled when it is first called, as without the caller.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("default"):
            return function(*args, **kwargs)

    outside: Callable[..., Any] = torch.compiler.disable(called)  # type: ignore[no-untyped-call]
    return outside


_bounds: ContextVar[tuple[Any, Any]] = ContextVar("bounds", default=(None, None))


@contextmanager
def within(
    documents: tuple[tuple[int, int], ...] | None, prefixes: Prefixes | None
) -> Iterator[None]:
    """Use these bounds inside the block where none are passed to attention.

    Compiled layers receive no bounds, because torch.compile would specialize their code for them.
    """
    before = _bounds.set((documents, prefixes))
    try:
        yield
    finally:
        _bounds.reset(before)


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
    prefixes: Prefixes | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; query ``[B, H, T, K]``, key and value ``[B, G, T, K]``, result ``[B, T, H, K]``.

    With documents, B is 1, and ``prefixes`` has the bounds of the prefix that each one continues,
    if any. Without, the mask defines the visible positions, including windows.

    Raises:
        ModelFileError: the model requests a kind of attention that is not implemented here.
    """
    _refuse_others(module, is_causal, kwargs)
    if documents is None:
        documents, prefixes = _bounds.get()
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
    asked = Request(
        dtype=query.dtype,
        width=query.shape[-1],
        value_width=value.shape[-1],
        window=sliding_window,
        softcap=softcap,
        scale=scale,
        prefixes=prefixes,
    )
    there = machine_of(query.device)
    kernel = None if there is None else kernel_for(asked, there)
    if kernel is not None:
        return attend(kernel, query, key, value, documents, asked), None
    if softcap is None and query.device.type == "cpu" and torch.is_grad_enabled():
        of_products = [one.to(products_dtype(one)) for one in (query, key, value)]
        learned: torch.Tensor = _CausalBlocks.apply(  # type: ignore[no-untyped-call]
            *of_products, documents, prefixes, sliding_window, scale
        )
        return learned, None
    one = _sdpa_document
    if softcap is not None:
        one = functools.partial(_capped_document, softcap=softcap)
    tokens = query.shape[2]
    parts = []
    for (start, end), prefix in _with_prefixes(documents, prefixes):
        stop = min(start + _bucket(end - start), tokens)
        own, before = slice(start, stop), _before(prefix, tokens)
        bias = _bias_after(prefix, before, stop - start, sliding_window, query)
        keys, values = (_joined(x[0], before, own) for x in (key, value))
        attended = one(query[0, :, own], keys, values, bias, scale)
        parts.append(attended[:, : end - start])
    beyond = tokens - documents[-1][1]
    if beyond:  # padding belongs to no document
        parts.append(query.new_zeros((query.shape[1], beyond, value.shape[-1])))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


_registered: Callable[..., Any] = _attention


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
            "this kind of attention is not supported",
            where=type(module).__name__,
            found=", ".join(unknown),
            expected="causal attention, with windows or capped scores at most",
        )


def _bucket(tokens: int) -> int:
    """Round a document's length up, so that the kernels are called with few different shapes.

    oneDNN builds and caches a kernel for each new shape (measured: 7 MB more with every
    micro-batch). The rows past the end belong to the next document and are discarded; no row of
    this document attends to them, because they are in its future.
    """
    return -(-tokens // BUCKET) * BUCKET


def _bias(
    tokens: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the bias added to scores, ``[N, N]``: the lowest number at masked positions.

    A position attends neither to the future nor to positions ``window`` or more tokens back.
    """
    size = 1 << max(tokens - 1, 0).bit_length()  # few sizes, each created once and sliced
    return _whole_bias(size, window, dtype, device)[:tokens, :tokens]


def _bias_after(
    prefix: tuple[int, int] | None,
    before: slice,
    tokens: int,
    window: int | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return the bias of tokens that continue a prefix, ``[N, P + N]``; see `_bias`.

    Keys that `_before` adds by rounding up are masked.
    """
    length = 0 if prefix is None else prefix[1] - prefix[0]
    bias = _bias(length + tokens, window, like.dtype, like.device)[length:]
    beyond = before.stop - before.start - length
    if not beyond:
        return bias
    masked = bias.new_full((tokens, beyond), torch.finfo(bias.dtype).min)
    return torch.cat([bias[:, :length], masked, bias[:, length:]], dim=1)


def _with_prefixes(
    documents: Sequence[tuple[int, int]], prefixes: Prefixes | None
) -> Iterator[tuple[tuple[int, int], tuple[int, int] | None]]:
    """Yield the bounds of each document, and of the prefix that it continues."""
    return zip(documents, prefixes or (None,) * len(documents), strict=True)


def _before(prefix: tuple[int, int] | None, tokens: int) -> slice:
    """Return the range of a prefix's keys, rounded up like a document's length."""
    start, end = prefix or (0, 0)
    return slice(start, min(start + _bucket(end - start), tokens))


def _joined(x_GTK: torch.Tensor, before: slice, own: slice) -> torch.Tensor:
    """Return the keys or values of a prefix and of the tokens after it, ``[G, P + N, K]``."""
    if before.start == before.stop:
        return x_GTK[:, own]
    return torch.cat([x_GTK[:, before], x_GTK[:, own]], dim=1)


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


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive queries of a document, with the keys that any of them attends to.

    Attributes:
        queries: the queries; past the end of the document, they belong to the next one.
        count: the number of queries that belong to the document.
        before: the keys of the document's prefix, their number rounded up.
        keys: from the start of the first query's window to the last query.
    """

    queries: slice
    count: int
    before: slice
    keys: slice


def _blocks(
    documents: Sequence[tuple[int, int]],
    prefixes: Prefixes | None,
    window: int | None,
    like: torch.Tensor,
) -> Iterator[tuple[_Block, torch.Tensor]]:
    """Yield blocks, each with the bias of its last keys; earlier keys have no bias."""
    for (start, end), prefix in _with_prefixes(documents, prefixes):
        stop = min(start + _bucket(end - start), like.shape[2])
        before = _before(prefix, like.shape[2])
        bias = _bias_after(prefix, before, stop - start, window, like)
        own = before.stop - before.start - start  # added to a key's index, gives its column
        step = _bucket(-(-(stop - start) // max((stop - start) // ROWS, 1)))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            if prefix is not None:
                seen, biased = start, 0 if window is not None else prefix[1] - prefix[0]
            else:
                seen = start if window is None else max(start, first - window + 1)
                biased = own + (first if window is None else seen)
            block = _Block(
                queries=slice(first, last),
                count=min(last, end) - first,
                before=before,
                keys=slice(seen, last),
            )
            yield block, bias[first - start : last - start, biased : own + last]


class _CausalBlocks(torch.autograd.Function):
    """Attention of packed documents with plain matrix products, a block of queries at a time.

    Keys after a block are left out, which halves the work and the saved weights of a long document
    (measured on one core, forward and backward of 512 tokens, 9 heads of 64: 12 ms, with all keys
    22 ms, with torch's flash attention 29 ms; experiments/LOG.md). The softmax kernel computes in
    f32 whatever the dtype of its input and output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Sequence[tuple[int, int]],
        prefixes: Prefixes | None,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Return ``[1, T, H, K]``; padding belongs to no document, and gets zeros."""
        groups = key.shape[1]
        query_TGRK = _by_token(query, groups)
        output_TGRK = query.new_empty((*query_TGRK.shape[:3], value.shape[3]))
        output_TGRK[documents[-1][1] :] = 0
        blocks, saved = [], []
        for block, bias in _blocks(documents, prefixes, window, query):
            query_GSK = _gathered(query_TGRK, block)
            key_GNK, value_GNK = (_joined(x[0], block.before, block.keys) for x in (key, value))
            weights_GSN = product(query_GSK, key_GNK.transpose(1, 2), scale=scale)
            rows, columns = bias.shape
            weights_GSN.view(groups, -1, rows, key_GNK.shape[1])[..., -columns:] += bias
            weights_GSN = torch.softmax(weights_GSN, -1)
            blocks.append(block)
            saved.append(weights_GSN)
            _scatter(product(weights_GSN, value_GNK), output_TGRK, block)
        ctx.save_for_backward(query, key, value, *saved)
        ctx.blocks, ctx.scale, ctx.end = blocks, scale, documents[-1][1]
        return output_TGRK.flatten(1, 2)[None]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Return the gradients of query, key and value, laid out by token like the inputs."""
        query, key, value, *saved = ctx.saved_tensors
        groups = key.shape[1]
        query_TGRK = _by_token(query, groups)
        slope_TGRK = upstream[0][0].view(len(query_TGRK), groups, -1, value.shape[3])
        of_query_TGRK = query_TGRK.new_empty(query_TGRK.shape)
        of_query_TGRK[ctx.end :] = 0
        of_key, of_value = (
            like.new_zeros((like.shape[2], groups, like.shape[3])).transpose(0, 1)
            for like in (key, value)
        )
        for block, weights_GSN in zip(ctx.blocks, saved, strict=True):
            key_GNK, value_GNK = (_joined(x[0], block.before, block.keys) for x in (key, value))
            slope_GSK = _gathered(slope_TGRK, block)
            _add_by_key(of_value, block, weights_GSN, slope_GSK)
            of_weights_GSN = product(slope_GSK, value_GNK.transpose(1, 2))
            of_scores_GSN = torch._softmax_backward_data(  # noqa: SLF001  # the fused kernel
                of_weights_GSN, weights_GSN, -1, weights_GSN.dtype
            )
            query_GSK = _gathered(query_TGRK, block)
            _add_by_key(of_key, block, of_scores_GSN, query_GSK, scale=ctx.scale)
            found_GSK = product(of_scores_GSN, key_GNK, scale=ctx.scale)
            _scatter(found_GSK, of_query_TGRK, block)
        of_query = of_query_TGRK.flatten(1, 2).transpose(0, 1)[None]
        return of_query, of_key[None], of_value[None], None, None, None, None


def _by_token(query: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a view ``[T, G, R, K]`` of ``[1, H, T, K]``."""
    _, _, tokens, width = query.shape
    return query[0].transpose(0, 1).view(tokens, groups, -1, width)


def _gathered(x_TGRK: torch.Tensor, block: _Block) -> torch.Tensor:
    """Return a block's queries ``[G, S, K]``; zeros for those of the next document."""
    x_GRTK = x_TGRK[block.queries].permute(1, 2, 0, 3)
    # Always a copy: `contiguous` would return the tensor itself where heads precede tokens.
    x_GRTK = x_GRTK.clone(memory_format=torch.contiguous_format)
    x_GRTK[:, :, block.count :] = 0
    return x_GRTK.flatten(1, 2)


def _scatter(x_GSK: torch.Tensor, into_TGRK: torch.Tensor, block: _Block) -> None:
    """Write a block's queries; those of the next document are discarded."""
    rows = block.queries.stop - block.queries.start
    groups, _, width = x_GSK.shape
    x_TGRK = x_GSK.view(groups, -1, rows, width).permute(2, 0, 1, 3)
    into_TGRK[block.queries][: block.count] = x_TGRK[: block.count]


def _add_by_key(
    into_GTK: torch.Tensor,
    block: _Block,
    weights_GSN: torch.Tensor,
    x_GSK: torch.Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """Add ``scale · weightsᵀ x`` to a block's keys, both the prefix's and the document's."""
    own = block.before.stop - block.before.start
    if own:
        before_GNS = weights_GSN[..., :own].transpose(1, 2)
        add_product(into_GTK[:, block.before], before_GNS, x_GSK, scale=scale)
    add_product(into_GTK[:, block.keys], weights_GSN[..., own:].transpose(1, 2), x_GSK, scale=scale)


def _sdpa_document(
    query_HNK: torch.Tensor,
    key_GNK: torch.Tensor,
    value_GNK: torch.Tensor,
    bias_NN: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with torch's fused kernel if no gradient is needed or no other kernel fits.

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
    groups, keys, _ = key_GNK.shape
    query = (query_HNK * scale).reshape(groups, -1, width)
    scores_HNN = (query @ key_GNK.transpose(1, 2)).view(heads, tokens, keys).float()
    capped = softcap * torch.tanh(scores_HNN / softcap) + bias_NN
    weights_HNN = torch.softmax(capped, -1).to(value_GNK.dtype)
    return (weights_HNN.view(groups, -1, keys) @ value_GNK).view(heads, tokens, -1)


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
    # The second name is that of transformers up to 5.17 at least; later ones warn about it.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.disable_input_require_grads()


def is_checkpointing(model: Any) -> bool:
    """Return whether a model recomputes activations, in any release of transformers."""
    found = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if found is None else found)
