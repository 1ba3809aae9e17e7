"""Settings of a run that differ from those of a run without overrides."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mens_exp.config.compose import compose, typed
from mens_exp.plan.semantics import learned_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.root import RunConfig

__all__ = ["differences"]

# What an override of these leaves as it was: everything that is learned.
_APART = ("task=", "hydra.", "path=", "out=")


def differences(config: RunConfig, overrides: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Return the settings that change what is learned and are not our defaults, by dotted path.

    Args:
        config: the run.
        overrides: what made it, as typed, or None where that is not known. Without any that could
            change a setting the defaults are not composed, which takes a third of a second.

    Returns:
        ``found``, and ``default`` where the setting exists there, for each.
    """
    if overrides is not None and all(text.lstrip("+").startswith(_APART) for text in overrides):
        return {}
    usual = _usual()
    return {
        path: ({"default": usual[path]} if path in usual else {}) | {"found": found}
        for path, found in sorted(learned_settings(config).items())
        if path not in usual or usual[path] != found
    }


@functools.cache
def _usual() -> dict[str, Any]:
    return learned_settings(typed(compose([[]])[0].values))
