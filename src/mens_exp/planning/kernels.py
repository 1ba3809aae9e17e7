"""The parts of a step that Liger-Kernel may compute, and why torch computes the others.

The plan states this before the model is loaded. :mod:`mens_exp.model.liger` also examines the model
and writes the final choice to the run's record.
"""

from __future__ import annotations

from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mens_exp.config.model import Kernels
from mens_exp.config.trainer import TUNING
from mens_exp.errors import MensError
from mens_exp.layout.shape import HEAD, shape_of
from mens_exp.layout.targets import chosen
from mens_exp.planning.memory import is_in_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.config.root import RunConfig

PACKAGE = "liger-kernel"


class Part(StrEnum):
    """A part of a step that has a kernel."""

    HEAD = "head and loss"
    ROPE = "RoPE"
    NORMS = "RMSNorm"
    MLP = "SwiGLU"


def reasons(config: RunConfig, *, on_gpu: bool) -> dict[Part, str | None]:
    """Return why torch computes each part; None where Liger-Kernel does if the model allows it.

    Args:
        config: the run.
        on_gpu: whether it computes on a CUDA GPU.
    """
    of_all = why_not_at_all(config, on_gpu=on_gpu)
    if of_all is not None:
        return dict.fromkeys(Part, of_all)
    of_layers = "trainer.compile=true compiles it" if config.trainer.compile is True else None
    return {**dict.fromkeys(Part, of_layers), Part.HEAD: _of_head(config)}


def why_not_at_all(config: RunConfig, *, on_gpu: bool) -> str | None:
    """Return why torch computes all parts of a run; None if Liger-Kernel computes some."""
    if config.model.kernels is Kernels.torch:
        return "model.kernels=torch"
    if not config.backend.spec.adapts_transformers:
        return f"backend={config.backend.name} has its own training step"
    if not on_gpu:
        return "the device is not a CUDA GPU"
    if not is_installed():
        return f"{PACKAGE} is not installed"
    return None


def is_installed() -> bool:
    """Return whether Liger-Kernel and the Triton that it is written in are installed."""
    return all(find_spec(name) is not None for name in ("liger_kernel", "triton"))


def _of_head(config: RunConfig) -> str | None:
    """Return why the head and the loss cannot be fused."""
    objective = config.objective
    if config.module._target_ != TUNING:  # Hydra's own spelling
        return "the module is a class of yours, which may ask for logits"
    if not objective.spec.fuses_head:
        return f"objective={objective.name} needs logits"
    if getattr(objective, "dft", False):
        return "objective.dft weighs tokens by probabilities, which the kernel rounds to bf16"
    if is_in_parts(config):
        return "the base is in parts, one in each process"
    try:
        adapted = {one.path for one in chosen(config.lora, shape_of(config.model))}
    except MensError:
        return "the model's modules are unknown"  # reported by the check of the model
    return "the head has an adapter" if HEAD in adapted else None


def described(found: Mapping[Part, str | None]) -> dict[str, str]:
    """Return the library that computes each part, with the reason if it is torch."""
    library = f"{PACKAGE} {metadata.version(PACKAGE)}" if None in found.values() else ""
    return {str(part): library if why is None else f"torch: {why}" for part, why in found.items()}
