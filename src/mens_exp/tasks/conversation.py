"""Several models in one conversation: each sees the user's turns and its own answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.backends.streaming import Stream
from mens_exp.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.task import ChatConfig
    from mens_exp.tokenizer.protocol import Tokenizer
    from mens_exp.tokenizer.templates import Message

__all__ = ["Answer", "Conversation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of one model so far."""

    text: str
    tokens: int
    is_done: bool
    ended: bool


@dataclass(kw_only=True, slots=True)
class Conversation:
    """The turns so far, by condition.

    Attributes:
        backend: the graph.
        tokenizer: with the chat template in force.
        settings: of the answers.
        seed: of drawn tokens; the same for every condition, so that they differ by the model.
        conditions: name -> what is entered around each of its steps.
        system: the system turn, or None for the template's own.
        turns: the record, one entry a question.
    """

    backend: Backend
    tokenizer: Tokenizer
    settings: ChatConfig
    seed: int
    conditions: Mapping[str, Callable[[], AbstractContextManager[None]]]
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    _since: int = 0

    def reset(self) -> None:
        """Forget the turns; the record keeps them."""
        self._since = len(self.turns)

    def say_system(self, text: str | None) -> None:
        """Set the system turn and begin anew."""
        self.system = text or None
        self.reset()

    def ask(self, question: str, show: Callable[[dict[str, Answer]], None]) -> dict[str, Answer]:
        """Let every model answer, a token each in turn, and show what there is after each.

        Raises:
            RequestError: the conversation is longer than the model's positions.
            DataError: the chat template refuses it.
        """
        streams = {name: self._stream(name, question) for name in self.conditions}
        answers = {name: self._answer(stream) for name, stream in streams.items()}
        while not all(stream.is_done for stream in streams.values()):
            for stream in streams.values():
                stream.advance()
            answers = {name: self._answer(stream) for name, stream in streams.items()}
            show(answers)
        self.turns.append(
            {
                "system": self.system,
                "continues": len(self.turns) > self._since,
                "user": question,
                "answers": {
                    name: {"text": one.text, "tokens": one.tokens, "ended": one.ended}
                    for name, one in answers.items()
                },
            }
        )
        return answers

    def _stream(self, name: str, question: str) -> Stream:
        (ids,) = self.tokenizer.encode_prompts([self._messages(name, question)])
        if len(ids) >= self.backend.max_positions:
            raise RequestError(
                "the conversation is longer than the model's positions reach",
                found=f"{len(ids)} tokens",
                expected=f"fewer than {self.backend.max_positions}",
                remedy="begin anew with /reset",
            )
        return Stream(
            self.backend,
            ids,
            end_ids=self.tokenizer.end_ids,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            seed=self.seed + len(self.turns),  # a question asked again is answered afresh
            condition=self.conditions[name],
        )

    def _messages(self, name: str, question: str) -> list[Message]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[self._since :]:
            messages += [
                {"role": "user", "content": turn["user"]},
                {"role": "assistant", "content": turn["answers"][name]["text"]},
            ]
        return [*messages, {"role": "user", "content": question}]

    def _answer(self, stream: Stream) -> Answer:
        text = self.tokenizer.decode(stream.ids)
        if not stream.is_done:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character whose bytes are to come
        return Answer(
            text=text, tokens=len(stream.ids), is_done=stream.is_done, ended=stream.is_ended
        )
