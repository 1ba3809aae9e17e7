"""Logical layer names: the adapter's own names for projections of Llama-shaped models.

``model.layers.3.self_attn.q_proj`` is ``l3.q`` (REFERENCE, adapter schema).
"""

from __future__ import annotations

import re

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import ModelFileError

__all__ = ["LLAMA_SHAPED", "MLP", "PROJECTIONS", "base_key", "check_family", "logical_name"]

PROJECTIONS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
MLP = ("gate_proj", "up_proj", "down_proj")
LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
_PATH = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)$")


def check_family(model_type: object) -> None:
    """Refuse a model family whose layer names are not known.

    Raises:
        ModelFileError: naming the known families.
    """
    if model_type not in LLAMA_SHAPED:
        raise ModelFileError(
            "unknown model_type",
            where="config.json: model_type",
            found=str(model_type),
            expected=expected_name(str(model_type), LLAMA_SHAPED),
        )


def logical_name(module_path: str) -> str:
    """Name a projection the adapter's way: ``model.layers.3.mlp.up_proj`` is ``l3.up``.

    Raises:
        ModelFileError: the path is no projection of a Llama-shaped model.
    """
    match = _PATH.search(module_path)
    if match is None or match[2] not in PROJECTIONS:
        raise ModelFileError("is no projection with a logical name", where=module_path)
    return f"l{match[1]}.{PROJECTIONS[match[2]]}"


def base_key(module_path: str) -> str:
    """Return the checkpoint key of a projection's weight."""
    match = _PATH.search(module_path)
    assert match is not None, "logical_name has accepted this path"
    return f"{match[0]}.weight"
