"""task=plan: say what a run would do and cost, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.plan.preflight import writable_cache
from mens_exp.report import terminal, token_view
from mens_exp.tasks.measured import note_plan, planned

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.text import Text

    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["plan"]


def plan(config: RunConfig, run: Run) -> None:
    """Write plan.json and show it, and the first training rows where `data.show` asks for them."""
    cache = writable_cache()
    made = planned(config, run.manifest, cache)
    atomic.write_json(run.dir.plan, made)
    run.telemetry.emit("plan", made)
    note_plan(run.manifest, made)
    console = Console()
    console.print(terminal.plan_table(made))
    if config.data.show:
        console.print()
        console.print(token_view.legend(), soft_wrap=True)
        for text in _rows(config, cache):
            console.print(text, soft_wrap=True)


def _rows(config: RunConfig, cache: Path) -> Iterator[Text]:
    """Yield the first training rows as they are encoded for training."""
    from mens_exp.corpus.source import load_rows

    tokenizer = _tokenizer(config, cache)
    for number, pair in enumerate(load_rows(config.data, cache).train[: config.data.show], start=1):
        yield from _documents(config, tokenizer, pair, number)


def _tokenizer(config: RunConfig, cache: Path) -> Tokenizer:
    """Read the tokenizer; where the model has to be made first, make it."""
    from mens_exp.layout.cached import ready
    from mens_exp.tokenizer.load import load_tokenizer

    directory = ready(config.model, cache)
    if directory is None:
        from mens_exp.model.resolve import resolve

        directory = resolve(config.model, cache).directory
    return load_tokenizer(config.tokenizer, directory)


def _documents(
    config: RunConfig, tokenizer: Tokenizer, pair: TrainingPair, number: int
) -> Iterator[Text]:
    import dataclasses

    from mens_exp.corpus.source import labelling_of
    from mens_exp.rows.encode import encode

    labelling = labelling_of(config)
    # Encoded again without a limit, only to say how much the limit takes.
    endless = dataclasses.replace(labelling, seq_len=2**31)
    whole = encode([pair], tokenizer, endless).lengths.sum()
    made = encode([pair], tokenizer, labelling)
    cut = int(whole) - len(made.ids)
    title = f"Row {number}, {pair.name.removeprefix('row ')}"
    for i in range(len(made)):
        part = slice(made.offsets[i], made.offsets[i + 1])
        several = f", document {i + 1} of {len(made)}" if len(made) > 1 else ""
        yield token_view.shown(
            token_view.ShownDocument(
                title=title + several,
                ids=made.ids[part].tolist(),
                supervised=made.supervised[part].tolist(),
                cut=cut if i == len(made) - 1 else 0,
            ),
            tokenizer,
        )
    if made.dropped:
        yield token_view.dropped(title, made.dropped, labelling.seq_len)
