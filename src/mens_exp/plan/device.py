"""The device that a run would compute on, as far as can be known without torch."""

from __future__ import annotations

import shutil

__all__ = ["may_use_gpu"]


def may_use_gpu(accelerator: str) -> bool:
    """Tell whether a GPU may do the work; asking torch itself would take seconds."""
    if accelerator == "auto":
        return shutil.which("nvidia-smi") is not None
    return accelerator == "gpu"
