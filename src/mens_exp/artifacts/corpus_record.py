"""step.json and corpus.json: what each step of a corpus did, and the files that came of all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError

__all__ = ["CorpusRecord", "OutputFile", "StepRecord", "StepSummary"]

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
