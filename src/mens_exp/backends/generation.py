"""Batched generation, greedy or sampled, and per-layer traces of one document.

Each prompt has its own random stream, and each of its tokens consumes one uniform number. A prompt
with a given seed therefore gets the same tokens regardless of the rest of the batch. A trace holds
the hidden states after each layer.

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

# Extra tokens to inspect beyond the length of the longest stop text. A token usually has at least
# one character, but one that ends in the middle of a character may decode to none.
_MARGIN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: above 0; logits are divided by it.
        top_p: tokens are drawn from the smallest set with this cumulative probability.
        seeds: one for each prompt.
    """

    temperature: float
    top_p: float
    seeds: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Texts that end an answer.

    Attributes:
        texts: the stop texts of each prompt; empty if it has none.
        decode: turns ids into text.
    """

    texts: Sequence[Sequence[str]]
    decode: Callable[[Sequence[int]], str]


class Draw:
    """Draws the next token of every prompt."""

    def __init__(self, sampling: Sampling) -> None:
        """Start the random stream of every prompt."""
        self.sampling = sampling
        self._streams = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]

    def __call__(self, logits_BV: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Draw one token per prompt, ``[B]``.

        Args:
            logits_BV: logits of the next token.
            rows: the prompt of each row; all prompts in order by default.
        """
        streams = self._streams if rows is None else [self._streams[row] for row in rows]
        uniform = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
        uniform_B1 = torch.stack(uniform).to(logits_BV.device)
        ordered_BV, tokens_BV = (logits_BV.double() / self.sampling.temperature).sort(
            dim=-1, descending=True, stable=True
        )
        chance_BV = ordered_BV.softmax(-1)
        reached_BV = chance_BV.cumsum(-1)
        # Always keep the first token; keep another while those before it do not reach top_p.
        kept_BV = reached_BV - chance_BV < self.sampling.top_p
        total_B1 = (chance_BV * kept_BV).sum(-1, keepdim=True)
        place_B1 = (reached_BV <= uniform_B1 * total_B1).sum(-1, keepdim=True)
        place_B1 = place_B1.minimum(kept_BV.sum(-1, keepdim=True) - 1)
        return tokens_BV.gather(-1, place_B1).squeeze(-1)

    def as_processor(self, ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Mask all logits but the drawn token's, as a transformers logits processor."""
        del ids_BT
        drawn_B1 = self(logits_BV).unsqueeze(-1)
        return torch.full_like(logits_BV, -torch.inf).scatter(-1, drawn_B1, 0.0)


class StopWatch:
    """Detects when an answer has reached one of its stop texts."""

    def __init__(self, stops: Stops) -> None:
        """Start with empty answers."""
        self.stops = stops
        self._window = max((len(text) for one in stops.texts for text in one), default=0) + _MARGIN
        self.lengths: dict[int, int] = {}

    def has_stopped(self, row: int, ids: Sequence[int]) -> bool:
        """Return whether an answer has reached a stop text, and remember its length at that point.

        Args:
            row: index of the prompt.
            ids: the answer so far.
        """
        if row not in self.lengths:
            texts = self.stops.texts[row]
            tail = self.stops.decode(ids[-self._window :]) if texts else ""
            if any(text in tail for text in texts):
                self.lengths[row] = len(ids)
        return row in self.lengths


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside the block, then restore the mode of each module."""
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
    """Continue left-padded prompts until an end id, a stop text or the limit.

    Dropout is off in any mode of the model. Sampling settings in the model's files (a repetition
    penalty, for example) are ignored.

    Args:
        model: a transformers model.
        prompts: the ids of each prompt.
        max_new_tokens: maximum length of an answer.
        end_ids: ids that end an answer.
        pad_id: pads shorter prompts on the left.
        sampling: sampling settings; None is greedy decoding.
        stops: texts that end an answer.

    Returns:
        The new ids of each prompt, including the end id or stop text that ended it.
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
    model.generation_config = GenerationConfig()  # or its values would fill in what we leave unset
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
            disable_compile=True,  # a static cache would start it on a GPU, for minutes
        )
    lengths = watch.lengths if watch is not None else {}
    return [
        _until(ids[: lengths.get(row)], end_ids)
        for row, ids in enumerate(output[:, width:].tolist())
    ]


def _cache(model: Any, tokens: int) -> Any:
    """Return a cache of fixed size; a growing cache left gigabytes of fragmented memory.

    When an f32 model runs under autocast, keys leave the rotary embedding in f32 and values leave
    their projection in bf16, but transformers' cache accepts a single dtype.
    """
    from transformers import StaticCache

    class OneFormat(StaticCache):  # type: ignore[misc]  # untyped to mypy
        def update(self, key_states: Any, value_states: Any, *rest: Any, **named: Any) -> Any:
            return super().update(key_states, value_states.to(key_states.dtype), *rest, **named)

    return OneFormat(config=model.config, max_cache_len=tokens)


def _criterion(watch: StopWatch, width: int) -> Any:
    """Return a transformers stopping criterion for prompts that reached a stop text."""

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
        logits_TV: f32; row t predicts the token after position t.
    """

    hidden: dict[str, torch.Tensor]
    logits_TV: torch.Tensor


def trace(model: Any, ids: Sequence[int], *, device: torch.device | None = None) -> Trace:
    """Run a document through a transformers causal model in evaluation mode.

    Args:
        model: the model; its own code computes everything between the layers.
        ids: the document's token ids.
        device: device for the ids; None uses the model's.
    """
    ids_BT = torch.tensor([list(ids)], device=device or model.device)
    with torch.inference_mode(), evaluating(model), quiet():
        output = model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    states = output.hidden_states
    # transformers' last entry is the head's input, after the final norm.
    names = ["embedding", *(f"l{i}" for i in range(len(states) - 2)), "final norm"]
    hidden = {name: state[0].float() for name, state in zip(names, states, strict=True)}
    return Trace(hidden=hidden, logits_TV=output.logits[0].float())
