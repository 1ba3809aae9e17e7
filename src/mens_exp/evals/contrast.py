"""The contrast guard: whether two arms differ in their declared factors and in nothing else.

Two arms are unconfounded if and only if substituting the declared factors of one into the record of
the other gives its contract digest (ignoring the seed), and both read the same inputs. Only the
records are needed, so the files of an old run need not be available.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.config.fields import Effect
from mens_exp.config.schemas import contract_parts, effect_of
from mens_exp.planning.contract import recorded_digest
from mens_exp.planning.extension import extension_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# Content hashes of inputs that a declared factor of each group may change.
_MOVES: dict[str, tuple[str, ...]] = {
    "model": (
        *("base_weights_sha256", "base_config_sha256", "base_code_sha256"),
        *("tokenizer_sha256", "chat_template_sha256"),
        "teacher.",  # the teacher is the base unless the objective names another model
    ),
    "tokenizer": ("tokenizer_sha256", "chat_template_sha256"),
    "data": ("data.",),
    "objective": ("teacher.",),
}
# Hashes that runs of earlier releases lack.
_LATER = frozenset({"base_config_sha256", "base_code_sha256"})
_ENCODED = ("data.train_sha256", "data.val_sha256")
# Settings of `data` that only divide the same rows differently.
_CUT = frozenset({"data.seq_len", "data.micro_batch_size", "data.packing", "data.truncation"})
_BACKEND = "backend"

Record = dict[str, Any]
Implied = tuple[dict[str, Any], dict[str, Any]]
"""The settings that two backends imply differently, by the first and by the second backend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """The guard's findings about two arms.

    Attributes:
        confounded_by: undeclared differences, in words; empty for a clean contrast.
        environment: differences of machine and versions, which are labelled but not confounders.
        moved_inputs: content hashes that a declared factor inherently changes.
    """

    confounded_by: tuple[str, ...]
    environment: tuple[str, ...]
    moved_inputs: tuple[str, ...]


def guard(
    arm: Mapping[str, Any],
    reference: Mapping[str, Any],
    factors: Sequence[str],
    implied: Implied | None = None,
) -> Guard:
    """Compare two runs, one of each arm.

    Args:
        arm: ``contract`` (recorded), ``inputs`` (content hashes by dotted name), ``provenance``
            and ``numerics`` (implementations that computed its step) of one run.
        reference: the same of a run of the reference.
        factors: declared factors: dotted settings, or groups.
        implied: implied settings of the two backends, if `backend` is a factor.
    """
    mine = without_seed(arm["contract"])
    made = applied(mine, without_seed(reference["contract"]), factors, implied)
    found = [*_other_settings(mine, made), *_extended_apart(arm["contract"], reference["contract"])]
    if not found and recorded_digest(made) != recorded_digest(mine):
        found = ["a part of the contract that no setting explains"]
    hashes = dict(arm["inputs"]), dict(reference["inputs"])
    names = sorted((hashes[0].keys() | hashes[1].keys()) - _LATER) + sorted(
        hashes[0].keys() & hashes[1].keys() & _LATER
    )
    changed = [name for name in names if hashes[0].get(name) != hashes[1].get(name)]
    allowed = _moved_by([*factors, *_implied_apart(arm, reference, factors, implied)])
    moved = tuple(name for name in changed if allowed(name))
    found += [f"another content of {name}" for name in changed if name not in moved]
    return Guard(
        confounded_by=tuple(found),
        environment=(
            *_environment(arm["provenance"], reference["provenance"]),
            *_numerics(arm.get("numerics") or {}, reference.get("numerics") or {}),
        ),
        moved_inputs=moved,
    )


def without_seed(contract: Mapping[str, Any]) -> Record:
    """Return a contract's record without the seed, which may differ."""
    record: Record = copy.deepcopy(dict(contract))
    (record.get("settings") or {}).pop("seed", None)
    (record.get("exec") or {}).pop("seed", None)
    return record


def applied(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    factors: Iterable[str],
    implied: Implied | None = None,
) -> Record:
    """Return the target's record with the source's values of the factors.

    Args:
        source: the contract to take values from.
        target: the contract to put them into.
        factors: dotted settings, or groups.
        implied: differing implied settings of the source's and the target's backends. A setting
            with the value implied by the target's backend gets the value implied by the source's.
            Settings that were set by hand, or are equal in both contracts, stay unchanged.
    """
    made: Record = copy.deepcopy(dict(target))
    mine, theirs = source.get("settings") or {}, made.setdefault("settings", {})
    paths: set[str] = set()
    for factor in factors:
        paths |= {path for path in {*mine, *theirs} if _under(path, factor)}
    if _BACKEND in factors and implied is not None:
        ours, before = implied
        for path in ours.keys() | before.keys():
            # A path that the other schema does not have is absent there, which counts as its value.
            shared = mine.get(path) == theirs.get(path)
            if path not in paths and not shared and theirs.get(path) == before.get(path):
                _put(theirs, path, ours.get(path))
                _put_parts(made, source, path, keep=mine.get(path) == ours.get(path))
    for path in paths:
        _put(theirs, path, mine.get(path))
        _put_parts(made, source, path, keep=True)
    return made


def implied_by(compose: Callable[[str], Mapping[str, Any]], arm: str, reference: str) -> Implied:
    """Return the settings outside `backend` whose implied values differ between two backends.

    Args:
        compose: returns the learned settings of a run with only this option of `backend` set.
        arm: the option of one arm.
        reference: the option of the other.
    """
    one, other = (dict(compose(name)) for name in (arm, reference))
    paths = [
        path
        for path in one.keys() | other.keys()
        if not _under(path, _BACKEND) and one.get(path) != other.get(path)
    ]
    return {p: one.get(p) for p in paths}, {p: other.get(p) for p in paths}


def _under(path: str, factor: str) -> bool:
    return path == factor or path.startswith(f"{factor}.")


def _put(settings: Record, path: str, value: Any) -> None:
    if value is None:
        settings.pop(path, None)
    else:
        settings[path] = value


def _put_parts(made: Record, source: Mapping[str, Any], path: str, *, keep: bool) -> None:
    """Copy the parts of the contract that derive from a setting."""
    if not keep:
        return  # the source set it by hand, so its part of the contract is not the implied one
    for part in contract_parts(path):
        group, _, field = part.partition(".")
        value = copy.deepcopy(source.get(group))
        if field:
            made[group] = {**(made.get(group) or {}), field: (value or {}).get(field)}
        else:
            made[group] = value


def _other_settings(target: Mapping[str, Any], made: Mapping[str, Any]) -> Iterable[str]:
    """Yield the settings in which two contracts still differ."""
    ours, theirs = (record.get("settings") or {} for record in (target, made))
    for path in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(path), theirs.get(path)
        if one != other and effect_of(path) is Effect.TRAINING:
            yield path


def _extended_apart(arm: Mapping[str, Any], reference: Mapping[str, Any]) -> Iterable[str]:
    """Describe differing schedules of two arms, unless both were extended at the same steps."""
    parts = ((one.get("exec") or {}).get("extensions") or [] for one in (arm, reference))
    if next(parts) != next(parts):
        words = (" and ".join(extension_words(one)) for one in (arm, reference))
        one, other = (text or "not extended" for text in words)
        yield f"the schedule before an extension (the arm was {one}, the reference {other})"


def _implied_apart(
    arm: Mapping[str, Any],
    reference: Mapping[str, Any],
    factors: Sequence[str],
    implied: Implied | None,
) -> list[str]:
    """List the implied settings in which the two arms differ."""
    if _BACKEND not in factors or implied is None:
        return []
    mine, theirs = (one["contract"].get("settings") or {} for one in (arm, reference))
    paths = implied[0].keys() | implied[1].keys()
    return [path for path in paths if mine.get(path) != theirs.get(path)]


def _moved_by(factors: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate for the inputs that the factors may change."""
    of_rows = [factor for factor in factors if factor not in _CUT]
    groups = {factor.partition(".")[0] for factor in of_rows}
    moved = [name for group in groups & _MOVES.keys() for name in _MOVES[group]]
    if groups & _MOVES.keys() or len(of_rows) < len(
        factors
    ):  # other tokens, other labels or other documents
        moved += _ENCODED
    return lambda name: any(
        name == one or (one.endswith(".") and name.startswith(one)) for one in moved
    )


def _environment(arm: Mapping[str, Any], reference: Mapping[str, Any]) -> Iterable[str]:
    for name in ("commit", "diff_sha256", "python", "platform", "own_classes", "environment"):
        if arm.get(name) != reference.get(name):
            yield name
    packages = arm.get("packages") or {}, reference.get("packages") or {}
    for name in sorted(packages[0].keys() | packages[1].keys()):
        one, other = packages[0].get(name), packages[1].get(name)
        if one != other:
            yield f"{name} {one or 'absent'} and {other or 'absent'}"
    for name, key in (("cpu", "model"), ("accelerators", None)):
        values = [side.get(name) for side in (arm, reference)]
        if key is not None:
            values = [(value or {}).get(key) for value in values]
        if values[0] != values[1]:
            yield name


def _numerics(arm: Mapping[str, str], reference: Mapping[str, str]) -> Iterable[str]:
    """Yield the parts of a step whose implementations, and so their rounding, differ."""
    for part in sorted(arm.keys() | reference.keys()):
        if arm.get(part) != reference.get(part):
            yield f"numerics of {part}"
