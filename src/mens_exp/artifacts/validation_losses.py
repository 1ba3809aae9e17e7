"""validation.jsonl: the validation loss of each document, of the base model and the tuned one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from mens_exp.artifacts.record import read_lines, write_lines
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["DocumentLoss", "read_document_losses", "write_document_losses"]


class DocumentLoss(TypedDict):
    """One document under one condition.

    ``item_id`` is made of its tokens and of which of them are learned, so that runs over the same
    text name it alike. ``loss`` is the sum over its ``tokens`` supervised tokens, in nats.
    """

    item_id: str
    condition: str
    loss: float
    tokens: int


def write_document_losses(path: Path, losses: Iterable[DocumentLoss]) -> None:
    """Write one line for each document and condition, atomically."""
    write_lines(path, losses, DocumentLoss)


def read_document_losses(path: Path) -> list[DocumentLoss]:
    """Read what `write_document_losses` wrote.

    Raises:
        DataError: the file is missing, or a line is no such loss (``file:line``).
        Problems: several are.
    """
    losses: list[DocumentLoss] = read_lines(path, DocumentLoss)
    seen: set[tuple[str, str]] = set()
    problems = []
    for number, one in enumerate(losses, start=1):
        where = f"{path}:{number}"
        key = (one["condition"], one["item_id"])
        if key in seen:
            problems.append(DataError("is there twice", where=where, found=one["item_id"]))
        if one["tokens"] < 1 or one["loss"] < 0:
            found = f"loss {one['loss']} over {one['tokens']} tokens"
            expected = "a loss of at least 0 over at least 1 token"
            problems.append(DataError("wrong value", where=where, found=found, expected=expected))
        seen.add(key)
    Problems.raise_if(problems)
    return losses
