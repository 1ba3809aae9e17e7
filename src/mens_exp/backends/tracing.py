"""One document through a causal model, with the hidden states after each layer.

Shapes: T tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.greedy import evaluating
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Trace", "trace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Hidden states and logits of a model over a document.

    Attributes:
        hidden: layer -> states, ``[T, D]`` f32, first layer first.
        logits_TV: f32; row t is of the token after t.
    """

    hidden: dict[str, torch.Tensor]
    logits_TV: torch.Tensor


def trace(model: Any, ids: Sequence[int], *, device: torch.device | None = None) -> Trace:
    """Feed a document to a causal model of transformers, in evaluation mode.

    Args:
        model: the model; what is between its layers is as its code has it.
        ids: of the document.
        device: where the ids go; None is where the model lies.
    """
    ids_BT = torch.tensor([list(ids)], device=device or model.device)
    with torch.inference_mode(), evaluating(model), quiet():
        output = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    states = output.hidden_states
    # transformers' last entry is what the head reads, after the final norm.
    names = ["embedding", *(f"l{i}" for i in range(len(states) - 2)), "final norm"]
    hidden = {name: state[0].float() for name, state in zip(names, states, strict=True)}
    return Trace(hidden=hidden, logits_TV=output.logits[0].float())
