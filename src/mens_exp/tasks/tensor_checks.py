"""Tensors of a replayed step against those that the run kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.digest import digest, sha256_bytes
from mens_exp.tasks.checking import compared
from mens_exp.tasks.checkpoint_anatomy import read_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.inspection import Check
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig

__all__ = ["saved_adapter_check", "state_checks"]


def state_checks(
    run: RunDir, step: int, trainable: Mapping[str, Any], optimizer: Mapping[int, dict[str, Any]]
) -> list[Check]:
    """Compare adapter and optimizer with the run's training state of a step, if it kept one.

    Args:
        run: it.
        step: that was just taken.
        trainable: parameters by name, in the optimizer's order.
        optimizer: its state, by number of the parameter and name.
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
    """Compare the adapter with the one that the run wrote, if it has; it is of this step."""
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
    """Name the first tensor that differs, or all of them together where none does."""
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
    """Hash the format, the shape and the bytes of a tensor or an array; say any other value."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    kind = f"{value.dtype} {tuple(value.shape)}"
    return sha256_bytes(kind.encode() + flat.numpy().tobytes())
