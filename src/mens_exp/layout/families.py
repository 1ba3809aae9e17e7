"""Model families: linear modules of a decoder layer, from a table or inferred from a checkpoint.

Sizes are sums of four dimensions: ``d`` the residual stream, ``f`` the MLP, ``q`` all query heads,
``kv`` all key (or value) heads. The table follows transformers' modelling code, with one entry per
family.

For a ``model_type`` missing from the table, names and sizes are inferred from the checkpoint's
headers, so that such a model can be trained. Features that interpret weights (the proxy stack, a
warm start) require a family in the table, whose names are verified.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ModelFileError, expected_name
from mens_exp.layout.norms import RMS, SANDWICH, Norm, norms_in, of_heads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mens_exp.layout.checkpoint_files import ModelDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Position of a checkpoint tensor in transformers' tensor of all experts of a layer.

    Attributes:
        parameter: that tensor, such as ``mlp.experts.gate_up_proj``; ``[experts, out, in]``.
        experts: number of experts in it.
        expert: index of the expert; None if the checkpoint's tensor also holds all of them.
        part: 0, or 1 for rows placed below those of part 0 that read the same input.
    """

    parameter: str
    experts: int
    expert: int | None
    part: int = 0

    @property
    def matrices(self) -> int:
        """Number of experts in the checkpoint's own tensor."""
        return self.experts if self.expert is None else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One linear module of a decoder layer.

    Attributes:
        path: path inside the layer, such as ``self_attn.q_proj``.
        logical: its logical name in adapters, such as ``q`` in ``l3.q``.
        reads: identifier of its input inside the layer; modules with the same input share it.
        out: dimensions whose sum is the number of outputs.
        width: dimension of the input.
        layers: indices of the layers that have it; None means every layer. A module whose size
            differs between layers has one projection per size.
        slot: its position among the experts of a mixture; None for a linear module.
    """

    path: str
    logical: str
    reads: str
    out: tuple[str, ...]
    width: str
    layers: frozenset[int] | None = None
    slot: Slot | None = None

    def is_in(self, layer: int) -> bool:
        """Return whether a decoder layer has it."""
        return self.layers is None or layer in self.layers


_LLAMA = (
    Projection(path="self_attn.q_proj", logical="q", reads="self_attn.qkv", out=("q",), width="d"),
    Projection(path="self_attn.k_proj", logical="k", reads="self_attn.qkv", out=("kv",), width="d"),
    Projection(path="self_attn.v_proj", logical="v", reads="self_attn.qkv", out=("kv",), width="d"),
    Projection(
        path="self_attn.o_proj", logical="o", reads="self_attn.o_proj", out=("d",), width="q"
    ),
    Projection(path="mlp.gate_proj", logical="gate", reads="mlp.gate_up", out=("f",), width="d"),
    Projection(path="mlp.up_proj", logical="up", reads="mlp.gate_up", out=("f",), width="d"),
    Projection(path="mlp.down_proj", logical="down", reads="mlp.down_proj", out=("d",), width="f"),
)
_PHI3 = (
    Projection(
        path="self_attn.qkv_proj",
        logical="qkv",
        reads="self_attn.qkv",
        out=("q", "kv", "kv"),
        width="d",
    ),
    _LLAMA[3],
    Projection(
        path="mlp.gate_up_proj", logical="gate_up", reads="mlp.gate_up", out=("f", "f"), width="d"
    ),
    _LLAMA[6],
)
_GPT2 = (
    Projection(
        path="attn.c_attn", logical="qkv", reads="attn.c_attn", out=("q", "kv", "kv"), width="d"
    ),
    Projection(path="attn.c_proj", logical="o", reads="attn.c_proj", out=("d",), width="q"),
    Projection(path="mlp.c_fc", logical="fc", reads="mlp.c_fc", out=("f",), width="d"),
    Projection(path="mlp.c_proj", logical="proj", reads="mlp.c_proj", out=("d",), width="f"),
)

# Names of the dimensions in config.json.
_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The properties common to every model of one ``model_type``.

    Attributes:
        model_type: as in config.json.
        layers: module path of the list of decoder layers.
        embedding: module path of the embedding table.
        projections: the linear modules of a layer, in the adapter's order.
        groups: target group -> the logical names in it; a group that the family's fused modules
            cannot separate (``qv``) is absent.
        keys: dimension -> its name in config.json.
        tied: whether the head is tied to the embedding by default.
        head_dim: default width of a head; None is hidden_size / heads.
        norms: the norms in a layer; the size of those of queries and keys is ``q`` and ``kv``, or
            that of one head, ``h``.
        outer_norms: the norms outside of the layers; in the table, the one after the last layer.
        biased: logical names of the projections that have a bias.
        learned_positions: whether positions are a table of weights.
        transposed: whether checkpoints store these weights as ``[in, out]`` (transformers' Conv1D).
        sizes: dimensions inferred from a checkpoint's headers.
        verified: whether the names are those of this table, checked against real checkpoints.
    """

    model_type: str
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    projections: tuple[Projection, ...] = _LLAMA
    groups: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "all_linear": ("q", "k", "v", "o", "gate", "up", "down"),
            "attention": ("q", "k", "v", "o"),
            "qkv": ("q", "k", "v"),
            "qv": ("q", "v"),
            "o_proj": ("o",),
            "mlp": ("gate", "up", "down"),
        }
    )
    keys: Mapping[str, str] = field(default_factory=lambda: _KEYS)
    tied: bool = False
    head_dim: int | None = None
    norms: tuple[Norm, ...] = RMS
    outer_norms: tuple[Norm, ...] = (Norm(path="model.norm"),)
    biased: tuple[str, ...] = ()
    learned_positions: bool = False
    transposed: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    verified: bool = True

    def logical_norm(self, path: str, vector: str) -> str | None:
        """Return the logical name of a norm's vector, such as ``l3.ln_1_bias``; None if unknown.

        Args:
            path: path of the module.
            vector: ``weight`` or ``bias``.
        """
        layer, _, inside = path.removeprefix(f"{self.layers}.").partition(".")
        for one in self.outer_norms:
            if one.path == path and vector in one.vectors:
                return one.logical(vector)
        for one in self.norms:
            if one.path == inside and layer.isdigit() and vector in one.vectors:
                return f"l{layer}.{one.logical(vector)}"
        return None


_ALL = (
    Family(model_type="llama"),
    Family(model_type="mistral"),
    Family(model_type="qwen2", biased=("q", "k", "v")),
    Family(model_type="qwen3", head_dim=128, norms=(*RMS, *of_heads("h", "h"))),
    Family(model_type="gemma2", tied=True, head_dim=256, norms=SANDWICH),
    Family(
        model_type="gemma3_text", tied=True, head_dim=256, norms=(*SANDWICH, *of_heads("h", "h"))
    ),
    Family(
        model_type="olmo2",
        norms=(RMS[1], Norm(path="post_feedforward_layernorm"), *of_heads("q", "kv")),
    ),
    Family(
        model_type="phi3",
        projections=_PHI3,
        groups={
            "all_linear": ("qkv", "o", "gate_up", "down"),
            "attention": ("qkv", "o"),
            "qkv": ("qkv",),
            "o_proj": ("o",),
            "mlp": ("gate_up", "down"),
        },
    ),
    Family(
        model_type="gpt2",
        layers="transformer.h",
        embedding="transformer.wte",
        projections=_GPT2,
        groups={
            "all_linear": ("qkv", "o", "fc", "proj"),
            "attention": ("qkv", "o"),
            "qkv": ("qkv",),
            "o_proj": ("o",),
            "mlp": ("fc", "proj"),
        },
        keys=_GPT2_KEYS,
        tied=True,
        norms=(Norm(path="ln_1", biased=True), Norm(path="ln_2", biased=True)),
        outer_norms=(Norm(path="transformer.ln_f", biased=True),),
        biased=("qkv", "o", "fc", "proj"),
        learned_positions=True,
        transposed=True,
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}


LAYERS = "layers"  # key of the number of layers in the sizes of an inferred family

_IN_LAYER = re.compile(r"(?P<layers>.+?)\.(?P<number>\d+)\.(?P<path>.+)\.weight$")
_MATRIX, _STACK = 2, 3
# Published text-only models of families that otherwise include images.
_TEXT_ONLY = {"gemma3_text": "google/gemma-3-1b-it"}
# Names of dimensions in transformers' configurations, the usual name first.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_size": (
        *("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"),
    ),
    "num_hidden_layers": (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    ),
    "num_attention_heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        "decoder_attention_heads",
    ),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    ),
}
_LOGICAL = {one.path.rpartition(".")[2]: one.logical for one in FAMILIES["llama"].projections}
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Experts:
    """Names of a layer's experts, with ``{}`` for the index of one.

    Attributes:
        module: the module that holds them in transformers, as ``gate_up_proj`` and ``down_proj``.
        gate_up: checkpoint names of the parts of ``gate_up_proj``, gate first.
        down: checkpoint name of ``down_proj``.
    """

    module: str = "mlp.experts"
    gate_up: tuple[str, ...]
    down: str

    def slot_of(self, path: str, experts: int) -> Slot | None:
        """Return the position of a checkpoint tensor; None if it belongs to no expert.

        Args:
            path: path of the tensor inside its layer.
            experts: number of experts in the layer.
        """
        named = [("gate_up_proj", part, name) for part, name in enumerate(self.gate_up)]
        for leaf, part, name in [*named, ("down_proj", 0, self.down)]:
            match = re.fullmatch(re.escape(name).replace(r"\{\}", r"(\d+)"), path)
            if match is not None:
                return Slot(
                    parameter=f"{self.module}.{leaf}",
                    experts=experts,
                    expert=int(match[1]) if match.groups() else None,
                    part=part,
                )
        return None


_MIXTRAL = _Experts(
    gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
_QWEN = _Experts(
    gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
_GRANITE = _Experts(
    module="block_sparse_moe.experts",
    gate_up=("block_sparse_moe.input_linear",),
    down="block_sparse_moe.output_linear",
)
# By model_type, as in transformers' conversion_mapping.py. A graph whose experts do not match
# these names is refused when it is built (backends/adapters.py).
_EXPERTS = {
    **dict.fromkeys(("mixtral", "phimoe"), _MIXTRAL),
    **dict.fromkeys(
        (
            *("qwen2_moe", "qwen3_moe", "olmoe", "afmoe", "cohere2_moe", "ernie4_5_moe"),
            *("exaone_moe", "glm4_moe", "hunyuan_v1_moe"),
        ),
        _QWEN,
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE),
}


def family_in(directory: ModelDirectory) -> Family:
    """Return the family of a model directory: from the table, or inferred from its headers.

    Raises:
        ModelFileError: the table does not contain the model_type, and headers are missing or have
            no numbered layers; or the model is not text-only.
    """
    model_type = str(directory.config.get("model_type"))
    known = FAMILIES.get(model_type)
    if known is not None:
        return known
    _refuse_more_than_text(directory, model_type)
    prefix, layers = _layers(directory, model_type)
    modules = _modules(layers)
    names = _logical_names(dict.fromkeys(path for path, _ in modules))
    slots = _slots(modules, model_type)
    groups = FAMILIES["llama"].groups
    vocabulary = _tables(directory, prefix)
    inside, outside, norm_sizes = norms_in(directory.tensors, prefix, layers.keys())
    return Family(
        model_type=model_type,
        layers=prefix,
        embedding=next(iter(vocabulary), FAMILIES["llama"].embedding),
        projections=tuple(
            Projection(
                path=path,
                logical=names[path],
                reads=path,
                out=(f"{path} {out}x{width} out",),
                width=f"{path} {out}x{width} in",
                layers=None if len(numbers) == len(layers) else frozenset(numbers),
                slot=slots.get(path),
            )
            for (path, (*_, out, width)), numbers in modules.items()
        ),
        groups={
            "all_linear": tuple(names.values()),
            **({"experts": tuple(names[path] for path in slots)} if slots else {}),
            **{
                name: members
                for name, members in groups.items()
                if name != "all_linear" and set(members) <= set(names.values())
            },
        },
        keys={
            dimension: next((one for one in tried if one in directory.config), tried[0])
            for dimension, tried in _NAMES.items()
        },
        tied=len(vocabulary) < _MATRIX,  # a table and a head of the same shape are two
        norms=inside,
        outer_norms=outside,
        sizes={LAYERS: len(layers)}
        | norm_sizes
        | {
            f"{path} {out}x{width} {side}": size
            for path, (*_, out, width) in modules
            for side, size in (("out", out), ("in", width))
        },
        verified=False,
    )


def _refuse_more_than_text(directory: ModelDirectory, model_type: str) -> None:
    """Refuse a model whose decoder is only one part; its names and classes differ."""
    text = directory.config.get("text_config")
    if not isinstance(text, dict):
        return
    inner = str(text.get("model_type"))
    examples = f", such as {_TEXT_ONLY[inner]}" if inner in _TEXT_ONLY else ""
    raise ModelFileError(
        "the model is multimodal, and only text models are supported",
        where=f"{directory.path}: config.json: model_type",
        found=f"{model_type}, whose text_config is of {inner}",
        expected=f"a text-only model, of model_type {inner}{examples}",
        remedy="choose one, or save the text part as a separate model",
    )


def _layers(directory: ModelDirectory, model_type: str) -> tuple[str, dict[int, Shapes]]:
    """Return the path of the decoder layers, and the shape of each matrix in each of them."""
    found: dict[str, dict[int, Shapes]] = defaultdict(lambda: defaultdict(dict))
    experts = _EXPERTS.get(model_type)
    for name, info in directory.tensors.items():
        match = _IN_LAYER.match(name)
        if match is None:
            continue
        holds = experts is not None and experts.slot_of(match["path"], 0) is not None
        if len(info.shape) == _MATRIX or (len(info.shape) == _STACK and holds):
            found[match["layers"]][int(match["number"])][match["path"]] = info.shape
    if not found:
        raise ModelFileError(
            "unknown model_type, and its headers show no decoder layers",
            where=f"{directory.path}: config.json: model_type",
            found=model_type,
            expected=f"{expected_name(model_type, FAMILIES)}, or weights of numbered layers",
        )
    prefix, layers = max(found.items(), key=lambda item: sum(map(len, item[1].values())))
    return prefix, layers


def _modules(layers: Mapping[int, Shapes]) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """Return the layers that have each matrix, keyed by its path and shape, in layer order.

    The first layers of a mixture of experts are often dense, and a hybrid has layers of several
    kinds.
    """
    found: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for number, matrices in sorted(layers.items()):
        for one in matrices.items():
            found[one].append(number)
    return found


def _slots(modules: Iterable[tuple[str, tuple[int, ...]]], model_type: str) -> dict[str, Slot]:
    """Return the position of every expert's tensor, keyed by its path inside a layer."""
    names = _EXPERTS.get(model_type)
    if names is None:
        return {}
    shapes = {path: shape for path, shape in modules}  # noqa: C416  # a mapping would be copied
    found = {path: slot for path in shapes if (slot := names.slot_of(path, 0)) is not None}
    many = len({slot.expert for slot in found.values()})
    return {
        path: replace(slot, experts=shapes[path][0] if slot.expert is None else many)
        for path, slot in found.items()
    }


def _logical_names(paths: Iterable[str]) -> dict[str, str]:
    """Name each matrix by the last part of its path, or by the whole path if that is ambiguous."""
    last = {path: path.rpartition(".")[2] for path in paths}
    names = {path: _LOGICAL.get(leaf, leaf) for path, leaf in last.items()}
    times = Counter(names.values())
    return {
        path: name if times[name] == 1 else path.replace(".", "_") for path, name in names.items()
    }


def _tables(directory: ModelDirectory, prefix: str) -> list[str]:
    """Return the paths of the vocabulary-sized matrices; the embedding comes first."""
    config: Mapping[str, Any] = directory.config
    found = [
        name.removesuffix(".weight")
        for name, info in directory.tensors.items()
        if len(info.shape) == _MATRIX
        and info.shape[0] == config.get("vocab_size")
        and not name.startswith(f"{prefix}.")
    ]
    # An embedding is inside the backbone, a head at the root.
    return sorted(found, key=lambda path: (-path.count("."), path))
