"""What becomes of something written once its certificate is known: kept, or set aside."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import sha256_file
from mens_exp.errors import GateError

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.certificate import Certificate

__all__ = ["PARITY_NAME", "hashes_of", "rejected_place", "settle"]

PARITY_NAME = "parity.json"
_LISTED = 4


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a directory, its certificate left out."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): sha256_file(path)
        for path in files
        if path != directory / PARITY_NAME
    }


def rejected_place(out: Path) -> Path:
    """Return where something lies that its certificate spoke against."""
    return out.with_name(f"{out.name}.rejected")


def settle(temporary: Path, out: Path, certificate: Certificate) -> None:
    """Put the certificate beside what it is of, and set both aside when it says no.

    Args:
        temporary: the directory, not yet in its place.
        out: that place; whoever made ``temporary`` moves it there.
        certificate: of what lies in ``temporary``.

    Raises:
        GateError: it is over the budget and nobody accepted that; it lies beside ``out`` now.
    """
    certificate.write(temporary / PARITY_NAME)
    if certificate.passed or certificate.accepted:
        return
    aside = rejected_place(out)
    shutil.rmtree(aside, ignore_errors=True)
    temporary.replace(aside)
    over = certificate.exceeded()
    more = f" and {len(over) - _LISTED} more" if len(over) > _LISTED else ""
    raise GateError(
        "what was written is not the model that was trained",
        where=str(aside),
        found="; ".join(over[:_LISTED]) + more,
        expected="within parity.budget",
        remedy=f"read {PARITY_NAME} there; parity.accept=true keeps it on record all the same",
    )
