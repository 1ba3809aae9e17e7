"""Changes of a DoRA's row lengths since its start."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.config.merge import MergeConfig
from mens_exp.errors import MensError
from mens_exp.layout.cached import ready
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from mens_exp.config.root import RunConfig
    from mens_exp.export.adapter import AdapterPlace
    from mens_exp.tasks.adapter_anatomy import Anatomy

__all__ = ["tell_magnitudes"]

_FIELD = "layers.magnitude_change"


def tell_magnitudes(anatomy: Anatomy, place: AdapterPlace, config: RunConfig) -> None:
    """Set ``magnitude_change`` of every layer of a DoRA, or say why it is not told.

    Args:
        anatomy: of the adapter; changed in place.
        place: where the adapter lies.
        config: of the command.
    """
    if not anatomy.magnitudes:
        return
    if place.run is None:
        anatomy.unknown[_FIELD] = "the run that says what it began with is not at hand"
        return
    theirs, cache = config_of(place.run), writable_cache()
    if theirs.lora.init.value != "default":
        anatomy.unknown[_FIELD] = f"it began with {theirs.lora.init.value}'s matrices, not zero"
        return
    try:
        is_here = ready(theirs.model, cache) is not None
    except MensError as error:
        anatomy.unknown[_FIELD] = f"the base is not here: {error.what}"
        return
    if not is_here:
        anatomy.unknown[_FIELD] = "the base is not on this machine"
        return
    for layer, before_O in _before(place, config).items():
        moved = np.linalg.norm(anatomy.magnitudes[layer].astype(np.float64) - before_O)
        anatomy.layers[layer]["magnitude_change"] = float(moved / np.linalg.norm(before_O))


def _before(place: AdapterPlace, config: RunConfig) -> dict[str, npt.NDArray[np.float64]]:
    """Return the lengths of the rows of the weights as the adapter met them, by layer."""
    from mens_exp.export.weight_parity import row_lengths
    from mens_exp.tasks.merge_choices import decide, deltas_of
    from mens_exp.tasks.merge_inputs import gather

    asked = copy.deepcopy(config)
    asked.path, asked.merge = str(place.directory), MergeConfig()
    inputs = gather(asked, writable_cache())
    choices = decide(inputs, asked.merge)
    deltas = deltas_of(inputs, choices)
    return {
        one.logical: row_lengths(one, deltas[one.logical], choices.quantizer).numpy()
        for one in choices.all_places
        if one.logical is not None
    }
