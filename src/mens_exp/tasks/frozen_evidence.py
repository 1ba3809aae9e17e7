"""Digests of a cycle's runs, frozen in the ledger the first time that they are seen.

Whoever edits a run can hash it again, so that hashes in the run's own manifest find no forger. An
entry of the ledger cannot be taken back: a later comparison or decision over the same runs, or over
others of the same cycle, arm and seed, must read the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.decision_ledger import EntryKind, append, frozen_runs, read_ledger
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mens_exp.artifacts.comparison import Comparison, FrozenBy
    from mens_exp.artifacts.decision_ledger import FrozenRun, LedgerEntry

__all__ = ["Frozen", "freeze", "runs_of"]

_REMEDY = "put the files back as they were; of a registered arm and seed the first run counts"
_OF_DECISION = "another comparison of this decision"
_DIGESTS = ("manifest_sha256", "scorer_sha256", "scorecard_sha256", "events_sha256")


class Frozen:
    """The frozen records, by cycle, arm and seed, and by file."""

    def __init__(self, entries: Sequence[LedgerEntry]) -> None:
        """Take over what the ledger froze."""
        self._runs: dict[tuple[str, str, int], tuple[str, FrozenRun]] = {}
        self._files: dict[Path, tuple[str, str]] = {}
        for number, run in frozen_runs(entries):
            self._add(run, f"entry {number}")

    def add(self, runs: Iterable[FrozenRun]) -> None:
        """Add the runs of a comparison whose decision is being made."""
        for run in runs:
            self._add(run, _OF_DECISION)

    def has(self, run: FrozenRun) -> bool:
        """Tell whether a run of this cycle, arm and seed is frozen."""
        return _key(run) in self._runs

    def differences(self, runs: Sequence[FrozenRun]) -> Iterator[DataError]:
        """Yield the files that differ from the frozen ones, and seeds that are there twice.

        Args:
            runs: of one comparison; those of no cycle are looked up by their files alone.
        """
        seen: dict[tuple[str, str, int], FrozenRun] = {}
        for run in runs:
            frozen = self._runs.get(_key(run)) if run["cycle"] else None
            if frozen is not None:
                yield from _unlike(run, *frozen)
            else:
                yield from self._edited(run)
            first = seen.setdefault(_key(run), run)
            if run["cycle"] and any(first[name] != run[name] for name in _DIGESTS):  # type: ignore[literal-required]
                yield DataError(
                    f"seed {run['seed']} of {run['arm']} is there twice",
                    where=run["path"],
                    found=f"{first['path']} too",
                    expected=f"one run of every arm and seed of cycle {run['cycle']}",
                    remedy="leave out the later one",
                )

    def _add(self, run: FrozenRun, by: str) -> None:
        self._runs.setdefault(_key(run), (by, run))
        for file, sha256 in _files(run):
            if sha256 is not None:
                self._files.setdefault(file, (by, sha256))

    def _edited(self, run: FrozenRun) -> Iterator[DataError]:
        for file, sha256 in _files(run):
            by, frozen = self._files.get(file, ("", sha256))
            if frozen != sha256:
                yield _another(file, sha256, frozen, by)


def runs_of(record: Comparison, cycle: str) -> list[FrozenRun]:
    """Return what a ledger has of a comparison's runs; `cycle` is empty for an exploratory one."""
    return [
        {
            "cycle": cycle,
            "arm": run["arm"],
            "seed": run["seed"],
            "path": run["path"],
            "scored_by": run["scored_by"],
            "manifest_sha256": run["manifest_sha256"],
            "scorer_sha256": run["scorer_sha256"],
            "scorecard_sha256": run["scorecard_sha256"],
            "events_sha256": run["events_sha256"],
        }
        for run in record.runs
    ]


def freeze(ledger: Path, runs: Sequence[FrozenRun]) -> FrozenBy | None:
    """Refuse runs that differ from frozen ones, and freeze those of a cycle that are new.

    Args:
        ledger: that is there.
        runs: of one comparison.

    Returns:
        The last entry that froze one of them; None for runs of no cycle.

    Raises:
        DataError: a file is another one than was frozen, or a seed is there twice.
        Problems: several are.
    """

    def made(entries: list[LedgerEntry]) -> list[FrozenRun]:
        Problems.raise_if(list(Frozen(entries).differences(runs)))
        return list(runs)

    entries = read_ledger(ledger)
    made(entries)
    if not runs or not runs[0]["cycle"]:
        return None
    if not all(map(Frozen(entries).has, runs)):
        entries.append(append(ledger, EntryKind.EVIDENCE, made))
    wanted = {_key(run) for run in runs}
    first: dict[tuple[str, str, int], int] = {}
    for number, run in frozen_runs(entries):
        first.setdefault(_key(run), number)
    last = max(number for key, number in first.items() if key in wanted)
    sha256 = next(entry["sha256"] for entry in entries if entry["number"] == last)
    return {"entry": last, "sha256": sha256}


def _key(run: FrozenRun) -> tuple[str, str, int]:
    return run["cycle"], run["arm"], run["seed"]


def _files(run: FrozenRun) -> Iterator[tuple[Path, str | None]]:
    """Yield the files of a run in the order of `_DIGESTS`."""
    place = RunDir(Path(run["path"]))
    scorer = RunDir(Path(run["scored_by"] or run["path"]))
    files = (place.manifest, scorer.manifest, scorer.scorecard, scorer.events)
    yield from zip(files, (run[name] for name in _DIGESTS), strict=True)  # type: ignore[literal-required]


def _unlike(run: FrozenRun, by: str, frozen: FrozenRun) -> Iterator[DataError]:
    for (file, sha256), (_, expected) in zip(_files(run), _files(frozen), strict=True):
        if sha256 != expected:
            yield _another(file, sha256, expected, f"{by}, of {frozen['path']}")


def _another(file: Path, found: str | None, frozen: str | None, by: str) -> DataError:
    return DataError(
        "is not what the ledger froze",
        where=str(file),
        found=found or "no such file",
        expected=f"{frozen or 'no such file'}, by {by}",
        remedy=_REMEDY,
    )
