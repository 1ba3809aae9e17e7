"""PEFT's format: adapter_config.json, read strictly, and how it stores experts of a mixture.

Keys of PEFT 0.21 (https://huggingface.co/docs/peft/package_reference/lora) that decide what a LoRA
adapter adds.

transformers holds the experts of a layer as ``gate_up_proj`` and ``down_proj``, ``[E, O, I]``. PEFT
(0.21, ``ParamWrapper``) adapts such a tensor with one pair: A ``[E · R, I]``, expert by expert, and
B ``[O, R · E]``, whose column ``k · E + e`` is column ``k`` of expert ``e``. Schema v3 has a layer
for each tensor of the checkpoint instead, so that ``B @ A`` is what is added to it: gate and up of
an expert with the same A and each its rows of B, or ``[E, R, I]`` and ``[E, O, R]`` where the
checkpoint has all experts in one tensor.

Shapes: E experts, R rank, I inputs and O outputs of an expert's projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.record import check_keys, parse_json, read_bytes
from mens_exp.artifacts.untrusted_input import pattern_matches, pattern_problem
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.layout.targets import LinearModule

    Tensors = Mapping[str, npt.NDArray[np.float32]]

CONFIG_NAME = "adapter_config.json"
_READ: dict[str, Any] = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    "use_rslora": bool | None,
    "use_dora": bool | None,
    "rank_pattern": dict[str, int] | None,
    "alpha_pattern": dict[str, float] | None,
    "base_model_name_or_path": str | None,
    "target_parameters": list[str] | None,
}
# They say how an adapter was made or is found again, and nothing of what its tensors mean.
_HARMLESS = frozenset(
    [
        *("auto_mapping", "peft_version", "task_type", "inference_mode", "revision"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("ensure_weight_tying", "velora_config"),
    ]
)
# Starts that leave the base as it is; others (pissa, olora, corda, loftq, lora_ga) change it.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The part of a configuration that the tensors need.

    Attributes:
        r: rank of modules that no pattern matches.
        alpha: numerator of the scale of those.
        rslora: whether the scale is ``alpha / sqrt(r)`` instead of ``alpha / r``.
        dora: whether the tensors hold row lengths too.
        ranks: pattern (a regular expression over the end of a path) to rank.
        alphas: pattern to alpha.
        base_model: as it is recorded.
        file: that holds it, for messages.
        parameters: ends of the paths of adapted tensors that are no module's weight.
    """

    r: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    base_model: str | None
    file: str
    parameters: tuple[str, ...] = ()

    def adapts(self, parameter: str) -> bool:
        """Return whether a parameter is among those that it names; the end of a path counts."""
        return any(f".{parameter}".endswith(f".{one}") for one in self.parameters)

    def rank_of(self, path: str) -> int:
        """Return r of a module; the first pattern that matches counts, as in PEFT."""
        return next((r for key, r in self.ranks.items() if self._applies(key, path)), self.r)

    def alpha_of(self, path: str) -> float:
        """Return alpha of a module."""
        alphas = self.alphas.items()
        return next((alpha for key, alpha in alphas if self._applies(key, path)), self.alpha)

    def scale_of(self, path: str) -> float:
        """Return the factor before ``B @ A`` of a module."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.rslora else rank)

    def _applies(self, pattern: str, path: str) -> bool:
        """Return whether PEFT applies a pattern to a module: it matches the end of the path."""
        return pattern_matches(_in_full(pattern), path, self.file)


def read_settings(directory: Path) -> PeftSettings:
    """Read the configuration of a LoRA adapter.

    Args:
        directory: holds adapter_config.json.

    Raises:
        DataError: it cannot be read, is of another method, or makes another update than
            ``scale * B A`` (and DoRA's) on the listed modules.
        Problems: several of these.
    """
    path = directory / CONFIG_NAME
    config = parse_json(read_bytes(path), str(path))
    if not isinstance(config, dict):
        raise DataError("not an object", where=str(path))
    known = {name: value for name, value in config.items() if name in _READ}
    found = check_keys(known, _READ, ("peft_type", "r", "lora_alpha"), str(path))
    Problems.raise_if(found or list(_problems(config, str(path))))
    return PeftSettings(
        r=config["r"],
        alpha=config["lora_alpha"],
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        ranks=config.get("rank_pattern") or {},
        alphas=config.get("alpha_pattern") or {},
        base_model=config.get("base_model_name_or_path") or None,
        file=str(path),
        parameters=tuple(config.get("target_parameters") or ()),
    )


def _problems(config: dict[str, Any], where: str) -> Iterator[DataError]:
    if config["peft_type"] != "LORA":
        yield DataError(
            "no LoRA adapter",
            where=f"{where}: peft_type",
            found=config["peft_type"],
            expected="LORA",
        )
        return
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        yield DataError(
            "its start changed the weights of the base, which the tensors do not tell",
            where=f"{where}: init_lora_weights",
            found=start,
            expected=", ".join(str(one) for one in _STARTS[1:]),
            remedy="save it from PEFT with path_initial_model_for_weight_conversion",
        )
    for name in sorted(config.keys() - _READ.keys() - _HARMLESS - {"init_lora_weights"}):
        if config[name] not in _NOTHING:
            yield DataError(
                "the adapter is more than LoRA matrices",
                where=f"{where}: {name}",
                found=config[name],
                expected="nothing",
                remedy="train without it, or take it out of a copy of the file if it changes "
                "nothing that is computed",
            )
    yield from _number_problems(config, where)


def _number_problems(config: dict[str, Any], where: str) -> Iterator[DataError]:
    for name in ("r", "lora_alpha"):
        if config[name] <= 0:
            yield _too_small(f"{where}: {name}", config[name])
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, value in (config.get(name) or {}).items():
            place = f"{where}: {name}.{pattern}"
            if value <= 0:
                yield _too_small(place, value)
            problem = pattern_problem(_in_full(pattern), where)
            if problem is not None:
                yield DataError("no regular expression", where=place, found=problem)


def _too_small(where: str, found: object) -> DataError:
    return DataError("wrong value", where=where, found=found, expected="more than 0")


def _in_full(pattern: str) -> str:
    """Return what PEFT matches in place of a pattern."""
    return rf"(.*\.)?({pattern})$"


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


def split_experts(tensors: Tensors, stacks: Iterable[Stack]) -> dict[str, npt.NDArray[np.float32]]:
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


def join_experts(
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
