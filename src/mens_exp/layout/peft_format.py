"""PEFT's format: adapter_config.json, read strictly, and the storage of experts of a mixture.

Covers the keys of PEFT 0.21 (https://huggingface.co/docs/peft/package_reference/lora) that
determine what a LoRA adapter adds.

transformers stores the experts of a layer as ``gate_up_proj`` and ``down_proj``, ``[E, O, I]``.
PEFT (0.21, ``ParamWrapper``) adapts such a tensor with one pair: A ``[E · R, I]``, expert by
expert, and B ``[O, R · E]``, whose column ``k · E + e`` is column ``k`` of expert ``e``. Schema v3
instead has a layer for each tensor of the checkpoint, so that ``B @ A`` is added to that tensor:
gate and up of an expert have the same A and separate rows of B, or ``[E, R, I]`` and ``[E, O, R]``
if the checkpoint stores all experts in one tensor.

Shapes: E experts, R rank, I inputs and O outputs of an expert's projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.record import check_keys, parse_json, read_bytes
from mens_exp.artifacts.untrusted_input import first_match, pattern_problems
from mens_exp.config.lora import ADAPTERS, PEFT_FLAGS
from mens_exp.errors import DataError, Problems
from mens_exp.layout import norms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from mens_exp.layout.modules import LinearModule

    Tensors = Mapping[str, npt.NDArray[np.float32]]

CONFIG_NAME = "adapter_config.json"
_READ: dict[str, Any] = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    **dict.fromkeys(PEFT_FLAGS, bool | None),
    "rank_pattern": dict[str, int] | None,
    "alpha_pattern": dict[str, float] | None,
    "base_model_name_or_path": str | None,
    "target_parameters": list[str] | None,
}
# Keys about how an adapter was created or is located; they do not affect the tensors' meaning.
_HARMLESS = frozenset(
    [
        *("auto_mapping", "peft_version", "task_type", "inference_mode", "revision"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("ensure_weight_tying", "velora_config"),
    ]
)
# Initializations that leave the base unchanged; others modify it (pissa,
# olora, corda, loftq, lora_ga).
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The part of a configuration that is needed to interpret the tensors.

    Attributes:
        r: rank of modules that match no pattern.
        alpha: numerator of the scale of those modules.
        flags: the enabled keys among those that select a variant of LoRA.
        ranks: pattern (a regular expression matched against the end of a path) -> rank.
        alphas: pattern -> alpha.
        base_model: the recorded base model.
        file: the configuration file, for messages.
        parameters: path suffixes of adapted tensors that are not module weights.
        tunes_norms: whether the tensors are tuned norms; these have no rank or alpha.
    """

    r: int
    alpha: float
    flags: tuple[str, ...]
    ranks: dict[str, int]
    alphas: dict[str, float]
    base_model: str | None
    file: str
    parameters: tuple[str, ...] = ()
    tunes_norms: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        """The adapter methods that the flags select: several at once, or plain LoRA."""
        if self.tunes_norms:
            return (norms.METHOD,)
        chosen = tuple(
            spec.name
            for spec in ADAPTERS.built_in.values()
            if spec.peft and all(flag in self.flags for flag in spec.peft)
        )
        return chosen or ("lora",)

    def adapts(self, parameter: str) -> bool:
        """Return whether it names a parameter, by the end of the path."""
        return any(f".{parameter}".endswith(f".{one}") for one in self.parameters)

    def rank_of(self, path: str) -> int:
        """Return the rank r of a module; the first matching pattern applies, as in PEFT."""
        return int(self._value_of(self.ranks, path, self.r))

    def alpha_of(self, path: str) -> float:
        """Return alpha of a module."""
        return self._value_of(self.alphas, path, self.alpha)

    def scale_of(self, path: str) -> float:
        """Return the factor applied to ``B @ A`` of a module."""
        rank = self.rank_of(path)
        forms = [ADAPTERS.built_in[name].form for name in self.variants]
        of_root = next((form for form in forms if form.root_scale), forms[0])
        return of_root.scale(self.alpha_of(path), rank)

    def _value_of(self, values: Mapping[str, float], path: str, usual: float) -> float:
        """Return the value of the first pattern that matches the end of a module's path."""
        found = first_match([_in_full(key) for key in values], path, self.file) if values else None
        return usual if found is None else list(values.values())[found]


def read_settings(directory: Path) -> PeftSettings:
    """Read the configuration of a LoRA adapter, or of tuned norms.

    Args:
        directory: contains adapter_config.json.

    Raises:
        DataError: it cannot be read, is for another method, or defines an update other than
            ``scale * B A`` (or DoRA's) on the listed modules.
        Problems: several of these.
    """
    path = directory / CONFIG_NAME
    config = parse_json(read_bytes(path), str(path))
    if not isinstance(config, dict):
        raise DataError("not an object", where=str(path))
    peft_type = config.get("peft_type")
    if isinstance(peft_type, str) and peft_type not in _CONTENT:
        raise _not_read(path, peft_type)
    tunes_norms = peft_type == norms.PEFT_TYPE
    needed = ("peft_type", *(() if tunes_norms else ("r", "lora_alpha")))
    known = {name: value for name, value in config.items() if name in _READ}
    found = check_keys(known, _READ, needed, str(path))
    Problems.raise_if(found or list(_problems(config, str(path))))
    return PeftSettings(
        r=config.get("r", 1),
        alpha=config.get("lora_alpha", 1),
        flags=tuple(flag for flag in PEFT_FLAGS if config.get(flag)),
        ranks=config.get("rank_pattern") or {},
        alphas=config.get("alpha_pattern") or {},
        base_model=config.get("base_model_name_or_path") or None,
        file=str(path),
        parameters=tuple(config.get("target_parameters") or ()),
        tunes_norms=tunes_norms,
    )


_CONTENT = {"LORA": "LoRA matrices", norms.PEFT_TYPE: "the vectors of norms"}


def _not_read(path: Path, peft_type: str) -> DataError:
    return DataError(
        "not a LoRA adapter, and no tuned norms",
        where=f"{path}: peft_type",
        found=peft_type,
        expected=" or ".join(_CONTENT),
        remedy="name the run, or the directory with its adapter_manifest.json, if it is from here",
    )


def _problems(config: dict[str, Any], where: str) -> Iterator[DataError]:
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        yield DataError(
            "its initialization changed the weights of the base, which the tensors do not record",
            where=f"{where}: init_lora_weights",
            found=start,
            expected=", ".join(str(one) for one in _STARTS[1:]),
            remedy="save it from PEFT with path_initial_model_for_weight_conversion",
        )
    for name in sorted(config.keys() - _READ.keys() - _HARMLESS - {"init_lora_weights"}):
        if config[name] not in _NOTHING:
            yield DataError(
                f"the adapter contains more than {_CONTENT[config['peft_type']]}",
                where=f"{where}: {name}",
                found=config[name],
                expected="nothing",
                remedy="train without it, or take it out of a copy of the file if it changes "
                "nothing that is computed",
            )
    yield from _number_problems(config, where)


def _number_problems(config: dict[str, Any], where: str) -> Iterator[DataError]:
    for name in ("r", "lora_alpha"):
        if config.get(name, 1) <= 0:
            yield _too_small(f"{where}: {name}", config[name])
    for name in ("rank_pattern", "alpha_pattern"):
        values = config.get(name) or {}
        problems = pattern_problems([_in_full(pattern) for pattern in values], where)
        for (pattern, value), problem in zip(values.items(), problems, strict=True):
            place = f"{where}: {name}.{pattern}"
            if value <= 0:
                yield _too_small(place, value)
            if problem is not None:
                yield DataError("no regular expression", where=place, found=problem)


def _too_small(where: str, found: object) -> DataError:
    return DataError("wrong value", where=where, found=found, expected="more than 0")


def _in_full(pattern: str) -> str:
    """Return the full regular expression that PEFT uses for a pattern."""
    return rf"(.*\.)?({pattern})$"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A tensor that contains a projection of every expert of a layer.

    Attributes:
        path: path of the parameter in transformers' graph.
        logical: name of its pair in a training state, such as ``l3.experts_gate_up``.
        experts: E.
        members: checkpoint tensors that it consists of: expert by expert, gate before up.
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
        """Return the members that are stacked vertically in one expert."""
        return tuple(one for one in self.members if _expert(one) == _expert(self.members[0]))

    def rows(self, one: LinearModule) -> slice:
        """Return the rows of an expert's matrix that a member occupies."""
        assert one.slot is not None, "a member of a stack has a slot"
        first = sum(other.out for other in self._parts()[: one.slot.part])
        return slice(first, first + one.out)


def stacks_of(modules: Iterable[LinearModule]) -> list[Stack]:
    """Return the tensors that contain the modules, in module order; linear modules have none.

    Args:
        modules: contains all experts of a layer or none.
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
    """Sort key of stacks: by layer, and gate with up before down, as PEFT nests them."""
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
    """Return an adapter's tensors with one pair for each tensor of the checkpoint.

    Args:
        tensors: by logical name, with stacks in PEFT's form.
        stacks: stacks whose pairs are split.
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
    """Undo :func:`split_experts`.

    Args:
        tensors: with one pair for each tensor of the checkpoint.
        stacks: stacks whose pairs are joined.
        where: the adapter, for messages.

    Raises:
        DataError: gate and up of an expert have different matrices A, or experts have different
            ranks, neither of which PEFT supports.
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
                "gate and up of an expert are adapted separately, or experts have different ranks",
                where=f"{where}: {parts[0].logical}",
                found="other matrices A",
                expected="one A for both and one rank for all, as transformers holds the experts "
                "in one tensor",
                remedy="merge it: task=merge",
            )
        A.append(first)
        B.append(np.concatenate([tensors[f"{one.logical}.lora_b"] for one in parts]))
    return np.stack(A), np.stack(B)
