"""Experts of a mixture: one matrix each in an adapter, all of a layer in one pair in PEFT.

transformers holds the experts of a layer as ``gate_up_proj`` and ``down_proj``, ``[E, O, I]``. PEFT
(0.21, ``ParamWrapper``) adapts such a tensor with one pair: A ``[E · R, I]``, expert by expert, and
B ``[O, R · E]``, whose column ``k · E + e`` is column ``k`` of expert ``e``. Schema v3 has a layer
for each tensor of the checkpoint instead, so that ``B @ A`` is what is added to it: gate and up of
an expert with the same A and each its rows of B, or ``[E, R, I]`` and ``[E, O, R]`` where the
checkpoint has all experts in one tensor.

Shapes: E experts, R rank, I inputs and O outputs of an expert's projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from mens_exp.layout.targets import LinearModule

    Tensors = Mapping[str, npt.NDArray[np.float32]]

__all__ = ["Stack", "joined", "split", "stacks_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A tensor that holds a projection of every expert of a layer.

    Attributes:
        path: of the parameter in transformers' graph.
        logical: the name of its pair in a training state, such as ``l3.experts_gate_up``.
        experts: E.
        members: tensors of the checkpoint that it is made of: expert by expert, gate before up.
    """

    path: str
    logical: str
    experts: int
    members: tuple[LinearModule, ...]

    @property
    def module(self) -> str:
        """Path of the module that holds the parameter."""
        return self.path.rpartition(".")[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The parameter's shape, ``[E, O, I]``."""
        first = self.members[0]
        return self.experts, sum(one.out for one in self._parts()), first.width

    def _parts(self) -> tuple[LinearModule, ...]:
        """Return the members that stand on top of each other in one expert."""
        return tuple(one for one in self.members if _expert(one) == _expert(self.members[0]))

    def rows(self, one: LinearModule) -> slice:
        """Return the rows of an expert's matrix that a member is."""
        assert one.slot is not None, "a member of a stack has a slot"
        first = sum(other.out for other in self._parts()[: one.slot.part])
        return slice(first, first + one.out)


def stacks_of(modules: Iterable[LinearModule]) -> list[Stack]:
    """Return the tensors that modules are parts of, in the modules' order; linear ones have none.

    Args:
        modules: with every expert of a layer or none of it.
    """
    found: dict[str, list[LinearModule]] = {}
    for one in modules:
        if one.stack is not None:
            found.setdefault(one.stack, []).append(one)
    return [
        Stack(
            path=path,
            logical=_logical(path, members[0]),
            experts=_experts(members[0]),
            members=tuple(sorted(members, key=lambda one: (_expert(one), _part(one)))),
        )
        for path, members in sorted(found.items(), key=lambda item: _order(*item))
    ]


def _order(path: str, members: list[LinearModule]) -> tuple[int, bool]:
    """Order stacks by layer, and gate with up before down, as PEFT nests them."""
    return members[0].layer or 0, not path.endswith(".gate_up_proj")


def _logical(path: str, one: LinearModule) -> str:
    return f"l{one.layer}.experts_{path.rpartition('.')[2].removesuffix('_proj')}"


def _experts(one: LinearModule) -> int:
    assert one.slot is not None, "a member of a stack has a slot"
    return one.slot.experts


def _expert(one: LinearModule) -> int:
    return -1 if one.slot is None or one.slot.expert is None else one.slot.expert


def _part(one: LinearModule) -> int:
    return 0 if one.slot is None else one.slot.part


def split(tensors: Tensors, stacks: Iterable[Stack]) -> dict[str, npt.NDArray[np.float32]]:
    """Return an adapter's tensors with a pair for each tensor of the checkpoint.

    Args:
        tensors: by logical name, those of stacks as PEFT has them.
        stacks: whose pairs are taken apart.
    """
    found = dict(tensors)
    for stack in stacks:
        A, B = (found.pop(f"{stack.logical}.lora_{which}") for which in "ab")
        A_ERI = A.reshape(stack.experts, -1, A.shape[1])
        B_EOR = B.reshape(len(B), -1, stack.experts).transpose(2, 0, 1)
        for one in stack.members:
            number = slice(None) if _expert(one) < 0 else _expert(one)
            found[f"{one.logical}.lora_a"] = np.ascontiguousarray(A_ERI[number])
            rows = B_EOR[number][..., stack.rows(one), :]
            found[f"{one.logical}.lora_b"] = np.ascontiguousarray(rows)
    return found


def joined(
    tensors: Tensors, stacks: Iterable[Stack], where: str
) -> dict[str, npt.NDArray[np.float32]]:
    """Undo :func:`split`.

    Args:
        tensors: with a pair for each tensor of the checkpoint.
        stacks: whose pairs are put together.
        where: the adapter, for messages.

    Raises:
        DataError: gate and up of an expert have other matrices A, or experts other ranks, which no
            pair of PEFT's has.
    """
    found = dict(tensors)
    for stack in stacks:
        A_ERI, B_EOR = _whole(found, stack, where)
        experts, r, width = A_ERI.shape
        found[f"{stack.logical}.lora_a"] = A_ERI.reshape(experts * r, width)
        B_ORE = B_EOR.transpose(1, 2, 0).reshape(B_EOR.shape[1], r * experts)
        found[f"{stack.logical}.lora_b"] = np.ascontiguousarray(B_ORE)
        for one in stack.members:
            del found[f"{one.logical}.lora_a"], found[f"{one.logical}.lora_b"]
    return found


def _whole(
    tensors: Tensors, stack: Stack, where: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return A ``[E, R, I]`` and B ``[E, O, R]`` of a stack."""
    if _expert(stack.members[0]) < 0:
        whole = stack.members[0].logical
        return tensors[f"{whole}.lora_a"], tensors[f"{whole}.lora_b"]
    by_expert: dict[int, list[LinearModule]] = {}
    for one in stack.members:
        by_expert.setdefault(_expert(one), []).append(one)
    A: list[npt.NDArray[np.float32]] = []
    B: list[npt.NDArray[np.float32]] = []
    for parts in by_expert.values():
        first, *others = (tensors[f"{one.logical}.lora_a"] for one in parts)
        if not all(np.array_equal(first, other) for other in others) or first.shape != (
            A[0].shape if A else first.shape
        ):
            raise DataError(
                "gate and up of an expert are adapted apart, or experts with ranks that differ",
                where=f"{where}: {parts[0].logical}",
                found="other matrices A",
                expected="one A for both and one rank for all, as transformers holds the experts "
                "in one tensor",
                remedy="merge it: task=merge",
            )
        A.append(first)
        B.append(np.concatenate([tensors[f"{one.logical}.lora_b"] for one in parts]))
    return np.stack(A), np.stack(B)
