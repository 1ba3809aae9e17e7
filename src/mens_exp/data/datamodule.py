"""The LightningDataModule: encoded and packed rows, in the order of the stream."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning import LightningDataModule

from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.config.data import RowsData
from mens_exp.config.objective_spec import shares_prompts
from mens_exp.corpus.mix import RowStream, validates_apart
from mens_exp.corpus.source import cache_key, labelling_of
from mens_exp.corpus.split import Side
from mens_exp.data.stream import MicroBatches, StreamedMicroBatches, permutation
from mens_exp.errors import DataError
from mens_exp.rows.cache import TokenCounts, encoded_parts
from mens_exp.rows.documents import share_prompts
from mens_exp.rows.encode import encode, encode_parts
from mens_exp.rows.packing import Blocks, blocks_of, cached_blocks, pack, single
from mens_exp.tokenizer.load import text_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.config.data import DataConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.rows.documents import Encoded
    from mens_exp.tokenizer.load import Tokenizer


class RowsDataModule(LightningDataModule):
    """Train and validation streams over one set of rows.

    If rows are streamed, ``train_documents``, ``train_counts`` and ``blocks`` are those of the
    first window.
    """

    def __init__(self, config: RunConfig, rows: Rows, tokenizer: Tokenizer, cache: Path) -> None:
        """Encode both sides, or open them from the cache.

        Raises:
            DataError: a side has no supervised tokens.
        """
        super().__init__()
        self.config = config
        self.rows = rows
        self.tokenizer = tokenizer
        self.train_documents, self.train_counts = self._encoded(Side.TRAIN, cache)
        self.val_documents, self.val_counts = self._encoded(Side.VAL, cache)
        self.blocks = self._train_blocks(cache)
        self._train = self._streamed() if rows.streamed else self._laid_out()
        self._train.total = math.ceil(self._train_places / config.data.micro_batch_size)
        self._validation: MicroBatches | None = None

    def _encoded(self, side: Side, cache: Path) -> tuple[Encoded, TokenCounts]:
        return encoded_side(self.config, self.rows, side, self.tokenizer, cache)

    def _laid_out(self) -> MicroBatches:
        config, pad_id = self.config, self.tokenizer.pad_id
        stream = _stream(
            config.data, self.train_documents, self.blocks, seed=config.seed, pad_id=pad_id
        )
        stream.places = self._train_places
        return stream

    def _streamed(self) -> MicroBatches:
        data, labelling = self.config.data, labelling_of(self.config)
        assert isinstance(data, RowsData), "no other rows are streamed"
        val = self.rows.val if validates_apart(data) else None
        return StreamedMicroBatches(
            lambda: RowStream(data, val),
            self.rows.train,
            self.train_documents,
            lambda pairs: _arranged(self.config, encode(pairs, self.tokenizer, labelling)),
            data=data,
            seed=self.config.seed,
            total=0,
            pad_id=self.tokenizer.pad_id,
        )

    def _train_blocks(self, cache: Path) -> Blocks:
        documents, data = self.train_documents, self.config.data
        if not data.packing:
            return blocks_of(documents, packing=False, capacity=data.seq_len)
        return cached_blocks(
            cache,
            self.train_counts.sha256,
            documents.room,
            data.seq_len,
            together=documents.together,
            shares=documents.shared is not None,
            virtual_tokens=documents.virtual_tokens,
        )

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the run: max_steps, or the number implied by max_epochs."""
        return math.ceil(self._train_places / self._blocks_per_step)

    @property
    def _blocks_per_step(self) -> int:
        trainer = self.config.trainer
        return self.config.data.micro_batch_size * trainer.accumulate_grad_batches

    @property
    def _train_places(self) -> int:
        """Blocks to train on, with repetitions; epochs are whole, so the last step may be smaller.

        Its loss is the mean over its own tokens, as for any other step.
        """
        trainer = self.config.trainer
        limits = [trainer.max_steps * self._blocks_per_step] if trainer.max_steps > 0 else []
        if trainer.max_epochs > 0:
            limits.append(trainer.max_epochs * len(self.blocks))
        return min(limits)

    @property
    def epochs(self) -> float | None:
        """Number of passes over the training rows; None for streamed rows."""
        if self.rows.streamed or not len(self.blocks):
            return None
        return round(self._train_places / len(self.blocks), 4)

    def epochs_after(self, step: int) -> float | None:
        """Return the passes over the training rows after an optimizer step; None as above."""
        if self.rows.streamed or not len(self.blocks):
            return None
        return min(step * self._blocks_per_step, self._train_places) / len(self.blocks)

    @property
    def packing_efficiency_frac(self) -> float:
        """Fraction of the blocks' capacity filled by training tokens."""
        room = len(self.blocks) * self.config.data.seq_len
        return float(self.train_documents.room.sum() / room)

    @property
    def documents_per_block(self) -> float:
        """Average number of training documents per block."""
        return len(self.train_documents) / len(self.blocks)

    def in_blocks(self) -> MicroBatches:
        """Return all training blocks, each a micro-batch, in stored order."""
        stream = _stream(
            self.config.data,
            self.train_documents,
            self.blocks,
            seed=None,
            pad_id=self.tokenizer.pad_id,
        )
        stream.micro_batch_size, stream.total = 1, len(self.blocks)
        return stream

    def trained_blocks(self) -> np.ndarray:
        """Return the numbers of the blocks that the run trains on, ``[n] int64``, ascending."""
        order = permutation(self.config.seed, 0, len(self.blocks))
        return np.sort(order[: self._train_places])

    def train_dataloader(self) -> MicroBatches:
        """Return the training stream."""
        return self._train

    def consumed(self) -> dict[str, Any]:
        """Return statistics of the rows read from a stream; empty for other rows."""
        stream = self._train
        return stream.consumed() if isinstance(stream, StreamedMicroBatches) else {}

    @cached_property
    def validated_bytes(self) -> tuple[int | None, str | None]:
        """UTF-8 bytes of the text of :attr:`validated_ids`, or None and the reason."""
        if self.config.trainer.limit_val_batches is not None:
            return None, "trainer.limit_val_batches leaves some of the text out"
        return text_bytes(self.tokenizer, self.validated_ids)

    @property
    def validated_ids(self) -> np.ndarray:
        """The supervised tokens of the validation documents, ``[n] int32``."""
        documents = self.val_documents
        chosen = _sample(documents, self.config.data.val_max_tokens)
        bounds = [documents.offsets[i : i + 2] for i in chosen]
        parts = [documents.ids[a:b][documents.supervised[a:b]] for a, b in bounds]
        return np.concatenate(parts)

    def val_document_ids(self, numbers: Sequence[int]) -> list[str]:
        """Return ids of validation documents, derived from their tokens and supervised positions.

        Documents that are equal in both are distinguished by their order.

        Args:
            numbers: numbers of the documents.
        """
        documents, seen = self.val_documents, Counter[str]()
        names = []
        for number in numbers:
            start, end = documents.offsets[number : number + 2]
            ids = np.ascontiguousarray(documents.ids[start:end], np.int32).tobytes()
            learned = np.ascontiguousarray(documents.supervised[start:end], bool).tobytes()
            name = sha256_bytes(ids + learned)[:16]
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        return names

    def val_dataloader(self) -> MicroBatches:
        """Return the validation documents, limited by ``data.val_max_tokens``."""
        if self._validation is None:
            data = self.config.data
            self._validation = sampled_stream(
                data, self.val_documents, data.val_max_tokens, pad_id=self.tokenizer.pad_id
            )
        return self._validation


def encoded_side(
    config: RunConfig, rows: Rows, side: Side, tokenizer: Tokenizer, cache: Path
) -> tuple[Encoded, TokenCounts]:
    """Encode one side of the rows, or open it from the cache.

    Raises:
        DataError: it has no supervised tokens.
    """
    pairs = getattr(rows, side.value)
    key = cache_key(config, rows, side, tokenizer)

    def build(kept: Path) -> Sequence[Encoded]:
        return encode_parts(pairs, tokenizer, key.labelling, kept)

    documents, counts = encoded_parts(cache, key, build)
    if not len(documents):
        raise DataError(
            "no row has a supervised token left",
            where=f"data ({side.value})",
            found=f"{counts.dropped} rows dropped, {counts.truncated} over the limit",
            expected=f"answers that begin within data.seq_len={key.labelling.seq_len} tokens",
            remedy="raise data.seq_len",
        )
    return _arranged(config, documents), counts


def _arranged(config: RunConfig, documents: Encoded) -> Encoded:
    """Return documents with shared prompts and room for virtual tokens, as the run asks for."""
    many = config.lora.spec.virtual_tokens(config.lora)
    placed = replace(documents, virtual_tokens=many) if many else documents
    return share_prompts(placed) if shares_prompts(config.objective) else placed


def sampled_stream(
    data: DataConfig, documents: Encoded, most_tokens: int, *, pad_id: int
) -> MicroBatches:
    """Build one pass over an unbiased sample of documents with about this many tokens."""
    chosen = _sample(documents, most_tokens)
    rooms = documents.room[chosen[:: documents.together] // documents.together]
    blocks = pack(rooms, data.seq_len) if data.packing else single(len(rooms))
    blocks = blocks.of_units(documents.together).of(chosen)
    stream = _stream(data, documents, blocks, seed=None, pad_id=pad_id)
    stream.total = math.ceil(len(stream.blocks) / stream.micro_batch_size)
    return stream


def _stream(
    data: DataConfig, documents: Encoded, blocks: Blocks, *, seed: int | None, pad_id: int
) -> MicroBatches:
    """Build a stream over blocks, without its length."""
    return MicroBatches(
        documents,
        blocks,
        micro_batch_size=data.micro_batch_size,
        total=0,
        seed=seed,
        packing=data.packing,
        pad_id=pad_id,
    )


def _sample(documents: Encoded, limit: int) -> np.ndarray:
    """Select documents until they contain ``limit`` tokens, in ascending order; whole units.

    The selection is independent of the run's seed and of packing, so that arms validate on the same
    documents. It is unbiased, unlike the first packed blocks, which hold the longest documents.
    """
    units, together = documents.units, documents.together
    order = np.random.Generator(np.random.Philox(0)).permutation(len(units))
    count = int(np.searchsorted(np.cumsum(units[order]), limit)) + 1
    return (np.sort(order[:count])[:, None] * together + np.arange(together)).reshape(-1)
