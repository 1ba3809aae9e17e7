"""Dimensions of a model, the logical names of its layers, and the proxy's projection stack.

``model.layers.3.self_attn.q_proj`` is ``l3.q``, ``transformer.h.3.attn.c_attn`` is ``l3.qkv``, and
the head is ``lm_head`` (REFERENCE, adapter schema).

A middle projection of the proxy is a decoder layer's attention output (``o_proj``, GPT-2's
``c_proj``); the head is the embedding table. The stack is either complete or consists of the head
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import Composition
from mens_exp.config.model import BundledModel, HfModel, ModelConfig, RandomModel
from mens_exp.errors import ConfigError, ModelFileError
from mens_exp.layout import hub
from mens_exp.layout.families import FAMILIES, LAYERS, Family, Projection, family_in
from mens_exp.layout.model_cache import random_config
from mens_exp.layout.prequantized import CODES, StoredLayers, format_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from mens_exp.config.backend import ProxyConfig
    from mens_exp.layout.checkpoint_files import ModelDirectory
    from mens_exp.layout.norms import Norm

UNBOUNDED = 1 << 20  # tokens; for a model without a maximum length, such as one with ALiBi


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Dimensions of a model, and the layers that were published as codes."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied: bool
    stored: StoredLayers | None = None

    def projections(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of each projection of a decoder layer, by its path inside it."""
        return {one.path: self.size_of(one) for one in self.family.projections if one.is_in(layer)}

    def size_of(self, projection: Projection) -> tuple[int, int]:
        """Return ``(out, in)`` of a projection."""
        sizes = self._sizes()
        return sum(sizes[name] for name in projection.out), sizes[projection.width]

    def norm_size(self, norm: Norm) -> int:
        """Return the size of a norm's vectors."""
        return self._sizes()[norm.size]

    def _sizes(self) -> dict[str, int]:
        return {
            **self.family.sizes,
            "d": self.hidden_size,
            "f": self.intermediate_size,
            "q": self.num_attention_heads * self.head_dim,
            "kv": self.num_key_value_heads * self.head_dim,
            "h": self.head_dim,
        }

    def facts(self) -> dict[str, int]:
        """Return the dimensions stored in records, under the seeds' names."""
        return {
            "n_layers": self.num_hidden_layers,
            "n_heads": self.num_attention_heads,
            "d_model": self.hidden_size,
            "vocab_size": self.vocab_size,
        }

    @property
    def linear_parameters(self) -> int:
        """Number of weights in all projections of all layers."""
        sizes = [(one, *self.size_of(one)) for one in self.family.projections]
        return (
            sum(out * width * self._times(one) for one, out, width in sizes if one.slot is None)
            + self.expert_parameters
        )

    @property
    def expert_parameters(self) -> int:
        """Number of expert weights that transformers stores as three-dimensional tensors."""
        sizes = [(one, *self.size_of(one)) for one in self.family.projections]
        return sum(
            one.slot.matrices * out * width * self._times(one)
            for one, out, width in sizes
            if one.slot is not None
        )

    def _times(self, projection: Projection) -> int:
        """Return the number of layers that have a projection."""
        layers = projection.layers
        return self.num_hidden_layers if layers is None else len(layers)

    @property
    def small_parameters(self) -> int:
        """Weights of norms, biases and a position table; 0 if the family is not verified.

        Based on the family's published models; a config.json may enable more biases.
        """
        family, sizes = self.family, self._sizes()
        if not family.verified:
            return 0
        shapes = self.projections()
        in_layer = sum(sizes[one.size] * len(one.vectors) for one in family.norms)
        in_layer += sum(shapes[p.path][0] for p in family.projections if p.logical in family.biased)
        positions = self.max_position_embeddings * self.hidden_size * family.learned_positions
        last = sum(sizes[one.size] * len(one.vectors) for one in family.outer_norms)
        return self.num_hidden_layers * in_layer + last + positions

    @property
    def parameters(self) -> int:
        """Number of weights in linear layers, the embedding, and an untied head."""
        return self.linear_parameters + self.embedding_parameters

    @property
    def total_parameters(self) -> int:
        """Number of all weights, as far as they are known; see :attr:`small_parameters`."""
        return self.parameters + self.small_parameters

    @property
    def embedding_parameters(self) -> int:
        """Number of weights in the embedding table and, if it is not tied, the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)


def family_for(model: ModelConfig) -> Family:
    """Return a model's family; its dimensions may be wrong or unknown.

    Raises:
        ModelFileError: a model's files are missing, truncated, or of an unknown family.
        SetupError: the model is on the hub, which cannot be reached.
    """
    if isinstance(model, HfModel):
        return family_in(hub.describe(model))
    return FAMILIES[model.family.value if isinstance(model, RandomModel) else "llama"]


def shape_of(model: ModelConfig) -> Shape:
    """Return a model's dimensions from the configuration or from its config.json.

    Raises:
        ModelFileError: a model's files are missing, truncated, or of an unknown family.
        SetupError: the model is on the hub, which cannot be reached.
    """
    if isinstance(model, HfModel):
        directory = hub.describe(model)
        where = str(directory.path / "config.json")
        found = _from_config(directory.config, where, family_in(directory))
        return replace(found, stored=stored_in(directory))
    if isinstance(model, RandomModel):
        return _from_config(random_config(model), "model", family_for(model))
    assert isinstance(model, BundledModel)
    return Shape(
        family=family_for(model),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        tied=True,
    )


def stored_in(directory: ModelDirectory) -> StoredLayers | None:
    """Return the layers that are stored as codes; None also for an unsupported format."""
    try:
        return stored_layers(directory)
    except ModelFileError:
        return None  # the checks before a run refuse it by name


def stored_layers(directory: ModelDirectory) -> StoredLayers | None:
    """Return the layers that are stored as codes; None for an unquantized model.

    Raises:
        ModelFileError: the format is not supported, or no layer is stored in it.
    """
    where, tensors = str(directory.path), directory.tensors
    found = format_of(directory.config, where)
    if found is None:
        return None
    names = frozenset(name for name, info in tensors.items() if info.dtype == CODES)
    if tensors and not names:
        raise ModelFileError(
            "config.json declares a quantization, but no layer is quantized",
            where=f"{where}: config.json: quantization_config",
            found=f"{found.method}, and no tensor whose name ends in .{found.marker}",
            remedy="take the model that these weights were made from; or take quantization_config "
            "out of config.json, if they are not quantized",
        )
    family = family_in(directory)
    if family.transposed:
        raise ModelFileError(
            "quantized checkpoints of this family are not supported",
            where=where,
            found=family.model_type,
            expected="a family whose layers are torch.nn.Linear, such as llama",
            remedy="take the model that these weights were made from",
        )
    return StoredLayers(format=found, names=names if tensors else None)


def _from_config(config: dict[str, Any], where: str, family: Family) -> Shape:
    keys = family.keys
    try:
        hidden, heads = int(config[keys["hidden_size"]]), _heads(config, family)
        width = config.get(keys["intermediate_size"])
        if width is None and (family.transposed or not family.verified):
            width = 4 * hidden  # GPT-2 omits the default width; for others it is in the headers
        return Shape(
            family=family,
            hidden_size=hidden,
            intermediate_size=int(config[keys["intermediate_size"]] if width is None else width),
            num_hidden_layers=_layers(config, keys["num_hidden_layers"], family),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or family.head_dim or hidden // heads),
            vocab_size=int(config[keys["vocab_size"]]),
            max_position_embeddings=_longest(config, keys["max_position_embeddings"], family),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
        )
    except KeyError as error:
        raise ModelFileError(f"has no {error.args[0]}", where=where) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError("has an unusable dimension", where=where, found=str(error)) from error


def _layers(config: dict[str, Any], key: str, family: Family) -> int:
    """Return the number of layers; from the headers if config.json lists their kinds instead."""
    return int(config[key]) if config.get(key) or family.verified else family.sizes[LAYERS]


def _heads(config: dict[str, Any], family: Family) -> int:
    """Return the number of attention heads; a recurrent model counts as having one wide head."""
    key = family.keys["num_attention_heads"]
    return int(config[key]) if family.verified or config.get(key) is not None else 1


def _longest(config: dict[str, Any], key: str, family: Family) -> int:
    """Return the maximum sequence length in tokens; models without a position table may lack it."""
    if family.verified or config.get(key) is not None:
        return int(config[key])
    return UNBOUNDED


def check_weights(directory: ModelDirectory) -> None:
    """Compare the projections of every layer with the dimensions in config.json.

    Loading would initialize a missing matrix randomly and only log a warning.

    Raises:
        ModelFileError: names the first projection that is missing or has a different shape.
    """
    where = str(directory.path / "config.json")
    shape = _from_config(directory.config, where, family_in(directory))
    layers = shape.family.layers.partition(".")[2]
    # Keys of a model saved without its head lack the first part of each name.
    found = {
        name[name.find(f"{layers}.") :]: info.shape for name, info in directory.tensors.items()
    }
    coded = {
        name[name.find(f"{layers}.") :]
        for name, info in directory.tensors.items()
        if info.dtype == CODES
    }
    stacked = {
        one.path: one.slot.experts
        for one in shape.family.projections
        if one.slot is not None and one.slot.expert is None
    }
    for layer in range(shape.num_hidden_layers):
        for path, (out, width) in shape.projections(layer).items():
            expected: tuple[int, ...] = (width, out) if shape.family.transposed else (out, width)
            if path in stacked:
                expected = (stacked[path], *expected)
            key = f"{layers}.{layer}.{path}.weight"
            if key in coded:
                expected = (out, width) if len(found[key]) > 1 else (out * width,)
            if found.get(key) != expected:
                raise ModelFileError(
                    "weights disagree with config.json",
                    where=f"{directory.path}: {key}",
                    found=str(list(found[key])) if key in found else "no such tensor",
                    expected=str(list(expected)),
                )


HEAD = "lm_head"
_PEFT_PREFIX = "base_model.model."


def logical_name(module_path: str, family: Family) -> str:
    """Return a module's logical name in adapters: ``model.layers.3.mlp.up_proj`` is ``l3.up``.

    Raises:
        ModelFileError: the path is not a projection of the family.
    """
    path = module_path.removeprefix(_PEFT_PREFIX)
    if path == HEAD:
        return HEAD
    layer, _, inside = path.removeprefix(f"{family.layers}.").partition(".")
    for projection in family.projections:
        if projection.path == inside and layer.isdigit():
            return f"l{layer}.{projection.logical}"
    raise ModelFileError("is not a projection with a logical name", where=module_path)


def base_key(
    module_path: str, family: Family, keys: Collection[str], vector: str = "weight"
) -> str:
    """Return the key of a module's weight in the base checkpoint.

    Args:
        module_path: path of the module, optionally with PEFT's prefix.
        family: the model's family.
        keys: the checkpoint's keys. Checkpoints saved without the head lack the first part of
            every name; a tied head is the embedding table.
        vector: ``bias`` for the bias of a norm.

    Raises:
        ModelFileError: the checkpoint has no such weight.
    """
    path = module_path.removeprefix(_PEFT_PREFIX)
    paths = [path, path.partition(".")[2]]
    if path == HEAD:
        paths = [path, family.embedding, family.embedding.partition(".")[2]]
    for candidate in paths:
        if f"{candidate}.{vector}" in keys:
            return f"{candidate}.{vector}"
    raise ModelFileError(f"the checkpoint has no {vector} of this module", where=path)


_LISTED = 32  # missing keys listed in a message, as in the seeds' preflight
# Number of middle projections from which a composition without factors gives a warning. measured:
# SmolLM2's 30 give the base a validation loss of 3.0e18 nats sequential, 9.6e18 residual_plain,
# 12.8 residual (k = 64, stdlib rows). The onset between 1 and 30 is an unverified guess.
DEEP_STACK = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyStack:
    """The selected projections of the proxy's graph.

    Attributes:
        middle: module paths of the active middle projections, first to last.
        expected: requested number of middle projections.
        missing: keys of those missing from the checkpoint.
        composition: the way in which they are composed.
    """

    middle: tuple[str, ...]
    expected: int
    missing: tuple[str, ...]
    composition: Composition

    @property
    def complete(self) -> bool:
        """Whether every requested middle projection is present."""
        return not self.missing

    @property
    def matched(self) -> int:
        """Number of requested middle projections that the checkpoint has."""
        return self.expected - len(self.missing)

    @property
    def graph_id(self) -> str:
        """Name of the graph, in the seeds' format."""
        return graph_name(self.composition.value, len(self.middle))

    @property
    def layers(self) -> list[str]:
        """Logical names of the trained projections."""
        return [*(f"mid{i}" for i in range(len(self.middle))), HEAD]

    @property
    def warnings(self) -> list[str]:
        """Warnings to read before relying on a result."""
        found = []
        if self.missing:
            found.append(
                f"the checkpoint lacks {len(self.missing)} of {self.expected} middle projections "
                f"({_few(self.missing)}): the head alone is trained"
            )
        if self.composition is not Composition.residual and len(self.middle) >= DEEP_STACK:
            found.append(
                f"{len(self.middle)} projections without the factors of the residual form grow "
                "with depth: losses may be astronomical (3e18 nats on SmolLM2); "
                "backend.composition=residual is the remedy"
            )
        return found


def graph_name(composition: str, middle: int) -> str:
    """Return the seeds' name for a graph with this number of middle projections."""
    return f"proxy_stack_v1_{composition}" if middle else "lm_head_only"


def stack_of(shape: Shape, backend: ProxyConfig, keys: Collection[str] | None = None) -> ProxyStack:
    """Select the weights of the stack.

    Args:
        shape: dimensions of the model.
        backend: the `backend` group.
        keys: the checkpoint's keys; None means a checkpoint yet to be created, which is complete.

    Raises:
        ConfigError: more layers are requested than exist.
        ModelFileError: a middle projection is not square, or is missing under
            ``backend.require_full_stack``.
    """
    wanted = _wanted(shape, backend)
    if wanted:
        _refuse_oblong(shape)
    missing = () if keys is None else tuple(_missing(shape, wanted, keys))
    if missing and backend.require_full_stack:
        raise ModelFileError(
            "the checkpoint lacks middle projections",
            where="backend.require_full_stack",
            found=f"{len(wanted) - len(missing)} of {len(wanted)}; missing {_few(missing)}",
            expected="every one of them",
            remedy="set backend.require_full_stack=false to train the head alone, or "
            "download the model again",
        )
    return ProxyStack(
        middle=() if missing else tuple(wanted),
        expected=len(wanted),
        missing=missing,
        composition=backend.composition,
    )


def middle_projection(shape: Shape) -> str:
    """Return the path, inside a decoder layer, of the attention's output projection."""
    (logical,) = shape.family.groups["o_proj"]
    return next(one.path for one in shape.family.projections if one.logical == logical)


def _wanted(shape: Shape, backend: ProxyConfig) -> list[str]:
    count = shape.num_hidden_layers
    if backend.max_layers is not None and backend.max_layers > count:
        raise ConfigError(
            "more layers than the model has",
            where="backend.max_layers",
            found=backend.max_layers,
            expected=f"at most {count}",
        )
    taken = count if backend.max_layers is None else backend.max_layers
    path = middle_projection(shape)
    layers = range(0 if backend.lm_head_only else taken)
    return [f"{shape.family.layers}.{layer}.{path}" for layer in layers]


def _refuse_oblong(shape: Shape) -> None:
    path = middle_projection(shape)
    out, width = shape.projections()[path]
    if out != width:
        raise ModelFileError(
            "the proxy stack needs square middle projections",
            where=path,
            found=f"[{out}, {width}]: {shape.num_attention_heads} heads of {shape.head_dim}, and "
            f"a width of {shape.hidden_size}",
            expected=f"[{out}, {out}]",
            remedy="set backend.lm_head_only=true, or choose backend=qlora",
        )


def _missing(shape: Shape, paths: list[str], keys: Collection[str]) -> list[str]:
    found = []
    for path in paths:
        try:
            base_key(path, shape.family, keys)
        except ModelFileError:
            found.append(f"{path}.weight")
    return found


def _few(keys: tuple[str, ...]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(keys[:_LISTED]) + (f" and {more} more" if more > 0 else "")
