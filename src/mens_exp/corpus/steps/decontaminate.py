"""The step decontaminate: rows that share n-grams with a benchmark are dropped, and listed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.atomic import json_line
from mens_exp.corpus.benchmarks import benchmark_texts
from mens_exp.corpus.overlap import OverlapIndex, texts_of
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_sides
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.corpus_decontaminate import DecontaminateConfig

__all__ = ["LIST", "decontaminate"]

LIST: Final = "contaminated.jsonl"
_HELDOUT: Final = "heldout"


def decontaminate(step: StepInput) -> StepResult:
    """Drop the rows that share n-grams with an item of a benchmark; held-out rows pass.

    `contaminated.jsonl` lists each dropped row with the item that it shares most with.

    Raises:
        DataError: a file cannot be read, a row in it is wrong, or a benchmark has no items.
        MissingExtra: a benchmark's package is not installed.
    """
    config = step.config.decontaminate
    items: Counter[str] = Counter()
    index = OverlapIndex(_items(step, config, items), config.ngram_words)
    rows = 0
    dropped: Counter[str] = Counter()
    found: set[str] = set()
    with RowWriter(step.directory) as writer, (step.directory / LIST).open("xb") as gone:
        for side, pair in read_sides(step.files):
            rows += 1
            overlaps = [] if side is Side.HELDOUT else index.overlaps(texts_of(pair))
            found.update(one.item for one in overlaps)
            if not overlaps or overlaps[0].share < config.min_share_frac:
                writer.write(pair, side)
                continue
            worst = overlaps[0]
            dropped[f"in {worst.item.partition(' ')[0]}"] += 1
            line = {
                "row": pair.id,
                "place": pair.place,
                "item": worst.item,
                "shared_ngrams": worst.shared,
                "share": round(worst.share, 6),
                "items": len(overlaps),
            }
            gone.write(json_line(line, LIST))
        total = writer.total
    return StepResult(
        rows_in=rows,
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={"items": dict(sorted(items.items())), "items_found": len(found)},
    )


def _items(
    step: StepInput, config: DecontaminateConfig, items: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield the items of every benchmark, each under its benchmark's name; count them."""
    for name in config.against:
        texts = (
            _held_out(step)
            if name == _HELDOUT
            else benchmark_texts(name, synthetic_items=config.synthetic_items)
        )
        for item, text in texts:
            items[name] += 1
            yield f"{name} {item}", text
        if not items[name]:
            raise DataError(
                "a benchmark has no items",
                where="corpus.decontaminate.against",
                found=name,
                expected="held-out rows, after the step split"
                if name == _HELDOUT
                else "one item at least",
                remedy=f"take {name} out of the list, or split before",
            )


def _held_out(step: StepInput) -> Iterator[tuple[str, str]]:
    for side, pair in read_sides(step.files):
        if side is Side.HELDOUT:
            yield pair.id, "\n".join(texts_of(pair))
