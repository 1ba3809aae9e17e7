"""replay=true: the first steps of a run taken again, and the first value that differs."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.inspection import Check, Replay
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.adapter import Selection
from mens_exp.config.callbacks import CallbackConfig
from mens_exp.config.compose import config_digest, from_yaml
from mens_exp.config.logger import NoLogger
from mens_exp.corpus.source import load_rows
from mens_exp.errors import RequestError
from mens_exp.layout import starting_adapter
from mens_exp.layout.shape import family_for
from mens_exp.plan.preflight import writable_cache
from mens_exp.plan.semantics import RECORDING_CALLBACKS
from mens_exp.tasks.checking import compared, described, differing, not_here
from mens_exp.tasks.inputs import describe, hashes_in, tokenizer_of
from mens_exp.tasks.recertifying import other_conditions
from mens_exp.tasks.run import Run
from mens_exp.tasks.subject import config_of
from mens_exp.tasks.tensor_checks import saved_adapter_check, state_checks

if TYPE_CHECKING:
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.layout.starting_adapter import StartingAdapter

__all__ = ["recorded_steps", "replay"]

_DIGESTS = "mens_exp.training.callbacks.digests.Digests"
# In the order in which a difference comes about: what is read, how far it moves, what it gives.
_FIGURES = (
    "batches_sha256",
    "data/supervised_tokens",
    "optim/lr",
    "train/loss",
    "train/grad_norm",
)


@dataclass(kw_only=True, slots=True)
class _Again:
    """A run on its way a second time.

    Attributes:
        subject: the run.
        config: its own, its sinks and validations left out.
        manifest: as it was recorded.
        recorded: figures of its steps.
        steps: how many are taken again.
        checks: what was compared so far.
        identical: the last step of which everything was equal.
    """

    subject: RunDir
    config: RunConfig
    manifest: Manifest
    recorded: dict[int, dict[str, Any]]
    steps: int
    checks: list[Check] = field(default_factory=list)
    identical: int = 0


def replay(subject: RunDir, steps: int) -> Replay:
    """Take the first steps of a run again, in a scratch directory, until something differs.

    Args:
        subject: a training run; nothing in it is changed.
        steps: at most so many; a shorter run is taken again whole.

    Raises:
        RequestError: it recorded no step, or an adapter that it began with is gone.
        MensError: its base or its rows cannot be read any more.
    """
    theirs = config_of(subject)
    recorded = recorded_steps(subject)
    if not recorded:
        raise RequestError(
            "the run recorded no step that could be taken again",
            where="replay",
            found=str(subject.path),
            expected="step events in telemetry.jsonl",
        )
    again = _Again(
        subject=subject,
        config=_bare(theirs),
        manifest=Manifest.read(subject.manifest),
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


def recorded_steps(subject: RunDir) -> dict[int, dict[str, Any]]:
    """Return what telemetry says of each optimizer step, by its number."""
    if not subject.telemetry.is_file():
        return {}
    events = read_events(subject.telemetry)
    steps = [event["payload"] for event in events if event["event"] == "step"]
    return {int(payload["step"]): payload for payload in steps if "step" in payload}


def _bare(theirs: RunConfig) -> RunConfig:
    """Leave out what only records and validates; what may change what is learned stays."""
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
    """Compare start and steps; return the device."""
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.resolve import resolve
    from mens_exp.training.build import build_backend, device_of, lightning_quiet

    config, cache = again.config, writable_cache()
    base = resolve(config.model, cache)
    tokenizer = tokenizer_of(config.tokenizer, base, again.subject)
    rows = load_rows(config.data, cache)
    data = RowsDataModule(config, rows, tokenizer, cache)
    found = dict(hashes_in(describe(base, tokenizer, rows, data)))
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
        again.checks += _start_checks(again, backend)
        if not differing(again.checks):
            _steps(again, backend, data)
    return str(device_of(config.trainer.accelerator))


def _start(config: RunConfig) -> StartingAdapter | None:
    if config.lora.init_from is None:
        return None
    place = starting_adapter.find(config.lora.init_from)
    return starting_adapter.read(place, family_for(config.model))


def _start_checks(again: _Again, backend: Backend) -> list[Check]:
    """Hold what training starts from against what the run started from, layer by layer."""
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


def _steps(again: _Again, backend: Backend, data: RowsDataModule) -> None:
    """Train until a step differs, or enough of them were the same."""
    from mens_exp.training.build import build_module, build_trainer
    from mens_exp.training.first_steps import fit_first_steps

    def look(step: int, figures: dict[str, Any], state: dict[int, dict[str, Any]]) -> bool:
        checks = _figure_checks(again, step, figures)
        if not differing(checks):
            checks += state_checks(again.subject, step, backend.trainable(), state)
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
            module = build_module(again.config, backend, data)
            trainer = build_trainer(again.config, scratch, max_steps=data.max_steps)
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
    """Say what was otherwise than when the run was trained, or may come out otherwise."""
    found = other_conditions(again.manifest)
    if config_digest(from_yaml(again.subject.config)) != again.manifest.config_digest:
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
    return found
