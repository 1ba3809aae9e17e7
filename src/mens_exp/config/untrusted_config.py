"""Refuse a stored configuration that could run code which the user does not trust.

A stored config.yaml may come from someone else. It may name classes of ours, Lightning and torch,
each in its own group. Any other class must also be named in ``./conf`` of the working directory,
by which the user declares it trusted. The same applies to models with remote code.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from mens_exp.config.option_files import config_directory, read_option, user_directories
from mens_exp.config.user_config import CLASS_GROUPS
from mens_exp.errors import ConfigError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def targets_in(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of every ``_target_``, at any depth."""
    if isinstance(values, dict):
        for key, value in values.items():
            if key == "_target_":
                yield f"{prefix}{key}", value
            else:
                yield from targets_in(value, f"{prefix}{key}.")
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from targets_in(value, f"{prefix}{number}.")


@functools.cache
def our_targets() -> frozenset[str]:
    """Return every class named by built-in options."""
    return _targets_under(config_directory())


def user_targets() -> frozenset[str]:
    """Return every class named by user options."""
    return frozenset().union(*map(_targets_under, user_directories())) - our_targets()


def user_trusted_models() -> frozenset[str]:
    """Return the ids of models whose remote code is trusted in ``./conf``."""
    files = [file for root in user_directories() for file in sorted(root.glob("model/*.yaml"))]
    options = [values for file in files if isinstance(values := read_option(file), dict)]
    return frozenset(str(o.get("id")) for o in options if o.get("trust_remote_code") is True)


def _targets_under(root: Path) -> frozenset[str]:
    return frozenset(
        str(target) for file in root.rglob("*.yaml") for _, target in targets_in(read_option(file))
    )


_TRUSTED = ("mens_exp.", "lightning.", "torch.")
_GROUPS = "|".join(sorted(CLASS_GROUPS.keys() - {"callbacks", "data"}))  # no trusted classes there
_PLACE = re.compile(
    rf"(({_GROUPS})|(callbacks|logger)\.\w+|trainer\.(strategy|profiler|plugins\.\d+))\._target_"
)


def refuse_untrusted(values: Any, file: Path) -> None:
    """Refuse a stored configuration that could run untrusted code.

    Args:
        values: the configuration as plain data, without resolved interpolations.
        file: its file, for messages.

    Raises:
        ConfigError: it names an untrusted class, or refers to the environment.
        Problems: several of these.
    """
    found = [*_targets(values, file), *_references(values, file), *_remote_code(values, file)]
    found += _functions(values, file)
    Problems.raise_if(found)


def _targets(values: Any, file: Path) -> Iterator[ConfigError]:
    vouched = user_targets() | our_targets()
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
    """Yield an error for untrusted remote code of a model."""
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict) or model.get("trust_remote_code") is not True:
        return
    if str(model.get("id")) not in user_trusted_models():
        yield ConfigError(
            "a stored configuration may not run a model's own code",
            where=f"{file}: model.trust_remote_code",
            found=f"true, for {model.get('id')}",
            expected="false, or a model that ./conf of the working directory trusts",
            remedy="if you trust its code, write its id and trust_remote_code: true into a file "
            "of ./conf/model",
        )


def _functions(values: Any, file: Path) -> Iterator[ConfigError]:
    """Yield an error for a suite's function, which is code in a file named by someone else."""
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
    """Yield the values that would be resolved when read, such as environment variables."""
    if isinstance(values, dict | list):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in pairs:
            yield from _references(value, file, f"{place}.{key}" if place else str(key))
    elif isinstance(values, str) and "${" in values:
        yield ConfigError(
            "a stored configuration may hold values, but no references",
            where=f"{file}: {place}",
            found=values,
            expected="what the run wrote",
        )
