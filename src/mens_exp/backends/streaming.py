"""One answer, token by token, so that it can be shown as it is made.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.greedy import evaluating
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.backends.protocol import Backend

__all__ = ["Stream", "step"]


def step(model: Any, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
    """Feed ids to a causal model.

    Args:
        model: a transformers model.
        ids: the tokens that its cache does not hold yet.
        cache: what an earlier call returned; None begins a sequence.

    Returns:
        The logits of the token that follows, ``[V]``, f32, and the cache.
    """
    ids_T = torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode(), evaluating(model), quiet():
        output = model(input_ids=ids_T, past_key_values=cache, use_cache=True)
    return output.logits[0, -1].float(), output.past_key_values


class Stream:
    """The answer to one prompt under one condition; each call of `advance` adds a token.

    The condition is entered for each token alone, so that streams of base and tuned model can
    take turns on one graph.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Sequence[int],
        *,
        end_ids: set[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        condition: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Begin an answer.

        Args:
            backend: the graph.
            prompt: the ids before the answer; at least one.
            end_ids: ids that end it.
            max_new_tokens: the longest answer.
            temperature: 0 takes the likeliest token; above, tokens are drawn.
            seed: of the drawing.
            condition: entered around each step, ``backend.base_only`` for the base model.
        """
        self.backend = backend
        self.end_ids = end_ids
        self.max_new_tokens = min(max_new_tokens, backend.max_positions - len(prompt))
        self.temperature = temperature
        self.condition = condition
        self.ids: list[int] = []
        self._pending = list(prompt)
        self._cache: Any = None
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def is_ended(self) -> bool:
        """Whether the answer ended by an end id."""
        return bool(self.ids) and self.ids[-1] in self.end_ids

    @property
    def is_done(self) -> bool:
        """Whether the answer ended, or reached its limit."""
        return self.is_ended or len(self.ids) >= self.max_new_tokens

    def advance(self) -> None:
        """Add one token, unless the answer is done."""
        if self.is_done:
            return
        with self.condition():
            logits_V, self._cache = self.backend.next_logits(self._pending, self._cache)
        token = self._choose(logits_V.cpu())
        self.ids.append(token)
        self._pending = [token]

    def _choose(self, logits_V: torch.Tensor) -> int:
        if self.temperature == 0:
            return int(logits_V.argmax())
        chances = torch.softmax(logits_V / self.temperature, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._generator))
