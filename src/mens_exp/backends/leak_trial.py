"""A trial of packed documents before training: does the model's code keep them apart?

Packing hands document bounds down to attention. The families that we know pass them on; another's
code, or code that somebody ships with a model, may drop them, and every document would read its
neighbours in silence.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.causal_forward import backbone
from mens_exp.errors import ModelFileError
from mens_exp.model import attention

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OF_FOREIGN_CODE", "refuse_leaks"]

_WINDOW = 4  # tokens; shorter than the documents, as no real window is
_LENGTHS = (7, 9)
_BOUNDS = ((0, 7), (7, 16))
# Of a document's norm. Its neighbour's values reach it through nothing but a leak, so that rounding
# is no excuse; alone, it meets other kernels, and bf16 rounds otherwise. Unverified guesses.
_BY_NEIGHBOUR, _BY_PACKING = 1e-3, 0.05

# What code that knows no bounds of documents, or another form of mask, raises.
OF_FOREIGN_CODE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def refuse_leaks(causal_lm: Any) -> None:
    """Compare two documents packed, packed with another neighbour, alone, and without packing.

    Raises:
        ModelFileError: the model's code takes no document bounds, or a document's hidden states
            depend on its neighbour or its place.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = causal_lm.config.vocab_size
    ids = torch.randint(vocabulary, (1, sum(_LENGTHS)), generator=generator).to(causal_lm.device)
    changed = ids.clone()
    changed[:, : _LENGTHS[0]] = (changed[:, : _LENGTHS[0]] + 1) % vocabulary
    second = slice(*_BOUNDS[1])
    try:
        with torch.no_grad(), _narrow_windows(causal_lm):
            packed = _hidden(causal_lm, ids, _BOUNDS)[:, second]
            other = _hidden(causal_lm, changed, _BOUNDS)[:, second]
            alone = _hidden(causal_lm, ids[:, second], ((0, _LENGTHS[1]),))
            plain = backbone(causal_lm)(input_ids=ids[:, second], use_cache=False)
    except OF_FOREIGN_CODE as error:
        raise _refusal(causal_lm, str(error)) from error
    for what, found, limit in (
        ("another neighbour", other, _BY_NEIGHBOUR),
        ("no neighbour", alone, _BY_PACKING),
        ("no packing", plain.last_hidden_state, _BY_PACKING),
    ):
        moved = float((found - packed).float().norm() / packed.float().norm())
        if not moved <= limit:
            raise _refusal(causal_lm, f"{what} moves a document's hidden states by {moved:.1%}")


@contextmanager
def _narrow_windows(causal_lm: Any) -> Iterator[None]:
    """Narrow windows of attention: code may tell them to transformers' masks and not to attention.

    Such code (PhiMoE's) attends to whole documents where they are packed.
    """
    holders = [causal_lm.config, *causal_lm.modules()]
    kept = [
        (vars(holder), window)
        for holder in holders
        if type(window := vars(holder).get("sliding_window")) is int
    ]
    try:
        for held, _ in kept:
            held["sliding_window"] = _WINDOW
        yield
    finally:
        for held, window in kept:
            held["sliding_window"] = window


def _hidden(causal_lm: Any, ids: torch.Tensor, bounds: tuple[tuple[int, int], ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(b - a, device=ids.device) for a, b in bounds])[None]
    hidden: torch.Tensor = backbone(causal_lm)(
        input_ids=ids,
        position_ids=positions,
        attention_mask=attention.no_mask(ids),
        use_cache=False,
        documents=bounds,
    ).last_hidden_state
    return hidden


def _refusal(causal_lm: Any, found: str) -> ModelFileError:
    return ModelFileError(
        "the model's code cannot keep packed documents apart",
        where=type(causal_lm).__name__,
        found=found,
        expected="attention through transformers' attention interface, arguments handed on",
        remedy="set data.packing=false; or model.trust_remote_code=false, where transformers has "
        "the model itself",
    )
