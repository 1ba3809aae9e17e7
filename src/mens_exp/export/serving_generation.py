"""Generation for transformers' serving handlers, with our penalties, stops and cancellation.

The handlers, their model and their generation thread are those of `transformers serve`.
"""

from __future__ import annotations

import contextvars
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from tokenizers.decoders import DecodeStream
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    GenerateManager,
    GenerationState,
    response_events_to_chunks,
)

from mens_exp.export.serving import turns

if TYPE_CHECKING:
    import asyncio

_MOST_NEW_TOKENS: Final = 1024  # default of a request
_LEAST_TEMPERATURE: Final = 1e-5  # below it, decode greedily, because logits may overflow


@dataclass(kw_only=True, slots=True)
class Generation:
    """The generation of one request, which stops early once ``ended`` is set.

    Attributes:
        ended: event that stops it.
        frequency_penalty: subtracted from a token's logit for each time that it was generated.
        presence_penalty: subtracted once if it was generated at all.
        seed: seed of sampling; None draws a seed from the system.
        stops: texts that end the answer and are not part of it.
        config: transformers' settings, which its handlers read again after the answer.
    """

    ended: threading.Event = field(default_factory=threading.Event)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stops: tuple[str, ...] = ()
    config: GenerationConfig = field(default_factory=GenerationConfig)

    def before_stop(self, text: str) -> tuple[str, bool]:
        """Return the text before the first stop, and whether there is one."""
        at = min((where for stop in self.stops if (where := text.find(stop)) >= 0), default=None)
        return (text, False) if at is None else (text[:at], True)

    def complete(self) -> None:
        """Note that the answer has reached its end, so that its ``finish_reason`` is ``stop``.

        transformers' handlers report ``length`` for every answer of ``max_new_tokens`` tokens.
        """
        self.config.max_new_tokens = None


CURRENT: Final[contextvars.ContextVar[Generation]] = contextvars.ContextVar("generation")


class _Ended(StoppingCriteria):  # type: ignore[misc]  # untyped
    """Stopping criterion: the generation was ended, or is complete: an end token or a stop.

    The text is decoded incrementally, because transformers' ``stop_strings`` misses control bytes,
    and both without special tokens, as the client sees it, and with them, as they may be stops.
    """

    def __init__(self, generation: Generation, tokenizer: Any) -> None:
        self.generation = generation
        self.tokenizer = tokenizer
        ends = generation.config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())
        self.longest = max(map(len, generation.stops), default=0)
        self.tails = {DecodeStream([], skip_special_tokens=skips): "" for skips in (True, False)}

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        token = int(input_ids[0, -1])
        is_complete = token in self.ends
        for decoding, tail in self.tails.items() if self.longest else ():
            text = tail + (decoding.step(self.tokenizer, token) or "")
            is_complete = is_complete or self.generation.before_stop(text)[1]
            self.tails[decoding] = text[-self.longest :]
        if is_complete:
            self.generation.complete()
        done = is_complete or self.generation.ended.is_set()
        return torch.full((input_ids.shape[0],), done, device=input_ids.device)


class _Penalties(LogitsProcessor):  # type: ignore[misc]  # likewise
    """OpenAI's additive penalties of repeated tokens, instead of transformers serve's factor."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.start: int | None = None  # position at which the answer starts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.start is None:
            self.start = input_ids.shape[1]
        said_BL = input_ids[:, self.start :]
        counts_BV = torch.zeros_like(scores)
        counts_BV.scatter_add_(1, said_BL, torch.ones_like(said_BL, dtype=scores.dtype))
        return (
            scores
            - self.generation.frequency_penalty * counts_BV
            - self.generation.presence_penalty * (counts_BV > 0)
        )


class _Manager(GenerateManager):  # type: ignore[misc]  # likewise
    """Generation that stops when its client disconnects, streamed or not, queued or running."""

    def generate_streaming(self, model: Any, processor: Any, *rest: Any, **named: Any) -> Any:
        generation = CURRENT.get()
        ending = _Model(model, generation, processor)
        queue, streamer = super().generate_streaming(ending, processor, *rest, **named)
        return (_Pieces(queue, generation) if generation.stops else queue), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, *rest: Any, **named: Any
    ) -> Any:
        generation = CURRENT.get()
        ending = _Model(model, generation, processor)
        whole, *others = await super().generate_non_streaming(ending, processor, *rest, **named)
        text, has_stopped = generation.before_stop(whole)
        if has_stopped:  # a stop may also appear once incomplete characters are decoded
            generation.complete()
        return (text, *others)


class _Pieces:
    """The pieces of a streamed answer up to its first stop, which may span several pieces."""

    def __init__(self, queue: asyncio.Queue[Any], generation: Generation) -> None:
        self.queue = queue
        self.generation = generation
        self.ready: list[Any] = []
        self.held = ""
        self.has_stopped = False

    async def get(self) -> Any:
        """Return the next piece; None ends the answer."""
        while not self.ready:
            self._take(await self.queue.get())
        return self.ready.pop(0)

    def get_nowait(self) -> Any:
        """Return the next piece if it is available.

        Raises:
            asyncio.QueueEmpty: it is not available.
        """
        while not self.ready:
            self._take(self.queue.get_nowait())
        return self.ready.pop(0)

    def _take(self, piece: Any) -> None:
        if type(piece) is not str:  # the end, an error, reasoning or a tool call
            self.ready += [self.held, piece] if self.held else [piece]
            self.held = ""
            return
        if self.has_stopped:
            return
        text, self.has_stopped = self.generation.before_stop(self.held + piece)
        if self.has_stopped:
            self.generation.complete()
        kept = 0 if self.has_stopped else self._beginning(text)
        self.held = text[len(text) - kept :]
        if len(text) > kept:
            self.ready.append(text[: len(text) - kept])

    def _beginning(self, text: str) -> int:
        """Return the length of the longest suffix of a text that is a prefix of a stop."""
        return max(
            (
                length
                for stop in self.generation.stops
                for length in range(1, len(stop))
                if text.endswith(stop[:length])
            ),
            default=0,
        )


class _Streamer:
    """transformers' streamer, which also sends a last character whose bytes are incomplete.

    Its decoder waits for the missing bytes. A decoded complete answer has U+FFFD there.
    """

    def __init__(self, streamer: Any, tokenizer: Any) -> None:
        self.streamer = streamer
        self.tokenizer = tokenizer
        self.skips = streamer._parser is None  # noqa: SLF001  # special tokens, as it does
        self.decoding = DecodeStream([], skip_special_tokens=self.skips)
        self.ids: list[int] | None = None  # of the answer; the first tokens put are the prompt
        self.said = ""

    def put(self, value: torch.Tensor) -> None:
        self.streamer.put(value)
        if self.ids is None:
            self.ids = []
            return
        for token in value.tolist():
            self.ids.append(token)
            self.said += self.decoding.step(self.tokenizer, token) or ""

    def end(self) -> None:
        whole = self.tokenizer.decode(self.ids or [], skip_special_tokens=self.skips)
        if whole.startswith(self.said) and (rest := whole[len(self.said) :]):
            parser = self.streamer._parser  # noqa: SLF001
            pieces = [rest] if parser is None else response_events_to_chunks(parser.feed(rest))
            for piece in pieces:
                self.streamer._enqueue(piece)  # noqa: SLF001
        self.streamer.end()


class _Model:
    """A model whose `generate` stops when its generation is ended."""

    def __init__(self, model: Any, generation: Generation, processor: Any) -> None:
        self._model = model
        self._generation = generation
        self._tokenizer = getattr(processor, "tokenizer", processor)._tokenizer  # noqa: SLF001

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **named: Any) -> Any:
        criteria = StoppingCriteriaList([_Ended(self._generation, self._tokenizer)])
        asks = self._generation.frequency_penalty or self._generation.presence_penalty
        penalties = LogitsProcessorList([_Penalties(self._generation)] if asks else [])
        if self._generation.ended.is_set():  # ended while it was queued
            named["generation_config"].max_new_tokens = 1
        if (streamer := named.get("streamer")) is not None:
            named["streamer"] = _Streamer(streamer, self._tokenizer)
        if (seed := self._generation.seed) is None:
            torch.seed()
        else:  # here, in the single generation thread, as torch has one generator for all requests
            torch.manual_seed(seed)
        return self._model.generate(**named, stopping_criteria=criteria, logits_processor=penalties)


class _Handler:
    """Changes to transformers' handlers, for a single model in a local directory."""

    def _resolve_model(self, body: Any) -> tuple[str, Any, Any]:
        """Return the model's name as in requests, without a Hub revision."""
        name, model, processor = super()._resolve_model(body)  # type: ignore[misc]  # of the other base
        return name.removesuffix("@main"), model, processor

    @staticmethod
    def chunk_to_sse(chunk: Any) -> str:
        """Return an event; ``finish_reason`` is null in all but the last, as in OpenAI's API."""
        if isinstance(chunk, str):
            return str(ChatCompletionHandler.chunk_to_sse(chunk))
        event = chunk.model_dump(mode="json", exclude_none=True)
        for choice in event["choices"]:
            choice.setdefault("finish_reason", None)
        return f"data: {json.dumps(event)}\n\n"

    def _build_generation_config(self, body: Any, *arguments: Any, **named: Any) -> Any:
        """Sample if a request asks for it, and from all tokens, as OpenAI's API does.

        transformers' handlers keep the model's ``do_sample``, which is usually unset, and their
        default ``top_k`` is 50.
        """
        config = super()._build_generation_config(body, *arguments, **named)  # type: ignore[misc]
        temperature, top_p = body.get("temperature"), body.get("top_p")
        if temperature is not None or top_p is not None:
            config.do_sample = temperature is None or temperature >= _LEAST_TEMPERATURE
        if not config.do_sample:
            config.temperature = config.top_p = None  # avoids warnings of transformers
        elif config.top_k is None:
            config.top_k = 0
        biases = config.sequence_bias or {}  # transformers refuses empty dicts and integers
        config.sequence_bias = {tokens: float(bias) for tokens, bias in biases.items()} or None
        CURRENT.get().config = config
        return config


class Chat(_Handler, ChatCompletionHandler):  # type: ignore[misc]  # untyped
    """Answers to messages."""

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], _: Any) -> Any:
        """Return the turns as they were checked.

        transformers' own function drops the text of a message that has calls, and fields such as
        ``name`` and ``reasoning_content``.
        """
        return turns(messages)

    def _build_completion(self, request_id: str, content: Any, *rest: Any, **named: Any) -> Any:
        """Cut the content that was parsed from the complete answer at its first stop."""
        cut = content if content is None else CURRENT.get().before_stop(content)[0]
        return super()._build_completion(request_id, cut, *rest, **named)


class Text(_Handler, CompletionHandler):  # type: ignore[misc]  # untyped
    """Continuations of a text."""


class State(GenerationState):  # type: ignore[misc]  # likewise
    """A single model with a single generation thread."""

    def __init__(self) -> None:
        """Start without a model."""
        super().__init__()
        self.manager = _Manager()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:  # noqa: ARG002  # its base has it
        """Return the one manager."""
        return self.manager
