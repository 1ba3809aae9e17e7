"""Evidence of task=promote: recomputed comparisons and their registered cycles.

Digests of a cycle's runs are frozen in the ledger the first time that they are seen. Hashes in a
run's own manifest do not protect against forgery, because anyone who edits a run can update them. A
ledger entry is permanent: a later comparison or decision over the same runs, or over others of the
same cycle, arm and seed, must read the same bytes.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.certificate import Certificate, Outcome
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.decision_ledger import (
    EntryKind,
    append,
    cycles_of,
    frozen_runs,
    read_ledger,
)
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.record import parse_json, read_bytes
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.data import ContractConfig
from mens_exp.config.promotion import (
    CompareConfig,
    CompareTarget,
    CompareTest,
    Sequential,
    Stopping,
)
from mens_exp.config.task import BudgetConfig
from mens_exp.errors import DataError, MensError, Problems, RequestError
from mens_exp.evals.arms import overlap_with_items, trained_on
from mens_exp.evals.kpis import as_recorded
from mens_exp.evals.promotion_rules import Evidence, Parity
from mens_exp.evals.study import conducted
from mens_exp.export.certificate import certified_place
from mens_exp.tasks.as_written import (
    ABSENT,
    differences,
    hash_of,
    not_as_written,
    place_of,
    refusal_of,
)
from mens_exp.tasks.checks import described, differing, text_check
from mens_exp.tasks.lineage import written_by
from mens_exp.tasks.study_runs import has_own_scorecard, read_study

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.comparison import FrozenBy, RunRecord
    from mens_exp.artifacts.decision_ledger import CycleEntry, FrozenRun, LedgerEntry

_REMEDY = "restore the files; of a registered arm and seed the first run counts"
_OF_DECISION = "another comparison of this decision"
_DIGESTS = ("manifest_sha256", "scorer_sha256", "scorecard_sha256", "events_sha256")


class Frozen:
    """The frozen records, by cycle, arm and seed, and by file."""

    def __init__(self, entries: Sequence[LedgerEntry]) -> None:
        """Load the records that the ledger froze."""
        self._runs: dict[tuple[str, str, int], tuple[str, FrozenRun]] = {}
        self._files: dict[Path, tuple[str, str]] = {}
        for number, run in frozen_runs(entries):
            self._add(run, f"entry {number}")

    def add(self, runs: Iterable[FrozenRun]) -> None:
        """Add the runs of a comparison whose decision is being made."""
        for run in runs:
            self._add(run, _OF_DECISION)

    def has(self, run: FrozenRun) -> bool:
        """Return whether a run of this cycle, arm and seed is frozen."""
        return _key(run) in self._runs

    def differences(self, runs: Sequence[FrozenRun]) -> Iterator[DataError]:
        """Yield the files that differ from the frozen ones, and duplicate seeds.

        Args:
            runs: the runs of one comparison; runs outside a cycle are looked up only by their
                files.
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
                    f"seed {run['seed']} of {run['arm']} occurs twice",
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
        # A run that scored itself has one manifest under two names; the second has no digest.
        files = dict(reversed([*_files(run)]))
        for file, sha256 in reversed(files.items()):
            by, frozen = self._files.get(file, ("", sha256))
            if frozen != sha256:
                yield _another(file, sha256, frozen, by)


def runs_of(record: Comparison, cycle: str) -> list[FrozenRun]:
    """Return the ledger form of a comparison's runs; `cycle` is empty if it is exploratory."""
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
    """Refuse runs that differ from frozen ones, and freeze new runs of a cycle.

    Args:
        ledger: an existing ledger.
        runs: the runs of one comparison.

    Returns:
        The last entry that froze one of them; None for runs outside a cycle.

    Raises:
        DataError: a file differs from the frozen one, or a seed occurs twice.
        Problems: there are several such errors.
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
        "contradicts the ledger",
        where=str(file),
        found=found or ABSENT,
        expected=f"{frozen or ABSENT}, by {by}",
        remedy=_REMEDY,
    )


_ROUNDING = 1e-9
_SAME = (
    *("factors", "reference", "primary", "alpha", "test", "target", "sequential", "power"),
    "condition",
    *("arms", "contrasts", "noise"),
)


def comparison_files(text: str) -> list[Path]:
    """Return the compare.json files in the comma-separated ``path``; a directory means its own.

    Raises:
        RequestError: one does not exist.
    """
    found = []
    for part in (one.strip() for one in text.split(",")):
        path = Path(part).expanduser()
        file = RunDir(path).comparison if path.is_dir() else path
        if not file.is_file():
            raise RequestError(
                "no comparison found",
                where="path",
                found=part,
                expected="compare.json, or a directory of task=compare; several with commas "
                "between",
                remedy="make one with task=compare path=<runs>",
            )
        found.append(file.absolute())
    return list(dict.fromkeys(found))


def gathered(
    files: Sequence[Path], entries: Sequence[LedgerEntry], *, freezes: bool = True
) -> list[Evidence]:
    """Read comparisons, recompute each from its runs, and find their cycles.

    Args:
        files: paths of compare.json.
        entries: ledger entries up to the decision.
        freezes: whether runs must match the frozen ones; versions before 3 froze none.

    Raises:
        DataError: a comparison cannot be read at all.
    """
    cycles = cycles_of(entries)
    found = []
    frozen = Frozen(entries)
    for file in files:
        record = Comparison.read(file)
        cycle, why = cycle_of(record, cycles)
        runs = runs_of(record, "" if cycle is None else cycle["cycle"])
        problems, unverifiable = comparison_problems(record)
        if freezes:
            problems += [str(one) for one in frozen.differences(runs)]
            problems += _cut(record, entries)
        if cycle is None or problems or not freezes:
            runs = []  # refused runs must not affect the others
        late = sum(not frozen.has(run) for run in runs)
        frozen.add(runs)
        earlier = [one for _, one in cycles.values()]
        shared: set[int] = set()
        if cycle is not None:
            before = earlier[: earlier.index(cycle)]
            shared = set(cycle["seeds"]) & {seed for one in before for seed in one["seeds"]}
        found.append(
            Evidence(
                name=str(file),
                comparison=record,
                problems=problems,
                cycle=cycle,
                why_exploratory=why,
                shared_seeds=sorted(shared),
                runs=runs,
                unverifiable=[*unverifiable, *_late(late, cycle)],
                trained_on_items=list(_trained_on_items(record)),
                rescored=list(_rescored(record)),
            )
        )
    return found


def _cut(record: Comparison, entries: Sequence[LedgerEntry]) -> list[str]:
    """Report a missing entry that froze a comparison's runs; a truncated ledger is still valid."""
    frozen = record.frozen
    if frozen is None or any(one["sha256"] == frozen["sha256"] for one in entries):
        return []
    return [f"the ledger lacks entry {frozen['entry']}, {frozen['sha256']}, that froze its runs"]


def _trained_on_items(record: Comparison) -> Iterator[str]:
    """Yield the runs whose training rows contain more items than a run accepts by default."""
    for run in record.runs:
        trained = RunDir(Path(run["path"])).manifest
        scorer = RunDir(Path(run["scored_by"])).manifest if run["scored_by"] else None
        if run["suite_digest"] is None or not all(
            one.is_file() for one in (trained, scorer) if one
        ):
            continue  # it was not scored, or its absence is reported as a contradiction
        by = None if scorer is None else Manifest.read(scorer)
        part = overlap_with_items(Manifest.read(trained), by)
        if part is not None and part["contained_frac"] > ContractConfig().max_overlap_frac:
            yield f"seed {run['seed']} of {run['arm']}: {trained_on(part)}"


def _rescored(record: Comparison) -> Iterator[str]:
    """Yield the runs that an evaluation scored after they had scored themselves."""
    for run in record.runs:
        suite, scorer = run["suite_digest"], run["scored_by"]
        if suite is not None and scorer and has_own_scorecard(RunDir(Path(run["path"])), suite):
            yield f"seed {run['seed']} of {run['arm']}"


def _late(count: int, cycle: CycleEntry | None) -> list[str]:
    if not count or cycle is None:
        return []
    name, since = cycle["cycle"], "so that they may have been edited and hashed again until then"
    return [
        f"unverifiable: {count} runs of cycle {name} were not frozen before this decision, {since}"
    ]


def is_of_older_version(file: Path, sha256: str) -> bool:
    """Return whether a decided comparison still exists and has an older version.

    Args:
        file: the comparison.
        sha256: hash of the decided comparison; any other file says nothing about its version.
    """
    if hash_of(file) != sha256:
        return False
    version = parse_json(read_bytes(file), str(file)).get("version")
    return bool(version != Comparison.__dataclass_fields__["version"].default)


def certificate_of(path: str | None, evidence: Sequence[Evidence], backend: str) -> Parity | None:
    """Compare a certificate with the adapters of the challenger's runs, and with its own run.

    Args:
        path: path of a parity.json; None if none was given.
        evidence: evidence with the runs to consider.
        backend: the challenger's backend.
    """
    if path is None:
        return None
    file = Path(path).expanduser()
    file = RunDir(file).parity if file.is_dir() else file
    try:
        certificate = Certificate.read(file)
    except MensError as error:
        return Parity(name=str(file), problem=str(error))
    adapter = certificate.sources.get("adapter_sha256")
    if not certificate.measures_something:
        problem: str | None = "it measured nothing: it has no tensors and no judged comparison"
    elif not certificate.passed:
        problem = "it did not pass"
    elif over := certificate.exceeded(dataclasses.asdict(BudgetConfig())):
        problem = f"its own budget was looser than the default one, which it exceeds: {over[0]}"
    elif adapter is None or adapter not in set(_adapters(evidence, backend)):
        problem = f"it is of adapter {adapter}, which no {backend} run of the evidence has"
    else:
        problem = _not_of_its_run(file, certificate)
    return Parity(name=str(file), problem=problem)


def _not_of_its_run(file: Path, certificate: Certificate) -> str | None:
    """Return the reason why a certificate is not what a merge or an export wrote; None if it is."""
    near = certified_place(file)
    own = RunDir(near)  # its copy is from before the card got its last section
    writer = own if own.manifest.is_file() else written_by(certificate, near)
    if writer is None:
        return (
            f"no task=merge or task=export run that wrote it was found below outputs or next to "
            f"{near}: move that run next to it, or merge again"
        )
    try:
        checks = differing([*differences(writer, (writer.config, writer.telemetry, writer.parity))])
        if not checks:
            checks = differing([text_check(certificate, Certificate.read(writer.parity))])
    except MensError as error:
        return f"the record of the run that wrote it cannot be read: {error}"
    return f"it is not as {writer.path} wrote it: {described(checks[0])}" if checks else None


def _adapters(evidence: Sequence[Evidence], backend: str) -> Iterator[str]:
    for one in evidence:
        arms = {arm["name"] for arm in one.comparison.arms if arm["backend"] == backend}
        for run in one.comparison.runs:
            manifest = RunDir(Path(run["path"])).manifest
            if run["arm"] in arms and manifest.is_file():
                outputs = Manifest.read(manifest).outputs
                yield from (sha for name, sha in outputs.items() if name.startswith("adapter/"))


def cycle_of(
    record: Comparison, cycles: Mapping[str, tuple[str, CycleEntry]]
) -> tuple[CycleEntry | None, str]:
    """Return the cycle that registered a comparison, or the closest cycle's reason for no match.

    Args:
        record: the comparison.
        cycles: cycles of the ledger, as returned by `cycles_of`.
    """
    if not cycles:
        return None, "the ledger has no cycle"
    reasons = {name: _not_of(record, utc, cycle) for name, (utc, cycle) in cycles.items()}
    fitting = [name for name, found in reasons.items() if not found]
    if fitting:
        return cycles[fitting[-1]][1], ""
    name = min(reasons, key=lambda one: len(reasons[one]))
    return None, f"not cycle {name}: {'; '.join(reasons[name])}"


def _not_of(record: Comparison, opened_utc: str, cycle: CycleEntry) -> list[str]:
    found = []
    suites = {run["suite_digest"] for run in record.runs}
    if suites != {cycle["suite_digest"]}:
        found.append("another suite digest")
    if not _are_registered({run["seed"] for run in record.runs}, cycle):
        found.append("other seeds than were registered")
    early = [run for run in record.runs if run["started_utc"] < opened_utc]
    if early:
        found.append(f"{len(early)} runs began before it was opened")
    named = {arm["name"] for arm in record.arms} | {str(arm["backend"]) for arm in record.arms}
    unknown = [
        arm["name"]
        for arm in record.arms
        if not {arm["name"], str(arm["backend"])} & set(cycle["arms"])
    ]
    if unknown:
        found.append(f"arms that were not registered: {', '.join(unknown)}")
    if not set(cycle["arms"]) <= named:
        found.append("a registered arm is missing")
    if cycle["kpi"] != record.primary:
        found.append(f"{cycle['kpi']} was registered, and {record.primary} is the primary KPI")
    if record.factors != cycle["factor"].split(","):
        factors = ", ".join(record.factors) or "none"
        found.append(f"{cycle['factor']} was registered, and the arms are of {factors}")
    frozen = cycle.get("frozen")
    if frozen is not None:
        pairs = {
            "alpha": (frozen["alpha"], record.alpha),
            "test": (frozen["test"], record.test),
            "condition": (frozen["condition"], record.condition),
            "target": (frozen.get("target", "these_items"), record.target),
            "sequential": (frozen.get("sequential", "none"), record.sequential),
        }
        found += [
            f"{was} was frozen as {name}, and the comparison has {now}"
            for name, (was, now) in pairs.items()
            if was != now
        ]
    return found


def _are_registered(seeds: set[int], cycle: CycleEntry) -> bool:
    """Return whether these are a cycle's seeds, or its first ones if the cycle may stop early."""
    registered = cycle["seeds"]
    study = cycle.get("study")
    if study is not None and study["stopping"] == Stopping.first_verdict.value:
        registered = registered[: len(seeds)]
    return bool(seeds) and seeds == set(registered)


def comparison_problems(record: Comparison) -> tuple[list[str], list[str]]:
    """Hash the files of a comparison and recompute it.

    Returns:
        Reasons to reject it, such as changed files or differing figures; and the parts that cannot
        be verified.
    """
    found = [problem for run in record.runs for problem in _of_run(run)]
    # Otherwise, results computed from them mean nothing.
    return (found, []) if found else _computed_again(record)


def _of_run(run: RunRecord) -> Iterator[str]:
    """Hash the files read from a run again, and compare them with the run's manifest."""
    place = RunDir(Path(run["path"]))
    scorer = place if run["scored_by"] is None else RunDir(Path(run["scored_by"]))
    expected = {
        place.manifest: run["manifest_sha256"],
        scorer.manifest: run["scorer_sha256"] or run["manifest_sha256"],
        scorer.scorecard: run["scorecard_sha256"],
        scorer.events: run["events_sha256"],
    }
    changed = [file for file, sha in expected.items() if sha is not None and hash_of(file) != sha]
    yield from (f"{file} is not what was compared" for file in changed)
    if place.manifest in changed or scorer.manifest in changed:
        return
    if run["scorecard_sha256"] is not None and run["events_sha256"] is None:
        yield f"{scorer.events} is not there, so that no figure can be computed again"
    other = None if run["scored_by"] is None else scorer
    yield from (
        f"{place_of(check)} {refusal_of(check).what}"
        for check in not_as_written(place, other)
        if check["outcome"] == Outcome.DIFFERS
    )
    if (Manifest.read(place.manifest).contract or {}).get("digest") != run["contract"]:
        yield f"{place.manifest}: the contract is not the one that was compared"


def _computed_again(record: Comparison) -> tuple[list[str], list[str]]:
    """Compare the same runs again; return the fields that differ, and labels."""
    settings = {k: v for k, v in record.settings.items() if k != "factors"}
    settings["test"] = CompareTest(settings["test"])
    settings["target"] = CompareTarget(settings.get("target", "these_items"))
    settings["sequential"] = Sequential(settings.get("sequential", "none"))
    places = [run["scored_by"] or run["path"] for run in record.runs]
    try:
        read = read_study(list(dict.fromkeys(places)))
        declared = list(record.settings["factors"])
        again = conducted(places, read.runs, declared, CompareConfig(**settings))
    except (MensError, KeyError, TypeError, ValueError) as error:
        return [f"the comparison cannot be recomputed: {error}"], []
    was, now = dataclasses.asdict(record), dataclasses.asdict(again)
    others = [name for name in _SAME if not _alike(was[name], now[name])]
    labels = [*read.unverifiable, *as_recorded(again.contrasts[0]["kpis"])]
    return [f"{name} come out otherwise from the same runs" for name in others], labels


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values are equal, up to rounding differences between machines."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(one == other)
