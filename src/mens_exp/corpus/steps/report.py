"""The report step: measure the rows of the previous steps, and list these steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.corpus_record import (
    Before,
    Constructs,
    CorpusReport,
    Diversity,
    Mixed,
    NGrams,
    Parsed,
    Remaining,
    Safety,
    Share,
    StepRecord,
)
from mens_exp.artifacts.credentials import without_secrets
from mens_exp.corpus.large_files import map_in_order, pieces
from mens_exp.corpus.measures import KINDS_IN, OTHERS, Measures, Source, all_kinds, measured
from mens_exp.corpus.source import labelling_of
from mens_exp.corpus.steps.dedupe import duplicates
from mens_exp.corpus.steps.step import StepResult, read_rows, read_sides
from mens_exp.corpus.token_counts import drawn, token_counts
from mens_exp.errors import MensError, MissingExtra
from mens_exp.layout.model_cache import ready_directory
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.corpus_record import Tokens
    from mens_exp.corpus.steps.step import StepInput

_RECORD: Final = "step.json"


def steps_before(files: Sequence[Path]) -> list[Before]:
    """Return the steps that produced some files, oldest first.

    A step produced another's input if it precedes it by directory number, and its files have the
    same content; the leftovers of an earlier corpus do not.

    Args:
        files: row files of a step, or any others.

    Returns:
        The recorded steps; empty for files that no step produced.
    """
    found: list[Before] = []
    directory = files[0].parent if files else None
    wanted: set[str] | None = None
    while directory is not None:
        record = _record(directory)
        if record is None or (wanted is not None and wanted != _row_hashes(record)):
            break
        found.append(_before(record))
        wanted = set(record.inputs.values())
        directory = _previous(directory)
    return found[::-1]


def _row_hashes(record: StepRecord) -> set[str]:
    return {file["sha256"] for file in record.outputs.values() if file["rows"] is not None}


def _previous(directory: Path) -> Path | None:
    """Return the directory of the previous step, such as ``02-…`` for ``03-…``."""
    number = directory.name.partition("-")[0]
    if not number.isdecimal() or int(number) < 2:  # noqa: PLR2004 - the first step has none
        return None
    return next(iter(sorted(directory.parent.glob(f"{int(number) - 1:02d}-*"))), None)


def _record(directory: Path) -> StepRecord | None:
    if not (directory / _RECORD).is_file():
        return None
    try:
        return StepRecord.read(directory / _RECORD)
    except MensError:
        return None


def _before(record: StepRecord) -> Before:
    mixed: dict[str, Any] | None = record.facts.get("sources") if record.step == "mix" else None
    return Before(
        step=record.step,
        rows_in=record.rows_in,
        rows_out=record.rows_out,
        dropped=record.dropped,
        sources=None
        if mixed is None
        else {
            name: Mixed(
                share_asked=one["share_asked"],
                share=one["share"],
                rows=one["rows"],
                passes=one["passes"],
            )
            for name, one in mixed.items()
        },
    )


RECORD: Final = "corpus_report.json"
_ROWS_AT_ONCE: Final = 500
_MOST_SHARES: Final = 50  # sources listed, including one for the rest


def report(step: StepInput) -> StepResult:
    """Write ``corpus_report.json`` on the rows of the previous steps.

    Memory use is constant, plus some 50 bytes per row during the search for duplicates.

    Args:
        step: the input and output of the step; ``step.run`` has the tokenizer and the sequence
            length.

    Raises:
        DataError: a file cannot be read, or a row in it is invalid.
    """
    sums = Measures()
    named = ((side.value if side else "all", pair) for side, pair in read_sides(step.files))
    processes = step.config.report.processes
    for some in map_in_order(measured, pieces(named, _ROWS_AT_ONCE), processes):
        sums.join(some)
    unknown = dict[str, str]()
    record = CorpusReport(
        rows=sums.rows,
        sides=dict(sums.sides),
        characters=dict(sums.characters),
        lengths={
            name: found
            for name, lengths in sums.lengths.items()
            if (found := lengths.record()) is not None
        },
        tokens=_tokens(step, sums.rows, unknown),
        parse=_parse(sums, unknown),
        constructs=_constructs(sums),
        duplicates=_remaining(step, unknown),
        diversity=_diversity(sums, unknown),
        safety=_safety(sums),
        sources=_sources(sums),
        before=steps_before(step.files),
        unknown=unknown,
    )
    record.write(step.directory / RECORD)
    return StepResult(rows_in=sums.rows, rows_out=sums.rows, facts={"unknown": unknown})


def _tokens(step: StepInput, rows: int, unknown: dict[str, str]) -> Tokens | None:
    """Encode rows as the run would; if that fails, record the reason."""
    if step.run is None or not rows:
        unknown["tokens"] = "there are no rows" if not rows else "no run names the tokenizer"
        return None
    # The built-in Vox tokenizer needs no model files.
    is_ours = step.run.tokenizer.name == "vox"
    directory = Path() if is_ours else ready_directory(step.run.model, cache_root())
    if directory is None:
        unknown["tokens"] = f"the tokenizer of {step.run.model.name} is not on this machine yet"
        return None
    tokenizer = load_tokenizer(step.run.tokenizer, directory)
    some = drawn(read_rows(step.files), rows, step.config.report.token_rows)
    try:
        return token_counts(some, rows, tokenizer, labelling_of(step.run))
    except MensError as error:
        # The finding may contain a row's text, which does not belong in a report.
        first = getattr(error, "problems", [error])[0]
        unknown["tokens"] = f"{first.where or 'a row'}: {first.what}"
        return None


def _parse(sums: Measures, unknown: dict[str, str]) -> dict[str, Parsed]:
    found = {}
    for language, rows in sorted(sums.languages.items()):
        name = without_secrets(language)
        parsed = sums.parsed[language] if language in KINDS_IN else None
        if language in sums.unparsed:
            parsed, unknown[f"parse.{name}"] = None, sums.unparsed[language]
        elif parsed is None:
            why = "nothing here parses it" if language else "these rows name no language"
            unknown[f"parse.{name}"] = why
        found[name] = Parsed(rows=rows, parsed=parsed)
    return found


def _constructs(sums: Measures) -> dict[str, Constructs]:
    return {
        language: Constructs(
            rows=sums.parsed[language],
            occurring=dict(sorted(kinds.items())),
            absent=sorted(all_kinds(language) - kinds.keys()),
        )
        for language, kinds in sorted(sums.kinds.items())
        if all_kinds(language)
    }


def _remaining(step: StepInput, unknown: dict[str, str]) -> Remaining | None:
    if not step.config.report.duplicates:
        unknown["duplicates"] = "corpus.report.duplicates is false"
        return None
    config = step.config.dedupe
    try:
        facts = duplicates(read_rows(step.files), config, step.scratch).facts()
    except MissingExtra as error:
        unknown["duplicates"] = str(error)
        return None
    return Remaining(
        exact=facts["exact"],
        near=facts["near"],
        clusters=facts["clusters"],
        threshold=config.threshold,
        by=config.by.value,
    )


def _diversity(sums: Measures, unknown: dict[str, str]) -> Diversity | None:
    if not sums.compressed_bytes:
        unknown["diversity"] = "there are no rows"
        return None
    return Diversity(
        distinct={
            str(size): NGrams(
                total=one.total,
                distinct=one.count,
                exact=one.is_exact,
                share=one.count / one.total if one.total else 0.0,
            )
            for size, one in sums.distinct.items()
        },
        compression_ratio=sums.answer_bytes / sums.compressed_bytes,
    )


def _safety(sums: Measures) -> Safety:
    return Safety(
        secrets=dict(sorted(sums.secrets.items())),
        injections=dict(sorted(sums.injections.items())),
        findings=sums.findings,
    )


def _sources(sums: Measures) -> dict[str, list[Share]]:
    """Return the sources with the most rows, and the others combined."""
    characters = sums.characters["prompts"] + sums.characters["answers"]
    found: dict[str, list[Share]] = {}
    for by, named in sums.sources.items():
        ranked = sorted(named.items(), key=lambda one: (-one[1].rows, one[0]))
        largest = [one for one in ranked if one[0] != OTHERS][:_MOST_SHARES]
        kept = {name for name, _ in largest}
        rest = [source for name, source in ranked if name not in kept]
        others = Source(
            rows=sum(one.rows for one in rest), characters=sum(one.characters for one in rest)
        )
        found[by] = [
            Share(
                name=without_secrets(name),
                rows=one.rows,
                rows_share=one.rows / sums.rows,
                characters=one.characters,
                characters_share=one.characters / characters if characters else 0.0,
            )
            for name, one in [*largest, (OTHERS, others)]
            if one.rows
        ]
    return found
