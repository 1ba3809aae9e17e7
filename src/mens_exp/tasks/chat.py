"""task=chat: base and tuned model answer side by side, alternating token by token.

Each model sees the user's turns and its own answers only.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.live import Live

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.digest import refuse_changed_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.backends.protocol import Stream
from mens_exp.errors import DataError, RequestError
from mens_exp.export.subject import config_of, subject_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal, wording
from mens_exp.report.document import Step
from mens_exp.tasks.inputs import definition_of, refuse_changed, tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from rich.console import Console

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.config.task import ChatConfig
    from mens_exp.report.document import Item
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.load import Tokenizer
    from mens_exp.tokenizer.templates import Message

_HELP = "/reset starts over · /system <text> sets the system turn · Ctrl-D leaves"


def chat(config: RunConfig, run: Run) -> None:
    """Load the run's model and adapter, and answer ``prompt`` or typed questions."""
    backend, tokenizer, is_tuned = _loaded(config, run)
    conditions: dict[str, Any] = {"base": backend.base_only}
    if is_tuned:
        conditions["tuned"] = nullcontext
    talk = Conversation(
        backend=backend,
        tokenizer=tokenizer,
        settings=config.chat,
        seed=config.seed,
        conditions=conditions,
    )
    titles = {"base": str(run.manifest.inputs["base_model"]), "tuned": f"tuned ({config.path})"}
    console = terminal.console()
    if config.chat.prompt is not None:
        _ask(talk, config.chat.prompt, titles, console)
        _write(run, talk)
        again = wording.command("task=chat", ("path", str(config.path)))
        terminal.say_next(
            [Step(again, "continue a conversation")], on=terminal.console(stderr=True)
        )
        return
    if sys.stdin.isatty():
        console.print(_HELP, style="dim")
    while (line := _typed(console)) is not None:
        _turn(talk, line.strip(), titles, console)
        _write(run, talk)
    _write(run, talk)
    terminal.say(f"Transcript: {run.dir.transcript}")


def _loaded(config: RunConfig, run: Run) -> tuple[Backend, Tokenizer, bool]:
    """Return the model with the run's adapter, or without one for ``path=base``."""
    from mens_exp.model.sources import resolve
    from mens_exp.training.build import build_backend, lightning_quiet

    assert config.path is not None, "validation has asked for it"
    subject = None if config.path == "base" else subject_of(config.path)
    if subject is not None:
        refuse_changed_adapter(subject.adapter)
    theirs = config if subject is None else config_of(subject)
    theirs.trainer.accelerator = config.trainer.accelerator
    base = resolve(theirs.model, writable_cache())
    tokenizer = tokenizer_of(theirs.tokenizer, base, run.dir if subject is None else subject)
    inputs = {
        "base_model": base.name,
        "base_weights_sha256": base.weights_sha256,
        **definition_of(base),
        "tokenizer_sha256": tokenizer.sha256,
        "chat_template_sha256": tokenizer.template_sha256,
    }
    if subject is not None:
        refuse_changed(Manifest.read(subject.manifest).inputs, inputs)
    run.manifest.inputs.update(inputs, subject=config.path)
    run.save()
    with lightning_quiet():
        backend = build_backend(theirs, base)
    if subject is not None:
        backend.load_adapter(read_adapter(subject.adapter)[1])
    return backend, tokenizer, subject is not None


def _typed(console: Console) -> str | None:
    """Read a line; None at the end of the input."""
    try:
        return console.input("[bold]> [/]") if sys.stdin.isatty() else input()
    except EOFError:
        return None


def _turn(talk: Conversation, line: str, titles: dict[str, str], console: Console) -> None:
    """Process a typed line: a command or a question."""
    command, _, rest = line.partition(" ")
    if not line:
        return
    if command == "/reset":
        talk.reset()
        console.print("The conversation starts over.", style="dim")
    elif command == "/system":
        talk.say_system(rest.strip())
        told = "is set" if talk.system else "is the template's own"
        console.print(f"The system turn {told}; the conversation starts over.", style="dim")
    elif command.startswith("/"):
        console.print(f"{command} is unknown. {_HELP}", style="dim", markup=False)
    else:
        try:
            _ask(talk, line, titles, console)
        except (DataError, RequestError) as error:  # concerns this turn only
            console.print(str(error), style="red", markup=False)


def _ask(talk: Conversation, question: str, titles: dict[str, str], console: Console) -> None:
    """Stream the answers; if the output is not a terminal, print them when complete."""

    def shown(answers: dict[str, Answer]) -> Item:
        texts = {name: (one.text, one.is_done) for name, one in answers.items()}
        return terminal.conversation(texts, titles)

    if not console.is_terminal:
        answers = talk.ask(question, lambda _answers: None)
    else:
        # While streaming, output taller than the screen is cut; the whole text remains at the end.
        with Live(console=console, refresh_per_second=12, transient=True) as live:

            def update(now: dict[str, Answer]) -> None:
                live.update(terminal.streamed(shown(now), console.width))

            answers = talk.ask(question, update)
    terminal.show(shown(answers), on=console, most=terminal.WHOLE)


def _write(run: Run, talk: Conversation) -> None:
    """Write the turns so far, so that an interrupted chat keeps them."""
    record = {
        "format": "mens_exp_transcript",
        "version": 1,
        "subject": run.manifest.inputs["subject"],
        "turns": talk.turns,
    }
    atomic.write_json(run.dir.transcript, record)
    run.manifest.results["turns"] = len(talk.turns)


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
        backend: the model.
        tokenizer: the tokenizer, with the active chat template.
        settings: generation settings.
        seed: sampling seed; shared by all conditions, so that answers differ only by the model.
        conditions: name -> context manager entered around each step.
        system: the system turn; None uses the template's default.
        turns: the record, one entry per question.
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
        """Set the system turn and start a new conversation."""
        self.system = text or None
        self.reset()

    def ask(self, question: str, show: Callable[[dict[str, Answer]], None]) -> dict[str, Answer]:
        """Let the models answer, alternating token by token, and update the display after each.

        Raises:
            RequestError: the conversation is longer than the model's positions.
            DataError: the chat template rejects the conversation.
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
                "the conversation is longer than the model's context window",
                found=f"{len(ids)} tokens",
                expected=f"fewer than {self.backend.max_positions}",
                remedy="start over with /reset",
            )
        return Stream(
            self.backend,
            ids,
            end_ids=self.tokenizer.end_ids,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            seed=self.seed + len(self.turns),  # so a repeated question is sampled anew
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
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # an incomplete character
        return Answer(
            text=text, tokens=len(stream.ids), is_done=stream.is_done, ended=stream.is_ended
        )
