"""step.json and corpus.json, the record of a corpus, and corpus_report.json, its measurements.

The records list what each step did and the files that it wrote. In the report, what is unknown is
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
    """One file: the hash of its content, and its rows; None where it holds no rows to train on."""

    sha256: str
    rows: int | None


class StepSummary(TypedDict):
    """One step as the whole corpus has it."""

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
        version: of this layout.
        step: the step's name.
        key: SHA-256 of all that its files depend on: step, version of its code, settings, what made
            them, and input. A step whose key is that of its record is not done again.
        settings: its own settings, and those of the command that it reads besides.
        made_by: versions of the code and of what it leans on.
        inputs: name of each input -> SHA-256 of its content.
        outputs: file -> its hash and rows.
        rows_in: rows read.
        rows_out: rows written, over all sides.
        dropped: what was not taken, by reason.
        facts: what else is to be known of it.
        seconds: how long it took.
        peak_bytes: peak resident memory of the process meanwhile, what it held before included;
            None where the system does not tell.
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
        """Return the digests that are none."""
        named = {"key": self.key} | {f"inputs.{name}": one for name, one in self.inputs.items()}
        named |= {f"outputs.{name}": one["sha256"] for name, one in self.outputs.items()}
        return _no_digests(named, where)


@dataclass(kw_only=True, slots=True)
class CorpusRecord(StoredRecord):
    """The steps of a corpus in order, and its files.

    Attributes:
        format: always ``mens_exp_corpus``.
        version: of this layout.
        inputs: name of each input of the first step -> SHA-256 of its content.
        steps: each step, in order.
        files: path under the corpus -> hash and rows, of the files of the last step with rows.
    """

    format: str = "mens_exp_corpus"
    version: int = 1
    inputs: dict[str, str]
    steps: list[StepSummary]
    files: dict[str, OutputFile]

    def problems(self, where: str) -> list[DataError]:
        """Return the digests that are none."""
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

    ``counts[i]`` lie from ``edges[i]`` to under ``edges[i + 1]``; the quantiles are the middles of
    finer bins, off by 2.2 % at most.
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
    """The rows as they are encoded for training, under the run's tokenizer and objective.

    Totals are of all rows; where only ``encoded_rows`` of them were encoded they are estimates,
    and ``tokens_se`` is the standard error of ``tokens``. What truncation loses is what a document
    has beyond ``seq_len``, and all of one that keeps nothing to learn.
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
    """Rows of one language, as they name it; ``parsed`` is null where nobody here parses it."""

    rows: int
    parsed: int | None


class Constructs(TypedDict):
    """Kinds of syntax nodes in the rows of a language that parse: how many rows have each."""

    rows: int
    occurring: dict[str, int]
    absent: list[str]


class Remaining(TypedDict):
    """Duplicates among the rows as they are, of the first row of each cluster."""

    exact: int
    near: int
    clusters: int
    threshold: float | None
    by: str


class NGrams(TypedDict):
    """Runs of so many tokens of the answers; ``distinct`` is an estimate where not ``exact``."""

    total: int
    distinct: int
    exact: bool
    share: float


class Diversity(TypedDict):
    """Distinct-n by n, and the bytes of the answers over those that zlib makes of them."""

    distinct: dict[str, NGrams]
    compression_ratio: float


class Finding(TypedDict):
    """One finding of the screen; ``shown`` is a secret's masked beginning, null for a phrase."""

    kind: str
    place: str
    field: str
    shown: str | None


class Safety(TypedDict):
    """Findings by kind, all counted, the first of each kind listed."""

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
    """One source of a mix: the share of the rows that was asked for, and that it has."""

    share_asked: float
    share: float
    rows: int
    passes: float


class Before(TypedDict):
    """A step before the report: what it read, passed on and dropped, and in a mix each source."""

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
        version: of this layout.
        rows: how many.
        sides: rows by side; ``all`` before a split.
        characters: of prompts, answers and system prompts.
        lengths: characters of a prompt and of an answer.
        tokens: None where the rows could not be encoded.
        parse: by language; rows that name none are under an empty name.
        constructs: by language.
        duplicates: None where nobody looked.
        diversity: None without rows.
        safety: what the screen found.
        sources: shares by what tells sources apart: category, language, project.
        before: the steps that made these rows, in order; none where no step did.
        unknown: field that is null -> why.
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
        """Return what is null without a reason, and counts that deny each other."""
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
                    "the sides are not the rows",
                    where=f"{where}: sides",
                    found=sum(self.sides.values()),
                    expected=str(self.rows),
                )
            )
        return found
