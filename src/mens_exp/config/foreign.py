"""Names that a configuration may use when it comes with somebody else's run.

A stored config.yaml is read when a run goes on, is scored or is talked to; it may be another's. It
names classes, and a class that is named is called: so it may name ours, Lightning's and torch's,
each at its group's own place, and beyond these only what ``./conf`` of the working directory names
too, which is how the user vouches for it. The same holds for a model whose own code would run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mens_exp.config.own_conf import our_targets, own_targets, own_trusted_models, targets_in
from mens_exp.config.own_schema import CLASS_GROUPS
from mens_exp.errors import ConfigError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["refuse_foreign"]

_TRUSTED = ("mens_exp.", "lightning.", "torch.")
_GROUPS = "|".join(sorted(CLASS_GROUPS.keys() - {"callbacks"}))
_PLACE = re.compile(rf"(({_GROUPS})|callbacks\.\w+)\._target_")


def refuse_foreign(values: Any, file: Path) -> None:
    """Refuse a stored configuration that could run something nobody here has vouched for.

    Args:
        values: the configuration, as plain data, nothing of it resolved.
        file: where it was read from, for messages.

    Raises:
        ConfigError: it names such a class, or refers to the environment.
        Problems: several of these.
    """
    found = [*_targets(values, file), *_references(values, file), *_remote_code(values, file)]
    found += _functions(values, file)
    Problems.raise_if(found)


def _targets(values: Any, file: Path) -> Iterator[ConfigError]:
    vouched = own_targets() | our_targets()
    for place, target in targets_in(values):
        named = target if isinstance(target, str) else ""
        trusted = named.startswith(_TRUSTED)
        if named in vouched or (trusted and _PLACE.fullmatch(place)):
            continue
        yield ConfigError(
            "a stored configuration may not name this class",
            where=f"{file}: {place}",
            found=str(target),
            expected="a class of mens_exp, lightning or torch, at its group's own place"
            if trusted
            else "a class of mens_exp, lightning or torch",
            remedy="if you know and trust it, name the same _target_ in a file of ./conf",
        )


def _remote_code(values: Any, file: Path) -> Iterator[ConfigError]:
    """Yield the code of a model that would run because another's command once allowed it."""
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict) or model.get("trust_remote_code") is not True:
        return
    if str(model.get("id")) not in own_trusted_models():
        yield ConfigError(
            "a stored configuration may not run a model's own code",
            where=f"{file}: model.trust_remote_code",
            found=f"true, for {model.get('id')}",
            expected="false, or a model that ./conf of the working directory trusts",
            remedy="if you trust its code, write its id and trust_remote_code: true into a file "
            "of ./conf/model",
        )


def _functions(values: Any, file: Path) -> Iterator[ConfigError]:
    """Yield a suite's own function: a file that would be run because another's command named it."""
    suite = values.get("suite") if isinstance(values, dict) else None
    if isinstance(suite, dict) and suite.get("function") is not None:
        yield ConfigError(
            "a stored configuration may not name a function to run",
            where=f"{file}: suite.function",
            found=str(suite["function"]),
            expected="null",
            remedy="name it in your own command, task=evaluate suite.function=<file>.py:<name>",
        )


def _references(values: Any, file: Path, place: str = "") -> Iterator[ConfigError]:
    """Yield what would be looked up when read, such as a variable of the environment."""
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            yield from _references(value, file, f"{place}.{key}" if place else str(key))
    elif isinstance(values, str) and "${" in values:
        yield ConfigError(
            "a stored configuration holds values, no references",
            where=f"{file}: {place}",
            found=values,
            expected="what the run wrote",
        )
