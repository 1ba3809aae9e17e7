"""A merged model as a complete Hugging Face directory."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from mens_exp.artifacts import atomic
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.backends.saved_model import copy_tokenizer
from mens_exp.export.merge import outlines, write_tensors
from mens_exp.layout.directory import INDEX, SINGLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from mens_exp.export.merge import Merge
    from mens_exp.layout.merge_map import Place
    from mens_exp.model.resolve import BaseModel

__all__ = ["MergedModel", "merged_config", "write_directory"]

# Beside weights, tokenizer and config.json: how it generates, its code, and what its licence asks.
_COPIED = ("generation_config.json", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedModel:
    """The parts of a merged directory besides its weights.

    Attributes:
        base: the model merged into.
        config: its config.json.
        unties: whether the head gets a weight of its own.
        tokenizer: whether the base's tokenizer goes with it; another one's ids were learned else.
        chat_template: a file that takes the place of the base's own template.
        told: lines of the model card, in Markdown.
        model_card: of the run that trained the adapter.
    """

    base: BaseModel
    config: dict[str, Any]
    unties: bool
    tokenizer: bool = True
    chat_template: Path | None = None
    told: Sequence[str] = ()
    model_card: Path | None = None


def merged_config(config: Mapping[str, Any], dtype: str, *, unties: bool) -> dict[str, Any]:
    """Return config.json of a merged model.

    Args:
        config: the base's.
        dtype: of the merged weights, as safetensors calls it.
        unties: whether the head gets a weight of its own.
    """
    made = {name: value for name, value in config.items() if name != "quantization_config"}
    made["dtype"] = _NAMES[dtype]
    if "torch_dtype" in made:  # the older name; where both stand, they agree
        made["torch_dtype"] = _NAMES[dtype]
    return made | ({"tie_word_embeddings": False} if unties else {})


def write_directory(
    directory: Path, places: Mapping[Path, Sequence[Place]], merge: Merge, model: MergedModel
) -> None:
    """Write a merged model, its weights in files of the base's names.

    Args:
        directory: an empty one.
        places: where each tensor comes from, by the base's file.
        merge: what becomes of it.
        model: everything else.

    Raises:
        RequestError: a number is beyond the output's format.
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
    atomic.write_text(directory / "README.md", _card(model))


def _index(places: Mapping[Path, Iterable[Place]], dtype: str) -> dict[str, Any]:
    every = [one for listed in places.values() for one in outlines(listed, dtype).values()]
    files = {one.name: shard.name for shard, listed in places.items() for one in listed}
    return {"metadata": {"total_size": sum(one.nbytes for one in every)}, "weight_map": files}


def _replace_template(directory: Path, template: Path) -> None:
    shutil.copyfile(template, directory / "chat_template.jinja")
    path = directory / "tokenizer_config.json"
    if path.is_file():
        config = parse_json(path.read_bytes(), str(path))
        if config.pop("chat_template", None) is not None:  # it would say something else
            atomic.write_json(path, config)


def _card(model: MergedModel) -> str:
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if model.base.source != "random":  # which exists nowhere but in its seed
        head["base_model"] = model.base.name
    if model.base.license:
        head["license"] = model.base.license
    lines = ["---", yaml.safe_dump(head, sort_keys=True).rstrip(), "---", ""]
    lines += [f"# {model.base.name.rpartition('/')[2]}, merged", "", *model.told, ""]
    return "\n".join(lines)
