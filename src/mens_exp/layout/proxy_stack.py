"""The proxy's projection stack: which weights of a checkpoint it is made of.

A middle projection is a decoder layer's attention output (``o_proj``, GPT-2's ``c_proj``); the head
is the embedding table. The stack is whole or it is the head alone, never a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.config.backend import Composition
from mens_exp.errors import ConfigError, ModelFileError
from mens_exp.layout.names import HEAD, base_key

if TYPE_CHECKING:
    from collections.abc import Collection

    from mens_exp.config.backend import ProxyConfig
    from mens_exp.layout.shape import Shape

__all__ = ["DEEP", "ProxyStack", "graph_name", "stack_of"]

_LISTED = 32  # missing keys that a message names, as the seeds' preflight did
# Middle projections from which a composition without factors is warned about. measured: SmolLM2's
# 30 give the base a validation loss of 3.0e18 nats sequential, 9.6e18 residual_plain, 12.8 residual
# (k = 64, stdlib rows). Where between 1 and 30 it begins is an unverified guess.
DEEP = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyStack:
    """The parts of the graph.

    Attributes:
        middle: module paths of the active middle projections, first to last.
        expected: middle projections that were asked for.
        missing: keys of those that the checkpoint lacks.
        composition: how they follow each other.
    """

    middle: tuple[str, ...]
    expected: int
    missing: tuple[str, ...]
    composition: Composition

    @property
    def complete(self) -> bool:
        """Whether every middle projection that was asked for is there."""
        return not self.missing

    @property
    def matched(self) -> int:
        """Middle projections of those asked for that the checkpoint has."""
        return self.expected - len(self.missing)

    @property
    def graph_id(self) -> str:
        """Name of the graph, as the seeds write it."""
        return graph_name(self.composition.value, len(self.middle))

    @property
    def layers(self) -> list[str]:
        """Logical names of the trained projections."""
        return [*(f"mid{i}" for i in range(len(self.middle))), HEAD]

    @property
    def warnings(self) -> list[str]:
        """The warnings that an operator should read before believing a number."""
        found = []
        if self.missing:
            found.append(
                f"the checkpoint lacks {len(self.missing)} of {self.expected} middle projections "
                f"({_few(self.missing)}): the head alone is trained"
            )
        if self.composition is not Composition.residual and len(self.middle) >= DEEP:
            found.append(
                f"{len(self.middle)} projections without the factors of the residual form grow "
                "with depth: losses may be astronomical (3e18 nats on SmolLM2); "
                "backend.composition=residual is the remedy"
            )
        return found


def graph_name(composition: str, middle: int) -> str:
    """Name a graph of so many middle projections as the seeds do."""
    return f"proxy_stack_v1_{composition}" if middle else "lm_head_only"


def stack_of(shape: Shape, backend: ProxyConfig, keys: Collection[str] | None = None) -> ProxyStack:
    """Choose the weights of the stack.

    Args:
        shape: dimensions of the model.
        backend: the `backend` group.
        keys: what the checkpoint has; None stands for a checkpoint that is not made yet, whole.

    Raises:
        ConfigError: more layers are asked for than there are.
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
            found=f"[{out}, {width}]: {shape.num_attention_heads} heads of {shape.head_dim} "
            f"beside a width of {shape.hidden_size}",
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
