"""task=chat: base and tuned model answer side by side, a token each in turn."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.outputs import refuse_changed_adapter
from mens_exp.errors import DataError, RequestError
from mens_exp.plan.preflight import writable_cache
from mens_exp.report.chat_view import columns, sections
from mens_exp.tasks.conversation import Answer, Conversation
from mens_exp.tasks.inputs import refuse_changed, tokenizer_of
from mens_exp.tasks.subject import config_of, subject_of

if TYPE_CHECKING:
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["chat"]

_HELP = "/reset begins anew · /system <text> sets the system turn · Ctrl-D leaves"


def chat(config: RunConfig, run: Run) -> None:
    """Load the run's model and adapter, and answer ``prompt`` or what is typed."""
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
    console = Console()
    if config.prompt is not None:
        _ask(talk, config.prompt, titles, console)
        _write(run, talk)
        return
    if sys.stdin.isatty():
        console.print(_HELP, style="dim")
    while (line := _typed(console)) is not None:
        _turn(talk, line.strip(), titles, console)
        _write(run, talk)
    _write(run, talk)
    console.print(f"Transcript: {run.dir.transcript}", soft_wrap=True, markup=False)


def _loaded(config: RunConfig, run: Run) -> tuple[Backend, Tokenizer, bool]:
    """Return the graph with the run's adapter, or with none for ``path=base``."""
    from mens_exp.model.resolve import resolve
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
    """Read a line, or None where there is no other."""
    try:
        return console.input("[bold]> [/]") if sys.stdin.isatty() else input()
    except EOFError:
        return None


def _turn(talk: Conversation, line: str, titles: dict[str, str], console: Console) -> None:
    """Do what a typed line says."""
    command, _, rest = line.partition(" ")
    if not line:
        return
    if command == "/reset":
        talk.reset()
        console.print("The conversation begins anew.", style="dim")
    elif command == "/system":
        talk.say_system(rest.strip())
        told = "is set" if talk.system else "is the template's own"
        console.print(f"The system turn {told}; the conversation begins anew.", style="dim")
    elif command.startswith("/"):
        console.print(f"{command} is unknown. {_HELP}", style="dim", markup=False)
    else:
        try:
            _ask(talk, line, titles, console)
        except (DataError, RequestError) as error:  # of this turn alone
            console.print(str(error), style="red", markup=False)


def _ask(talk: Conversation, question: str, titles: dict[str, str], console: Console) -> None:
    """Show answers as they are made, or whole where the output is no terminal."""

    def shown(answers: dict[str, Answer]) -> dict[str, tuple[str, bool]]:
        return {name: (one.text, one.is_done) for name, one in answers.items()}

    if not console.is_terminal:
        answers = talk.ask(question, lambda _answers: None)
        print(sections(shown(answers), titles), flush=True)  # noqa: T201  # plain, unwrapped
        return
    # While it streams, what is taller than the screen is cut; the whole stays when it is done.
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        answers = talk.ask(question, lambda now: live.update(columns(shown(now), titles)))
    console.print(columns(shown(answers), titles))


def _write(run: Run, talk: Conversation) -> None:
    """Write what was said so far; a chat that is cut off keeps its turns."""
    record = {
        "format": "mens_exp_transcript",
        "version": 1,
        "subject": run.manifest.inputs["subject"],
        "turns": talk.turns,
    }
    atomic.write_json(run.dir.transcript, record)
    run.manifest.results["turns"] = len(talk.turns)
