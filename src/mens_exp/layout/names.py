"""Logical layer names: the adapter's own names for projections, and their checkpoint keys.

``model.layers.3.self_attn.q_proj`` is ``l3.q``, ``transformer.h.3.attn.c_attn`` is ``l3.qkv``, and
the head is ``lm_head`` (REFERENCE, adapter schema).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Collection

    from mens_exp.layout.families import Family

__all__ = ["HEAD", "base_key", "logical_name"]

HEAD = "lm_head"
_PEFT_PREFIX = "base_model.model."


def logical_name(module_path: str, family: Family) -> str:
    """Name a module the adapter's way: ``model.layers.3.mlp.up_proj`` is ``l3.up``.

    Raises:
        ModelFileError: the path is no projection of the family.
    """
    path = module_path.removeprefix(_PEFT_PREFIX)
    if path == HEAD:
        return HEAD
    layer, _, inside = path.removeprefix(f"{family.layers}.").partition(".")
    for projection in family.projections:
        if projection.path == inside and layer.isdigit():
            return f"l{layer}.{projection.logical}"
    raise ModelFileError("is no projection with a logical name", where=module_path)


def base_key(module_path: str, family: Family, keys: Collection[str]) -> str:
    """Return the key of a module's weight in the base checkpoint.

    Args:
        module_path: path of the module; PEFT's prefix may stand before it.
        family: the model's family.
        keys: the keys that the checkpoint has. Some are saved without the head, and then lack the
            first part of every name; a tied head is the embedding table.

    Raises:
        ModelFileError: the checkpoint has no such weight.
    """
    path = module_path.removeprefix(_PEFT_PREFIX)
    paths = [path, path.partition(".")[2]]
    if path == HEAD:
        paths = [path, family.embedding, family.embedding.partition(".")[2]]
    for candidate in paths:
        if f"{candidate}.weight" in keys:
            return f"{candidate}.weight"
    raise ModelFileError("the checkpoint has no weight of this module", where=path)
