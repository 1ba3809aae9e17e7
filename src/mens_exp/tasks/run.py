"""Run one task: open its record, do the work, and close the record with the outcome.

The manifest is updated from `started` to its close. The first Ctrl-C or SIGTERM cancels a run
gracefully; a second one ends the process immediately.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mens_exp.artifacts import atomic, provenance
from mens_exp.artifacts.digest import manifest_digest, rename_later_checkpoints, sha256_file
from mens_exp.artifacts.host import machine_fault, run_lock
from mens_exp.artifacts.manifest import Attempt, Failure, Manifest, Status, utc_now
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import Telemetry, read_events, rewind
from mens_exp.config.compose import config_digest, to_yaml
from mens_exp.corpus.source import rows_read_once
from mens_exp.errors import MensError, RequestError
from mens_exp.planning.checks import classes
from mens_exp.planning.contract import contract_of
from mens_exp.training.wandb_names import agent_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig
    from mens_exp.planning.contract import Extension

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Cancelled(BaseException):
    """A stop request by the user or the system; not an Exception, so no handler catches it."""


@contextmanager
def cancellable(is_closing: Callable[[], bool]) -> Iterator[None]:
    """Turn the first signal inside the block into :class:`Cancelled`.

    Args:
        is_closing: whether the run already has its final status; the first signal is then ignored,
            so that a closing record is never left incomplete.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        end_at_once()
        if not is_closing():
            raise Cancelled(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


_at_second: Any = signal.SIG_DFL


def end_at_once() -> None:
    """Make the next signal end the process, or interrupt it if it is :func:`kept_alive`."""
    if threading.current_thread() is threading.main_thread():
        for each in _SIGNALS:
            signal.signal(each, _at_second)


@contextmanager
def kept_alive() -> Iterator[None]:
    """Make a second signal inside the block a KeyboardInterrupt; the process belongs to a user.

    A notebook or a script continues after a cancelled run, so its process must not be ended.
    """
    global _at_second  # noqa: PLW0603  # signal handlers belong to the whole process as well
    before, _at_second = _at_second, signal.default_int_handler
    try:
        yield
    finally:
        _at_second = before


# Tasks that describe a fine-tune; the others read a finished one.
TRAINING = frozenset({"train", "plan"})
_VALIDATED_FIRST = ("base_val_loss", "initial_val_loss")  # measured before the first step
# Provenance fields that may affect results.
_CONDITIONS = ("commit", "diff_sha256", "packages", "python", "cpu", "environment", "own_classes")


class Run:
    """An open run: its directory, event log and manifest."""

    def __init__(self, directory: RunDir, manifest: Manifest) -> None:
        """Open the event log; use :func:`open_run`."""
        self.dir = directory
        self.manifest = manifest
        self.telemetry = Telemetry(directory.telemetry)
        self.prints = True  # whether results are shown on standard output, as on a command line
        self.is_closing = False
        self._after_close: list[Callable[[Manifest], None]] = []
        self._began = time.monotonic()
        self._earlier_s = manifest.results.get("wall_s") or 0.0  # of earlier, closed attempts

    def save(self) -> None:
        """Write the manifest."""
        self.manifest.write(self.dir.manifest)

    def after_close(self, fn: Callable[[Manifest], None]) -> None:
        """Call ``fn`` with the closed manifest, once it is on disk; its errors are isolated."""
        self._after_close.append(fn)

    def unknown(self, field: str, reason: str) -> None:
        """Record why a dotted field of the manifest is null."""
        self.manifest.unknown[field] = reason

    def close(self, status: Status, error: BaseException | None = None) -> None:
        """Close manifest and event log, render the report, and hand over to the sinks."""
        self.is_closing = True
        manifest = self.manifest
        manifest.status = status
        manifest.ended_utc = utc_now()
        attempt = manifest.attempts[-1]
        attempt["ended_utc"], attempt["status"] = manifest.ended_utc, status
        manifest.results["wall_s"] = self._earlier_s + time.monotonic() - self._began
        manifest.error = _failure(error) if status is Status.FAILED and error else None
        if status is Status.CANCELLED and self.dir.pruned.exists():
            manifest.notes.append(self.dir.pruned.read_text("utf-8"))
        self._without_infinities()
        manifest.outputs = _hash_outputs(self.dir)
        self._isolated("report", self._write_views)
        manifest.outputs |= _hashes(self.dir, [self.dir.run_summary, self.dir.skip_stats])
        self._isolated("telemetry", self._emit_the_end)
        self.telemetry.close()
        manifest.outputs |= _hashes(self.dir, [self.dir.telemetry])
        self.save()
        self._isolated("report", self._render)
        for fn in self._after_close:
            self._isolated("sink", lambda fn=fn: fn(manifest))  # type: ignore[misc]

    def _emit_the_end(self) -> None:
        written = asdict(self.manifest.screened())
        end = {
            "status": str(self.manifest.status),
            "results": dict(self.manifest.results),
            "manifest_sha256": manifest_digest(written),
        }
        self.telemetry.emit("run_finished", end)

    def _write_views(self) -> None:
        """Write the views for other programs, which name the adapter by its recorded path."""
        from mens_exp.report.write import write_views

        write_views(self.dir, self.manifest.screened())

    def _without_infinities(self) -> None:
        """Replace non-finite results by null with a reason, because JSON cannot represent them."""
        for name, value in self.manifest.results.items():
            if isinstance(value, float) and not math.isfinite(value):
                self.manifest.results[name] = None
                self.unknown(f"results.{name}", f"not finite: {value}")

    def _render(self) -> None:
        from mens_exp.report.write import write_report

        write_report(self.dir)

    def _isolated(self, what: str, action: Callable[[], None]) -> None:
        """Run an action that must not affect a closed run; a failure becomes a note."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  # the run is over; keep its record
            self.manifest.notes.append(f"{what} failed: {type(error).__name__}: {error}")
            self.save()


def _failure(error: BaseException) -> Failure:
    ours = error if isinstance(error, MensError) else machine_fault(error)
    return {
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "remedy": ours.remedy if ours else None,
        "exit_code": ours.exit_code if ours else MensError.exit_code,
    }


def _hash_outputs(run: RunDir) -> dict[str, str]:
    """Hash every complete file of the run, except checkpoints and the sinks' files.

    Quarantined rows are not outputs either, because they are not moved with the run.
    """
    files = [run.config, run.plan, run.telemetry, run.scorecard, run.events, run.transcript]
    files += [
        *run.scorecards.glob("step_*.jsonl"),
        run.samples,
        run.chat_template,
        run.validation,
        run.attribution,
        run.merged_tensors,
        run.parity,
        run.inspection,
        run.comparison,
        run.comparison_page,
        run.comparison_table,
    ]
    for made in (run.adapter, run.weights, run.merged):
        files += sorted(made.rglob("*"))
    return _hashes(run, files)


def _hashes(run: RunDir, files: Iterable[Path]) -> dict[str, str]:
    paths = {path.relative_to(run.path): path for path in files if path.is_file()}
    # A leading dot marks an incomplete file of a writer that died.
    whole = {name for name in paths if not any(part.startswith(".") for part in name.parts)}
    return {name.as_posix(): sha256_file(paths[name]) for name in sorted(whole)}


@contextmanager
def open_run(directory: Path, cell: Cell) -> Iterator[Run]:
    """Open a new run in a directory, and always close it at the end of the block.

    Raises:
        RequestError: the directory already holds a run.
    """
    run_dir = RunDir(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with run_lock(run_dir.lock):
        if run_dir.manifest.exists():
            raise run_is_there(directory)
        atomic.remove_stale(directory)  # from a run killed before it had a manifest
        atomic.write_text(run_dir.config, to_yaml(cell.composed.values))
        run = Run(run_dir, _manifest(directory.name, cell))
        run.save()
        with _closing(run):
            run.telemetry.emit("run_started", _started(run.manifest, cell.composed.values))
            yield run


def complete(directory: RunDir) -> bool:
    """Write missing pages of a successful run; return whether any were missing.

    Raises:
        RequestError: a process is still working on it.
    """
    manifest = Manifest.read(directory.manifest)
    pages = (directory.report, directory.model_card, directory.run_summary, directory.skip_stats)
    is_whole = all(page.is_file() for page in pages) and not directory.lock.exists()
    if manifest.task != "train" or manifest.status is not Status.SUCCEEDED or is_whole:
        return False
    from mens_exp.report.write import write_report

    with run_lock(directory.lock):
        atomic.remove_stale(directory.path)
        write_report(directory)
    return True


def run_is_there(directory: Path) -> RequestError:
    """Return the error for a directory that already holds a run."""
    other = "choose another hydra.run.dir"
    try:
        is_training = Manifest.read(RunDir(directory).manifest).task == "train"
    except RequestError:  # damaged: only another directory is safe
        is_training = False
    remedy = f"continue it with resume={directory}, or {other}" if is_training else other
    return RequestError("a run already exists", where=str(directory), remedy=remedy)


@contextmanager
def reopen_run(
    directory: RunDir,
    cell: Cell,
    *,
    step: int,
    notes: list[str],
    extensions: Sequence[Extension] = (),
) -> Iterator[Run]:
    """Reset a stopped run's record to an optimizer step and reopen it from there.

    A successful run stays unchanged if its continuation is refused before a step is taken.

    Args:
        directory: directory of the run.
        cell: the run's configuration from now on.
        step: the optimizer step.
        notes: notes to add to its manifest.
        extensions: extensions of its contract.

    Raises:
        RequestError: a process is still working on it.
    """
    with run_lock(directory.lock):
        for parent in (directory.path, directory.checkpoints, directory.adapter):
            atomic.remove_stale(parent)
        manifest = Manifest.read(directory.manifest)
        ended = _Ended(directory, step) if manifest.status is Status.SUCCEEDED else None
        rename_later_checkpoints(directory, step)
        validated = sum(name in manifest.results for name in _VALIDATED_FIRST)
        rewind(directory.telemetry, step, validated=validated)
        now = utc_now()
        manifest.status, manifest.error, manifest.ended_utc = Status.STARTED, None, None
        manifest.attempts.append(_attempt(now, step))
        here = _provenance(cell)
        notes = [*notes, *_condition_notes(manifest, here)]
        manifest.provenance = here
        manifest.config_digest = config_digest(cell.composed.values)
        # Fields that are null after this attempt are recorded again.
        manifest.contract, manifest.unknown = _contract(cell.config, extensions)
        manifest.notes += notes
        atomic.write_text(directory.config, to_yaml(cell.composed.values))
        run = Run(directory, manifest)
        run.save()
        try:
            with _closing(run, ended):
                run.telemetry.emit("resumed", {"step": step, "notes": notes})
                yield run
        finally:
            if (ended is None or not ended.is_back) and directory.bundle.exists():
                directory.bundle.unlink()  # the packed bundle is outdated


def _manifest(run_id: str, cell: Cell) -> Manifest:
    now = utc_now()
    contract, unknown = _contract(cell.config)
    return Manifest(
        run_id=run_id,
        task=cell.config.task.name,
        experiment=cell.composed.choices.get("experiment"),
        started_utc=now,
        attempts=[_attempt(now, None)],
        overrides=list(cell.composed.overrides),
        choices=cell.composed.choices,
        config_digest=config_digest(cell.composed.values),
        contract=contract,
        seed=cell.config.seed,
        unknown=unknown,
        provenance=_provenance(cell),
        inputs=agent_inputs(os.environ),
    )


def _contract(
    config: RunConfig, extensions: Sequence[Extension] = ()
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the contract of a run that trains or plans to, and reasons for null fields."""
    if config.task.name not in TRAINING:
        return None, {}
    contract = contract_of(config, extensions)
    return contract.record(), contract.unknown


def _provenance(cell: Cell) -> dict[str, Any]:
    return {**provenance.collect(Path.cwd()), "own_classes": classes.record(cell.config)}


def _condition_notes(manifest: Manifest, here: dict[str, Any]) -> list[str]:
    changed = [name for name in _CONDITIONS if manifest.provenance.get(name) != here.get(name)]
    if not changed:
        return []
    number = len(manifest.attempts)
    return [
        f"attempt {number} ran under other conditions than the one before: {', '.join(changed)}"
    ]


def _attempt(now: str, step: int | None) -> Attempt:
    return {
        "started_utc": now,
        "ended_utc": None,
        "status": Status.STARTED,
        "resumed_from_step": step,
    }


def _started(manifest: Manifest, values: Any) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "task": manifest.task,
        "overrides": manifest.overrides,
        "config": OmegaConf.to_container(values, resolve=True, enum_to_str=True),
    }


class _Ended:
    """The records of a successful run before it is continued."""

    def __init__(self, directory: RunDir, step: int) -> None:
        """Read the records; ``step`` is the step from which the run continues."""
        self.directory, self.step, self.is_back = directory, step, False
        paths = (directory.manifest, directory.config, directory.telemetry, directory.plan)
        self.content = {path: path.read_bytes() for path in paths if path.is_file()}

    def is_unchanged(self) -> bool:
        """Return whether no optimizer step has been taken since."""
        events = read_events(self.directory.telemetry)
        return not any(
            event["event"] == "step" and event["payload"]["step"] > self.step for event in events
        )

    def put_back(self) -> None:
        """Restore the records."""
        for path, content in self.content.items():
            atomic.write_bytes(path, content)
        self.is_back = True


@contextmanager
def _closing(run: Run, ended: _Ended | None = None) -> Iterator[None]:
    with cancellable(lambda: run.is_closing):
        try:
            yield
        except (Cancelled, KeyboardInterrupt) as error:
            end_at_once()
            run.close(Status.CANCELLED, error)
            raise
        except BaseException as error:
            if ended is not None and isinstance(error, MensError) and ended.is_unchanged():
                run.telemetry.close()
                ended.put_back()
            else:
                run.close(Status.FAILED, error)
            raise
        run.close(Status.SUCCEEDED)


_SHOWN_ANSWERS = 3  # on the terminal; the report has the others
CANCELLED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C


def perform(directory: Path, cell: Cell, *, prints: bool = True) -> None:
    """Run one task in its directory.

    Args:
        directory: the run directory.
        cell: the checked configuration.
        prints: whether the task shows its results on standard output.

    Raises:
        MensError: the task failed; its record is closed.
    """
    with rows_read_once(), open_run(directory, cell) as run:
        run.prints = prints
        _task(cell)(cell.config, run)


def run_task(directory: Path, cell: Cell) -> int:
    """Run one task in its directory and return its exit code."""

    def work() -> None:
        perform(directory, cell)

    task = cell.config.task.name
    if task == "train":
        return ended(work, directory)
    # Other tasks have no training state to resume from.
    done = "; steps that are done stay so" if task in _IN_STEPS else ""
    return ended(work, directory, f"the same command{done}")


# Tasks implemented in the module of another task; all others have a module of their name.
_MODULES = {"push": "export", "serve": "export", "rejection_sampling": "rounds"}


_IN_STEPS = {"corpus", "rejection_sampling"}


def _task(cell: Cell) -> Any:
    name = cell.config.task.name
    return getattr(import_module(f"mens_exp.tasks.{_MODULES.get(name, name)}"), name)


def ended(work: Callable[[], None], directory: Path, goes_on: str | None = None) -> int:
    """Do the work, and show its result or its error.

    Args:
        work: the work to do.
        directory: the run directory.
        goes_on: the command to continue a cancelled run with; `resume=` by default.

    Returns:
        The exit code.
    """
    import traceback

    from mens_exp.artifacts.host import machine_fault
    from mens_exp.errors import MensError

    again = goes_on or shlex.join(["python", "-m", "mens_exp", f"resume={directory}"])
    try:
        work()
    except MensError as error:
        complain(getattr(error, "problems", [error]))
        print(f"The record: {directory}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except (Cancelled, KeyboardInterrupt):
        print(f"Cancelled. Go on with: {again}", file=sys.stderr)  # noqa: T201
        return CANCELLED
    except (Exception, SystemExit) as error:  # noqa: BLE001  # outermost handler
        refused = machine_fault(error, again)
        if refused is not None:
            complain([refused])
            print(f"The record: {directory}", file=sys.stderr)  # noqa: T201
            return refused.exit_code
        traceback.print_exc()  # a bug: the user needs the full traceback for a report
        print(f"{_whose(error)}; the record: {directory}", file=sys.stderr)  # noqa: T201
        return 1
    _show(directory)
    return 0


def _whose(error: BaseException) -> str:
    """Attribute an error to a file of the working directory or to this package."""
    here, ours = Path.cwd().resolve(), Path(__file__).resolve().parents[1]
    frames = walk_tb(error.__traceback__)
    files = [Path(frame.f_code.co_filename).resolve() for frame, _ in frames]
    for file in reversed(files):
        if file.is_relative_to(ours):
            break
        if file.is_relative_to(here) and "site-packages" not in file.parts:
            return f"A bug in {file.relative_to(here)}"
    return "A bug in mens_exp"


def _show(directory: Path) -> None:
    """Print the result of a run and the next commands."""
    from mens_exp.report import run_page, summary, terminal

    run = RunDir(directory)
    found = summary.load(run)
    if found.manifest.task in {"train", "evaluate"}:
        terminal.show(*run_page.outcome(found, most=_SHOWN_ANSWERS))
        terminal.say(f"\nReport: {run.report}")
    terminal.say_next(run_page.steps(found))


def complain(problems: Sequence[MensError]) -> None:
    """Print problems to standard error, each on separate lines."""
    from mens_exp.report import terminal

    terminal.complain(problems)
