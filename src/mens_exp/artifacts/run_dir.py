"""The file names inside a run directory, defined only here."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.host import is_left_behind
from mens_exp.artifacts.record import parse_json, read_bytes
from mens_exp.errors import DataError, RequestError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHECKPOINT = re.compile(r"step_(\d{8,})\.ckpt")
_MANIFEST = "manifest.json"
TELEMETRY = "telemetry.jsonl"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of a run; nothing is created or read until accessed.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def manifest(self) -> Path:
        """The record of the run."""
        return self.path / _MANIFEST

    @property
    def lock(self) -> Path:
        """Lock held by the process that works on the run, as long as it lives."""
        return self.path / "run.lock"

    @property
    def is_interrupted(self) -> bool:
        """Whether its process was killed, so that the record was not closed."""
        return is_left_behind(self.lock)

    @property
    def job(self) -> Path:
        """In a sweep, what the job's process needs in addition to the configuration."""
        return self.path / "job.json"

    @property
    def job_lock(self) -> Path:
        """In a sweep, lock held by the job's process for its whole lifetime."""
        return self.path / "job.lock"

    @property
    def log(self) -> Path:
        """In a sweep, the output of the job's process, one attempt after the other."""
        return self.path / "job.log"

    @property
    def pruned(self) -> Path:
        """In a search, the reason why the job was asked to stop; written before it stops."""
        return self.path / "pruned.txt"

    @property
    def config(self) -> Path:
        """The composed configuration."""
        return self.path / "config.yaml"

    @property
    def chat_template(self) -> Path:
        """The chat template that was used, whichever file it came from."""
        return self.path / "chat_template.jinja"

    @property
    def plan(self) -> Path:
        """The predictions, with the measured values next to them."""
        return self.path / "plan.json"

    @property
    def telemetry(self) -> Path:
        """The telemetry events, one per line."""
        return self.path / TELEMETRY

    @property
    def quarantine(self) -> Path:
        """The rows that could not be used, one per line, if quarantining was requested."""
        return self.path / "quarantine.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The directory of training states."""
        return self.path / "checkpoints"

    @property
    def processes(self) -> Path:
        """The directory of the output of a run's other processes, one `<rank>.log` each."""
        return self.path / "processes"

    @property
    def adapter(self) -> Path:
        """The directory of the adapter in schema v3."""
        return self.path / "adapter"

    @property
    def peft(self) -> Path:
        """The directory of the same adapter in PEFT's format."""
        return self.adapter / "peft"

    @property
    def weights(self) -> Path:
        """The directory of the model, if its weights were trained."""
        return self.path / "weights"

    @property
    def merged(self) -> Path:
        """The default directory of a merged model."""
        return self.path / "merged"

    @property
    def merged_tensors(self) -> Path:
        """The default file of merged tensors."""
        return self.path / "merged.safetensors"

    @property
    def parity(self) -> Path:
        """The certificate of a merge or an export."""
        return self.path / "parity.json"

    @property
    def inspection(self) -> Path:
        """The findings about a run, an adapter, a checkpoint or a merged model."""
        return self.path / "inspection.json"

    @property
    def scorecard(self) -> Path:
        """The KPIs."""
        return self.path / "scorecard.json"

    @property
    def attribution(self) -> Path:
        """The costs of quantizing the base, module by module."""
        return self.path / "attribution.json"

    @property
    def events(self) -> Path:
        """One line per evaluated item and condition."""
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        """Unscored answers to held-out rows."""
        return self.path / "samples.json"

    @property
    def validation(self) -> Path:
        """The validation loss of each document, one per line."""
        return self.path / "validation.jsonl"

    @property
    def scorecards(self) -> Path:
        """The directory of the answers given during training, one file per scorecard."""
        return self.path / "scorecards"

    def events_at(self, step: int) -> Path:
        """Return the path of the item events of the scorecard after optimizer step `step`."""
        return self.scorecards / f"step_{step:08d}.jsonl"

    @property
    def comparison(self) -> Path:
        """The comparison of a study's arms."""
        return self.path / "compare.json"

    @property
    def comparison_page(self) -> Path:
        """The comparison as a page."""
        return self.path / "compare.html"

    @property
    def comparison_table(self) -> Path:
        """The comparison as a table in Markdown."""
        return self.path / "compare.md"

    @property
    def report(self) -> Path:
        """The rendered report."""
        return self.path / "report.html"

    @property
    def model_card(self) -> Path:
        """The rendered model card."""
        return self.path / "MODEL_CARD.md"

    @property
    def run_summary(self) -> Path:
        """The manifest's main figures under the mens trainer's keys."""
        return self.path / "run_summary.json"

    @property
    def skip_stats(self) -> Path:
        """The rows that were not used in training, by reason, under the mens trainer's keys."""
        return self.path / "training_skip_stats.json"

    @property
    def wandb(self) -> Path:
        """The directory of W&B's offline files."""
        return self.path / "wandb"

    @property
    def sync(self) -> Path:
        """The parts of the run that were uploaded to W&B services."""
        return self.path / "sync.json"

    @property
    def sync_lock(self) -> Path:
        """Lock held by the process that uploads the run."""
        return self.path / "sync.lock"

    @property
    def sync_log(self) -> Path:
        """The output of that process, if it runs during the training."""
        return self.path / "sync.log"

    @property
    def bundle(self) -> Path:
        """In an unpacked bundle, the list of its files."""
        return self.path / "bundle.json"

    @property
    def csv(self) -> Path:
        """The directory of Lightning's CSV logger, with one subdirectory per attempt."""
        return self.path / "csv"

    def of_logger(self, name: str) -> Path:
        """Return the directory of a user-defined logger, by the name of its option."""
        return self.path / name

    @property
    def profiles(self) -> Path:
        """The reports of Lightning's profilers."""
        return self.path / "profile"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files, with one subdirectory per attempt."""
        return self.path / "tensorboard"

    @property
    def transcript(self) -> Path:
        """The messages of a chat."""
        return self.path / "transcript.json"

    def checkpoint(self, step: int) -> Path:
        """Return the path of the training state after optimizer step `step`."""
        return self.checkpoints / f"step_{step:08d}.ckpt"

    def last_checkpoint(self) -> Path | None:
        """Return the training state of the highest step; None if there is none."""
        return next(reversed(self.states()), None)

    def states(self) -> list[Path]:
        """Return the training states in the order of their steps."""
        if not self.checkpoints.is_dir():
            return []
        found = [(_CHECKPOINT.fullmatch(path.name), path) for path in self.checkpoints.iterdir()]
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


_OUTPUTS = "outputs"


def resolve(text: str, here: Path = Path(), *, task: str | None = None) -> RunDir:
    """Find the run that `text` names.

    Args:
        text: ``latest``, the run that started last, or a run directory. A task that opens a new
            run must resolve ``latest`` before it does.
        here: directory in which `runs_near` looks for runs.
        task: restrict ``latest`` to runs of this task.

    Raises:
        RequestError: there is no such run; the message suggests the nearest one.
    """
    if text == "latest":
        return _latest(here, task)
    run = RunDir(Path(text).expanduser())
    if run.manifest.is_file():
        return run
    what = "no manifest.json in this directory" if run.path.is_dir() else "no such run directory"
    near = _nearest(run.path, here)
    known = f"; the nearest is {near}" if near else f"; there is none under {here / _OUTPUTS} yet"
    raise RequestError(
        what,
        where="path",
        found=text,
        expected=f"latest or a run directory{known}",
        remedy="name a directory that holds a manifest.json, or write latest"
        if near
        else "train first: python -m mens_exp",
    )


def _latest(here: Path, task: str | None) -> RunDir:
    started = [(started_utc(run, task), str(run.path), run) for run in runs_near(here)]
    dated = [entry for entry in started if entry[0]]
    if not dated:
        raise RequestError(
            "no run found",
            where="path",
            found="latest",
            expected=f"a {task or ''}{' ' if task else ''}run under {here / _OUTPUTS}, or where "
            "hydra.run.dir put it, at most two directories below the working directory",
            remedy="train one first: python -m mens_exp; or name a run directory",
        )
    return max(dated, key=lambda entry: entry[:2])[2]


def runs(outputs: Path) -> Iterator[RunDir]:
    """Yield every run below a directory, without searching inside runs."""
    for directory, names, files in os.walk(outputs):
        if _MANIFEST in files:
            names.clear()  # a run contains no runs, and may have many checkpoints
            yield RunDir(Path(directory))


def runs_near(here: Path) -> Iterator[RunDir]:
    """Yield the runs under ``outputs``, and those up to two directories below `here`.

    The latter are those of ``hydra.run.dir=run`` and ``hydra.sweep.dir=sweep``. Other programs also
    write files named manifest.json, so theirs are excluded.
    """
    yield from runs(here / _OUTPUTS)
    for depth in ("*", "*/*"):
        for name in sorted(glob.glob(f"{depth}/{_MANIFEST}", root_dir=here)):  # noqa: PTH207  # Path.glob stops at the first place that may not be read
            run = RunDir((here / name).parent)
            is_inside = (run.path.parent / _MANIFEST).is_file()  # of another run
            if not name.startswith(f"{_OUTPUTS}/") and not is_inside and started_utc(run, None):
                yield run


def started_utc(run: RunDir, task: str | None = None) -> str:
    """Return the start of a run's first attempt, for sorting; empty for a run of another task.

    It is read loosely, because a damaged or newer manifest must not hide the other runs.
    """
    try:
        manifest = parse_json(read_bytes(run.manifest), str(run.manifest))
    except DataError:
        return ""
    if not isinstance(manifest, dict) or (task is not None and manifest.get("task") != task):
        return ""
    started = manifest.get("started_utc")
    return started if isinstance(started, str) else ""


def _nearest(path: Path, here: Path) -> str | None:
    """Return the run with the most similar path, else the last one; None if there is no run."""
    known = [run.path.as_posix() for run in runs_near(here)]
    return nearest(path.as_posix(), known) or (max(known) if known else None)
