"""The run that every task opens: it owns the manifest's life from `started` to its close."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mens_exp.artifacts import atomic, provenance
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Attempt, Failure, Manifest, Status, utc_now
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import Telemetry
from mens_exp.config.compose import config_digest, to_yaml
from mens_exp.errors import MensError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from mens_exp.config.overrides import Cell

__all__ = ["Cancelled", "Run", "open_run", "reopen_run"]


class Cancelled(BaseException):
    """The user or the system asked the run to stop; not an error, so nothing may catch it."""


class Run:
    """An open run: its directory, event log and manifest."""

    def __init__(self, directory: RunDir, manifest: Manifest) -> None:
        """Open the event log; use :func:`open_run`."""
        self.dir = directory
        self.manifest = manifest
        self.telemetry = Telemetry(directory.telemetry)
        self._after_close: list[Callable[[Manifest], None]] = []
        self._began = time.monotonic()

    def save(self) -> None:
        """Write the manifest."""
        self.manifest.write(self.dir.manifest)

    def after_close(self, fn: Callable[[Manifest], None]) -> None:
        """Call ``fn`` with the closed manifest, once it is on disk; its errors are isolated."""
        self._after_close.append(fn)

    def unknown(self, field: str, reason: str) -> None:
        """Say why a dotted field of the manifest is null."""
        self.manifest.unknown[field] = reason

    def close(self, status: Status, error: BaseException | None = None) -> None:
        """Close manifest and event log, render the report, and hand over to the sinks."""
        manifest = self.manifest
        manifest.status = status
        manifest.ended_utc = utc_now()
        manifest.attempts[-1].update(ended_utc=manifest.ended_utc, status=status)
        manifest.results["wall_s"] = time.monotonic() - self._began
        manifest.error = _failure(error) if status is Status.FAILED and error else None
        self.telemetry.emit(
            "run_finished", {"status": str(status), "results": dict(manifest.results)}
        )
        self.telemetry.close()
        manifest.outputs = _hash_outputs(self.dir)
        self.save()
        self._isolated("report", self._render)
        for fn in self._after_close:
            self._isolated("sink", lambda fn=fn: fn(manifest))  # type: ignore[misc]

    def _render(self) -> None:
        from mens_exp.report.write import write_report

        write_report(self.dir)

    def _isolated(self, what: str, action: Callable[[], None]) -> None:
        """Do what must not undo a closed run; a failure becomes a note."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  # the run is over, its record must stand
            self.manifest.notes.append(f"{what} failed: {type(error).__name__}: {error}")
            self.save()


def _failure(error: BaseException) -> Failure:
    known = isinstance(error, MensError)
    return {
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "remedy": error.remedy if isinstance(error, MensError) else None,
        "exit_code": error.exit_code if known and isinstance(error, MensError) else 1,
    }


def _hash_outputs(run: RunDir) -> dict[str, str]:
    """Hash every finished file of the run; checkpoints and sinks' own files are not outputs."""
    files = [run.config, run.plan, run.telemetry, run.scorecard, run.events]
    files += sorted(path for path in run.adapter.rglob("*") if path.is_file())
    return {
        path.relative_to(run.path).as_posix(): sha256_file(path)
        for path in files
        if path.is_file()
    }


@contextmanager
def open_run(directory: Path, cell: Cell) -> Iterator[Run]:
    """Open a new run in a directory, and close it whatever happens inside the block.

    Raises:
        RequestError: a run is there already.
    """
    run_dir = RunDir(directory)
    if run_dir.manifest.exists():
        raise RequestError(
            "a run is there already",
            where=str(directory),
            remedy=f"continue it with resume={directory}, or choose another hydra.run.dir",
        )
    values, now = cell.composed.values, utc_now()
    directory.mkdir(parents=True, exist_ok=True)
    atomic.write_text(run_dir.config, to_yaml(values))
    manifest = Manifest(
        run_id=directory.name,
        task=cell.config.task.name,
        experiment=cell.composed.choices.get("experiment"),
        started_utc=now,
        attempts=[_attempt(now, None)],
        overrides=list(cell.composed.overrides),
        choices=cell.composed.choices,
        config_digest=config_digest(values),
        seed=cell.config.seed,
        provenance=provenance.collect(Path.cwd()),
    )
    run = Run(run_dir, manifest)
    run.save()
    run.telemetry.emit("run_started", _started(manifest, values))
    with _closing(run):
        yield run


@contextmanager
def reopen_run(directory: RunDir, cell: Cell, *, step: int, notes: list[str]) -> Iterator[Run]:
    """Open a stopped run again, to go on from an optimizer step in the same directory."""
    manifest = Manifest.read(directory.manifest)
    now = utc_now()
    manifest.status, manifest.error, manifest.ended_utc = Status.STARTED, None, None
    manifest.attempts.append(_attempt(now, step))
    manifest.provenance = provenance.collect(Path.cwd())
    manifest.config_digest = config_digest(cell.composed.values)
    manifest.notes += notes
    atomic.write_text(directory.config, to_yaml(cell.composed.values))
    run = Run(directory, manifest)
    run.save()
    run.telemetry.emit("resumed", {"step": step, "notes": notes})
    with _closing(run):
        yield run


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


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    with _cancellable():
        try:
            yield
        except (Cancelled, KeyboardInterrupt) as error:
            run.close(Status.CANCELLED, error)
            raise
        except BaseException as error:
            run.close(Status.FAILED, error)
            raise
        run.close(Status.SUCCEEDED)


@contextmanager
def _cancellable() -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into :class:`Cancelled`; a second ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for each in signals:
            signal.signal(each, signal.SIG_DFL)
        raise Cancelled(signal.Signals(number).name)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
