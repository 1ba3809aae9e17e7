"""One comparison of a recorded value with what was found, and the gate that counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.inspection import Check, Link, Outcome
from mens_exp.errors import GateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["compared", "described", "differing", "linked", "not_here", "refuse_differences"]

_LISTED = 4


def compared(name: str, recorded: Any, found: Any, *, step: int | None = None) -> Check:
    """Hold a value against its record; only the same value is equal."""
    outcome = Outcome.EQUAL if recorded == found else Outcome.DIFFERS
    return _check(name, step, outcome, recorded, found, None)


def not_here(name: str, recorded: Any, why: str, *, step: int | None = None) -> Check:
    """Say that there is nothing to hold a record against, which is no error."""
    return _check(name, step, Outcome.NOT_HERE, recorded, None, why)


def linked(link: Link, of: str, checks: Iterable[Check]) -> Iterator[Check]:
    """Name the link of the chain of evidence, and the record, that checks are of."""
    for check in checks:
        yield {**check, "link": check["link"] or link, "of": check["of"] or of}


def _check(
    name: str, step: int | None, outcome: Outcome, recorded: Any, found: Any, note: str | None
) -> Check:
    return Check(
        name=name,
        step=step,
        outcome=outcome,
        recorded=recorded,
        found=found,
        note=note,
        link=None,
        of=None,
    )


def differing(checks: Sequence[Check]) -> list[Check]:
    """Return the comparisons that came out different, in order."""
    return [check for check in checks if check["outcome"] == Outcome.DIFFERS]


def described(check: Check) -> str:
    """Say in a line what is compared, and both values."""
    step = "" if check["step"] is None else f"step {check['step']}: "
    note = f" ({check['note']})" if check["note"] else ""
    return f"{step}{check['name']}: recorded {check['recorded']}, found {check['found']}{note}"


def refuse_differences(what: str, where: str, checks: Sequence[Check], remedy: str) -> None:
    """Raise what differs, the first few by name and value.

    Raises:
        GateError: something does.
    """
    odd = differing(checks)
    if not odd:
        return
    more = f" and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
    raise GateError(
        what,
        where=where,
        found="; ".join(map(described, odd[:_LISTED])) + more,
        expected="every value as it is recorded",
        remedy=remedy,
    )
