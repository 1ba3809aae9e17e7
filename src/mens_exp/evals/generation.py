"""Answers to conversations, in batches, from the graph at hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mens_exp.artifacts.digest import sha256_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.backends.protocol import Backend
    from mens_exp.tokenizer.protocol import Tokenizer
    from mens_exp.tokenizer.templates import Message

__all__ = [
    "Completion",
    "Engine",
    "Generation",
    "GraphEngine",
    "Request",
    "cut",
    "in_batches",
    "seed_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The generation settings of answers.

    Attributes:
        max_new_tokens: the longest answer.
        batch_size: prompts completed together.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        top_p: the share of the probability that they are drawn from.
    """

    max_new_tokens: int
    batch_size: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A conversation to answer; `seed` is of the drawing, and `stop` ends the answer."""

    messages: tuple[Message, ...]
    seed: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An answer.

    Attributes:
        text: without the stop text.
        tokens_in: tokens of the prompt; None where nobody counted them.
        tokens_out: tokens generated, the end marker included; None as above.
        is_finished: whether it ended by itself, or at a stop text.
        latency_ms: until it was there; of a batch, all of it; None where it was there before.
        problem: why there is none; None where there is one.
    """

    text: str
    tokens_in: int | None
    tokens_out: int | None
    is_finished: bool
    latency_ms: float | None
    problem: str | None = None


class Engine(Protocol):
    """Answers conversations."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer each of them, in their order."""


def seed_of(seed: int, item_id: str, sample: int, attempt: int) -> int:
    """Return the seed of one answer: 60 bits that depend on nothing but the arguments."""
    return int(sha256_bytes(f"{seed}/{item_id}/{sample}/{attempt}".encode())[:15], 16)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the first of the stop texts in it, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def in_batches(
    requests: Sequence[Request],
    prompts: Sequence[list[int]],
    room: int,
    batch_size: int,
    answer: Callable[[list[Request], list[list[int]]], list[Completion]],
) -> list[Completion]:
    """Answer requests a batch at a time, in their order; a prompt over ``room`` tokens gets none.

    Args:
        requests: what is asked.
        prompts: the ids of each.
        room: tokens that a prompt may have.
        batch_size: requests answered together.
        answer: answers one batch.
    """
    made = {i: _no_room(len(ids), room) for i, ids in enumerate(prompts) if len(ids) > room}
    fitting = [i for i in range(len(requests)) if i not in made]
    for start in range(0, len(fitting), batch_size):
        batch = fitting[start : start + batch_size]
        answers = answer([requests[i] for i in batch], [prompts[i] for i in batch])
        made.update(zip(batch, answers, strict=True))
    return [made[i] for i in range(len(requests))]


class GraphEngine:
    """``eval.engine=hf``: the graph at hand, with its adapter or inside ``base_only``."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, generation: Generation) -> None:
        """Take the graph, and the tokenizer with the chat template of training."""
        self.backend, self.tokenizer, self.generation = backend, tokenizer, generation

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer each of them, as many at once as a batch has."""
        prompts = self.tokenizer.encode_prompts([list(one.messages) for one in requests])
        room = self.backend.max_positions - self.generation.max_new_tokens
        return in_batches(requests, prompts, room, self.generation.batch_size, self._batch)

    def _batch(self, requests: list[Request], prompts: list[list[int]]) -> list[Completion]:
        began = time.perf_counter()
        outputs = self.backend.generate(
            prompts,
            max_new_tokens=self.generation.max_new_tokens,
            end_ids=self.tokenizer.end_ids,
            pad_id=self.tokenizer.pad_id,
            **self._options(requests),
        )
        latency_ms = 1000 * (time.perf_counter() - began)
        completions = []
        for request, prompt, ids in zip(requests, prompts, outputs, strict=True):
            text, is_stopped = cut(self.tokenizer.decode(ids), request.stop)
            completions.append(
                Completion(
                    text=text,
                    tokens_in=len(prompt),
                    tokens_out=len(ids),
                    is_finished=is_stopped or bool(ids and ids[-1] in self.tokenizer.end_ids),
                    latency_ms=latency_ms,
                )
            )
        return completions

    def _options(self, requests: list[Request]) -> dict[str, Any]:
        from mens_exp.backends.sampling import Sampling, Stops

        options: dict[str, Any] = {}
        if self.generation.temperature > 0:
            options["sampling"] = Sampling(
                temperature=self.generation.temperature,
                top_p=self.generation.top_p,
                seeds=[one.seed for one in requests],
            )
        if any(one.stop for one in requests):
            options["stops"] = Stops(
                texts=[one.stop for one in requests], decode=self.tokenizer.decode
            )
        return options


def _no_room(tokens: int, room: int) -> Completion:
    """Return what stands for the answer to a prompt that leaves no room for one."""
    return Completion(
        text="",
        tokens_in=tokens,
        tokens_out=0,
        is_finished=False,
        latency_ms=0.0,
        problem=f"the prompt has {tokens} tokens; {max(room, 0)} leave room for an answer",
    )
