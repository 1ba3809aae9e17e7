"""Dimensions of the models that our presets name, shipped so that a plan needs no download."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

__all__ = ["shipped_config"]


def shipped_config(model_id: str) -> dict[str, Any] | None:
    """Return the dimensions part of a hub model's config.json, or None where we ship none."""
    return _all().get(model_id)


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    folder = resources.files("mens_exp.layout").joinpath("shipped")
    records = (
        json.loads(file.read_text("utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    )
    return {record["id"]: record["config"] for record in records}
