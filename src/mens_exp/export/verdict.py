"""Fate of a written output once its certificate is known: kept, or set aside."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.errors import GateError

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.certificate import Certificate

__all__ = ["CARD_NAME", "PARITY_NAME", "certificate_place", "hashes_of", "rejected_place", "settle"]

CARD_NAME = "README.md"
PARITY_NAME = "parity.json"
_LISTED = 4


def hashes_of(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of every file below a directory but its certificate."""
    if directory.is_file():
        return {"": sha256_file(directory)}
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): sha256_file(path)
        for path in files
        if path != directory / PARITY_NAME
    }


def rejected_place(out: Path) -> Path:
    """Return where something lies that its certificate spoke against."""
    return out.with_name(f"{out.name}.rejected")


def certificate_place(out: Path) -> Path:
    """Return where the certificate of a directory lies, in it, or of a file, beside it."""
    return out / PARITY_NAME if out.is_dir() else out.with_name(f"{out.name}.{PARITY_NAME}")


def settle(temporary: Path, out: Path, certificate: Certificate, card: str = "") -> None:
    """Put the certificate with what it is of, and set both aside when it says no.

    Args:
        temporary: the directory or the file, not yet in its place.
        out: that place; whoever made ``temporary`` moves it there.
        certificate: of what lies in ``temporary``.
        card: what the model card of a directory, where it has one, is to say of it; Markdown.

    Raises:
        GateError: it is over the budget and nobody accepted that; it lies beside ``out`` now.
    """
    kept = certificate.passed or certificate.accepted
    aside = rejected_place(out)
    if temporary.is_dir():
        _tell(temporary, certificate, card)
        certificate.write(temporary / PARITY_NAME)
    else:
        certificate.write(certificate_place(out if kept else aside))
    if kept:
        return
    if aside.is_dir():
        shutil.rmtree(aside)
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


def _tell(directory: Path, certificate: Certificate, section: str) -> None:
    """Let the card of a written directory, where it has one, say what was measured."""
    card = directory / CARD_NAME
    if card.is_file() and section:
        atomic.write_text(card, f"{card.read_text('utf-8')}\n{section}")
        certificate.files[CARD_NAME] = sha256_file(card)
