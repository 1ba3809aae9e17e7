"""What a run reads, by content hash, so that nothing else is ever taken for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.errors import Problems, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.corpus.source import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.resolve import BaseModel
    from mens_exp.tokenizer.hf import HfTokenizer

__all__ = ["describe", "refuse_changed"]


def describe(
    base: BaseModel, tokenizer: HfTokenizer, rows: Rows, data: RowsDataModule | None = None
) -> dict[str, Any]:
    """Return the manifest's ``inputs``; without ``data``, nothing of the encoded documents."""
    rows_of = {"source": rows.source, "rows_sha256": rows.sha256, "heldout_rows": len(rows.heldout)}
    return {
        "base_model": base.name,
        "base_source": base.source,
        "base_weights_sha256": base.weights_sha256,
        **_from_hub(base),
        "license": base.license,
        "tokenizer_sha256": tokenizer.sha256,
        "chat_template_sha256": tokenizer.template_sha256,
        "chat_template": "the tokenizer's own" if tokenizer.template_is_own else "ChatML",
        "data": rows_of if data is None else {**rows_of, **_encoded(data)},
    }


def _from_hub(base: BaseModel) -> dict[str, Any]:
    """Say which commit of the hub was meant, and that its code was run where that was asked for."""
    pinned = {} if base.revision is None else {"base_id": base.name, "base_revision": base.revision}
    return pinned | ({"trust_remote_code": True} if base.trust_remote_code else {})


def _encoded(data: RowsDataModule) -> dict[str, Any]:
    return {
        "train_rows": data.train_counts.documents,
        "val_rows": data.val_counts.documents,
        "train_sha256": data.train_counts.sha256,
        "val_sha256": data.val_counts.sha256,
        "train_truncated": data.train_counts.truncated,
        "train_dropped": data.train_counts.dropped,
    }


def refuse_changed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Hold what is read now against what a run recorded when it first read it.

    Args:
        recorded: ``inputs`` of that run's manifest; what it does not have is not compared.
        now: what `describe` says.

    Raises:
        RequestError: a content hash is another one.
        Problems: several are.
    """
    before, after = dict(_hashes(recorded)), dict(_hashes(now))
    Problems.raise_if(
        [
            RequestError(
                "is not what the run was trained on",
                where=f"inputs.{name}",
                found=after[name],
                expected=before[name],
                remedy="put it back as it was, or start a new run",
            )
            for name in sorted(before.keys() & after.keys())
            if before[name] != after[name]
        ]
    )


def _hashes(inputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from _hashes(value, f"{prefix}{name}.")
        elif name.endswith("_sha256"):
            yield f"{prefix}{name}", str(value)
