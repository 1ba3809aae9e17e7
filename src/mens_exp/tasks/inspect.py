"""task=inspect: describe an output and its lineage, and check both against the records.

With inspect.replay, the first steps of a run are repeated up to the first value that differs.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.certificate import (
    ArtifactKind,
    Certificate,
    Check,
    Inspection,
    Replay,
    Verification,
)
from mens_exp.artifacts.digest import digest, sha256_bytes
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import stored_digest
from mens_exp.config.logger import NoLogger
from mens_exp.config.schedule import ScheduleConfig
from mens_exp.config.trainer import TUNING, CallbackConfig, Selection
from mens_exp.corpus.source import load_rows
from mens_exp.errors import MensError, RequestError
from mens_exp.export.subject import config_of
from mens_exp.layout import starting_adapter
from mens_exp.layout.shape import family_for
from mens_exp.planning.extension import (
    ByAttempts,
    extension_words,
    extensions_of,
    takes_total,
    with_extensions,
)
from mens_exp.planning.learned_settings import RECORDING_CALLBACKS
from mens_exp.planning.machine import ALONE
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.report.evidence_views import (
    inspection_document,
    replay_verdict,
    verification_verdict,
)
from mens_exp.tasks import adapter_anatomy
from mens_exp.tasks.adapter_anatomy import read_state, tell_magnitudes
from mens_exp.tasks.checks import (
    compared,
    described,
    differing,
    not_here,
    other_conditions,
    refuse_differences,
)
from mens_exp.tasks.fit import compute_reference, start_from_rows
from mens_exp.tasks.inputs import describe, hashes_in, read_teacher, tokenizer_of
from mens_exp.tasks.lineage import Inspected, lineage, named_base, shortened
from mens_exp.tasks.resolve_references import inspected
from mens_exp.tasks.run import Run
from mens_exp.tasks.verification import verification

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.layout.starting_adapter import StartingAdapter
    from mens_exp.model.sources import BaseModel

T = TypeVar("T")


def inspect(config: RunConfig, run: Run) -> None:
    """Describe the object that `path` names, and write the findings before judging them."""
    assert config.path is not None, "validation has asked for it"
    found = inspected(config.path)
    record = Inspection(kind=found.kind, path=str(found.path), what=found.what)
    run.manifest.inputs.update(subject=str(found.path), subject_kind=found.kind.value)
    damage: list[Check] = []
    certificate = _tried(config, damage, "certificate", lambda: _certificate(found))
    _tried(config, damage, "layers", lambda: _anatomy(config, record, found))
    record.base = named_base(found, record.base, certificate)
    if record.base is None:
        is_record = found.kind in {ArtifactKind.COMPARISON, ArtifactKind.DECISION}
        why = "each of its runs names its own" if is_record else "no record next to it names one"
        record.unknown["base"] = why
    if record.base is not None and record.base["base_quant"] is not None:
        record.unknown.pop("base.base_quant", None)
    if certificate is not None:
        record.certificate = shortened(certificate)
    line = _tried(config, damage, "lineage", lambda: lineage(found, record.base, certificate))
    record.lineage = line or []
    record.unknown |= dict.fromkeys((one["name"] for one in damage), "it cannot be read")
    if config.inspect.verify:
        verified = verification(config, found, certificate)
        checks = [*damage, *verified["checks"]]
        record.verification = Verification(checks=checks, unchecked=verified["unchecked"])
    if config.inspect.replay:
        assert found.run is not None, "the command was refused otherwise"
        record.replay = replay(found.run, config.inspect.replay_steps)
    record.write(run.dir.inspection)
    run.manifest.results.update(layers=len(record.layers), parameters=record.parameters)
    if record.parameters is None:
        run.unknown("results.parameters", record.unknown["layers"])
    shown = inspection_document(record)
    terminal.show(*shown.parts)
    terminal.say(f"\nRecord: {run.dir.inspection}")
    _judge(record, run)
    terminal.say_next(shown.steps)


def _judge(record: Inspection, run: Run) -> None:
    """Fail the task if a check differs, after everything has been recorded.

    Raises:
        GateError: a check differs.
    """
    checks: list[Check] = []
    if record.verification is not None:
        checks += record.verification["checks"]
        run.manifest.results.update(verified=verification_verdict(checks))
    if record.replay is not None:
        checks += record.replay["checks"]
        run.manifest.results.update(replayed=replay_verdict(record.replay))
    remedy = f"read {run.dir.inspection}: it has every value, and what of this machine is other"
    refuse_differences("is not what its records say", record.path, checks, remedy)


def _tried(config: RunConfig, damage: list[Check], name: str, read: Callable[[], T]) -> T | None:
    """Read something; with inspect.verify, report a failure as a differing check.

    Raises:
        MensError: reading failed and verify is false.
    """
    try:
        return read()
    except MensError as error:
        if not config.inspect.verify:
            raise
        damage.append(compared(name, "something that can be read", str(error)))
        return None


def _certificate(found: Inspected) -> Certificate | None:
    path = found.certificate
    return Certificate.read(path) if path is not None and path.is_file() else None


def _anatomy(config: RunConfig, record: Inspection, found: Inspected) -> None:
    """Add the layers of a training state or an adapter to the inspection."""
    if found.kind is ArtifactKind.CHECKPOINT:
        record.checkpoint, anatomy = adapter_anatomy.anatomy_of(found.path, found.run)
    elif found.adapter is not None:
        record.form = found.adapter.form
        anatomy = adapter_anatomy.of_adapter(found.adapter)
        tell_magnitudes(anatomy, found.adapter, config)
    else:
        unfinished = "the run has no adapter: it has not ended, or it trained every weight"
        merged = "they were merged into the weights, so none are left to list"
        why = {
            ArtifactKind.RUN: unfinished,
            ArtifactKind.MODEL: merged,
            ArtifactKind.TENSORS: merged,
        }
        record.unknown["layers"] = why.get(found.kind, f"a {found.kind} has none")
        return
    record.layers, record.parameters = anatomy.layers, anatomy.parameters
    record.variant, record.base = anatomy.variant, anatomy.base
    record.unknown |= anatomy.unknown


_DIGESTS = "mens_exp.training.callbacks.digests.Digests"
# In causal order: inputs, size of the step, result.
_FIGURES = (
    "batches_sha256",
    "data/supervised_tokens",
    "optim/lr",
    "train/loss",
    "train/grad_norm",
)


@dataclass(kw_only=True, slots=True)
class _Again:
    """A run that is being replayed.

    Attributes:
        subject: the run.
        config: its configuration without sinks and validations.
        manifest: its recorded manifest.
        recorded: recorded figures of its steps.
        steps: number of steps to repeat.
        checks: comparisons so far.
        identical: the last step at which everything was equal.
    """

    subject: RunDir
    config: RunConfig
    manifest: Manifest
    recorded: dict[int, dict[str, Any]]
    steps: int
    checks: list[Check] = field(default_factory=list)
    identical: int = 0


def replay(subject: RunDir, steps: int) -> Replay:
    """Repeat the first steps of a run in a scratch directory until something differs.

    Args:
        subject: a training run; nothing in it is changed.
        steps: maximum number of steps; a shorter run is repeated completely.

    Raises:
        RequestError: it recorded no step, the adapter that it started from is gone, or it was
            extended and something other than its schedule depends on the number of steps.
        MensError: its base or its rows can no longer be read.
    """
    theirs = config_of(subject)
    recorded = recorded_steps(subject)
    if not recorded:
        raise RequestError(
            "the run recorded no step that can be replayed",
            where="inspect.replay",
            found=str(subject.path),
            expected="step events in telemetry.jsonl",
        )
    manifest = Manifest.read(subject.manifest)
    _refuse_extended(theirs, manifest, subject)
    again = _Again(
        subject=subject,
        config=_bare(theirs),
        manifest=manifest,
        recorded=recorded,
        steps=min(steps, max(recorded)),
    )
    device = _run(again)
    odd = differing(again.checks)
    return Replay(
        steps=again.steps,
        identical_through=again.identical,
        conditions=_conditions(again, device),
        first_difference=described(odd[0]) if odd else None,
        checks=again.checks,
    )


def _refuse_extended(config: RunConfig, manifest: Manifest, subject: RunDir) -> None:
    """Refuse an extended run if more than its learning rates depends on the number of steps.

    Raises:
        RequestError: more than the rates depends on it.
    """
    depends = {
        f"lora.variant={config.lora.spec.name}": config.lora.spec.allocates,
        "the schedule's class": takes_total(config.schedule),
        "the module's class": config.module._target_ != TUNING,  # Hydra's own spelling
    }
    names = [name for name, does in depends.items() if does]
    if names and extensions_of(manifest):
        raise RequestError(
            "an extended run can be replayed only if nothing but the rates depends on its length",
            where="inspect.replay",
            found=f"{subject.path}, {'; '.join(_extended(manifest))}, with {', '.join(names)}",
            remedy="check its files with inspect.verify=true, or train a run that is not extended",
        )


def _extended(manifest: Manifest) -> list[str]:
    assert manifest.contract is not None, "a training run has one"
    return extension_words(with_extensions(manifest.contract, extensions_of(manifest)))


def recorded_steps(subject: RunDir) -> dict[int, dict[str, Any]]:
    """Return the telemetry of each optimizer step, by step number."""
    if not subject.telemetry.is_file():
        return {}
    events = read_events(subject.telemetry)
    steps = [event["payload"] for event in events if event["event"] == "step"]
    return {int(payload["step"]): payload for payload in steps if "step" in payload}


def _bare(theirs: RunConfig) -> RunConfig:
    """Remove recording and validation; keep everything that may affect training."""
    config = copy.deepcopy(theirs)
    config.logger = NoLogger()
    config.adapter.select = Selection.last
    config.trainer.val_check_interval = None
    config.callbacks = {
        name: one
        for name, one in config.callbacks.items()
        if one._target_ not in RECORDING_CALLBACKS  # Hydra's own spelling
    }
    config.callbacks["digests"] = CallbackConfig(_target_=_DIGESTS)
    return config


def _run(again: _Again) -> str:
    """Compare the initial state and the steps; return the device."""
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.sources import resolve
    from mens_exp.training.build import build_backend, device_of, lightning_quiet

    config, cache = again.config, writable_cache()
    base = resolve(config.model, cache)
    tokenizer = tokenizer_of(config.tokenizer, base, again.subject)
    rows = load_rows(config.data, cache)
    data = RowsDataModule(config, rows, tokenizer, cache)
    teacher = read_teacher(config, base, cache)
    found = dict(hashes_in(describe(base, tokenizer, rows, data, teacher)))
    start = _start(config)
    if start is not None:
        found["init_from.adapter_sha256"] = start.sha256
    recorded = dict(hashes_in(again.manifest.inputs))
    again.checks += [
        compared(f"inputs.{name}", recorded[name], found[name], step=0)
        for name in recorded
        if name in found
    ]
    with lightning_quiet():
        backend = build_backend(config, base)
        if start is not None:
            backend.load_adapter(start.tensors)
        start_from_rows(config, backend, data)
        again.checks += _start_checks(again, backend)
        if not differing(again.checks):
            _steps(again, backend, data, base, teacher)
    return str(device_of(config.trainer.accelerator))


def _start(config: RunConfig) -> StartingAdapter | None:
    if config.lora.init_from is None:
        return None
    place = starting_adapter.find(config.lora.init_from)
    return starting_adapter.read(place, family_for(config.model))


def _start_checks(again: _Again, backend: Backend) -> list[Check]:
    """Compare the initial adapter with the run's recorded one, layer by layer."""
    from mens_exp.training.callbacks.digests import layer_digests

    recorded = again.manifest.facts.get("lora_init_layers_sha256") or {}
    found = layer_digests(backend.trainable())
    if not recorded:
        why = "the run has no digest of the matrices that it started from"
        return [not_here("start of the adapter", None, why, step=0)] if found else []
    names = [*(name for name in found if name in recorded), *sorted(recorded.keys() - found.keys())]
    odd = [name for name in names if recorded[name] != found.get(name)]
    if odd:
        name = odd[0]
        return [compared(f"start of {name}", recorded[name], found.get(name), step=0)]
    what = f"start of the adapter, {len(names)} layers"
    sha256 = again.manifest.facts.get("lora_init_sha256")
    return [compared(what, sha256, digest(found), step=0)]


def _steps(
    again: _Again,
    backend: Backend,
    data: RowsDataModule,
    base: BaseModel,
    teacher: BaseModel | None,
) -> None:
    """Train until a step differs or enough steps were equal."""
    from mens_exp.training.build import build_module, build_trainer, fit_first_steps
    from mens_exp.training.optimizer import in_its_order
    from mens_exp.training.precompute import teacher_for

    def look(step: int, figures: dict[str, Any], state: dict[int, dict[str, Any]]) -> bool:
        checks = _figure_checks(again, step, figures)
        if not differing(checks):
            trained = in_its_order(module.trainer.optimizers[0], backend.trainable())
            checks += state_checks(again.subject, step, trained, state)
            if again.manifest.results.get("adapter_step") == step:
                checks += saved_adapter_check(again.subject, step, backend, again.config)
        again.checks += checks
        if differing(checks):
            return False
        again.identical = step
        return step < again.steps

    with tempfile.TemporaryDirectory(prefix="mens_exp_replay_") as folder:
        blank = dataclasses.replace(
            again.manifest, inputs={}, facts={}, results={}, unknown={}, outputs={}, notes=[]
        )
        scratch = Run(RunDir(Path(folder)), blank)
        with scratch.telemetry:
            schedule, extensions = again.config.schedule, extensions_of(again.manifest)
            if extensions and isinstance(schedule, ScheduleConfig):
                again.config.schedule = ByAttempts(
                    kind=schedule.kind, schedule=schedule, extensions=extensions
                )
            learned = teacher_for(again.config, scratch, teacher, data)
            module = build_module(again.config, backend, data, teacher=learned)
            trainer = build_trainer(again.config, scratch, max_steps=data.max_steps)
            compute_reference(again.config, scratch, base, module, data, ALONE)
            fit_first_steps(trainer, module, data, look)


def _figure_checks(again: _Again, step: int, figures: dict[str, Any]) -> list[Check]:
    recorded = again.recorded.get(step)
    if recorded is None:
        return [compared("step", "not in telemetry", "taken", step=step)]
    return [
        compared(name, recorded[name], figures[name], step=step)
        if name in recorded
        else not_here(name, None, "telemetry does not have it", step=step)
        for name in _FIGURES
        if name in figures
    ]


def _conditions(again: _Again, device: str) -> list[str]:
    """List conditions that differ from the original run, or that may change results."""
    found = other_conditions(again.manifest)
    if stored_digest(again.subject.config) != again.manifest.config_digest:
        found.append("config.yaml is not the one that the manifest is of")
    events = read_events(again.subject.telemetry)
    began = [event["payload"] for event in events if event["event"] == "train_start"]
    then = began[0].get("device") if began else None
    if then is not None and then != device:
        found.append(f"device: {then} then, {device} now")
    elif not device.startswith("cpu"):
        found.append(f"device: {device}, whose sums need not end in the same bits twice")
    if (many := again.manifest.facts.get("processes", 1)) > 1:
        found.append(f"{many} processes then, one now, whose sums need not end in the same bits")
    if len(again.manifest.attempts) > 1:
        found.append("the run was resumed; its configuration is that of its last attempt")
    found += [
        f"the run was {how}; its rates are those of each attempt"
        for how in _extended(again.manifest)
    ]
    return found


def state_checks(
    run: RunDir, step: int, trainable: Mapping[str, Any], optimizer: Mapping[int, dict[str, Any]]
) -> list[Check]:
    """Compare adapter and optimizer with the run's checkpoint of a step, if it kept one.

    Args:
        run: the run.
        step: the step that was just taken.
        trainable: parameters by name, in the optimizer's order.
        optimizer: the optimizer state, by parameter index and name.
    """
    path = run.checkpoint(step)
    if not path.is_file():
        return []
    saved = read_state(path)
    found = [_first_difference(path.name, "adapter", saved.adapter, trainable, step)]
    names = list(trainable)
    before, now = _named(saved.optimizer, names), _named(optimizer, names)
    if before or now:
        found.append(_first_difference(path.name, "optimizer", before, now, step))
    return found


def saved_adapter_check(run: RunDir, step: int, backend: Backend, config: RunConfig) -> list[Check]:
    """Compare the adapter with the run's saved one, if there is one for this step."""
    if not (run.adapter / TENSORS_NAME).is_file():
        return []
    _, saved = read_adapter(run.adapter)
    _, now = backend.adapter(config)
    return [_first_difference(f"{run.adapter.name}/{TENSORS_NAME}", "", saved, now, step)]


def _named(state: Mapping[int, dict[str, Any]], names: list[str]) -> dict[str, Any]:
    return {
        f"{names[number]}.{part}": value
        for number, parts in sorted(state.items())
        for part, value in parts.items()
    }


def _first_difference(
    file: str, part: str, saved: Mapping[str, Any], now: Mapping[str, Any], step: int
) -> Check:
    """Return the check of the first differing tensor, or one check for all if none differs."""
    before = {name: _hash(value) for name, value in saved.items()}
    after = {name: _hash(value) for name, value in now.items()}
    names = [*before, *(name for name in after if name not in before)]
    odd = next((name for name in names if before.get(name) != after.get(name)), None)
    prefix = f"{file}: {part + ' ' if part else ''}"
    if odd is None:
        what = f"{prefix}{len(names)} tensors"
        return compared(what, digest(before), digest(after), step=step)
    return compared(f"{prefix}{odd}", before.get(odd), after.get(odd), step=step)


def _hash(value: Any) -> str:
    """Hash the dtype, shape and bytes of a tensor or an array; format any other value."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    kind = f"{value.dtype} {tuple(value.shape)}"
    return sha256_bytes(kind.encode() + flat.numpy().tobytes())
