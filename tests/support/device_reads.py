"""Count the reads of tensor values; on a GPU each of them waits for the device.

torch's meta device stands in for a GPU in `HostSyncs`: its tensors have shapes and no values, code
takes the paths of devices other than a CPU, and whatever a program reads of them has to pass here.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Reads(TorchDispatchMode):
    """Counts reads of numbers and of nonzero indices inside the context."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count an operation and run it."""
        del types
        self.count += func in _READS
        return func(*args, **kwargs or {})


DEVICE = torch.device("meta")
# Operations whose result, or its shape, the host must know before it continues.
_WAITS = frozenset(
    {
        "_local_scalar_dense",  # item, float, int, bool, tolist of a single number
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    }
)
_BY_MASK = frozenset({"index", "index_put", "index_put_"})  # they wait if an index is a mask
_COPIES = frozenset({"_to_copy", "copy_"})
_IN_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Sync:
    """A host synchronization: the operation, and the line that caused it."""

    what: str
    file: str
    line: int
    code: str | None

    def __str__(self):
        """Return one line for a message."""
        return f"{self.what} at {self.file}:{self.line}: {self.code}"


class HostSyncs(TorchDispatchMode):
    """Lists the synchronizations with a device inside the context.

    Readings of tensors on `DEVICE` count, and copies between it and the host, except those to the
    device that are asked for with ``non_blocking``. A program that reads gets ones.
    """

    def __init__(self):
        """Start with an empty list."""
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record an operation that waits, and run it; if it reads values, it gets ones."""
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _COPIES:
            return self._copied(func, name, args, kwargs)
        on_device = any(_is_on_device(one) for one in tree_leaves((args, kwargs)))
        if on_device and (name in _WAITS or (name in _BY_MASK and _has_mask(args[1]))):
            self._note(name)
            result = func(*tree_map(_ones, args), **tree_map(_ones, kwargs))
            return tree_map(_moved, result)
        return func(*args, **kwargs)

    def _copied(self, func, name, args, kwargs):
        if name == "copy_":
            target, source = args[0].device, args[1].device
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source = args[0].device
            target = torch.device(kwargs.get("device") or source)
            waits = not kwargs.get("non_blocking", False)
        if source.type == target.type or DEVICE.type not in {source.type, target.type}:
            return func(*args, **kwargs)
        if target == DEVICE:
            if waits:
                self._note("copy to the device")
            return func(*args, **kwargs)
        self._note("copy to the host")
        if name == "copy_":
            return args[0].fill_(1)
        return _ones(args[0]).to(kwargs.get("dtype") or args[0].dtype)

    def _note(self, what):
        frames = [
            frame
            for frame in traceback.extract_stack()
            if not frame.filename.startswith(_IN_TORCH) and frame.filename != __file__
        ]
        last = frames[-1]
        self.found.append(Sync(what, last.filename, last.lineno, last.line))


def _is_on_device(value):
    return isinstance(value, torch.Tensor) and value.device == DEVICE


def _has_mask(indices):
    masks = {torch.bool, torch.uint8}
    return any(isinstance(one, torch.Tensor) and one.dtype in masks for one in indices)


def _ones(value):
    if not _is_on_device(value):
        return value
    return torch.ones(value.shape, dtype=value.dtype)


def _moved(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def move_to_device(module):
    """Move parameters and buffers, quantized ones too, to `DEVICE`; values are lost."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = _on_device(parameter)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(DEVICE)


def _on_device(parameter):
    """Return a parameter of the same class; torch cannot move bitsandbytes' to this device."""
    plain = parameter.detach().as_subclass(torch.Tensor).to(DEVICE)
    moved = torch.Tensor._make_subclass(type(parameter), plain, parameter.requires_grad)
    vars(moved).update(vars(parameter))
    if (state := getattr(moved, "quant_state", None)) is not None:
        state.to(DEVICE)
    return moved
