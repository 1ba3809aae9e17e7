"""The base model that an adapter is for, as its headers tell it: layers, shapes and keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mens_exp.artifacts.adapter_tensors import few
from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.model import HfModel
from mens_exp.errors import DataError
from mens_exp.layout import hub
from mens_exp.layout.cached import ready
from mens_exp.layout.directory import read_directory
from mens_exp.layout.names import HEAD, base_key
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import adapter_shapes, linear_modules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.config.model import ModelConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.layout.targets import LinearModule

__all__ = ["AdapterBase", "base_of"]


@dataclass(frozen=True, kw_only=True)
class AdapterBase:
    """A base model without its weights.

    Attributes:
        name: the hub's id, or the directory's or option's name.
        shape: its dimensions.
        keys: of its checkpoint.
        revision: the hub's commit or branch, where it is told.
    """

    name: str
    shape: Shape
    keys: Collection[str]
    revision: str | None = None

    @cached_property
    def modules(self) -> dict[str, LinearModule]:
        """Every module that an adapter can sit on, by logical name, in the model's order."""
        return {one.logical: one for one in linear_modules(self.shape)}

    @property
    def embed_key(self) -> str:
        """Key of the embedding table."""
        return base_key(self.shape.family.embedding, self.shape.family, self.keys)

    def key_of(self, layer: str) -> str:
        """Return the key of a logical layer's weight."""
        return base_key(self.modules[layer].path, self.shape.family, self.keys)

    def problems(
        self, manifest: AdapterManifest, tensors: Mapping[str, npt.NDArray[np.float32]], where: str
    ) -> list[DataError]:
        """List what of an adapter this base does not have.

        Args:
            manifest: of the adapter; its layers have their tensors.
            tensors: by name.
            where: the adapter's place, for the messages.
        """
        found = [
            *self._layer_problems(manifest, where),
            *self._shape_problems(manifest, tensors, where),
        ]
        for name, ours in (("vocab", self.shape.vocab_size), ("d_model", self.shape.hidden_size)):
            theirs = getattr(manifest, name)
            if theirs != ours:
                found.append(
                    _of_another_base(f"{where}: {name}", theirs, f"{ours}, as {self.name} has it")
                )
        return few(found, where)

    def _layer_problems(self, manifest: AdapterManifest, where: str) -> Iterator[DataError]:
        for layer in manifest.layer_order:
            if layer not in self.modules:
                yield _of_another_base(where, layer, expected_name(layer, self.modules))
                continue
            theirs, ours = manifest.base_key_map[layer], self.key_of(layer)
            if theirs != ours:
                place = f"{where}: base_key_map.{layer}"
                yield _of_another_base(place, theirs, f"{ours}, as {self.name} has it")

    def _shape_problems(
        self, manifest: AdapterManifest, tensors: Mapping[str, npt.NDArray[np.float32]], where: str
    ) -> Iterator[DataError]:
        for layer in manifest.layer_order:
            module = self.modules.get(layer)
            if module is None:
                continue
            shapes = adapter_shapes(module, manifest.rank_of(layer))
            ours = [*shapes["lora_b"][:-1], module.width]
            A, B = (tensors[f"{layer}.lora_{which}"].shape for which in "ab")
            theirs = [*B[:-1], A[-1]]
            if theirs != ours:
                yield _of_another_base(
                    f"{where}: {layer}", f"a delta of {theirs}", f"{ours}, as {self.name} has it"
                )


def base_of(model: ModelConfig, cache: Path) -> AdapterBase:
    """Describe a base model by its headers; nothing is downloaded, made or loaded.

    Args:
        model: the `model` group.
        cache: where models that have to be made lie.

    Raises:
        ModelFileError: a model's files are missing, truncated, or of an unknown family.
        SetupError: the model is on the hub, which cannot be reached.
    """
    shape, revision = shape_of(model), None
    if isinstance(model, HfModel):
        described = hub.describe(model)
        name = model.id if hub.local(model.id) is None else described.path.resolve().name
        keys: Collection[str] = described.tensors
        revision = model.revision
    else:
        name, place = model.name, ready(model, cache)
        keys = () if place is None else read_directory(place).tensors
    return AdapterBase(name=name, shape=shape, keys=keys or _usual_keys(shape), revision=revision)


def _usual_keys(shape: Shape) -> set[str]:
    """Return the keys that transformers saves a model of these dimensions under."""
    paths = {one.path for one in linear_modules(shape)} | {shape.family.embedding}
    if shape.tied:
        paths.discard(HEAD)
    return {f"{path}.weight" for path in paths}


def _of_another_base(where: str, found: object, expected: str) -> DataError:
    return DataError(
        "the adapter is for another base model",
        where=where,
        found=found,
        expected=expected,
        remedy="name the model that it was trained on: model=hf model.id=<directory or hub id>",
    )
