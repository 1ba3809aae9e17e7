"""The append-only ledger of cycles, their evidence and decisions, with one entry per line.

Each entry contains the digest of the previous one, so that edited, removed or reordered lines are
detected. A ledger truncated at its end is not: store the head's digest elsewhere too.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.host import file_lock
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.record import cut_torn_end, read_lines
from mens_exp.errors import DataError, MensError, Problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

# Version 1 froze fewer values of a cycle; version 2 froze no runs.
_FORMAT, _VERSION = "mens_exp_decisions", 3
_FREEZES_RUNS = 3
_LONGEST = 2**20  # maximum bytes of an entry


class EntryKind(StrEnum):
    """The kind of a ledger entry."""

    CYCLE = "cycle"
    DECISION = "decision"
    EVIDENCE = "evidence"


class Answer(StrEnum):
    """The decision of a policy."""

    PROMOTE = "promote"
    HOLD = "hold"
    REJECT = "reject"
    INSUFFICIENT = "insufficient_evidence"


class Outcome(StrEnum):
    """The result of one rule."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Thresholds(TypedDict):
    """The policy values that a cycle freezes, under the names used in the ledger.

    Attributes:
        challenger, incumbent: backends.
        floors, ceilings: limits on the challenger's means, by KPI.
        share_margin, relative_margin: allowed degradation of another KPI.
        least_cycles: minimum number of cycles required for a promotion.
        certificate: whether a certificate of one of the challenger's adapters is required.
    """

    challenger: str
    incumbent: str
    floors: dict[str, float]
    ceilings: dict[str, float]
    share_margin: float
    relative_margin: float
    least_cycles: int
    certificate: bool


class _Compared(Thresholds):
    alpha: float
    test: str
    condition: str


class FrozenRules(_Compared, total=False):
    """All rules that decide on a cycle besides its hypothesis: a policy's part, and a comparison's.

    A cycle without a ``target`` was opened when verdicts covered only these items, and one without
    a ``sequential`` when only the single-look test existed.
    """

    target: str
    sequential: str


class StudyEntry(TypedDict):
    """The study that a cycle belongs to: the digest of its settings, and what it claims."""

    sha256: str
    hypothesis: str
    stopping: str


class _Registered(TypedDict):
    cycle: str
    suite_digest: str | None
    seeds: list[int]
    arms: list[str]
    factor: str
    kpi: str
    direction: str
    margin: float


class CycleEntry(_Registered, total=False):
    """A benchmark cycle, frozen before any run: ``arms`` are backends or names of arms.

    The challenger's KPI is expected to change in ``direction`` by more than ``margin``. An entry of
    version 1 has no ``frozen``: the missing values are unknown, and no defaults replace them.
    A cycle of a ``study`` may have several factors, joined by commas, and no suite.
    """

    frozen: FrozenRules
    study: StudyEntry


class RuleRecord(TypedDict):
    """One rule of a policy; ``leads_to`` is the decision if the rule does not pass."""

    rule: str
    evidence: str | None
    kpi: str | None
    observed: float | str | None
    threshold: float | str | None
    outcome: Outcome
    leads_to: Answer
    note: str


class EvidenceEntry(TypedDict):
    """One compare.json, and the cycle that registered it."""

    path: str
    sha256: str
    cycle: str | None


class FrozenRun(TypedDict):
    """One run of a cycle's arm and seed, by the digests of the files that its values come from.

    ``scored_by`` is the evaluation whose scorecard counts, None if it is the run's own;
    ``scorer_sha256`` is the digest of that evaluation's manifest.
    """

    cycle: str
    arm: str
    seed: int
    path: str
    scored_by: str | None
    manifest_sha256: str
    scorer_sha256: str | None
    scorecard_sha256: str | None
    events_sha256: str | None


class _Decided(TypedDict):
    policy: dict[str, Any]
    evidence: list[EvidenceEntry]
    parity: dict[str, str] | None
    rules: list[RuleRecord]
    decision: Answer
    recommendation: str | None


class DecisionEntry(_Decided, total=False):
    """A decision, with everything needed to compute it again.

    ``runs`` are those of the cycles' valid evidence, and ``unverifiable`` lists evidence that
    cannot be verified. An entry of version 2 has neither.
    """

    runs: list[FrozenRun]
    unverifiable: list[str]


class _Line(TypedDict):
    format: str
    version: int
    number: int
    utc: str
    kind: EntryKind
    cycle: CycleEntry | None
    decision: DecisionEntry | None
    previous: str | None
    sha256: str


class LedgerEntry(_Line, total=False):
    """One line; the field named by ``kind`` is set, and the others are null.

    ``evidence`` is present in every entry since version 3.
    """

    evidence: list[FrozenRun] | None


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Read every entry and verify the chain; an incomplete last line is ignored.

    A missing file is an empty ledger.

    Raises:
        DataError: a line is not a valid entry, or was modified (``file:line``).
        Problems: several lines are.
    """
    if not path.exists():
        return []
    found: list[LedgerEntry] = read_lines(path, LedgerEntry, torn_end=True)
    before: str | None = None
    problems: list[MensError] = []
    for number, entry in enumerate(found, start=1):
        problems += _wrong(entry, number, before, f"{path}:{number}")
        before = entry["sha256"]
    Problems.raise_if(problems)
    return found


def is_ledger(path: Path) -> bool:
    """Return whether a file starts with a ledger entry."""
    try:
        with path.open("rb") as file:
            return bool(json.loads(file.readline(_LONGEST))["format"] == _FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def append(path: Path, kind: EntryKind, made: Callable[[list[LedgerEntry]], Any]) -> LedgerEntry:
    """Append one entry; concurrent writers wait for each other.

    Args:
        path: the ledger; created with its parents if missing.
        kind: kind of the entry.
        made: takes the previous entries and returns the cycle, the evidence or the decision; if it
            raises, nothing is appended.

    Returns:
        The entry, as stored on disk.

    Raises:
        DataError: as in `read_ledger`; nothing is appended to a ledger that was modified.
    """
    with file_lock(path.with_name(f".{path.name}.lock")):
        earlier = read_ledger(path)
        body = made(earlier)
        entry: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "number": len(earlier) + 1,
            "utc": utc_now(),
            "kind": str(kind),
            "cycle": body if kind is EntryKind.CYCLE else None,
            "decision": body if kind is EntryKind.DECISION else None,
            "evidence": body if kind is EntryKind.EVIDENCE else None,
            "previous": earlier[-1]["sha256"] if earlier else None,
        }
        entry["sha256"] = digest(entry)
        cut_torn_end(path)
        with path.open("ab") as file:
            file.write(json_line(entry, str(path)))
            file.flush()
            os.fsync(file.fileno())
    return read_ledger(path)[len(earlier)]


def cycles_of(entries: Sequence[LedgerEntry]) -> dict[str, tuple[str, CycleEntry]]:
    """Return the registered cycles in order: name -> time and content."""
    found = ((entry["utc"], entry["cycle"]) for entry in entries)
    return {cycle["cycle"]: (utc, cycle) for utc, cycle in found if cycle is not None}


def froze_runs(entry: LedgerEntry) -> bool:
    """Return whether an entry is of a version that freezes runs."""
    return entry["version"] >= _FREEZES_RUNS


def frozen_runs(entries: Sequence[LedgerEntry]) -> Iterator[tuple[int, FrozenRun]]:
    """Yield every run frozen by the entries, in order, with the entry's number."""
    for entry in entries:
        decision = entry["decision"]
        runs = entry.get("evidence") or ([] if decision is None else decision.get("runs", []))
        yield from ((entry["number"], run) for run in runs)


def _wrong(
    entry: Mapping[str, Any], number: int, before: str | None, where: str
) -> Iterator[DataError]:
    if entry["format"] != _FORMAT or not 1 <= entry["version"] <= _VERSION:
        yield DataError(
            "not this format",
            where=where,
            found=f"{entry['format']} {entry['version']}",
            expected=f"{_FORMAT} 1 to {_VERSION}",
        )
        return
    odd = _unlike_its_kind(entry)
    if odd is not None:
        yield DataError("the entry does not match its kind", where=where, found=odd)
        return
    whole = {name: value for name, value in entry.items() if name != "sha256"}
    if digest(whole) != entry["sha256"]:
        yield DataError(
            "the entry was modified after it was written",
            where=where,
            found=digest(whole),
            expected=str(entry["sha256"]),
            remedy="restore the ledger; entries are never edited",
        )
    elif entry["previous"] != before or entry["number"] != number:
        yield DataError(
            "the entry does not follow its predecessor",
            where=where,
            found=f"number {entry['number']} after {entry['previous']}",
            expected=f"number {number} after {before}",
            remedy="restore the ledger; entries are never removed or reordered",
        )


def _unlike_its_kind(entry: Mapping[str, Any]) -> str | None:
    """Return a contradiction between an entry and its kind or version; None if there is none."""
    kinds = [EntryKind.CYCLE, EntryKind.DECISION]
    is_new = entry["version"] >= _FREEZES_RUNS
    if is_new:
        kinds.append(EntryKind.EVIDENCE)
    if entry["kind"] not in kinds or ("evidence" in entry) != is_new:
        return f"{entry['kind']} of version {entry['version']}"
    for kind in kinds:
        if (entry.get(kind) is not None) != (kind == entry["kind"]):
            state = "null" if entry.get(kind) is None else "not null"
            return f"kind {entry['kind']}, and {kind} is {state}"
    if (
        is_new
        and entry["decision"] is not None
        and not {"runs", "unverifiable"} <= set(entry["decision"])
    ):
        return "a decision without runs"
    return None
