"""Records of a corpus: step.json, corpus.json, and the measurements in corpus_report.json.

The records list what each step did and the files that it wrote. In the report, unknown values are
null, with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError

_SHA256 = re.compile(r"[0-9a-f]{64}")


class OutputFile(TypedDict):
    """One file: its content hash and number of rows, None if it has no training rows."""

    sha256: str
    rows: int | None


class StepSummary(TypedDict):
    """Summary of one step in the record of the whole corpus."""

    step: str
    directory: str
    key: str
    rows_in: int
    rows_out: int
    dropped: dict[str, int]


@dataclass(kw_only=True, slots=True)
class StepRecord(StoredRecord):
    """Input and result of one step.

    Attributes:
        format: always ``mens_exp_corpus_step``.
        version: version of this layout.
        step: the step's name.
        key: SHA-256 of everything that its files depend on: step, version of its code, settings,
            ``made_by``, and input. A step whose key matches its record is skipped.
        settings: the step's settings, and further settings of the command that it reads.
        made_by: versions of the code and of its dependencies.
        inputs: name of each input -> SHA-256 of its content.
        outputs: file -> its hash and rows.
        rows_in: rows read.
        rows_out: rows written, over all sides.
        dropped: number of dropped rows, by reason.
        facts: further facts about the step.
        seconds: duration.
        peak_bytes: peak resident memory of the process during the step, including what it held
            before; None if the system does not report it.
    """

    format: str = "mens_exp_corpus_step"
    version: int = 1
    step: str
    key: str
    settings: dict[str, Any]
    made_by: dict[str, str | None]
    inputs: dict[str, str]
    outputs: dict[str, OutputFile]
    rows_in: int
    rows_out: int
    dropped: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float
    peak_bytes: int | None

    def problems(self, where: str) -> list[DataError]:
        """Return the values that are not valid digests."""
        named = {"key": self.key} | {f"inputs.{name}": one for name, one in self.inputs.items()}
        named |= {f"outputs.{name}": one["sha256"] for name, one in self.outputs.items()}
        return _no_digests(named, where)


@dataclass(kw_only=True, slots=True)
class CorpusRecord(StoredRecord):
    """The steps of a corpus in order, and its files.

    Attributes:
        format: always ``mens_exp_corpus``.
        version: version of this layout.
        inputs: name of each input of the first step -> SHA-256 of its content.
        steps: each step, in order.
        files: path under the corpus -> hash and rows, for the files of the last step with rows.
    """

    format: str = "mens_exp_corpus"
    version: int = 1
    inputs: dict[str, str]
    steps: list[StepSummary]
    files: dict[str, OutputFile]

    def problems(self, where: str) -> list[DataError]:
        """Return the values that are not valid digests."""
        named = {f"files.{name}": one["sha256"] for name, one in self.files.items()}
        named |= {f"inputs.{name}": one for name, one in self.inputs.items()}
        named |= {f"steps.{one['directory']}.key": one["key"] for one in self.steps}
        return _no_digests(named, where)


def _no_digests(named: dict[str, str], where: str) -> list[DataError]:
    return [
        DataError(
            "wrong value",
            where=f"{where}: {name}",
            found=digest,
            expected="a SHA-256, 64 hexadecimal digits",
        )
        for name, digest in named.items()
        if not _SHA256.fullmatch(digest)
    ]


class Histogram(TypedDict):
    """A distribution of lengths.

    ``counts[i]`` is the number of values v with ``edges[i] <= v < edges[i + 1]``. Quantiles are the
    centers of finer bins, with an error of at most 2.2 %.
    """

    count: int
    mean: float
    smallest: int
    largest: int
    p50: float
    p90: float
    p99: float
    edges: list[float]
    counts: list[int]


class Tokens(TypedDict):
    """Statistics of the rows as encoded for training, with the run's tokenizer and objective.

    Totals refer to all rows. If only ``encoded_rows`` of them were encoded, they are estimates, and
    ``tokens_se`` is the standard error of ``tokens``. Truncation loses the part of a document
    beyond ``seq_len``, and the whole document if no supervised token remains.
    """

    encoded_rows: int
    exact: bool
    tokenizer_sha256: str
    template_sha256: str
    objective: str
    seq_len: int
    truncation: str
    documents: int
    tokens: int
    tokens_se: float
    supervised_tokens: int
    supervised_share: float
    truncated_documents: int
    dropped_documents: int
    lost_tokens: int
    lost_share: float
    lost_supervised_tokens: int
    lost_supervised_share: float
    lengths: Histogram


class Parsed(TypedDict):
    """Rows of one language, as they state it; ``parsed`` is null if no parser is available."""

    rows: int
    parsed: int | None


class Constructs(TypedDict):
    """Kinds of syntax nodes in the rows of a language that parse: number of rows with each."""

    rows: int
    occurring: dict[str, int]
    absent: list[str]


class Remaining(TypedDict):
    """Duplicates among the final rows, counted against the first row of each cluster."""

    exact: int
    near: int
    clusters: int
    threshold: float | None
    by: str


class NGrams(TypedDict):
    """Token n-grams of the answers; ``distinct`` is an estimate unless ``exact``."""

    total: int
    distinct: int
    exact: bool
    share: float


class Diversity(TypedDict):
    """Distinct-n by n, and the zlib compression ratio of the answers."""

    distinct: dict[str, NGrams]
    compression_ratio: float


class Finding(TypedDict):
    """One finding of the screen; ``shown`` is the masked start of a secret, null for a phrase."""

    kind: str
    place: str
    field: str
    shown: str | None


class Safety(TypedDict):
    """Findings by kind: all are counted, and the first of each kind are listed."""

    secrets: dict[str, int]
    injections: dict[str, int]
    findings: list[Finding]


class Share(TypedDict):
    """One source: its rows, and the characters of their prompts and answers."""

    name: str
    rows: int
    rows_share: float
    characters: int
    characters_share: float


class Mixed(TypedDict):
    """One source of a mix: its requested and its actual share of the rows."""

    share_asked: float
    share: float
    rows: int
    passes: float


class Before(TypedDict):
    """A step before the report: rows read, passed on and dropped, and for a mix each source."""

    step: str
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    sources: dict[str, Mixed] | None


@dataclass(kw_only=True, slots=True)
class CorpusReport(StoredRecord):
    """Measurements of a corpus.

    Attributes:
        format: always ``mens_exp_corpus_report``.
        version: version of this layout.
        rows: number of rows.
        sides: rows by side; ``all`` before a split.
        characters: of prompts, answers and system prompts.
        lengths: characters of a prompt and of an answer.
        tokens: None if the rows could not be encoded.
        parse: by language; rows without a language are under an empty name.
        constructs: by language.
        duplicates: None if they were not searched for.
        diversity: None without rows.
        safety: findings of the screen.
        sources: shares by the property that distinguishes sources: category, language, project.
        before: the steps that produced these rows, in order; may be empty.
        unknown: null field -> reason.
    """

    format: str = "mens_exp_corpus_report"
    version: int = 1
    rows: int
    sides: dict[str, int]
    characters: dict[str, int]
    lengths: dict[str, Histogram]
    tokens: Tokens | None
    parse: dict[str, Parsed]
    constructs: dict[str, Constructs]
    duplicates: Remaining | None
    diversity: Diversity | None
    safety: Safety
    sources: dict[str, list[Share]]
    before: list[Before] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)

    def problems(self, where: str) -> list[DataError]:
        """Return null values without a reason, and counts that contradict each other."""
        found = [
            DataError(
                "null without a reason",
                where=f"{where}: {name}",
                expected=f"a value, or a reason in unknown.{name}",
            )
            for name in ("tokens", "duplicates", "diversity")
            if getattr(self, name) is None and name not in self.unknown
        ]
        if sum(self.sides.values()) != self.rows:
            found.append(
                DataError(
                    "the sides do not add up to the rows",
                    where=f"{where}: sides",
                    found=sum(self.sides.values()),
                    expected=str(self.rows),
                )
            )
        return found
