"""The base model of an adapter, read from headers: layers, shapes, keys, and the merge map.

The map gives the base tensor of each layer, and the source of each output tensor. Names and headers
suffice, so everything that cannot be merged is refused before any weight is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_tensors import few
from mens_exp.config.model import HfModel
from mens_exp.errors import DataError, ModelFileError, RequestError, expected_name
from mens_exp.layout import hub
from mens_exp.layout.checkpoint_files import read_directory, read_headers
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.model_cache import ready_directory
from mens_exp.layout.modules import every_module, weight_shape
from mens_exp.layout.prequantized import CODES
from mens_exp.layout.shape import HEAD, base_key, shape_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.config.model import ModelConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.checkpoint_files import TensorInfo
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.shape import Shape


@dataclass(frozen=True, kw_only=True)
class AdapterBase:
    """A base model without its weights.

    Attributes:
        name: the Hub id, or the name of the directory or option.
        shape: its dimensions.
        keys: keys of its checkpoint.
        revision: the Hub commit or branch, if known.
    """

    name: str
    shape: Shape
    keys: Collection[str]
    revision: str | None = None

    @cached_property
    def modules(self) -> dict[str, LinearModule]:
        """Every module that can get an adapter, by logical name, in the model's order."""
        return {one.logical: one for one in every_module(self.shape)}

    @property
    def embed_key(self) -> str:
        """Key of the embedding table."""
        return base_key(self.shape.family.embedding, self.shape.family, self.keys)

    def key_of(self, layer: str) -> str:
        """Return the key of a logical layer's weight."""
        module = self.modules[layer]
        return base_key(module.path, self.shape.family, self.keys, module.norm or "weight")

    def problems(
        self, manifest: AdapterManifest, tensors: Mapping[str, npt.NDArray[np.float32]], where: str
    ) -> list[DataError]:
        """List the parts of an adapter that this base does not have.

        Args:
            manifest: manifest of the adapter; all its layers have tensors.
            tensors: tensors by name.
            where: location of the adapter, for messages.
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
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        for layer in manifest.layer_order:
            module = self.modules.get(layer)
            if module is None:
                continue
            ours = weight_shape(module)
            theirs = manifest.form.weight_shape(layer, shapes)
            if not fits(theirs, ours):
                yield _of_another_base(
                    f"{where}: {layer}",
                    f"a delta of {_shown(theirs)}",
                    f"{list(ours)}, as {self.name} has it",
                )


def fits(change: Sequence[int | None], weight: Sequence[int]) -> bool:
    """Return whether a change has a weight's shape; None matches any size."""
    pairs = zip(change, weight, strict=False)
    return len(change) == len(weight) and all(one in {None, size} for one, size in pairs)


def _shown(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if one is None else str(one) for one in shape)}]"


def base_of(model: ModelConfig, cache: Path) -> AdapterBase:
    """Describe a base model by its headers; nothing is downloaded, created or loaded.

    Args:
        model: the `model` group.
        cache: directory of models created locally.

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
        name, place = model.name, ready_directory(model, cache)
        keys = () if place is None else read_directory(place).tensors
    return AdapterBase(name=name, shape=shape, keys=keys or _usual_keys(shape), revision=revision)


def _usual_keys(shape: Shape) -> set[str]:
    """Return the keys under which transformers saves a model of these dimensions."""
    keys = {one.parameter for one in every_module(shape)} | {f"{shape.family.embedding}.weight"}
    return keys - {f"{HEAD}.weight"} if shape.tied else keys


def _of_another_base(where: str, found: object, expected: str) -> DataError:
    return DataError(
        "the adapter is for another base model",
        where=where,
        found=found,
        expected=expected,
        remedy="name the model that it was trained on: model=hf model.id=<directory or hub id>",
    )


FLOAT_DTYPES = ("F32", "F16", "BF16")
WEIGHT_DTYPES = (*FLOAT_DTYPES, CODES)
_HEAD_KEY = f"{HEAD}.weight"
_NUMBER = re.compile(r"\.(\d+)\.")
_OF_LAYER = re.compile(r"(?:l|mid)(\d+)")
_MATRIX = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """One layer of an adapter: its logical name, its key in the base, and its shape there.

    The shape is ``(out, in)``, or ``(experts, out, in)`` if one base tensor has all experts; None
    is a size that the adapter's tensors do not determine.
    """

    logical: str
    key: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The source of one output tensor.

    Attributes:
        name: name in the output.
        key: key in the base.
        shard: file of the base.
        info: header entry in the base.
        logical: layer of the adapter that is merged into it, if any.
        transposed: whether it is stored as ``[in, out]``.
        quantizer: quantizer of the values that the adapter was trained on, if any.
    """

    name: str
    key: str
    shard: Path
    info: TensorInfo
    logical: str | None = None
    transposed: bool = False
    quantizer: Quantizer | None = None


def stored_key(key: str, keys: Collection[str]) -> str | None:
    """Return a checkpoint's name for a key; None if it has none.

    Checkpoints of the same model differ in the prefix of their names: ``transformer.h.0…`` saved
    with the head is ``h.0…`` without it.
    """
    prefixes = {family.layers.partition(".")[0] for family in FAMILIES.values()}
    first, _, rest = key.partition(".")
    tried = [key, *([rest] if first in prefixes else [f"{one}.{key}" for one in sorted(prefixes)])]
    return next((one for one in tried if one in keys), None)


def layer_problems(
    layers: Iterable[AdaptedLayer], shards: Iterable[Path], where: str
) -> list[MensError]:
    """List the problems that prevent an adapter's layers from being merged into a checkpoint.

    Args:
        layers: in the adapter's own order.
        shards: the checkpoint's files.
        where: the adapter, for messages.

    Raises:
        ModelFileError: a shard is not a complete safetensors file.
    """
    layers = list(layers)
    tensors = {
        name: info for header in read_headers(shards).values() for name, info in header.items()
    }
    kinds = _kinds(one.key for one in layers)
    if len(kinds) > 1:
        listed = ", ".join(f"{key} ({kind})" for kind, key in sorted(kinds.items()))
        return [
            RequestError(
                "the adapter's layers are of several model families",
                where=f"{where}: base_key_map",
                found=listed,
                expected="keys of one family",
                remedy="write the adapter again from the run that made it",
            )
        ]
    theirs = _kinds(tensors)
    if kinds and theirs and not kinds.keys() & theirs.keys():
        return [
            RequestError(
                "adapter and base are of different model families",
                where=where,
                found=f"an adapter of {next(iter(kinds))}, a base of {', '.join(sorted(theirs))}",
                expected="the base that the adapter was trained on",
                remedy="name it with base=",
            )
        ]
    return [*_order_problems(layers, where), *_tensor_problems(layers, tensors)]


def _kinds(keys: Iterable[str]) -> dict[str, str]:
    """Return the naming schemes used by the keys, each with an example key."""
    found: dict[str, str] = {}
    for key in keys:
        for root, kind in _ROOTS.items():
            if key.startswith(f"{root}."):
                found.setdefault(kind, key)
                break
    return found


def _roots() -> dict[str, str]:
    roots: dict[str, str] = {}
    for family in FAMILIES.values():
        for path in (family.layers, family.embedding):
            for root in (path, path.partition(".")[2]):
                roots.setdefault(root, family.model_type)
    return roots


_ROOTS = _roots()  # the first family in the table represents all that share its names


def _order_problems(layers: list[AdaptedLayer], where: str) -> Iterator[MensError]:
    """Yield layers whose name and key name different decoder layers, and stacks out of order."""
    last = -1
    for one in layers:
        name, key = _OF_LAYER.match(one.logical), _NUMBER.search(one.key)
        if name is None or key is None:
            continue
        number = int(key[1])
        if one.logical.startswith("mid"):
            if number <= last:
                yield RequestError(
                    "the stack's layers are not in the base's order",
                    where=f"{where}: layer_order",
                    found=f"{one.logical} is {one.key}",
                    expected=f"a decoder layer after {last}",
                )
            last = number
        elif number != int(name[1]):
            yield RequestError(
                "name and key are of different decoder layers",
                where=f"{where}: base_key_map.{one.logical}",
                found=one.key,
                expected=f"a key of layer {name[1]}",
            )


def _tensor_problems(
    layers: Iterable[AdaptedLayer], tensors: Mapping[str, TensorInfo]
) -> Iterator[MensError]:
    for one in layers:
        key = stored_key(one.key, tensors)
        if key is None:
            yield ModelFileError(
                "the base has no such tensor",
                where=one.logical,
                found=one.key,
                expected=expected_name(one.key, tensors),
                remedy="name the base that the adapter was trained on, or all its shards",
            )
            continue
        shape = one.shape[::-1] if is_transposed(key) else one.shape
        if not fits(shape, tensors[key].shape):
            yield ModelFileError(
                "the adapter's layer does not fit the base's tensor",
                where=f"{one.logical}: {key}",
                found=str(list(tensors[key].shape)),
                expected=_shown(shape),
                remedy="name the base that the adapter was trained on",
            )
        elif tensors[key].dtype not in WEIGHT_DTYPES:
            yield ModelFileError(
                "the base's tensor cannot be merged into",
                where=f"{one.logical}: {key}",
                found=tensors[key].dtype,
                expected=f"one of {', '.join(FLOAT_DTYPES)}: an unquantized base",
                remedy="name the unquantized model with base=",
            )


def is_transposed(key: str) -> bool:
    """Return whether a key's weight is stored as ``[in, out]`` (transformers' Conv1D)."""
    for family in FAMILIES.values():
        if family.transposed:
            layers = {family.layers, family.layers.partition(".")[2]}
            paths = "|".join(re.escape(one.path) for one in family.projections)
            roots = "|".join(map(re.escape, sorted(layers)))
            if re.fullmatch(rf"(?:{roots})\.\d+\.(?:{paths})\.weight", key):
                return True
    return False


def untied(layer: AdaptedLayer) -> bool:
    """Return whether a layer is a head that is tied to the embedding table in the base."""
    return layer.logical == HEAD and not layer.key.endswith(_HEAD_KEY)


def places(
    layers: Iterable[AdaptedLayer],
    shards: Iterable[Path],
    *,
    only_merged: bool,
    unties: bool = True,
    quantizers: Mapping[str, Quantizer] | None = None,
) -> dict[Path, list[Place]]:
    """Return the source of every output tensor, by file of the base, in the base's order.

    Args:
        layers: layers without problems.
        shards: the base's files.
        only_merged: omit tensors that nothing is merged into.
        unties: give a head that is tied to the embedding table a separate tensor, in the last
            file; otherwise its delta is merged into the table.
        quantizers: quantizer of the base values that the adapter was trained on, by key;
            ``lm_head`` represents a tied head.
    """
    quantizers = quantizers or {}
    headers = read_headers(shards)
    keys = {key: shard for shard, header in headers.items() for key in header}
    layers = list(layers)
    apart = [one for one in layers if unties and untied(one)]
    by_key = {stored_key(one.key, keys): one for one in layers if one not in apart}
    out: dict[Path, list[Place]] = {shard: [] for shard in headers}
    for shard, header in headers.items():
        for key, info in sorted(header.items(), key=lambda item: item[1].start):
            layer = by_key.get(key)
            if layer is not None or not only_merged:
                place = Place(
                    name=key,
                    key=key,
                    shard=shard,
                    info=info,
                    logical=None if layer is None else layer.logical,
                    transposed=is_transposed(key),
                    quantizer=quantizers.get(key),
                )
                out[shard].append(place)
    for head in apart:
        table = stored_key(head.key, keys)
        assert table is not None, "layer_problems has looked"
        made = Place(
            name=_HEAD_KEY,
            key=table,
            shard=keys[table],
            info=headers[keys[table]][table],
            logical=HEAD,
            quantizer=quantizers.get(HEAD),
        )
        out[max(out)].append(made)
    return out


def dtype_of(infos: Iterable[TensorInfo]) -> str:
    """Return the dtype that preserves the base's precision: BF16 if all tensors are, else F32."""
    found: set[Any] = {info.dtype for info in infos if info.dtype in FLOAT_DTYPES}
    return "BF16" if found == {"BF16"} else "F32"
