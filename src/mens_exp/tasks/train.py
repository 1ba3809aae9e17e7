"""task=train: fine-tune an adapter, score base and tuned model, and record the evidence.

The first part is the recipe; the second is resume=<run>, which continues a stopped run in its
directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import checkpoint_digests, last_intact_checkpoint
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.config.compose import Composed, from_yaml, typed
from mens_exp.config.overrides import Cell
from mens_exp.config.schedule import ScheduleConfig, ScheduleKind
from mens_exp.config.trainer import Strategy
from mens_exp.config.validate import problems_of
from mens_exp.errors import ConfigError, Problems, RequestError
from mens_exp.planning.extension import RATES, continued, differences, extensions_of
from mens_exp.planning.preflight import preflight, writable_cache
from mens_exp.report import plan_view, terminal
from mens_exp.tasks.adapter_anatomy import read_state
from mens_exp.tasks.coordinator import distributed_run
from mens_exp.tasks.fit import certify_rows, fit, read_inputs
from mens_exp.tasks.plan import keep_measurement, note_plan, planned
from mens_exp.tasks.run import complete, reopen_run
from mens_exp.tasks.scoring import sample, score
from mens_exp.tokenizer.load import bits_per_byte

if TYPE_CHECKING:
    from pathlib import Path

    from lightning import Trainer

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.objective import ObjectiveConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.planning.contract import Extension
    from mens_exp.planning.machine import Rank
    from mens_exp.tasks.fit import Fitted, Inputs
    from mens_exp.tasks.run import Run


def train(config: RunConfig, run: Run, *, checkpoint: Path | None = None) -> None:
    """Run the recipe from plan to scorecard.

    Args:
        config: the whole configuration.
        run: the open run.
        checkpoint: training state to resume from.

    Raises:
        MensError: a part of the request cannot be fulfilled; the run is closed as failed.
    """
    cache = writable_cache()
    plan = planned(config, run.manifest, cache)
    atomic.write_json(run.dir.plan, plan)
    run.telemetry.emit("plan", plan)
    note_plan(run.manifest, plan)
    terminal.show(*plan_view.document(plan).parts, on=terminal.console(stderr=True))

    from mens_exp.artifacts import host
    from mens_exp.training.distributed import is_sharded

    host.reset_peak()
    held = host.held_bytes()
    inputs = read_inputs(config, run, cache)
    rows, tokenizer = inputs.rows, inputs.tokenizer
    certify_rows(config, run, rows, inputs.data, tokenizer, cache)
    with distributed_run(config, run, checkpoint) as rank:
        trained = fit(config, run, inputs, rank, checkpoint=checkpoint)
    backend = _to_be_scored(config, inputs, trained, rank)
    score(config, run, backend, rows.heldout, tokenizer, prepared=trained.early)
    if not is_sharded(config, rank):  # a sharded base is not gathered for this
        sample(config, run, backend, rows.heldout, tokenizer)
    _results(run, trained, inputs.data, plan)
    keep_measurement(run.manifest, plan, writable_cache(), held)


def _to_be_scored(config: RunConfig, inputs: Inputs, trained: Fitted, rank: Rank) -> Backend:
    """Return the trained model with a complete base in this process."""
    from mens_exp.training.build import build_backend, lightning_quiet
    from mens_exp.training.distributed import is_sharded

    module = trained.module
    if config.suite.spec.scores and is_sharded(config, rank):
        _, tensors = module.backend.adapter(config)
        del module.backend  # free the shards before loading the complete base
        with lightning_quiet():
            module.backend = build_backend(config, inputs.base)
        module.backend.load_adapter(tensors)
    return module.backend


def _results(run: Run, trained: Fitted, data: RowsDataModule, plan: dict[str, Any]) -> None:
    """Write the figures of the run, with measured next to predicted values."""
    from mens_exp.artifacts import host

    results, trainer, module = run.manifest.results, trained.trainer, trained.module
    note_bits_per_byte(module.config.objective, run, data)
    of_groups = module.config.objective.spec.compares_groups
    base, tuned = results["base_val_loss"], results["tuned_val_loss"]
    results.update(
        val_loss_change_frac=None if of_groups else tuned / base - 1,
        steps=trainer.global_step,
        micro_batches=_micro_batches(trainer, data),
        tokens=module.tokens,
        supervised_tokens=module.supervised_tokens,
        peak_rss_bytes=_higher(results.get("peak_rss_bytes"), host.peak_rss_bytes()),
        peak_cuda_bytes=_higher(results.get("peak_cuda_bytes"), host.peak_cuda_bytes()),
    )
    if module.ranks is not None:
        results["ranks_left"] = module.ranks.ranks_left()
    if consumed := data.consumed():
        results["streamed"] = consumed
    checkpoint = run.dir.last_checkpoint()
    results["checkpoint"] = (
        checkpoint.relative_to(run.dir.path).as_posix() if checkpoint is not None else None
    )
    for name, reason in (
        ("peak_rss_bytes", "this system does not report it"),
        ("peak_cuda_bytes", "no GPU was used"),
        ("checkpoint", "no checkpoint callback was configured"),
        ("val_loss_change_frac", "this loss is 0 while nothing is learned"),
    ):
        if results[name] is None:
            run.unknown(f"results.{name}", reason)
    measured = {"time_s": results.get("train_s"), "peak_bytes": results["peak_rss_bytes"]}
    atomic.write_json(run.dir.plan, {**plan, "measured": measured})


def _micro_batches(trainer: Trainer, data: RowsDataModule) -> int:
    """Count the micro-batches of all processes, without fillers, which only end the stream."""
    taken = (trainer.fit_loop.total_batch_idx + 1) * trainer.world_size
    return min(taken, data.train_dataloader().total)


def _higher(earlier: int | None, now: int | None) -> int | None:
    """Return the higher of two peaks, either of which may be unknown."""
    return max((peak for peak in (earlier, now) if peak is not None), default=None)


_CONDITIONS = ("base", "tuned")


def note_bits_per_byte(objective: ObjectiveConfig, run: Run, data: RowsDataModule) -> None:
    """Write base and tuned validation loss in bits per byte, or null with the reason."""
    total, reason = data.validated_bytes
    if not objective.spec.is_likelihood:
        total, reason = None, "the loss of this objective may be no likelihood"
    for condition in _CONDITIONS:
        name, results = f"{condition}_val_bits_per_byte", run.manifest.results
        loss = results[f"{condition}_val_loss"]
        results[name] = (
            None if total is None else bits_per_byte(loss, len(data.validated_ids), total)
        )
        if reason is not None:
            run.unknown(f"results.{name}", reason)
    run.manifest.results["val_text_bytes"] = total
    if reason is not None:
        run.unknown("results.val_text_bytes", reason)


_MAX_STEPS = "trainer.max_steps"
_PROCESSES = ("trainer.devices", "trainer.num_nodes")  # may change on resume


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """The checked plan for resuming a run."""

    directory: RunDir
    cell: Cell
    step: int
    checkpoint: Path | None
    notes: list[str]
    extensions: tuple[Extension, ...]


def completed(path: str) -> RunDir | None:
    """Write the missing pages of a run that succeeded but was killed before writing them all.

    Args:
        path: the run directory, or ``latest``.

    Returns:
        The run; None if there is nothing to write.

    Raises:
        RequestError: there is no such run, or a process is still working on it.
    """
    directory = _found(path)
    return directory if complete(directory) else None


def prepare_resumption(path: str, overrides: dict[str, str]) -> Resumption:
    """Check that a run can be resumed.

    Args:
        path: the run directory, or ``latest``.
        overrides: other overrides of the command, by key.

    Raises:
        RequestError: there is no such run, it is not a training run, it has ended, or an override
            changes something other than a larger ``trainer.max_steps`` or the number of processes.
    """
    directory = _found(path)
    manifest = Manifest.read(directory.manifest)
    if manifest.task != "train":
        raise RequestError(
            "only training can be continued",
            where="resume",
            found=f"{directory.path} ({manifest.task})",
            expected="a training run",
            remedy=f"start task={manifest.task} again",
        )
    values = from_yaml(directory.config)
    before = typed(values)
    steps = _checked(overrides, before)
    if steps is not None:
        OmegaConf.update(values, _MAX_STEPS, steps)
    counts = {key: _count(key, overrides[key]) for key in _PROCESSES if key in overrides}
    for key, count in counts.items():
        OmegaConf.update(values, key, count)
        if count > 1 and before.trainer.sharing is Strategy.one:
            OmegaConf.update(values, "trainer.strategy", Strategy.ddp.value)
    config = typed(values)
    if config.tokenizer.chat_template is not None and directory.chat_template.is_file():
        config.tokenizer.chat_template = str(directory.chat_template)  # the run's own copy
    Problems.raise_if([*problems_of(config), *preflight(config)])
    checkpoint, of_states = last_intact_checkpoint(directory)
    if checkpoint is not None and not checkpoint_digests(checkpoint):
        read_state(checkpoint)  # the only check of a checkpoint without a recorded digest
    step = int(checkpoint.stem.removeprefix("step_")) if checkpoint is not None else 0
    if manifest.results.get("stopped_early") and manifest.status is Status.SUCCEEDED:
        raise RequestError(
            "early stopping has ended the run",
            where="resume",
            found=str(directory.path),
            expected="a run that early stopping has not ended",
            remedy=f"start a new run from it with lora.init_from={directory.path}",
        )
    if manifest.status is Status.SUCCEEDED and steps is None:
        raise RequestError(
            "the run has ended already",
            where="resume",
            found=str(directory.path),
            remedy=f"give it more steps, {_MAX_STEPS}=<more than {before.trainer.max_steps}>",
        )
    extensions = continued(
        extensions_of(manifest), before.trainer.max_steps, config.trainer.max_steps, step
    )
    reasons = differences(config, extensions)
    composed = Composed(
        overrides=(*manifest.overrides, *(f"{k}={v}" for k, v in overrides.items())),
        values=values,
        choices=manifest.choices,
    )
    return Resumption(
        directory=directory,
        cell=Cell(composed=composed, config=config),
        step=step,
        checkpoint=checkpoint,
        notes=[*of_states, *_notes(before, config, step, reasons)],
        extensions=extensions if reasons else (),
    )


def _found(path: str) -> RunDir:
    try:
        return resolve(path, task="train")
    except RequestError as error:
        raise RequestError(
            error.what,
            where="resume",
            found=error.found,
            expected=error.expected,
            remedy=error.remedy,
        ) from error


def _checked(overrides: dict[str, str], before: RunConfig) -> int | None:
    others = sorted(overrides.keys() - {_MAX_STEPS, *_PROCESSES})
    Problems.raise_if(
        [
            ConfigError(
                "cannot change when a run continues",
                where=key,
                found=overrides[key],
                expected=f"nothing but a longer {_MAX_STEPS}, or another number of processes",
                remedy="start a new run for other settings",
            )
            for key in others
        ]
    )
    if _MAX_STEPS not in overrides:
        return None
    text, now = overrides[_MAX_STEPS], before.trainer.max_steps
    if now <= 0:
        raise ConfigError(
            "trainer.max_epochs ends this run, so more steps cannot make it longer",
            where=_MAX_STEPS,
            found=text,
            expected=f"nothing; trainer.max_epochs is {before.trainer.max_epochs}",
        )
    if not text.isdecimal() or int(text) <= now:
        raise ConfigError(
            "a run can only get longer", where=_MAX_STEPS, found=text, expected=f"more than {now}"
        )
    return int(text)


def _count(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            "is not a positive whole number", where=key, found=text, expected="1 or more"
        )
    return int(text)


def _notes(before: RunConfig, after: RunConfig, step: int, reasons: list[str]) -> list[str]:
    """List changes: number of processes, and the effect of a longer run on the schedule."""
    many, now = before.trainer.world_size, after.trainer.world_size
    changed = [] if many == now else [f"continued with {now} processes instead of {many}"]
    old, new = before.trainer.max_steps, after.trainer.max_steps
    if old != new:
        changed.append(_of_schedule(before, after, step, reasons))
    if old != new and reasons:
        changed.append(
            f"the run differs from one that was started with {new} steps, and so does its "
            f"contract, because of {' and '.join(reasons)}"
        )
    return changed


def _of_schedule(before: RunConfig, after: RunConfig, step: int, reasons: list[str]) -> str:
    old, new = before.trainer.max_steps, after.trainer.max_steps
    schedule = after.schedule
    if not isinstance(schedule, ScheduleConfig):
        return f"{_MAX_STEPS} went from {old} to {new}; the schedule continues as its class defines"
    kind = schedule.kind
    if kind is ScheduleKind.constant and RATES not in reasons:
        return f"{_MAX_STEPS} went from {old} to {new}; the constant schedule is unchanged"
    was, now = (after.optim.lr * schedule.multiple(step, total) for total in (old, new))
    laid = f"the {kind.value} schedule is laid over {new} steps from here on"
    rate = f"the rate of step {step + 1} is {now:.3g} instead of {was:.3g}"
    return f"{_MAX_STEPS} went from {old} to {new}: {laid}, so {rate}"


def resume_training(resumption: Resumption) -> None:
    """Continue training from the checkpoint."""
    with reopen_run(
        resumption.directory,
        resumption.cell,
        step=resumption.step,
        notes=resumption.notes,
        extensions=resumption.extensions,
    ) as run:
        train(resumption.cell.config, run, checkpoint=resumption.checkpoint)
