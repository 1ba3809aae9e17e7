"""Find and read the runs of a study, by run, sweep, scorecard, glob or list.

A sweep can also be read for review: its record, its runs, and a comparison of its arms.
"""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import write_text
from mens_exp.artifacts.certificate import Outcome
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.record import read_bytes, read_lines
from mens_exp.artifacts.run_dir import RunDir, resolve, runs, started_utc
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.sweep import JobState, SweepDir, SweepRecord
from mens_exp.artifacts.telemetry import own_results, read_document_losses, read_events
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.compose import from_yaml, typed
from mens_exp.config.promotion import CompareConfig
from mens_exp.config.suite import SUITES
from mens_exp.errors import DataError, MensError, Problems, RequestError
from mens_exp.evals.arms import Trial, overlap_with_items
from mens_exp.evals.observations import (
    SweepReview,
    cells_of,
    columns_of,
    observations,
    predictions_of,
)
from mens_exp.evals.recompute import Recomputed, graded_as_today, recomputed
from mens_exp.evals.study import Scored, conducted
from mens_exp.evals.suite import frozen_suite, suite_class
from mens_exp.tasks.as_written import not_as_written, place_of, refusal_of
from mens_exp.tasks.inputs import hashes_in
from mens_exp.tasks.lineage import MERGED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.comparison import RunRecord
    from mens_exp.artifacts.telemetry import DocumentLoss
    from mens_exp.evals.suite import Suite

_SWEEP = "multirun.yaml"  # written by Hydra's own launcher
_LISTED = 4  # maximum number of runs listed by name
_ROUNDING = 1e-5  # relative tolerance for a loss summed in f32; measured: 5e-8
_ABSENT = "absent"
_UNDIGESTED = "the manifest is not checked as a whole: the telemetry has no digest of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """The runs found at the paths: the usable ones, and reasons for excluding others.

    `unverifiable` lists files without a recorded hash, and data that could not be recomputed or
    read again.
    """

    runs: list[Scored]
    left_out: dict[str, str]
    unverifiable: list[str]


def named_paths(text: str) -> list[str]:
    """Return the paths in the comma-separated ``path``, each expanded.

    Args:
        text: runs, directories of runs, scorecard files, globs, or ``latest``: the sweep of the
            run that was trained last, or that run alone.

    Raises:
        RequestError: one of them matches nothing.
    """
    found: list[str] = []
    for part in (one.strip() for one in text.split(",")):
        if part == "latest":
            run = resolve("latest", task="train").path
            found.append(str(run.parent if _is_sweep(run.parent) else run))
        elif glob.has_magic(part):
            pattern = str(Path(part).expanduser())
            matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  # from any root
            matches = [one for one in matches if Path(one).is_dir() or _is_record(Path(one))]
            found += matches or [_nothing(part)]
        elif part:
            path = Path(part).expanduser()
            found.append(str(path) if path.exists() else _nothing(part))
    if not found:
        _nothing(text)
    return [str(Path(one).absolute()) for one in dict.fromkeys(found)]


def read_study(paths: Sequence[str]) -> Read:
    """Read every run at the given places, each once.

    The scorecard of an evaluation replaces that of the run that it scored. Runs that did not
    succeed, and runs that do not train, are excluded by name.

    Raises:
        DataError: a record is damaged, a file differs from what its run wrote, or a scorecard's
            figures, lines and answers contradict each other.
        RequestError: a path holds no run, or an evaluation's run is not available.
    """
    found: dict[Path, RunDir | None] = {}
    left_out: dict[str, str] = {}
    for run in (one for path in paths for one in _runs_at(Path(path))):
        manifest = Manifest.read(run.manifest)
        where = run.path.resolve()
        if manifest.status is not Status.SUCCEEDED:
            who = f"seed {manifest.seed}" if manifest.task == "train" else "it"
            left_out[str(where)] = f"{who} {_ended(manifest)}"
        elif manifest.task == "evaluate" and manifest.inputs.get("subject") in {None, "base"}:
            left_out[str(where)] = "it scored no training run"
        elif manifest.task == "evaluate":
            subject = Path(_scored(manifest)).resolve()
            ended = _trained(RunDir(subject))
            if ended is not None:
                left_out[str(where)] = f"the run that it scored {ended}"
            elif found.get(subject) is not None and found[subject] != run:
                left_out[str(where)] = "another evaluation of the same run is counted"
            elif _is_of_another(manifest, RunDir(subject)):
                left_out[str(where)] = f"it scored another adapter than {subject} has now"
            else:
                found[subject] = run
        elif manifest.task == "train":
            found.setdefault(where, None)
        else:
            left_out[str(where)] = f"task={manifest.task} trains nothing"
    counted = [(RunDir(path), scorer) for path, scorer in found.items()]
    suites = _SuitesAtHand()
    unverifiable = _refuse_edited(counted)
    read = [_read(run, scorer, suites) for run, scorer in counted]
    Problems.raise_if([problem for _, one in read for problem in one.problems])
    unverifiable += _grouped((_measured_by(run.record), one.unverifiable) for run, one in read)
    return Read(runs=[run for run, _ in read], left_out=left_out, unverifiable=unverifiable)


def _measured_by(record: RunRecord) -> str:
    return Path(record["scored_by"] or record["path"]).name


def _trained(subject: RunDir) -> str | None:
    """Return how a scored training run ended; None if it succeeded, or is not here."""
    if not subject.manifest.is_file():
        return None
    manifest = Manifest.read(subject.manifest)
    return None if manifest.status is Status.SUCCEEDED else _ended(manifest)


def _refuse_edited(counted: Iterable[tuple[RunDir, RunDir | None]]) -> list[str]:
    """Refuse runs that are not as they were written, and return what cannot be verified."""
    problems, unverifiable, undigested = [], [], []
    for run, scorer in counted:
        for check in not_as_written(run, scorer):
            if check["outcome"] == Outcome.NOT_HERE:
                undigested.append((Path(str(check["of"])).name, [_UNDIGESTED]))
            elif check["recorded"] is None:
                file = place_of(check)
                unverifiable.append(f"unverifiable: the run of {file} recorded no hash of it")
            else:
                problems.append(refusal_of(check))
    Problems.raise_if(problems)
    return [*unverifiable, *_grouped(undigested)]


def _grouped(found: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """List each reason once, with the names of its runs."""
    runs: dict[str, list[str]] = {}
    for run, reasons in found:
        for reason in reasons:
            runs.setdefault(reason, []).append(run)
    return [
        f"unverifiable: {reason} ({', '.join(names[:_LISTED])}"
        f"{f' and {len(names) - _LISTED} more runs' if len(names) > _LISTED else ''})"
        for reason, names in runs.items()
    ]


def _is_of_another(evaluation: Manifest, subject: RunDir) -> bool:
    """Return whether the run at that path differs from the scored one."""
    adapter = evaluation.inputs.get("adapter_sha256")
    if adapter is None or not subject.manifest.is_file():
        return False
    return adapter not in Manifest.read(subject.manifest).outputs.values()


def _scored(manifest: Manifest) -> str:
    """Return the run that an evaluation scored, directly or through its merged weights."""
    return str(manifest.inputs.get(MERGED) or manifest.inputs.get("subject"))


def _form(scorer: RunDir | None) -> dict[str, str]:
    """Label merged weights, because they are a different model from an adapter."""
    is_merged = scorer is not None and MERGED in Manifest.read(scorer.manifest).inputs
    return {"scored_model": "merged"} if is_merged else {}


def _is_sweep(directory: Path) -> bool:
    return SweepDir(directory).record.is_file() or (directory / _SWEEP).is_file()


def _runs_at(path: Path) -> Iterable[RunDir]:
    if path.is_file():
        if not _is_record(path):
            raise _unusable(path, "a file that is not a scorecard")
        path = path.parent
        if not RunDir(path).manifest.is_file():
            raise _unusable(path, "a scorecard without the manifest of its run")
    found = sorted(runs(path), key=job_order)
    if not found:
        raise _unusable(path, "a directory without a run")
    return found


def job_order(run: RunDir) -> tuple[str, int, str, str]:
    """Order the jobs of a sweep by their number, and other runs by their start."""
    number = run.path.name.partition("_")[0]
    is_job = number.isdigit() and len(number) < 8  # noqa: PLR2004  # a date is not a job number
    return str(run.path.parent), int(number) if is_job else 0, started_utc(run), run.path.name


def _is_record(path: Path) -> bool:
    return path.is_file() and path.name in {RunDir(path.parent).scorecard.name, "manifest.json"}


def _read(run: RunDir, scorer: RunDir | None, suites: _SuitesAtHand) -> tuple[Scored, Recomputed]:
    if not run.manifest.is_file():
        raise _unusable(run.path, "the run that was evaluated was not found")
    manifest = Manifest.read(run.manifest)
    measured = run if scorer is None else scorer
    scorecard = Scorecard.read(measured.scorecard) if measured.scorecard.is_file() else None
    lines: list[Any] = (
        read_lines(measured.events, dict[str, Any]) if measured.events.is_file() else []
    )
    for number, line in enumerate(lines, start=1):
        if "item_id" not in line:
            where = f"{measured.events}:{number}"
            raise DataError("missing key", where=where, expected="item_id")
    losses = read_document_losses(run.validation) if run.validation.is_file() else []
    contradicted = [
        *_contradicted_losses(run, manifest, losses),
        *_contradicted_metrics(run, manifest, scorecard if scorer is None else None),
    ]
    taken = _taken_metrics(run, manifest)
    settings = _settings(run)
    by = None if scorer is None else Manifest.read(scorer.manifest)
    trial = Trial(
        manifest=manifest,
        settings=settings,
        hashes=dict(hashes_in(manifest.inputs)) | _form(scorer),
        suite_digest=None if scorecard is None else scorecard.suite_digest,
        answering={} if scorecard is None else scorecard.generation,
        overlap=None if scorecard is None else overlap_with_items(manifest, by),
        is_rescored=scorecard is not None
        and scorer is not None
        and has_own_scorecard(run, scorecard.suite_digest),
    )
    scored = Scored(
        trial=trial,
        record=_record(run, manifest, scorer, scorecard),
        items=None if scorecard is None else scorecard.items,
        observe=lambda arm, condition: observations(
            arm, manifest, condition, scorecard, lines, losses
        ),
        curves=_curves(run),
    )
    if scorecard is None:
        return scored, Recomputed(problems=contradicted, unverifiable=taken)
    made = Manifest.read(measured.manifest)
    if not measured.events.is_file() and measured.events.name not in made.outputs:
        what = f"no figure could be computed again: the run has no {measured.events.name}"
        return scored, Recomputed(problems=contradicted, unverifiable=[what, *taken])
    again = recomputed(
        scorecard,
        lines,
        suites.of(measured, settings if scorer is None else _settings(scorer), scorecard, lines),
        scorecard_path=measured.scorecard,
        events_path=measured.events,
        python=made.provenance.get("python"),
    )
    again.problems += contradicted
    again.unverifiable += taken
    return scored, again


def _contradicted_losses(
    run: RunDir, manifest: Manifest, losses: Sequence[DocumentLoss]
) -> Iterator[DataError]:
    """Yield the validation losses that are not the mean over their documents' tokens."""
    for condition in sorted({one["condition"] for one in losses}):
        name = f"{condition}_val_loss"
        stated = manifest.results.get(name)
        of_these = [one for one in losses if one["condition"] == condition]
        found = sum(one["loss"] for one in of_these) / sum(one["tokens"] for one in of_these)
        if stated is not None and not math.isclose(stated, found, rel_tol=_ROUNDING):
            yield DataError(
                "is not the mean over the documents' tokens",
                where=f"{run.manifest}: results.{name}",
                found=stated,
                expected=f"{found}, over {len(of_these)} documents of {run.validation.name}",
                remedy="run it again; records are never edited",
            )


def _taken_metrics(run: RunDir, manifest: Manifest) -> list[str]:
    """Report the user's metrics of a run without telemetry, which cannot be verified."""
    names = sorted(manifest.results.get("metrics") or {})
    if not names or run.telemetry.is_file():
        return []
    return [f"{', '.join(names)} are taken as recorded: the run has no {run.telemetry.name}"]


def _contradicted_metrics(
    run: RunDir, manifest: Manifest, scorecard: Scorecard | None
) -> Iterator[DataError]:
    """Yield the user's metrics whose recorded values do not follow from the telemetry.

    Scorecards of earlier versions do not have these metrics.
    """
    stated = {f"{run.manifest}: results.metrics": manifest.results.get("metrics") or {}}
    if scorecard is not None and scorecard.metrics:
        stated[f"{run.scorecard}: metrics"] = scorecard.metrics
    if not any(stated.values()) or not run.telemetry.is_file():
        return
    _, again = own_results(run.telemetry)
    for where, values in stated.items():
        for name in sorted(values.keys() | again.keys()):
            if values.get(name, _ABSENT) != again.get(name, _ABSENT):
                yield DataError(
                    "is not what the steps in the telemetry reduce to",
                    where=f"{where}.{name}",
                    found=values.get(name, _ABSENT),
                    expected=str(again.get(name, _ABSENT)),
                    remedy="run it again; records are never edited",
                )


def has_own_scorecard(run: RunDir, suite_digest: str) -> bool:
    """Return whether a training run scored itself on a suite."""
    return run.scorecard.is_file() and Scorecard.read(run.scorecard).suite_digest == suite_digest


def _record(
    run: RunDir, manifest: Manifest, scorer: RunDir | None, scorecard: Scorecard | None
) -> RunRecord:
    measured = run if scorer is None else scorer
    has_events = measured.events.is_file()
    scored = None if scorer is None else Manifest.read(scorer.manifest)
    return {
        "run_id": manifest.run_id,
        "path": str(run.path),
        "arm": "",
        "seed": manifest.seed,
        "started_utc": manifest.started_utc,
        "contract": str((manifest.contract or {}).get("digest")),
        "manifest_sha256": sha256_file(run.manifest),
        "scored_by": None if scorer is None else str(scorer.path),
        "scored_utc": None if scored is None else scored.started_utc,
        "scorer_sha256": None if scorer is None else sha256_file(scorer.manifest),
        "scorecard_sha256": None if scorecard is None else sha256_file(measured.scorecard),
        "events_sha256": sha256_file(measured.events) if has_events else None,
        "suite_digest": None if scorecard is None else scorecard.suite_digest,
        "sandbox": None if scorecard is None else scorecard.sandbox,
    }


def _settings(run: RunDir) -> dict[str, Any]:
    """Return a run's stored configuration by dotted path; an empty mapping is a value."""
    stored = parse_yaml(read_bytes(run.config), str(run.config))
    if not isinstance(stored, dict):
        raise DataError("no mapping", where=str(run.config), found=type(stored).__name__)
    return dict(leaves_of(stored))


def leaves_of(values: dict[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the settings of a stored configuration by dotted path; an empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _curves(run: RunDir) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in read_events(run.telemetry) if run.telemetry.is_file() else []:
        payload = event["payload"]
        metric = {"step": "train/loss", "validation": "val/loss"}.get(event["event"])
        is_tuned = payload.get("condition", "tuned") == "tuned"
        if metric is not None and is_tuned and payload.get(metric) is not None:
            found.setdefault(metric, []).append((int(payload["step"]), float(payload[metric])))
    return found


def _ended(manifest: Manifest) -> str:
    return "has not ended" if manifest.status is Status.STARTED else f"ended {manifest.status}"


def _nothing(text: str) -> str:
    raise _unusable(text, "nothing is there")


def _unusable(path: object, what: str) -> RequestError:
    return RequestError(
        what,
        where="path",
        found=str(path),
        expected="a run, a directory of runs, a run's scorecard.json, a glob, or latest; several "
        "with commas between",
        remedy="name what holds manifest.json files",
    )


class _SuitesAtHand:
    """Suites of runs, read again from their original locations, each once."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._read: dict[str, Suite | str] = {}

    def of(
        self,
        run: RunDir,
        settings: Mapping[str, Any],
        scorecard: Scorecard,
        lines: Sequence[dict[str, Any]],
    ) -> Suite | str:
        """Return the suite of a scorecard, or the reason why it is not available.

        Args:
            run: the run with the scorecard.
            settings: the run's settings by dotted path.
            scorecard: its scorecard.
            lines: the lines of its events.jsonl.
        """
        if not graded_as_today(scorecard):
            return "graded by another version"
        spec = SUITES.known(scorecard.suite)
        if spec is not None and spec.from_rows:
            return suite_class(spec).of_lines(lines, scorecard.generation)
        if settings.get("suite.name") != scorecard.suite:
            told = settings.get("suite.name")
            return f"the configuration has suite={told}, the scorecard {scorecard.suite}"
        of_suite = [name for name in sorted(settings) if name.startswith("suite.")]
        key = repr([(name, settings[name]) for name in of_suite])
        if key not in self._read:
            self._read[key] = _suite_of(run)
        return self._read[key]


def _suite_of(run: RunDir) -> Suite | str:
    try:
        config = typed(from_yaml(run.config)).suite
    except MensError as error:
        return str(error)
    if config.spec.asked_by is not None:
        return f"suite={config.name} judges answers where it asks for them"
    if config.spec.brings_models:
        return f"suite={config.name} is read by its own command alone"
    if (function := config.spec.function(config)) is not None:
        return f"they are judged by a function of the user's own, {function}"
    try:
        return frozen_suite(config)
    except MensError as error:
        return str(error)


_OVER = frozenset({JobState.SUCCEEDED, JobState.FAILED})
_MOST_ITEMS = 30  # per run; more would make the page megabytes large


def read_sweep(directory: SweepDir) -> SweepReview:
    """Read a sweep, complete or not.

    Raises:
        DataError: its own record is missing or damaged; a damaged run record affects only that run.
    """
    record = SweepRecord.read(directory.record)
    cells = cells_of(directory, record)
    kpis, costs = columns_of(cells)
    comparison, why = _compared(directory, record)
    predictions, more = predictions_of(directory, cells, items=_MOST_ITEMS)
    return SweepReview(
        record=record,
        cells=cells,
        kpis=kpis,
        costs=costs,
        predictions=predictions,
        more_predictions=more,
        comparison=comparison,
        why_not_compared=why,
    )


def write_sweep_page(directory: SweepDir) -> None:
    """Render ``sweep.html`` from the records of a sweep.

    Raises:
        DataError: its own record is missing or damaged.
    """
    from mens_exp.report import html, sweep_view, wording

    review = read_sweep(directory)
    steps = sweep_view.steps(wording.path(directory.path), is_done=True)
    if review.record.study is not None:
        steps = sweep_view.steps_after_study(review.record, directory.path)
    write_text(directory.page, html.page(sweep_view.document(review, steps)))


def _compared(directory: SweepDir, record: SweepRecord) -> tuple[Comparison | None, str]:
    """Return the study's own comparison, or compare the successful runs with default settings."""
    if record.study is not None and record.study["comparison"] is not None:
        place = RunDir(directory.path / record.study["comparison"])
        try:
            return Comparison.read(place.comparison), ""
        except MensError as error:
            return None, f"Not compared: {error}"
    if record.study is not None:  # any other comparison would not be the registered one
        is_over = all(job["state"] in _OVER for job in record.jobs) and not record.study["later"]
        if not is_over:
            return None, "Not compared yet: the runs of the study have not all ended."
        return None, "Not compared: the registered comparison failed; the command says why."
    found = [directory.path / job["directory"] for job in record.jobs]
    paths = [str(path.absolute()) for path in found if (path / "manifest.json").is_file()]
    try:
        read = read_study(paths)
        if not read.runs:
            raise RequestError("no training run of this sweep has ended well")
        made = conducted([str(directory.path.absolute())], read.runs, [], CompareConfig())
    except MensError as error:
        return None, f"Not compared: {error}"
    made.left_out = read.left_out
    made.notes += read.unverifiable
    return made, ""
