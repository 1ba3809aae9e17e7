"""Fused attention of packed documents on a GPU, without a mask of all pairs of tokens.

torch's fused kernels do not support a mask with grouped heads: torch then computes all scores
(4.3 GB in a layer of 32 heads at 8,192 tokens). These kernels take document bounds instead:

- variable-length flash attention (`torch.nn.attention.varlen`), which takes windows;
- FlexAttention (arXiv:2412.05496), compiled by Triton, which takes capped scores too, and
  documents that continue a prefix;
- causal flash attention, document by document, if neither is available.

Shapes: H query heads, G key and value heads, T tokens, K head width, D documents, R blocks of
queries or of keys, S parts of documents, each within one block.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn.attention.flex_attention import BlockMask

BLOCK: Final = 128  # tokens of a block of FlexAttention's mask, its default
_SHAPES: Final = 512  # tokens; sequences are padded to a multiple of it, to compile few shapes
_WIDEST: Final = 256  # head width of flash attention
_WIDTH_UNIT: Final = 8  # head widths must be a multiple of it
_LEAST_WIDTH: Final = 16  # head width of FlexAttention
_AMPERE: Final = (8, 0)  # the first compute capability with bf16, which both kernels need


# Bounds of the prefix that each document continues: the first tokens of an earlier document.
Prefixes: TypeAlias = "tuple[tuple[int, int] | None, ...]"


class Kernel(StrEnum):
    """A way to attend within documents."""

    VARLEN = "variable-length flash attention"
    FLEX = "FlexAttention"
    CAUSAL = "causal flash attention of each document"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The attention of one layer.

    Attributes:
        dtype: of queries, keys and values.
        width: head width of queries and keys.
        value_width: head width of values.
        window: tokens that a query sees, itself included; None sees all before it.
        softcap: bound of the scores; None leaves them uncapped.
        scale: factor of the scores.
        prefixes: of the documents; None if no document has one.
    """

    dtype: torch.dtype
    width: int
    value_width: int
    window: int | None = None
    softcap: float | None = None
    scale: float = 1.0
    prefixes: Prefixes | None = None

    @property
    def is_usual_scale(self) -> bool:
        """Whether the factor is the default of every kernel."""
        return bool(self.scale == self.width**-0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Capabilities of a GPU and its torch.

    Attributes:
        capability: CUDA compute capability; None for another vendor's GPU.
        varlen: names of the arguments of `varlen_attn`; empty where torch has none.
        has_flex: whether FlexAttention can be compiled.
    """

    capability: tuple[int, int] | None
    varlen: frozenset[str]
    has_flex: bool


def kernel_for(asked: Request, there: Machine) -> Kernel | None:
    """Choose the kernel of a layer.

    Returns:
        None if no fused kernel of this machine computes this attention.
    """
    is_recent = there.capability is not None and there.capability >= _AMPERE
    if is_recent and there.varlen and _varlen_takes(asked, there.varlen):
        return Kernel.VARLEN
    is_wide = min(asked.width, asked.value_width) >= _LEAST_WIDTH
    if there.has_flex and is_wide and (is_recent or there.capability is None):
        return Kernel.FLEX
    is_plain = asked.window is None and asked.softcap is None and asked.prefixes is None
    return Kernel.CAUSAL if is_plain else None


def _varlen_takes(asked: Request, arguments: frozenset[str]) -> bool:
    widths = {asked.width, asked.value_width}
    return (
        asked.softcap is None
        and asked.prefixes is None
        and asked.dtype in {torch.bfloat16, torch.float16}
        and len(widths) == 1
        and asked.width <= _WIDEST
        and asked.width % _WIDTH_UNIT == 0
        and (asked.window is None or "window_size" in arguments)
        and (asked.is_usual_scale or "scale" in arguments)
    )


@functools.cache
def machine_of(device: torch.device) -> Machine | None:
    """Return the capabilities of a device's machine; None if the device is not a GPU."""
    if device.type != "cuda":
        return None
    is_nvidia = torch.version.hip is None
    varlen = _varlen()
    return Machine(
        capability=torch.cuda.get_device_capability(device) if is_nvidia else None,
        varlen=frozenset() if varlen is None else _arguments(varlen),
        has_flex=importlib.util.find_spec("triton") is not None,
    )


def _varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@functools.cache  # called by every layer
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def described(device: torch.device, dtype: torch.dtype, *, shares_prompts: bool = False) -> str:
    """Name the kernels that layers with plain and with soft-capped scores get on a device."""
    there = machine_of(device)
    if there is None:
        return "by document 1"
    prefixes = () if shares_prompts else None
    plain = Request(
        dtype=dtype, width=BLOCK, value_width=BLOCK, scale=BLOCK**-0.5, prefixes=prefixes
    )
    found = [kernel_for(one, there) for one in (plain, replace(plain, softcap=1.0))]
    return " and ".join(dict.fromkeys(f"{one or 'all scores'} 1" for one in found))


def attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Sequence[tuple[int, int]],
    asked: Request,
) -> torch.Tensor:
    """Attend within documents, each token to itself and to earlier ones.

    Args:
        kernel: as `kernel_for` chose it.
        query: ``[1, H, T, K]``.
        key: ``[1, G, T, K]``.
        value: ``[1, G, T, K]``.
        documents: start and end of each, in tokens, without gaps from 0 on; what follows the last
            is padding.
        asked: window, cap, scale and prefixes of the layer.

    Returns:
        ``[1, T, H, K]``; zeros for padding.
    """
    bounds = (0, *(end for _, end in documents))
    assert all(pair == found for pair, found in zip(pairwise(bounds), documents, strict=True))
    of_kernel = {Kernel.VARLEN: _of_varlen, Kernel.FLEX: _of_flex, Kernel.CAUSAL: _of_causal}
    found_1THK = of_kernel[kernel](query, key, value, bounds, asked)
    padding = query.shape[2] - bounds[-1]
    if not padding:
        return found_1THK
    zeros = found_1THK.new_zeros((1, padding, *found_1THK.shape[2:]))
    return torch.cat([found_1THK[:, : bounds[-1]], zeros], dim=1)


def _of_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[int, ...],
    asked: Request,
) -> torch.Tensor:
    varlen = _varlen()
    assert varlen is not None, "chosen only where it is"
    takes = _arguments(varlen)
    if "enable_gqa" not in takes and key.shape[1] != query.shape[1]:
        key, value = _repeated(key, query), _repeated(value, query)
    told: dict[str, Any] = {
        "is_causal": True,  # for releases without `window_size`
        "window_size": (-1 if asked.window is None else asked.window - 1, 0),
        "scale": asked.scale,
        "enable_gqa": key.shape[1] != query.shape[1],
    }
    starts_D = _starts(bounds, query.device)
    longest = max(end - start for start, end in pairwise(bounds))
    query_THK, key_TGK, value_TGK = (
        one[0, :, : bounds[-1]].transpose(0, 1) for one in (query, key, value)
    )
    known = {name: one for name, one in told.items() if name in takes}
    found: torch.Tensor = varlen(
        query_THK, key_TGK, value_TGK, starts_D, starts_D, longest, longest, **known
    )
    return found[None]


@functools.lru_cache(maxsize=8)  # shared by the layers of a step
def _starts(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the bounds of documents on a device, int32 ``[D + 1]``."""
    return _moved(np.asarray(bounds, np.int32), device)


def _moved(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device asynchronously."""
    with torch.inference_mode(mode=False):  # a step may save it for its backward pass
        there = torch.from_numpy(values)
        if device.type != "cuda":
            return there.to(device)
        return there.pin_memory().to(device, non_blocking=True)


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _of_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[int, ...],
    asked: Request,
) -> torch.Tensor:
    tokens = query.shape[2]
    room = -tokens % _SHAPES  # each number of tokens is compiled separately
    query, key, value = (
        torch.nn.functional.pad(one, (0, 0, 0, room)) for one in (query, key, value)
    )
    found: torch.Tensor = _flex(query.device.type)(
        query,
        key,
        value,
        score_mod=None if asked.softcap is None else _capping(asked.softcap),
        block_mask=block_mask(bounds, tokens + room, asked.window, query.device, asked.prefixes),
        scale=asked.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[:, :, :tokens].transpose(1, 2)


@functools.cache
def _flex(device: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled on a GPU, once for each shape and kind of layer."""
    from torch.nn.attention.flex_attention import flex_attention

    if device != "cuda":
        return flex_attention
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


@functools.cache
def _capping(softcap: float) -> Callable[..., torch.Tensor]:
    """Return a ``score_mod`` that soft-caps scores (Gemma 2, arXiv:2408.00118, section 2)."""

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.lru_cache(maxsize=8)  # shared by the layers of a step
def block_mask(
    bounds: tuple[int, ...],
    tokens: int,
    window: int | None,
    device: torch.device,
    prefixes: Prefixes | None = None,
) -> BlockMask:
    """Return FlexAttention's block mask, computed from document bounds alone.

    torch's `create_block_mask` would visit every pair of tokens on the device.

    Args:
        bounds: of the documents, from 0; the rest is padding, which attends to itself.
        tokens: length of the sequence.
        window: tokens that a query sees; None sees all of its document before it.
        device: device of the result.
        prefixes: of the documents; None if no document has one.
    """
    from torch.nn.attention.flex_attention import BlockMask

    of_D = _Bounds.of(bounds, tokens, prefixes)
    lengths = of_D.end - of_D.start
    document_T = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    of_T = _moved(document_T, device)

    def within(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        del batch, head
        seen = (of_T[query] == of_T[key]) & (query >= key)
        return seen if window is None else seen & (query - key < window)

    visible = within
    if prefixes is not None:
        before_T = _moved(of_D.before[document_T], device)
        until_T = _moved(of_D.until[document_T], device)
        further_T = _moved(of_D.further[document_T], device)

        def visible(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            seen = (key >= before_T[query]) & (key < until_T[query])
            if window is not None:
                seen = seen & (query - further_T[query] - key < window)
            return within(batch, head, query, key) | seen

    in_part, whole = _blocks(of_D, tokens, window)
    counts = _moved(in_part[0], device), _moved(whole[0], device)
    indices = _moved(in_part[1], device), _moved(whole[1], device)
    return BlockMask.from_kv_blocks(
        counts[0],
        indices[0],
        counts[1],
        indices[1],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(tokens, tokens),
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Bounds of documents and of their prefixes, int32 ``[D]`` each; padding is a document.

    Attributes:
        start: first token.
        end: past the last.
        before: first token of the prefix.
        until: past its last; equal to ``before`` if there is no prefix.
        further: tokens between the prefix and the document.
    """

    start: np.ndarray
    end: np.ndarray
    before: np.ndarray
    until: np.ndarray
    further: np.ndarray

    @classmethod
    def of(cls, bounds: tuple[int, ...], tokens: int, prefixes: Prefixes | None) -> _Bounds:
        """Return the bounds of contiguous documents."""
        start, end = np.asarray([bounds, [*bounds[1:], tokens]], np.int32)
        pairs = [one or (0, 0) for one in prefixes or ()]
        pairs += [(0, 0)] * (len(start) - len(pairs))
        before, until = np.asarray(pairs, np.int32).T
        return cls(start, end, before, until, start - until)


_Table = tuple[np.ndarray, np.ndarray]


def _blocks(of_D: _Bounds, tokens: int, window: int | None) -> tuple[_Table, _Table]:
    """Return the partial and the full key blocks of each query block.

    Args:
        of_D: bounds of the documents.
        tokens: length of the sequence.
        window: tokens that a query sees.

    Returns:
        For each kind, the number of key blocks per query block, ``[1, 1, R]``, and their indices in
        order, ``[1, 1, R, R]``.
    """
    first_R = np.arange(0, tokens, BLOCK)
    last_R = np.minimum(first_R + BLOCK, tokens) - 1
    reach = tokens if window is None else window
    first_S = np.union1d(first_R, of_D.start[of_D.start < tokens])
    last_S = np.append(first_S[1:], tokens) - 1
    of_S = np.searchsorted(of_D.start, first_S, side="right") - 1
    start_S, before_S, until_S = of_D.start[of_S], of_D.before[of_S], of_D.until[of_S]
    further_S = of_D.further[of_S]

    def lowest(query_S: np.ndarray, least_S: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.maximum(least_S, query_S - reach + 1)
        return found[:, None]

    seen_SR = (first_R <= last_S[:, None]) & (last_R >= lowest(first_S, start_S))
    whole_SR = (last_R <= first_S[:, None]) & (first_R >= lowest(last_S, start_S))
    lowest_S1 = lowest(first_S - further_S, before_S)
    seen_SR |= (np.maximum(first_R, lowest_S1) < until_S[:, None]) & (last_R >= lowest_S1)
    whole_SR |= (last_R < until_S[:, None]) & (first_R >= lowest(last_S - further_S, before_S))
    begins_R = np.searchsorted(first_S, first_R)
    seen_RR = np.logical_or.reduceat(seen_SR, begins_R)
    is_full_R = last_R - first_R == BLOCK - 1  # torch masks past the end only in partial blocks
    whole_RR = np.logical_and.reduceat(whole_SR, begins_R) & is_full_R & is_full_R[:, None]
    return _table(seen_RR & ~whole_RR), _table(whole_RR)


def _table(chosen_RR: np.ndarray) -> _Table:
    count_R = chosen_RR.sum(1, dtype=np.int32)
    order_RR = np.argsort(~chosen_RR, axis=1, kind="stable").astype(np.int32)
    return count_R[None, None], order_RR[None, None]


def _of_causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[int, ...],
    asked: Request,
) -> torch.Tensor:
    key, value = _repeated(key, query), _repeated(value, query)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=asked.scale,
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)
