"""Model families: what linear modules a decoder layer of each is made of.

Sizes are sums of four dimensions: ``d`` the residual stream, ``f`` the MLP, ``q`` all query heads,
``kv`` all key (or value) heads. Read off transformers' modelling code, one entry a family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "Family", "Projection", "Slot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Place of a checkpoint's tensor in the one that transformers holds for all experts of a layer.

    Attributes:
        parameter: that tensor, such as ``mlp.experts.gate_up_proj``; ``[experts, out, in]``.
        experts: how many it holds.
        expert: number of the expert; None where the checkpoint's tensor holds all of them too.
        part: 0, or 1 for rows that stand below those of part 0 and read the same input.
    """

    parameter: str
    experts: int
    expert: int | None
    part: int = 0

    @property
    def matrices(self) -> int:
        """Experts in the checkpoint's own tensor."""
        return self.experts if self.expert is None else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One linear module of a decoder layer.

    Attributes:
        path: inside the layer, such as ``self_attn.q_proj``.
        logical: the adapter's name for it, such as ``q`` in ``l3.q``.
        reads: a name of its input inside the layer; modules of one input share it.
        out: dimensions whose sum is the number of outputs.
        width: dimension of the input.
        layers: numbers of the layers that have it; None is every layer. A module whose size
            differs between layers is a projection for each size.
        slot: its place among the experts of a mixture; None for a linear module.
    """

    path: str
    logical: str
    reads: str
    out: tuple[str, ...]
    width: str
    layers: frozenset[int] | None = None
    slot: Slot | None = None

    def is_in(self, layer: int) -> bool:
        """Tell whether a decoder layer has it."""
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

# What names a dimension in config.json.
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
        model_type: as config.json has it.
        layers: module path of the list of decoder layers.
        embedding: module path of the embedding table.
        projections: the linear modules of a layer, in the adapter's order.
        groups: target group to the logical names in it; a group that the family's fused modules
            cannot tell apart (``qv``) is absent.
        keys: dimension to its name in config.json.
        tied: whether the head is the embedding where config.json does not say.
        head_dim: width of a head where config.json does not say; None is hidden_size / heads.
        norms: sizes of the norms in a layer, of each vector that they learn; those of queries and
            keys are of ``q`` and ``kv``, or of one head, ``h``.
        last_norm: likewise, of the norm behind the last layer.
        biased: logical names of the projections that have a bias.
        learned_positions: whether positions are a table of weights.
        transposed: whether checkpoints store these weights ``[in, out]`` (transformers' Conv1D).
        sizes: dimensions that a checkpoint's own headers told.
        verified: whether the names are those of this table, held against real checkpoints.
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
    norms: tuple[str, ...] = ("d", "d")
    last_norm: tuple[str, ...] = ("d",)
    biased: tuple[str, ...] = ()
    learned_positions: bool = False
    transposed: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    verified: bool = True


_ALL = (
    Family(model_type="llama"),
    Family(model_type="mistral"),
    Family(model_type="qwen2", biased=("q", "k", "v")),
    Family(model_type="qwen3", head_dim=128, norms=("d", "d", "h", "h")),
    Family(model_type="gemma2", tied=True, head_dim=256, norms=("d",) * 4),
    Family(model_type="gemma3_text", tied=True, head_dim=256, norms=("d",) * 4 + ("h", "h")),
    Family(model_type="olmo2", norms=("d", "d", "q", "kv")),
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
        norms=("d",) * 4,  # a weight and a bias each
        last_norm=("d", "d"),
        biased=("qkv", "o", "fc", "proj"),
        learned_positions=True,
        transposed=True,
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
