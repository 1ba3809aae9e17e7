"""The Python API: compose, plan, train, evaluate and compare in the caller's own process.

Each function takes command-line overrides as strings and runs the same code::

    from mens_exp import compare, train

    small = train("model=tiny_llama", "lora.r=4")
    large = train("model=tiny_llama", "lora.r=16")
    compare([small, large], "compare.factors=[lora.r]")

Runs are written to the same directories as on the command line, so each can read the other's runs.
Errors are raised as :class:`mens_exp.errors.MensError`; nothing exits the process. Ctrl-C marks the
run as cancelled and raises KeyboardInterrupt.
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mens_exp.artifacts.comparison import Comparison as ComparisonRecord
from mens_exp.artifacts.host import machine_fault
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.config.compose import begin_command, config_digest, run_composed, to_yaml
from mens_exp.config.option_files import reading
from mens_exp.config.override_parsing import parsed_override
from mens_exp.config.override_values import override_of
from mens_exp.config.overrides import check, sources_in
from mens_exp.corpus.source import rows_read_once
from mens_exp.errors import ConfigError, Problems, RequestError, TrainingError
from mens_exp.planning.machine import of_torchrun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.rows.schema import TrainingPair

__all__ = [
    "Comparison",
    "Composition",
    "Plan",
    "Run",
    "compare",
    "compose",
    "evaluate",
    "load_run",
    "plan",
    "train",
]


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A validated configuration that has not run yet.

    Pass it to :func:`plan` or :func:`train`, alone or followed by more overrides.

    Attributes:
        overrides: the overrides, in order.
        config: the typed configuration.
        choices: the selected option of each config group; None if none was selected.
        digest: SHA-256 of the composed values.
    """

    overrides: tuple[str, ...]
    config: RunConfig = field(repr=False)
    choices: dict[str, str | None] = field(repr=False)
    digest: str
    _yaml: str = field(repr=False)

    def to_yaml(self) -> str:
        """Return the composed values as YAML, as ``--cfg job`` prints them."""
        return self._yaml

    def _repr_html_(self) -> str:
        from mens_exp.report import html
        from mens_exp.report.document import Code, Section, Table

        rows = [(group, option or "–") for group, option in self.choices.items()]
        options = Table(("group", "option"), rows)
        values = Section("values", [Code(self._yaml)], folded=True)
        return html.fragment(Section(f"Configuration {self.digest[:8]}", [options, values]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The forecast of a training run that was not started.

    Attributes:
        path: the directory of the plan's own record.
        record: the contents of ``plan.json``.
    """

    path: Path
    record: dict[str, Any] = field(repr=False)

    @property
    def time_s(self) -> float | None:
        """Estimated duration in seconds; None if the speed of this machine is unknown."""
        return (self.record.get("time_s") or {}).get("estimate")

    @property
    def memory_bytes(self) -> int | None:
        """Estimated peak memory in bytes: GPU memory if there is a GPU, else process memory."""
        return (self.record.get("memory_bytes") or {}).get("estimate")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about possible problems of the run."""
        return tuple(self.record.get("warnings") or ())

    def _repr_html_(self) -> str:
        from mens_exp.report import html, plan_view

        return html.fragment(*plan_view.document(self.record).parts)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The record of a run of any task, read from its directory.

    Attributes:
        path: the run directory.
        manifest: its identity, inputs, facts and results.
        scorecard: its KPIs; None if nothing was scored.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    scorecard: Scorecard | None = field(repr=False)

    @property
    def results(self) -> dict[str, Any]:
        """The final metrics by name, such as ``tuned_val_loss``; units are in the names."""
        return self.manifest.results

    @property
    def status(self) -> Status:
        """The state of the run: started, succeeded, failed or cancelled."""
        return self.manifest.status

    @property
    def is_interrupted(self) -> bool:
        """Whether the process was killed, which leaves the status at ``started``."""
        return self.status is Status.STARTED and RunDir(self.path).is_interrupted

    @property
    def config(self) -> RunConfig:
        """The typed configuration of the run.

        Raises:
            ConfigError: the stored configuration is damaged, or names an untrusted class.
        """
        from mens_exp.export.subject import config_of

        return config_of(RunDir(self.path))

    @property
    def report(self) -> Path:
        """The path of the HTML report."""
        return RunDir(self.path).report

    def steps(self) -> list[dict[str, Any]]:
        """Return the telemetry of each optimizer step, oldest first, by metric name."""
        return self._payloads("step")

    def validations(self) -> list[dict[str, Any]]:
        """Return the results of each validation during training, oldest first."""
        return self._payloads("validation")

    def rows(self, side: str = "val") -> Sequence[TrainingPair]:
        """Return the rows of one side of the data split; of streamed rows, the first window's.

        Args:
            side: ``train``, ``val`` or ``heldout``.

        Raises:
            RequestError: there is no such side, or the rows have changed since the run.
        """
        from mens_exp.corpus.source import load_rows
        from mens_exp.corpus.split import Side
        from mens_exp.planning.preflight import writable_cache
        from mens_exp.tasks.inputs import refuse_changed

        if side not in list(Side):
            names = ", ".join(Side)
            raise RequestError("unknown side of the split", found=side, expected=f"one of {names}")
        rows = load_rows(self.config.data, writable_cache())
        if not rows.streamed:
            refuse_changed(self.manifest.inputs, {"data": {"rows_sha256": rows.sha256}})
        found: Sequence[TrainingPair] = getattr(rows, side)
        return found

    def model(self, accelerator: str = "auto") -> Any:
        """Build the trained model, in evaluation mode.

        Args:
            accelerator: ``auto``, ``cpu`` or ``gpu``.

        Returns:
            A PEFT ``PeftModel`` on the base model, quantized as in training; after full
            fine-tuning, a transformers model.

        Raises:
            RequestError: the run has no trained model, or the base model or adapter has changed.
        """
        from mens_exp.tasks.inputs import transformers_model

        return transformers_model(self._trained(), self.config, accelerator)

    def tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer, with the chat template of the run.

        Raises:
            RequestError: the run did not train, or its tokenizer is not from transformers.
        """
        from mens_exp.tasks.inputs import transformers_tokenizer

        return transformers_tokenizer(self._trained(), self.config)

    def _trained(self) -> RunDir:
        from mens_exp.export.subject import subject_of

        run = RunDir(self.path)
        has_weights = self.manifest.task == "train" and run.weights.is_dir()
        return run if has_weights and not run.adapter.is_dir() else subject_of(str(self.path))

    def _payloads(self, event: str) -> list[dict[str, Any]]:
        from mens_exp.report.summary import load

        return load(RunDir(self.path)).payloads(event)

    def _repr_html_(self) -> str:
        from mens_exp.report import html, run_page, summary
        from mens_exp.report.document import Note, Tone

        state = "interrupted" if self.is_interrupted else self.status
        where = Note(f"{self.manifest.task}, {state}: {self.path}", Tone.QUIET)
        if not (self.scorecard or self.results):
            return html.fragment(where)
        return html.fragment(run_page.results(summary.load(RunDir(self.path))), where)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A paired comparison of arms, as recorded by ``task=compare``.

    Attributes:
        path: the directory that holds ``compare.json`` and the HTML page.
        record: the contents of ``compare.json``.
    """

    path: Path
    record: ComparisonRecord = field(repr=False)

    @property
    def primary(self) -> str:
        """The KPI that decides the verdicts."""
        return self.record.primary

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict for each arm except the reference, by arm name."""
        primary = self.record.primary
        return {one["arm"]: str(one["kpis"][primary]["verdict"]) for one in self.record.contrasts}

    @property
    def differences(self) -> dict[str, float | None]:
        """The estimated difference in the primary KPI between each arm and the reference."""
        primary = self.record.primary
        return {one["arm"]: one["kpis"][primary]["estimate"] for one in self.record.contrasts}

    @property
    def page(self) -> Path:
        """The path of the comparison's HTML page."""
        return RunDir(self.path).comparison_page

    def _repr_html_(self) -> str:
        from mens_exp.report import comparison_view, html

        return html.fragment(comparison_view.verdicts(self.record))


Given: TypeAlias = str | Composition
"""An override such as ``lora.r=8``, or a composition, whose overrides are used."""

Subject: TypeAlias = Run | Path | str
"""A run, or a path: a run directory, sweep, glob, ``latest``, or (for evaluate) an adapter."""


def compose(*overrides: Given) -> Composition:
    """Compose and validate a configuration without running it.

    Args:
        overrides: as on the command line, such as ``"model=tiny_llama"`` and ``"lora.r=8"``.

    Raises:
        MensError: an override or a value is wrong; several problems are reported together.
    """
    texts = _texts(overrides)
    with reading(sources_in(texts)):
        [cell] = checked_cells(texts, with_files=False)
    composed = cell.composed
    return Composition(
        overrides=composed.overrides,
        config=cell.config,
        choices=composed.choices,
        digest=config_digest(composed.values),
        _yaml=to_yaml(composed.values),
    )


def plan(*overrides: Given) -> Plan:
    """Forecast the time, memory and disk space of a training run without starting it.

    Args:
        overrides: those of the training run.

    Raises:
        MensError: the run could not start; several problems are reported together.
    """
    from mens_exp.report.summary import load

    run = _conducted("plan", overrides)
    return Plan(path=run.path, record=load(run).plan or {})


def train(*overrides: Given, resume: Subject | None = None) -> Run:
    """Train an adapter, score the base model and the tuned model, and return the record.

    Args:
        overrides: as on the command line. With ``resume``, only a larger ``trainer.max_steps`` and
            a different number of processes are accepted.
        resume: a run that was stopped, to continue in its directory.

    Raises:
        MensError: the request is wrong or training failed; once a run has started, its record
            states the reason.
        KeyboardInterrupt: Ctrl-C; the run is marked as cancelled and can be resumed.
    """
    if resume is None:
        return load_run(_conducted("train", overrides).path)
    from mens_exp.tasks.train import prepare_resumption, resume_training

    _refuse_torchrun()
    begin_command()
    resumption = prepare_resumption(_path(resume), split_pairs(_texts(overrides)))
    with _state_restored():
        _guarded(lambda: resume_training(resumption), resumption.directory.path)
    return load_run(resumption.directory.path)


def evaluate(subject: Subject, *overrides: Given) -> Run:
    """Score a run, an adapter or a base model in a new run.

    Args:
        subject: the run or the path of an adapter; ``"base"`` scores the base model without one.
        overrides: the suite and its settings, such as ``"suite=mini_python"``.

    Raises:
        MensError: the subject cannot be scored.
        KeyboardInterrupt: Ctrl-C; the run is marked as cancelled.
    """
    path = override_of("path", _path(subject))
    return load_run(_conducted("evaluate", [*overrides, path]).path)


def compare(runs: Subject | Sequence[Subject], *overrides: Given) -> Comparison:
    """Compare arms of several runs, paired by seed and item.

    Args:
        runs: the runs, or paths of runs, sweeps or globs.
        overrides: settings of the comparison, such as ``"compare.factors=[lora.r]"``.

    Raises:
        MensError: there is nothing to compare, or a record was changed after its run.
    """
    several = [runs] if isinstance(runs, Run | Path | str) else list(runs)
    path = override_of("path", ",".join(map(_path, several)))
    run = _conducted("compare", [*overrides, path])
    return Comparison(path=run.path, record=ComparisonRecord.read(run.comparison))


def load_run(path: Subject) -> Run:
    """Read the record of a run of any task.

    Args:
        path: the run directory, or ``"latest"`` for the most recent training run.

    Raises:
        MensError: there is no such run, or a record is damaged.
    """
    found = resolve(_path(path), task="train" if path == "latest" else None)
    return Run(
        path=found.path.absolute(),  # stays right when the working directory changes
        manifest=Manifest.read(found.manifest),
        scorecard=Scorecard.read(found.scorecard) if found.scorecard.is_file() else None,
    )


def checked_cells(
    overrides: Sequence[str], *, multirun: bool = False, with_files: bool = True
) -> list[Cell]:
    """Compose every cell of a command, and report all problems at once.

    Args:
        overrides: as typed.
        multirun: whether several values of a key make several runs.
        with_files: also resolve references and check files.

    Raises:
        MensError: there is one problem.
        Problems: there are several.
    """
    from mens_exp.planning.checks import machine
    from mens_exp.tasks.resolve_references import pin_inputs

    checked = check(overrides, multirun=multirun)
    problems = list(checked.problems)
    for cell in checked.cells if with_files else ():
        problems += pin_inputs(cell)
        problems += _used_directory(cell, multirun=multirun)
        if of_torchrun() is not None:
            problems += machine.check_processes(cell.config)
    Problems.raise_if(list({str(problem): problem for problem in problems}.values()))
    return list(checked.cells)


def _used_directory(cell: Cell, *, multirun: bool) -> list[MensError]:
    """Refuse a directory that holds a run, before Hydra writes files into it."""
    from mens_exp.tasks.run import run_is_there

    directory = cell.composed.sweep_dir if multirun else cell.composed.run_dir
    if directory is None or not RunDir(Path(directory)).manifest.exists():
        return []
    return [run_is_there(Path(directory))]


def split_pairs(overrides: Sequence[str]) -> dict[str, str]:
    """Return plain overrides by key, in the form that ``resume`` expects."""
    return dict(text.lstrip("+").partition("=")[::2] for text in overrides)


def bound_kernel_cache() -> None:
    """Limit oneDNN's kernel cache; effective only before torch is imported.

    By default, oneDNN caches 1,024 kernels, one per shape, and memory grows for hundreds of steps;
    one step needs no more than 128 (experiments/LOG.md).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def _texts(overrides: Sequence[Given]) -> list[str]:
    texts: list[str] = []
    for one in overrides:
        if isinstance(one, Composition):
            texts += one.overrides
        elif isinstance(one, str):
            texts.append(one)
        else:
            raise RequestError(
                "an override must be a string",
                found=one,
                expected='"key=value" or "group=option", or what compose() returned',
                remedy="write train('lora.r=8', 'seed=2')",
            )
    Problems.raise_if([_several_values(text) for text in texts if _is_swept(text)])
    return texts


def _is_swept(text: str) -> bool:
    override = parsed_override(text, [])
    return override is not None and override.is_sweep_override()


def _several_values(text: str) -> ConfigError:
    return ConfigError(
        "one call takes one value for each setting",
        where=text.lstrip("+").partition("=")[0],
        found=text,
        expected="one value",
        remedy="loop over the values, sweep them by mens_exp -m in a shell, or quote a value that "
        "contains a comma",
    )


def _path(subject: Subject) -> str:
    return str(subject.path if isinstance(subject, Run) else subject)


def _refuse_torchrun() -> None:
    if of_torchrun() is None:
        return
    raise RequestError(
        "the Python API starts the processes of a run itself",
        where="torchrun",
        expected="one process, and trainer.devices=<how many>",
        remedy="start the command line under torchrun: torchrun … -m mens_exp",
    )


def _conducted(task_name: str, overrides: Sequence[Given]) -> RunDir:
    """Run one task as the command line does, and return its directory."""
    _refuse_torchrun()
    begin_command()
    chosen = [] if task_name == "train" else [f"task={task_name}"]
    texts = [*chosen, *_texts(overrides)]
    computes = task_name in {"train", "evaluate"}  # the others need no torch
    state = _state_restored() if computes else nullcontext()
    with state, reading(sources_in(texts)), rows_read_once():
        return _composed(task_name, texts)


def _composed(task_name: str, texts: Sequence[str]) -> RunDir:
    """Check and run one task; the config sources must be set."""
    from mens_exp.tasks.run import perform

    [cell] = checked_cells(texts)
    if cell.config.task.name != task_name:
        raise RequestError(
            "the function already determines the task",
            where="task",
            found=cell.config.task.name,
            expected=task_name,
            remedy=f"drop task=…, or call mens_exp.{cell.config.task.name}(…) where there is one",
        )
    directories: list[Path] = []
    raised: list[BaseException] = []

    def task(directory: Path) -> int:
        directories.append(directory)
        try:
            _guarded(lambda: perform(directory, cell, prints=False), directory)
        except Exception as error:  # noqa: BLE001  # Hydra would print it; it is raised below
            raised.append(error)
        return 0

    run_composed(cell.composed, task, configures_logging=False)
    if raised:
        raise raised[0]
    return RunDir(directories[0])


@contextmanager
def _state_restored() -> Iterator[None]:
    """Restore what a run sets for its whole process: random states and deterministic algorithms."""
    of_python = random.getstate()  # some imports draw from it
    import numpy as np
    import torch

    of_numpy = np.random.get_state()  # noqa: NPY002  # the notebook's
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)


def _guarded(work: Callable[[], None], directory: Path) -> None:
    """Call `work`; Ctrl-C cancels it without ending the process.

    Raises:
        MensError: `work` raised it, or the machine failed (a full disk, for example).
        KeyboardInterrupt: the run was cancelled.
    """
    from mens_exp.tasks.run import Cancelled, kept_alive

    bound_kernel_cache()
    try:
        with kept_alive():
            work()
    except Cancelled as stop:
        raise KeyboardInterrupt(f"cancelled; the record: {directory}") from stop
    except SystemExit as error:
        what = "a library asked to end the process"
        raise TrainingError(what, found=f"SystemExit({error.code})") from error
    except Exception as error:
        fault = machine_fault(error, f"train(resume={str(directory)!r})")
        if fault is None:
            raise
        raise fault from error
