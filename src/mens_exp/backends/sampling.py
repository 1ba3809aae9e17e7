"""Drawing tokens with a random stream of each prompt's own, and ending answers at given texts.

One uniform number is drawn for each token of each prompt, so that a prompt with its seed gets the
same tokens whatever stands beside it in the batch.

Shapes: B prompts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Draw", "Sampling", "StopWatch", "Stops"]

# Tokens looked at beyond the length of the longest stop text; a token has a character or more,
# but one that is cut off in the middle of a character may decode to none.
_MARGIN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The way tokens are drawn.

    Attributes:
        temperature: above 0; logits are divided by it.
        top_p: tokens are drawn from the fewest that have this share of the probability.
        seeds: one for each prompt.
    """

    temperature: float
    top_p: float
    seeds: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Texts that end an answer.

    Attributes:
        texts: of each prompt; empty where none ends it.
        decode: turns ids to text.
    """

    texts: Sequence[Sequence[str]]
    decode: Callable[[Sequence[int]], str]


class Draw:
    """Draws the next token of every prompt."""

    def __init__(self, sampling: Sampling) -> None:
        """Begin every prompt's stream."""
        self.sampling = sampling
        self._streams = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]

    def __call__(self, logits_BV: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return drawn tokens ``[B]``.

        Args:
            logits_BV: of the next token.
            rows: the prompt of each line; all of them by default.
        """
        streams = self._streams if rows is None else [self._streams[row] for row in rows]
        uniform = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
        uniform_B1 = torch.stack(uniform).to(logits_BV.device)
        ordered_BV, tokens_BV = (logits_BV.double() / self.sampling.temperature).sort(
            dim=-1, descending=True, stable=True
        )
        chance_BV = ordered_BV.softmax(-1)
        reached_BV = chance_BV.cumsum(-1)
        # The first token is always kept; another one where those before it lack some of the share.
        kept_BV = reached_BV - chance_BV < self.sampling.top_p
        total_B1 = (chance_BV * kept_BV).sum(-1, keepdim=True)
        place_B1 = (reached_BV <= uniform_B1 * total_B1).sum(-1, keepdim=True)
        place_B1 = place_B1.minimum(kept_BV.sum(-1, keepdim=True) - 1)
        return tokens_BV.gather(-1, place_B1).squeeze(-1)

    def as_processor(self, ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Leave the drawn token alone possible; how transformers asks for it."""
        del ids_BT
        drawn_B1 = self(logits_BV).unsqueeze(-1)
        return torch.full_like(logits_BV, -torch.inf).scatter(-1, drawn_B1, 0.0)


class StopWatch:
    """Notices when an answer has reached one of its stop texts."""

    def __init__(self, stops: Stops) -> None:
        """Begin with answers that are empty."""
        self.stops = stops
        self._window = max((len(text) for one in stops.texts for text in one), default=0) + _MARGIN
        self.lengths: dict[int, int] = {}

    def has_stopped(self, row: int, ids: Sequence[int]) -> bool:
        """Tell whether an answer is at a stop text, now or earlier; its length is kept.

        Args:
            row: the prompt.
            ids: its answer so far.
        """
        if row not in self.lengths:
            texts = self.stops.texts[row]
            tail = self.stops.decode(ids[-self._window :]) if texts else ""
            if any(text in tail for text in texts):
                self.lengths[row] = len(ids)
        return row in self.lengths
