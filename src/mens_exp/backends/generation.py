"""Generate continuations of many prompts at once, greedy or sampled, and trace one document.

A random stream belongs to each prompt, and one uniform number is drawn for each of its tokens, so
that a prompt with its seed gets the same tokens whatever else is in the batch. A trace holds the
hidden states after each layer.

Shapes: B prompts, T tokens of the longest or of the document, D hidden width, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block, then each module back into its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def greedy(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    end_ids: set[int],
    pad_id: int,
    sampling: Sampling | None = None,
    stops: Stops | None = None,
) -> list[list[int]]:
    """Continue prompts, padded on the left, until an end id, a stop text or the limit.

    Dropout is off whatever mode the model is in, and the sampling settings that its files may
    carry (a repetition penalty, say) play no part.

    Args:
        model: a transformers model.
        prompts: ids of each.
        max_new_tokens: the longest answer.
        end_ids: ids that end one.
        pad_id: fills what stands before shorter prompts.
        sampling: how tokens are drawn; None takes the likeliest.
        stops: texts that end an answer.

    Returns:
        The new ids of each prompt, its end id or stop text included where it ended.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width = max(map(len, prompts))
    ids_BT = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    watch = StopWatch(stops) if stops is not None else None
    processors: Any = LogitsProcessorList([Draw(sampling).as_processor] if sampling else [])
    criteria: Any = StoppingCriteriaList([_criterion(watch, width)] if watch else [])
    model.generation_config = GenerationConfig()  # what it holds would fill in what we leave open
    with torch.inference_mode(), evaluating(model), quiet():
        output = model.generate(
            input_ids=ids_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(end_ids),
            pad_token_id=pad_id,
            logits_processor=processors,
            stopping_criteria=criteria,
            past_key_values=_cache(model, width + max_new_tokens),
            disable_compile=True,  # which a static cache would start on a GPU, for minutes
        )
    lengths = watch.lengths if watch is not None else {}
    return [
        _until(ids[: lengths.get(row)], end_ids)
        for row, ids in enumerate(output[:, width:].tolist())
    ]


def _cache(model: Any, tokens: int) -> Any:
    """Return a cache of that many positions; one that grows left gigabytes of holes.

    Under autocast of an f32 model keys come out of the rotation in f32 and values out of their
    projection in bf16, and transformers' cache takes one format.
    """
    from transformers import StaticCache

    class OneFormat(StaticCache):  # type: ignore[misc]  # untyped to mypy
        def update(self, key_states: Any, value_states: Any, *rest: Any, **named: Any) -> Any:
            return super().update(key_states, value_states.to(key_states.dtype), *rest, **named)

    return OneFormat(config=model.config, max_cache_len=tokens)


def _criterion(watch: StopWatch, width: int) -> Any:
    """Tell transformers which prompts are at a stop text."""

    def stopped(ids_BT: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        del scores
        new = ids_BT[:, width:].tolist()
        done = [watch.has_stopped(row, ids) for row, ids in enumerate(new)]
        return torch.tensor(done, device=ids_BT.device)

    return stopped


def _until(ids: list[int], end_ids: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in end_ids), len(ids) - 1)
    return ids[: end + 1]


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
