"""The modules of a model that adapters can change, derived from its shape without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mens_exp.layout.shape import HEAD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mens_exp.layout.families import Family, Projection, Slot
    from mens_exp.layout.norms import Norm
    from mens_exp.layout.shape import Shape

EXPERTS = "experts"
EMBEDDING = "embedding"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearModule:
    """A linear module of the model that can get an adapter, or a vector of a norm that can.

    The weight and the bias of a norm have the same path and separate logical names, because an
    adapter has one tensor of the base for each logical name.

    Attributes:
        path: module path, such as ``model.layers.3.self_attn.q_proj``.
        logical: its logical name in adapters, such as ``l3.q``.
        kind: the logical name without the layer, such as ``q``.
        layer: index of its decoder layer; None for the head and the last norm.
        reads: identifier of its input in the whole model; modules with the same input share it.
        out: number of outputs.
        width: number of inputs.
        slot: its position among the experts of a mixture; None for a linear module.
        stack: path of the tensor that contains it in transformers' graph, such as
            ``model.layers.3.mlp.experts.gate_up_proj``; None for a linear module.
        norm: the vector of a norm that it is, ``weight`` or ``bias``; None for a linear module.
    """

    path: str
    logical: str
    kind: str
    layer: int | None
    reads: str
    out: int
    width: int
    slot: Slot | None = None
    stack: str | None = None
    norm: str | None = None

    @property
    def parameter(self) -> str:
        """Path of the parameter that an adapter changes."""
        return f"{self.path}.{self.norm or 'weight'}"

    def is_called(self, name: str) -> bool:
        """Return whether a name equals the last part or parts of a path."""
        return any(f".{path}".endswith(f".{name}") for path in self.paths)

    def is_like(self, glob: str) -> bool:
        """Return whether a glob matches a path."""
        return any(fnmatchcase(path, glob) for path in self.paths)

    @property
    def paths(self) -> tuple[str, ...]:
        """Its names: in the checkpoint and, for an expert's matrix, in the graph."""
        return (self.path,) if self.stack is None else (self.path, self.stack)


def linear_modules(shape: Shape) -> tuple[LinearModule, ...]:
    """Return every module that can get an adapter, in the model's order, the head last.

    The experts of a mixture are included in the form stored in the checkpoint.
    """
    family = shape.family
    sizes = [(one, *shape.size_of(one)) for one in family.projections]
    inside = [
        _module(family, layer, one, out, width)
        for layer in range(shape.num_hidden_layers)
        for one, out, width in sizes
        if one.is_in(layer)
    ]
    head = LinearModule(
        path=HEAD,
        logical=HEAD,
        kind=HEAD,
        layer=None,
        reads=HEAD,
        out=shape.vocab_size,
        width=shape.hidden_size,
    )
    return (*inside, head)


def norm_modules(shape: Shape) -> tuple[LinearModule, ...]:
    """Return the vectors of every norm, in the model's order, those outside of layers last."""
    family = shape.family
    inside = [
        one
        for layer in range(shape.num_hidden_layers)
        for norm in family.norms
        if norm.is_in(layer)
        for one in _vectors(shape, norm, layer)
    ]
    return (*inside, *(one for norm in family.outer_norms for one in _vectors(shape, norm, None)))


def _vectors(shape: Shape, norm: Norm, layer: int | None) -> list[LinearModule]:
    inside = "" if layer is None else f"{shape.family.layers}.{layer}."
    size = shape.norm_size(norm)
    return [
        LinearModule(
            path=f"{inside}{norm.path}",
            logical=f"{'' if layer is None else f'l{layer}.'}{norm.logical(vector)}",
            kind=norm.logical(vector),
            layer=layer,
            reads=f"{inside}{norm.path}",
            out=size,
            width=size,
            norm=vector,
        )
        for vector in norm.vectors
    ]


def embedding_module(shape: Shape) -> LinearModule:
    """Return the embedding table, to which prompt tuning adds rows."""
    return LinearModule(
        path=shape.family.embedding,
        logical=EMBEDDING,
        kind=EMBEDDING,
        layer=None,
        reads=EMBEDDING,
        out=shape.vocab_size,
        width=shape.hidden_size,
    )


def every_module(shape: Shape) -> tuple[LinearModule, ...]:
    """Return every module that some adapter method can adapt, the embedding table first."""
    return (embedding_module(shape), *linear_modules(shape), *norm_modules(shape))


def linear_weights(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the decoder's linear weights, by transformers' names.

    Experts, which transformers stores as three-dimensional tensors, are excluded.
    """
    return {
        f"{one.path}.weight": (one.out, one.width)
        for one in linear_modules(shape)
        if one.layer is not None and one.slot is None
    }


def expert_modules(family: Family, layers: Iterable[int]) -> list[LinearModule]:
    """Return the experts of an inferred family, which contains their sizes.

    Args:
        family: family of the model.
        layers: indices of the decoder layers.
    """
    sizes = family.sizes
    return [
        _module(family, layer, one, sum(sizes[name] for name in one.out), sizes[one.width])
        for layer in layers
        for one in family.projections
        if one.slot is not None and one.is_in(layer)
    ]


def _module(family: Family, layer: int, one: Projection, out: int, width: int) -> LinearModule:
    inside = f"{family.layers}.{layer}"
    return LinearModule(
        path=f"{inside}.{one.path}",
        logical=f"l{layer}.{one.logical}",
        kind=one.logical,
        layer=layer,
        reads=f"{inside}.{one.reads}",
        out=out,
        width=width,
        slot=one.slot,
        stack=None if one.slot is None else f"{inside}.{one.slot.parameter}",
    )


def weight_shape(one: LinearModule) -> tuple[int, ...]:
    """Return the shape of a module's weight, with all experts if the checkpoint stacks them."""
    return (one.out,) if one.norm is not None else (*stack_shape(one), one.out, one.width)


def stack_shape(one: LinearModule) -> tuple[int, ...]:
    """Return the leading dimension of a stacked tensor of experts; empty for any other module."""
    all_experts = one.slot is not None and one.slot.expert is None
    return (one.slot.experts,) if one.slot is not None and all_experts else ()
