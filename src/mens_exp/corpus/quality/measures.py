"""Sums of a pass over the rows: made of some rows at a time, and joined in their order."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.corpus_report import Finding
from mens_exp.artifacts.credentials import SECRETS
from mens_exp.corpus.code_checks import blocks_of
from mens_exp.corpus.quality.constructs import KINDS_IN
from mens_exp.corpus.quality.distinct import Distinct
from mens_exp.corpus.quality.lengths import Lengths
from mens_exp.corpus.quality.screen import hits_in
from mens_exp.corpus.shingles import runs, token_hashes
from mens_exp.corpus.split import project_of
from mens_exp.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.rows.schema import TrainingPair

__all__ = ["LISTED", "MOST_NAMES", "N_GRAMS", "OTHERS", "Measures", "Source", "measured"]

N_GRAMS: Final = (1, 2, 3)
LISTED: Final = 20  # findings of a kind; all are counted
MOST_NAMES: Final = 10_000  # sources told apart; rows of later ones are counted together
OTHERS: Final = "(others)"
_SOURCES: Final[dict[str, Callable[[TrainingPair], str]]] = {
    "category": lambda pair: pair.category or "",
    "language": lambda pair: pair.language or "",
    "project": project_of,
}


@dataclass(kw_only=True, slots=True)
class Source:
    """Rows of one source, and their characters."""

    rows: int = 0
    characters: int = 0


@dataclass(kw_only=True, slots=True)
class Measures:
    """Sums over rows; their size does not grow with the rows.

    Attributes:
        sides: rows by side.
        characters: of prompts, answers and system prompts.
        lengths: characters of each prompt, and of each answer.
        languages: rows by the language they name.
        parsed: those of them whose code parses.
        kinds: by language, rows that have a kind of node.
        unparsed: language -> why nobody could parse it.
        distinct: runs of tokens in answers, by their length.
        answer_bytes: of all answers.
        compressed_bytes: what zlib makes of them, some hundred rows at a time.
        secrets: findings by kind.
        injections: as above.
        findings: the first of each kind.
        sources: by what tells sources apart.
    """

    sides: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, Lengths] = field(
        default_factory=lambda: {"prompt": Lengths(), "answer": Lengths()}
    )
    languages: Counter[str] = field(default_factory=Counter)
    parsed: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    unparsed: dict[str, str] = field(default_factory=dict)
    distinct: dict[int, Distinct] = field(
        default_factory=lambda: {size: Distinct() for size in N_GRAMS}
    )
    answer_bytes: int = 0
    compressed_bytes: int = 0
    secrets: Counter[str] = field(default_factory=Counter)
    injections: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    sources: dict[str, dict[str, Source]] = field(
        default_factory=lambda: {by: {} for by in _SOURCES}
    )

    @property
    def rows(self) -> int:
        """Rows of all sides."""
        return self.sides.total()

    def join(self, other: Measures) -> None:
        """Add what was measured of the rows that follow."""
        for name in ("sides", "characters", "languages", "parsed", "secrets", "injections"):
            getattr(self, name).update(getattr(other, name))
        for name, lengths in other.lengths.items():
            self.lengths[name].join(lengths)
        for language, kinds in other.kinds.items():
            self.kinds.setdefault(language, Counter()).update(kinds)
        self.unparsed |= other.unparsed
        for size, distinct in other.distinct.items():
            self.distinct[size].join(distinct)
        self.answer_bytes += other.answer_bytes
        self.compressed_bytes += other.compressed_bytes
        for finding in other.findings:
            self.list_finding(finding)
        for by, named in other.sources.items():
            for name, source in named.items():
                self.add_source(by, name, source.rows, source.characters)

    def list_finding(self, finding: Finding) -> None:
        """Keep a finding unless enough of its kind are listed."""
        listed = sum(one["kind"] == finding["kind"] for one in self.findings)
        if listed < LISTED:
            self.findings.append(finding)

    def add_source(self, by: str, name: str, rows: int, characters: int) -> None:
        """Count rows of a source."""
        named = self.sources[by]
        if name not in named and len(named) >= MOST_NAMES:
            name = OTHERS
        source = named.setdefault(name, Source())
        source.rows += rows
        source.characters += characters


def measured(rows: Sequence[tuple[str, TrainingPair]]) -> Measures:
    """Measure some rows.

    Args:
        rows: each with the name of its side.
    """
    found = Measures()
    numbers: dict[str, Counter[int]] = {name: Counter() for name in found.lengths}
    answers = []
    for side, pair in rows:
        found.sides[side] += 1
        count = 0
        for asked, said in pair.exchanges:
            numbers["prompt"][len(asked)] += 1
            numbers["answer"][len(said)] += 1
            found.characters.update(prompts=len(asked), answers=len(said))
            count += len(asked) + len(said)
            answers.append(said)
            tokens = token_hashes(said)
            for size, distinct in found.distinct.items():
                distinct.add(runs(tokens, size))
        found.characters["system prompts"] += len(pair.system or "")
        for by, source_of in _SOURCES.items():
            found.add_source(by, source_of(pair), 1, count)
        _parse(pair, found)
        _screen(pair, found)
    for part, counts in numbers.items():
        found.lengths[part].add(counts)
    text = "\n".join(answers).encode("utf-8", "surrogatepass")
    found.answer_bytes, found.compressed_bytes = len(text), len(zlib.compress(text))
    return found


def _parse(pair: TrainingPair, found: Measures) -> None:
    language = (pair.language or "").casefold()
    found.languages[language] += 1
    kinds_in = KINDS_IN.get(language)
    if kinds_in is None:
        return
    kinds: set[str] = set()
    try:
        for code in blocks_of(pair):
            mine = kinds_in(code)
            if mine is None:
                return
            kinds |= mine
    except MissingExtra as error:
        found.unparsed[language] = str(error)
        return
    found.parsed[language] += 1
    found.kinds.setdefault(language, Counter()).update(kinds)


def _screen(pair: TrainingPair, found: Measures) -> None:
    for hit in hits_in(pair):
        counts = found.secrets if hit.kind in SECRETS else found.injections
        counts[hit.kind] += 1
        found.list_finding(
            Finding(kind=hit.kind, place=pair.place, field=hit.field, shown=hit.shown)
        )
