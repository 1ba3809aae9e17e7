"""Merge an adapter into a checkpoint's files, tensor by tensor, as a Hugging Face directory.

Only the current tensor is in memory: half a byte per weight if the base is requantized to 4 bits, a
full copy if it is stored transposed, otherwise a block of rows.

Shapes: O outputs and I inputs of a projection, N rows of a piece.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import yaml

from mens_exp.artifacts import atomic
from mens_exp.artifacts.record import parse_json
from mens_exp.backends.saved_model import copy_tokenizer
from mens_exp.errors import RequestError, SetupError
from mens_exp.layout.adapter_base import WEIGHT_DTYPES
from mens_exp.layout.checkpoint_files import (
    INDEX,
    SINGLE,
    Outline,
    SafetensorsWriter,
    read_directory,
)
from mens_exp.layout.prequantized import CODES
from mens_exp.model.stored_weights import TORCH_DTYPES, CodedRows, StoredRows
from mens_exp.quant.binding import DTYPES
from mens_exp.quant.round_trip import quantized_rows
from mens_exp.tokenizer.implementations import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.layout.adapter_base import Place
    from mens_exp.lora.method import Change

    Rows = Callable[[int, int], torch.Tensor]
    from collections.abc import Sequence

    from mens_exp.model.sources import BaseModel

_PIECE = 1 << 20  # weights processed at a time: 4 MB of f32, to stay in the processor's cache
_SPARE = 50_000_000  # bytes for everything but weights: tokenizers take up to 35 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """The operation on a checkpoint's tensors.

    Attributes:
        deltas: the adapter's deltas by logical name.
        dtype: safetensors' name of the output's floating-point format. Sums are f32, rounded to it
            once, to the nearest and ties to even.
        quantizer: the base's quantizer; the delta is added to the 4-bit values, and unquantized
            weights are rounded to the compute dtype. None merges into the published weights.
    """

    deltas: Mapping[str, Change]
    dtype: str
    quantizer: Quantizer | None = None


def outlines(places: Iterable[Place], dtype: str) -> dict[str, Outline]:
    """Return the header of one output file; non-floating-point tensors keep their dtype."""
    return {
        one.name: Outline(
            dtype=dtype if one.info.dtype in WEIGHT_DTYPES else one.info.dtype, shape=one.info.shape
        )
        for one in places
    }


def write_tensors(
    file: BinaryIO, places: Iterable[Place], merge: Merge, *, of_model: bool = True
) -> None:
    """Write one safetensors file.

    Args:
        file: the open, empty file.
        places: the source of each tensor.
        merge: the operation on the tensors.
        of_model: write a file of a model directory, in the given order and with the metadata that
            transformers requires; otherwise sorted by name and without metadata, as the safetensors
            library writes a dictionary.

    Raises:
        RequestError: a value exceeds the output's format, or blocks of 4-bit values would cross the
            ends of rows.
        ModelFileError: a file of the base ended while it was read.
    """
    by_name = {one.name: one for one in places}
    names = list(by_name) if of_model else sorted(by_name)
    outlined = outlines((by_name[name] for name in names), merge.dtype)
    writer = SafetensorsWriter(file, outlined, {"format": "pt"} if of_model else None)
    for name in writer.order:
        _write(writer, by_name[name], merge)
    writer.close()


def _write(writer: SafetensorsWriter, place: Place, merge: Merge) -> None:
    stored = (
        CodedRows(place.shard, place.key)
        if place.info.dtype == CODES
        else StoredRows(place.shard, place.key, place.info)
    )
    changes = place.logical is not None or merge.quantizer is not None
    inner = math.prod(stored.inner)
    if place.info.dtype not in WEIGHT_DTYPES or (not changes and place.info.dtype == merge.dtype):
        for first, last in _pieces(stored.rows, inner):
            writer.write(place.name, _bytes(stored.read(first, last)))
    elif place.transposed and changes:
        _write_transposed(writer, place, stored, merge)
    else:
        rows = _merged(place, lambda first, last: stored.read(first, last).float(), merge)
        for first, last in _pieces_of(place, merge, stored.rows, inner):
            writer.write(place.name, _bytes(_rounded(rows(first, last), place, merge.dtype)))


def _write_transposed(
    writer: SafetensorsWriter, place: Place, stored: StoredRows | CodedRows, merge: Merge
) -> None:
    """Merge a weight stored ``[I, O]``; quantizer and row norms operate on rows of ``[O, I]``."""
    stored_IO = stored.read(0, stored.rows)
    rows = _merged(
        place, lambda first, last: stored_IO[:, first:last].T.float().contiguous(), merge
    )
    out_IO = torch.empty(stored_IO.shape, dtype=TORCH_DTYPES[merge.dtype])
    for first, last in _pieces_of(place, merge, stored_IO.shape[1], stored_IO.shape[0]):
        out_IO[:, first:last] = _rounded(rows(first, last), place, merge.dtype).T
    writer.write(place.name, _bytes(out_IO))


def _merged(place: Place, published: Rows, merge: Merge) -> Rows:
    """Return a reader of the merged weight's rows, given a reader of the published weight's."""
    delta = None if place.logical is None else merge.deltas[place.logical]
    base = published
    if merge.quantizer is not None:
        base = _as_trained(place, published, delta, merge.quantizer)

    def rows(first: int, last: int) -> torch.Tensor:
        weight_NI = base(first, last)
        return weight_NI if delta is None else delta.onto(weight_NI, first)

    return rows


def _as_trained(place: Place, published: Rows, delta: Change | None, quantizer: Quantizer) -> Rows:
    """Return a reader of a weight's rows as they were when the adapter was trained."""
    if place.quantizer is None:
        return lambda first, last: (
            published(first, last).to(DTYPES[quantizer["compute_dtype"]]).float()
        )

    def left(first: int, last: int) -> torch.Tensor:
        weight_NI = published(first, last)
        return weight_NI if delta is None else delta.left_of(weight_NI, first)

    rows, columns = place.info.shape
    shape = (columns, rows) if place.transposed else (rows, columns)
    return quantized_rows(left, shape, place.quantizer, where=place.key)


def _pieces_of(place: Place, merge: Merge, rows: int, inner: int) -> Iterator[tuple[int, int]]:
    """Return the pieces of a weight: a single one if its change cannot be computed by rows."""
    change = None if place.logical is None else merge.deltas[place.logical]
    return _pieces(rows, inner) if change is None or change.by_rows else iter([(0, rows)])


def _pieces(rows: int, inner: int) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE // max(1, inner))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _rounded(values: torch.Tensor, place: Place, dtype: str) -> torch.Tensor:
    """Round f32 values to the output's format; refuse values that would become infinite."""
    out = values.to(TORCH_DTYPES[dtype])
    if dtype == "F16" and bool((out.isinf() & values.isfinite()).any()):
        raise RequestError(
            "a merged weight is beyond f16",
            where=place.name,
            found=f"{float(values.abs().max()):g}",
            expected="at most 65504",
            remedy="add merge.dtype=bf16",
        )
    return out


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def refuse_full_disk(out: Path, places: Iterable[Place], dtype: str) -> None:
    """Check that the disk has room for the output before writing.

    Raises:
        SetupError: the disk is too full.
    """
    needed = sum(one.nbytes for one in outlines(places, dtype).values())
    there = next(parent for parent in (out, *out.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed + _SPARE:
        raise SetupError(
            "the disk has no room for the merged weights",
            where=str(there),
            found=f"{free / 1e9:.2f} GB free",
            expected=f"{(needed + _SPARE) / 1e9:.2f} GB",
            remedy="free space, or name another place with out=",
        )


# Further files of a model: generation settings, its code, and files that its licence requires.
_COPIED = ("generation_config.json", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedModel:
    """The parts of a merged directory besides its weights.

    Attributes:
        base: the base model.
        config: its config.json.
        unties: whether the head gets a separate weight.
        tokenizer: whether to copy the base's tokenizer; not if training used another one.
        chat_template: a file that replaces the base's own template.
        card_lines: lines for the model card, in Markdown.
        model_card: model card of the run that trained the adapter.
    """

    base: BaseModel
    config: dict[str, Any]
    unties: bool
    tokenizer: bool = True
    chat_template: Path | None = None
    card_lines: Sequence[str] = ()
    model_card: Path | None = None


def merged_config(config: Mapping[str, Any], dtype: str, *, unties: bool) -> dict[str, Any]:
    """Return config.json of a merged model.

    Args:
        config: the base's config.json.
        dtype: safetensors' name for the dtype of the merged weights.
        unties: whether the head gets a separate weight.
    """
    made = {name: value for name, value in config.items() if name != "quantization_config"}
    made["dtype"] = _NAMES[dtype]
    if "torch_dtype" in made:  # the older name; if both are present, they must agree
        made["torch_dtype"] = _NAMES[dtype]
    return made | ({"tie_word_embeddings": False} if unties else {})


def write_directory(
    directory: Path, places: Mapping[Path, Sequence[Place]], merge: Merge, model: MergedModel
) -> None:
    """Write a merged model, with weights in files named like the base's.

    Args:
        directory: an empty directory.
        places: the source of each tensor, by the base's file.
        merge: the operation on the tensors.
        model: everything else.

    Raises:
        RequestError: a value exceeds the output's format.
        ModelFileError: a file of the base cannot be read.
    """
    source = model.base.directory
    for shard, listed in places.items():
        with (directory / shard.name).open("xb") as file:
            write_tensors(file, listed, merge)
    if set(places) != {source / SINGLE}:
        atomic.write_json(directory / INDEX, _index(places, merge.dtype))
    config = merged_config(model.config, merge.dtype, unties=model.unties)
    atomic.write_json(directory / "config.json", config)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, directory / path.name)
    if model.tokenizer:
        copy_tokenizer(source, directory)
        if model.chat_template is not None:
            _replace_template(directory, model.chat_template)
    if model.model_card is not None:
        shutil.copyfile(model.model_card, directory / "MODEL_CARD.md")
    title = f"{model.base.name.rpartition('/')[2]}, merged"
    atomic.write_text(directory / "README.md", _card(model.base, title, model.card_lines))


def write_base(directory: Path, base: BaseModel) -> None:
    """Copy a base model so that other programs can load it; add ChatML if it has no template.

    Args:
        directory: an empty directory.
        base: the model.

    Raises:
        ModelFileError: a file is missing, or was modified in the meantime.
    """
    for shard in read_directory(base.directory).shards:
        shutil.copyfile(shard, directory / shard.name)
    for pattern in ("config.json", INDEX, *_COPIED):
        for path in base.directory.glob(pattern):
            shutil.copyfile(path, directory / path.name)
    base.refuse_changed()
    copy_tokenizer(base.directory, directory)
    tokenizer = HfTokenizer.from_directory(base.directory)
    if not tokenizer.has_own_template:
        atomic.write_text(directory / "chat_template.jinja", tokenizer.chat_template)
    told = [f"The base model `{base.name}`, with the weights that mens_exp trains on:"]
    told += ["", f"- {_MADE[base.source]}", f"- their sha256: `{base.weights_sha256}`"]
    if not tokenizer.has_own_template:
        told.append("- chat_template.jinja is ChatML, as mens_exp renders prompts for this model")
    atomic.write_text(directory / "README.md", _card(base, base.name.rpartition("/")[2], told))


_MADE = {
    "bundled": "the 4-bit blocks of an installed package, dequantized and rounded to bf16",
    "random": "drawn at random from `model.init_seed`; of use in trials only",
    "directory": "copied from a directory",
    "hub": "downloaded from the hub",
}


def _index(places: Mapping[Path, Iterable[Place]], dtype: str) -> dict[str, Any]:
    every = [one for listed in places.values() for one in outlines(listed, dtype).values()]
    files = {one.name: shard.name for shard, listed in places.items() for one in listed}
    return {"metadata": {"total_size": sum(one.nbytes for one in every)}, "weight_map": files}


def _replace_template(directory: Path, template: Path) -> None:
    shutil.copyfile(template, directory / "chat_template.jinja")
    path = directory / "tokenizer_config.json"
    if path.is_file():
        config = parse_json(path.read_bytes(), str(path))
        if config.pop("chat_template", None) is not None:  # it would contradict the new template
            atomic.write_json(path, config)


def _card(base: BaseModel, title: str, card_lines: Sequence[str]) -> str:
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base.source != "random":  # random weights are published nowhere
        head["base_model"] = base.name
    if base.license:
        head["license"] = base.license
    lines = ["---", yaml.safe_dump(head, sort_keys=True).rstrip(), "---", ""]
    lines += [f"# {title}", "", *card_lines, ""]
    return "\n".join(lines)
