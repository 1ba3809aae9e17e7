"""Measure a stream of rows in constant memory: partial sums over batches, joined in order.

The measures are sizes, distinct n-grams (estimated from the smallest hashes, Bar-Yossef et al.
2002), node kinds in syntax trees, and the screen's findings: secrets and prompt injections, found
by a short list of patterns. The list covers only obvious cases, so a screen without findings proves
nothing. Secrets are tokens in an issuer's fixed format, and assigned passwords; injections are
recognized by their usual opening phrases.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mens_exp.artifacts.corpus_record import Finding
from mens_exp.artifacts.credentials import SECRETS, Pattern, found_in, masked, possible
from mens_exp.corpus import rust
from mens_exp.corpus.code_checks import blocks_of
from mens_exp.corpus.minhash import runs, token_hashes
from mens_exp.corpus.python_source import parse
from mens_exp.corpus.split import project_of
from mens_exp.corpus.token_counts import Lengths
from mens_exp.errors import MissingExtra
from mens_exp.rows.schema import further_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.rows.schema import TrainingPair

_CLASSES: Final = (
    *("stmt", "expr", "boolop", "operator", "unaryop", "cmpop"),
    *("excepthandler", "pattern", "type_param"),
)
# Nodes without an abstract base class. `Index` and `ExtSlice` are from Python 3.8 and before.
_ALONE: Final = ("comprehension", "keyword", "alias", "withitem", "match_case", "arg")
_GONE: Final = frozenset({"Index", "ExtSlice"})


def all_kinds(language: str) -> frozenset[str]:
    """Return every node kind of a language; empty if there is no such list.

    Raises:
        MissingExtra: the language is Rust and the grammar is not installed.
    """
    kinds = _ALL.get(language)
    return kinds() if kinds is not None else frozenset()


@functools.cache
def _python_kinds() -> frozenset[str]:
    found = {name for name in _ALONE if hasattr(ast, name)}
    for name in _CLASSES:
        kinds = getattr(ast, name).__subclasses__() if hasattr(ast, name) else []
        found |= {kind.__name__ for kind in kinds if kind.__module__ == "ast"}
    return frozenset(found - _GONE)


@functools.cache
def _rust_kinds() -> frozenset[str]:
    language = rust.parse_rust(b"").language
    assert language is not None, "the parser was given one"
    ids = range(language.node_kind_count)
    named = [i for i in ids if language.node_kind_is_named(i) and language.node_kind_is_visible(i)]
    return frozenset(kind for i in named if (kind := language.node_kind_for_id(i)) is not None)


def _in_python(code: str) -> frozenset[str] | None:
    tree = parse(code)
    if tree is None:
        return None
    return _python_kinds() & {type(node).__name__ for node in ast.walk(tree)}


def _in_rust(code: str) -> frozenset[str] | None:
    tree = rust.parse_rust(code.encode("utf-8", "surrogatepass"))
    if tree.root_node.has_error:
        return None
    found, waiting = set(), [tree.root_node]
    while waiting:
        node = waiting.pop()
        if node.is_named:
            found.add(node.type)
        waiting += node.children
    return _rust_kinds() & found


def _in_json(code: str) -> frozenset[str] | None:
    try:
        json.loads(code)
    except (ValueError, RecursionError):
        return None
    return frozenset()


_ALL: Final[dict[str, Callable[[], frozenset[str]]]] = {
    "python": _python_kinds,
    "rust": _rust_kinds,
}
# The node kinds in code of a language, or None if it does not parse.
KINDS_IN: Final[dict[str, Callable[[str], frozenset[str] | None]]] = {
    "python": _in_python,
    "rust": _in_rust,
    "json": _in_json,
}


# Counts are exact below this number; above, the standard error is 1/sqrt(MOST_EXACT), 0.4 %.
MOST_EXACT: Final = 2**16


class Distinct:
    """Counts distinct 64-bit hashes.

    Attributes:
        total: number of hashes added, including repeats.
    """

    def __init__(self, most: int = MOST_EXACT) -> None:
        """Keep the `most` smallest hashes."""
        self.total = 0
        self._most = most
        self._smallest = np.zeros(0, np.uint64)

    def add(self, hashes: np.ndarray) -> None:
        """Add hashes, which must be uniform over 64 bits."""
        self.total += len(hashes)
        self._keep(hashes)

    def join(self, other: Distinct) -> None:
        """Add all hashes of another counter."""
        self.total += other.total
        self._keep(other._smallest)

    @property
    def is_exact(self) -> bool:
        """Whether `count` is exact, not estimated."""
        return len(self._smallest) < self._most

    @property
    def count(self) -> int:
        """Number of distinct hashes, estimated from the k-th smallest, which is near k / n."""
        if self.is_exact:
            return len(self._smallest)
        return round((self._most - 1) / (float(self._smallest[-1]) / 2**64))

    def _keep(self, hashes: np.ndarray) -> None:
        if not self.is_exact:
            hashes = hashes[hashes < self._smallest[-1]]
        if len(hashes):
            both = np.concatenate([self._smallest, hashes])
            self._smallest = np.unique(both)[: self._most]


_BEFORE: Final = r"(?:previous|prior|above|earlier|preceding)"
_ORDERS: Final = r"(?:instructions?|prompts?|directions?|messages?|rules)"
_FILLING: Final = r"(?:(?:all|any|of|the|your|my)\s+)*"
INJECTIONS: Final[dict[str, Pattern]] = {
    "ignore previous instructions": Pattern(
        ("ignore", "disregard", "forget", "override"),
        re.compile(
            rf"(?i)\b(?:ignore|disregard|forget|override)\s+{_FILLING}{_BEFORE}\s+{_ORDERS}\b"
        ),
    ),
    "forget everything": Pattern(
        ("forget",),
        re.compile(r"(?i)\bforget\s+(?:everything|all)\s+(?:you|above|before|i\s+(?:said|told))\b"),
    ),
    "new instructions": Pattern(
        ("new",), re.compile(r"(?i)\b(?:these\s+are\s+your|your)\s+new\s+instructions\b")
    ),
    "do anything now": Pattern(("do",), re.compile(r"(?i)\bdo\s+anything\s+now\b")),
    "another role": Pattern(
        ("you",),
        re.compile(
            r"(?i)\byou\s+are\s+(?:now|no\s+longer)\s+(?:an?\s+)?(?:AI|DAN|unrestricted|bound)\b"
        ),
    ),
    "reveal the prompt": Pattern(
        ("prompt",),
        re.compile(
            r"(?i)\b(?:reveal|print|show|repeat|output|tell)\s+(?:me\s+)?(?:your|the)\s+"
            r"(?:hidden\s+|initial\s+|original\s+|full\s+)?system\s+prompt\b"
        ),
    ),
    "developer mode": Pattern(
        ("developer",), re.compile(r"(?i)\bdeveloper\s+mode\s+(?:is\s+)?(?:enabled|activated|on)\b")
    ),
    "control tokens": Pattern(
        ("<|", "<<sys>>", "inst]"),
        re.compile(
            r"<\|(?:im_start|im_end|endoftext|eot_id|start_header_id)\|>|<<SYS>>|\[/?INST\]"
        ),
    ),
}


class Hit(NamedTuple):
    """One finding; `shown` is the masked beginning of a secret, and None for a phrase."""

    kind: str
    field: str
    shown: str | None


def hits_in(pair: TrainingPair) -> Iterator[Hit]:
    """Yield the screen's findings in a row: every secret, and each phrase once per field."""
    fields = further_texts(pair)
    for number, (asked, said) in enumerate(pair.exchanges):
        turn = f", turn {number + 1}" if pair.history else ""
        fields += [(f"prompt{turn}", asked), (f"answer{turn}", said)]
    for place, text in fields:
        for kind, _, secret in found_in(text):
            yield Hit(kind, place, masked(secret))
        for kind, pattern in possible(INJECTIONS, text):
            if pattern.form.search(text):
                yield Hit(kind, place, None)


N_GRAMS: Final = (1, 2, 3)
LISTED: Final = 20  # findings listed per kind; all are counted
MOST_NAMES: Final = 10_000  # sources counted separately; later ones are counted together
OTHERS: Final = "(others)"
_SOURCES: Final[dict[str, Callable[[TrainingPair], str]]] = {
    "category": lambda pair: pair.category or "",
    "language": lambda pair: pair.language or "",
    "project": project_of,
}


@dataclass(kw_only=True, slots=True)
class Source:
    """Row and character counts of one source."""

    rows: int = 0
    characters: int = 0


@dataclass(kw_only=True, slots=True)
class Measures:
    """Sums over rows, of constant size.

    Attributes:
        sides: rows by side.
        characters: characters of prompts, answers and system prompts.
        lengths: distribution of characters per prompt and per answer.
        languages: rows by language.
        parsed: rows whose code parses, by language.
        kinds: rows that contain each node kind, by language.
        unparsed: the reason why a language could not be parsed, by language.
        distinct: distinct token n-grams in answers, by n.
        answer_bytes: bytes of all answers.
        compressed_bytes: the same after zlib, some hundred rows at a time.
        secrets: findings by kind.
        injections: findings by kind.
        findings: the first findings of each kind.
        sources: source counts by criterion (category, language, project).
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
        """Number of rows on all sides."""
        return self.sides.total()

    def join(self, other: Measures) -> None:
        """Add the measures of the rows that follow."""
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
        """List a finding, up to `LISTED` of its kind."""
        listed = sum(one["kind"] == finding["kind"] for one in self.findings)
        if listed < LISTED:
            self.findings.append(finding)

    def add_source(self, by: str, name: str, rows: int, characters: int) -> None:
        """Add rows of a source."""
        named = self.sources[by]
        if name not in named and len(named) >= MOST_NAMES:
            name = OTHERS
        source = named.setdefault(name, Source())
        source.rows += rows
        source.characters += characters


def measured(rows: Sequence[tuple[str, TrainingPair]]) -> Measures:
    """Measure a batch of rows.

    Args:
        rows: pairs of side name and row.
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
