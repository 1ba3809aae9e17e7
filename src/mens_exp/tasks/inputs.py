"""Inputs of a run, recorded by content hash so that nothing else is ever taken for them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mens_exp.corpus.source import labelling_of
from mens_exp.errors import Problems, RequestError
from mens_exp.plan.contract import origin_of
from mens_exp.rows import quarantine
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig
    from mens_exp.config.tokenizer import TokenizerConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.resolve import BaseModel
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = [
    "describe",
    "hashes_in",
    "keep_bad_rows",
    "note_origin",
    "refuse_changed",
    "tokenizer_of",
]


def tokenizer_of(config: TokenizerConfig, base: BaseModel, run: RunDir) -> Tokenizer:
    """Return the tokenizer of a run.

    Where its chat template was read from a file, the run's own copy is read once there is one:
    whatever becomes of the file, the copy says what rows and prompts were written in.

    Args:
        config: the run's `tokenizer` group.
        base: its base model.
        run: its directory.
    """
    if config.chat_template is not None and run.chat_template.is_file():
        config = dataclasses.replace(config, chat_template=str(run.chat_template))
    return load_tokenizer(config, base.directory)


def describe(
    base: BaseModel, tokenizer: Tokenizer, rows: Rows | None, data: RowsDataModule | None = None
) -> dict[str, Any]:
    """Return the manifest's ``inputs``; without ``data``, nothing of the encoded documents."""
    dated = {"chat_template_date": tokenizer.date} if tokenizer.is_dated else {}
    return {
        "base_model": base.name,
        "base_source": base.source,
        "base_weights_sha256": base.weights_sha256,
        **_from_hub(base),
        **({"base_made_again": list(base.made_again)} if base.made_again else {}),
        "license": base.license,
        "tokenizer_sha256": tokenizer.sha256,
        "chat_template_sha256": tokenizer.template_sha256,
        "chat_template": tokenizer.template_source,
        **dated,
        **({} if rows is None else {"data": _rows_of(rows) | (_encoded(data) if data else {})}),
    }


def _rows_of(rows: Rows) -> dict[str, Any]:
    first = {"first_rows_sha256": rows.sha256} if rows.streamed else {}
    return {
        "source": rows.source,
        "rows_sha256": None if rows.streamed else rows.sha256,
        "heldout_rows": len(rows.heldout),
        **first,
        **rows.record(),
    }


def keep_bad_rows(run: RunDir, rows: Rows) -> None:
    """Write the rows that were put aside into the run's directory, where there are any."""
    if rows.bad:
        quarantine.write(run.quarantine, rows.bad)


def _from_hub(base: BaseModel) -> dict[str, Any]:
    """Say which commit of the hub was meant, and that its code was run where that was asked for."""
    pinned = {} if base.revision is None else {"base_id": base.name, "base_revision": base.revision}
    return pinned | ({"trust_remote_code": True} if base.trust_remote_code else {})


def _encoded(data: RowsDataModule) -> dict[str, Any]:
    labelling = labelling_of(data.config)
    train = {
        "train_rows": data.train_counts.documents,
        "train_sha256": data.train_counts.sha256,
        "train_truncated": data.train_counts.truncated,
        "train_dropped": data.train_counts.dropped,
        "train_short": data.train_counts.short,
        "train_unrolled": data.train_counts.unrolled,
    }
    return {
        **({"first_window": train} if data.rows.streamed else train),
        "val_rows": data.val_counts.documents,
        "val_sha256": data.val_counts.sha256,
        "truncation": labelling.truncation,
        "turns": labelling.turns,
    }


def note_origin(config: RunConfig, manifest: Manifest) -> None:
    """Read the contract's provenance again: a model card that was just fetched states a licence."""
    part = origin_of(config)
    assert manifest.contract is not None, "it trains"
    manifest.contract["provenance"] = dataclasses.asdict(part)
    place = "contract.provenance."
    for name in [name for name in manifest.unknown if name.startswith(place)]:
        if name.removeprefix(place) not in part.unknown:
            del manifest.unknown[name]


def refuse_changed(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Hold what is read now against what a run recorded when it first read it.

    Args:
        recorded: ``inputs`` of that run's manifest; what it does not have is not compared.
        now: what `describe` says.

    Raises:
        RequestError: a content hash is another one.
        Problems: several are.
    """
    before, after = dict(hashes_in(recorded)), dict(hashes_in(now))
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


def hashes_in(inputs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every content hash of a manifest's ``inputs`` by its dotted name."""
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from hashes_in(value, f"{prefix}{name}.")
        elif name.endswith("_sha256") and value is not None:
            yield f"{prefix}{name}", str(value)
