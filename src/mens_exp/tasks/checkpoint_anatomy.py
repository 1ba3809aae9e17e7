"""A training state on disk: its step, its adapter, its optimizer, and whether a run can go on."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import MANIFEST_NAME, read_adapter
from mens_exp.artifacts.checkpoint_digests import refuse_damaged
from mens_exp.artifacts.inspection import CheckpointRecord
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.errors import DataError
from mens_exp.tasks.adapter_anatomy import Anatomy, of_state
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["State", "anatomy_of", "read_state"]

_NEEDED = ("adapter", "optimizer_states", "global_step", "counters", "callbacks", "loops")


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The part of a checkpoint that learns.

    Attributes:
        step: optimizer steps taken.
        adapter: every trained tensor by name.
        optimizer: state of each of them, by its number in that order, then by name.
        lacks: what a run needs to go on and is not there.
    """

    step: int
    adapter: dict[str, Any]
    optimizer: dict[int, dict[str, Any]]
    lacks: tuple[str, ...]


# What torch's reader and its unpickler fail with on files that torch did not write.
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError),
    *(AssertionError, ArithmeticError, pickle.UnpicklingError),
)


def read_state(path: Path) -> State:
    """Read a training state; nothing in it is run.

    Raises:
        DataError: it is not what was written, no training state of ours, or holds more than plain
            values.
    """
    import torch

    refuse_damaged(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise DataError(
            "is no training state that can be read",
            where=str(path),
            found=str(error).partition("\n")[0],
            expected="a whole step_….ckpt of a run",
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("adapter"), dict):
        raise DataError("is no training state of ours", where=str(path), expected="an adapter")
    states, step = found.get("optimizer_states") or [{}], found.get("global_step", 0)
    first = states[0] if isinstance(states, list) else None
    optimizer = first.get("state") or {} if isinstance(first, dict) else None
    if not isinstance(step, int) or not isinstance(optimizer, dict):
        raise DataError(
            "is no training state of ours",
            where=str(path),
            expected="a step, and the state of an optimizer",
        )
    return State(
        step=step,
        adapter=found["adapter"],
        optimizer=optimizer,
        lacks=tuple(name for name in _NEEDED if not found.get(name)),
    )


def anatomy_of(path: Path, run: RunDir | None) -> tuple[CheckpointRecord, Anatomy]:
    """Describe a training state and measure its adapter.

    Args:
        path: the file.
        run: that it lies in; None where its run is not at hand.

    Raises:
        DataError: as :func:`read_state`, or a value is not finite.
    """
    import torch

    state = read_state(path)
    tensors = {name: values.float().numpy() for name, values in state.adapter.items()}
    config = None if run is None else config_of(run)
    bare = "no run is at hand that says it; norms are those of B A"
    keys = {} if run is None else _keys(run)
    anatomy = of_state(tensors, config, keys, bare=bare, where=str(path))
    moments = [
        value
        for one in state.optimizer.values()
        for value in one.values()
        if isinstance(value, torch.Tensor)
    ]
    why = _why_not(state, path, run)
    record = CheckpointRecord(
        step=state.step,
        bytes=path.stat().st_size,
        optimizer_tensors=len(moments),
        optimizer_bytes=sum(one.numel() * one.element_size() for one in moments),
        resumable=why is None,
        why=why or f"resume={None if run is None else run.path} goes on from here",
    )
    return record, anatomy


def _keys(run: RunDir) -> dict[str, str]:
    """Return the base's keys as the run's adapter has them, or none before it is written."""
    if not (run.adapter / MANIFEST_NAME).is_file():
        return {}
    return read_adapter(run.adapter)[0].base_key_map


def _why_not(state: State, path: Path, run: RunDir | None) -> str | None:
    """Say why no run goes on from this state."""
    if state.lacks:
        return f"it lacks {', '.join(state.lacks)}"
    if run is None:
        return "it lies in no run, whose configuration going on needs"
    last = run.last_checkpoint()
    if last is None or last.name != path.name:
        return f"a run goes on from its last state, {last.name if last else 'of which it has none'}"
    manifest = Manifest.read(run.manifest)
    if manifest.status is Status.SUCCEEDED:
        return "its run has ended; it goes on only with a longer trainer.max_steps"
    return None
