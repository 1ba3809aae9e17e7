"""Normalization layers: where a model has them, and PEFT's form of tuned ones (LN tuning).

The norms of a family in the table are listed there. Those of an inferred family are the vectors in
the checkpoint's headers whose names are those of norms. PEFT 0.21 stores a tuned norm as a copy of
the whole layer, ``base_model.model.{path}.ln_tuning_layers.weight`` and ``….bias``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mens_exp.layout.checkpoint_files import TensorInfo

NORMS = "norms"  # the group of targets
WEIGHT, BIAS = "weight", "bias"
_NAMED = re.compile(r"norm|(?:^|_)ln(?:_|\d|$)", re.IGNORECASE)
_OF_HEADS = re.compile(r"(?:q|k|query|key)_(?:norm|layernorm|layer_norm|ln)")
_IN_LAYER = re.compile(r"(?P<number>\d+)\.(?P<path>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One normalization layer.

    Attributes:
        path: path inside a decoder layer or, outside of the layers, in the model.
        size: dimension of its trained vectors; see :class:`mens_exp.layout.families.Family`.
        biased: whether it has a bias besides its weight.
        layers: indices of the layers that have it; None means every layer.
        name: its logical name; None means the last part of the path.
    """

    path: str
    size: str = "d"
    biased: bool = False
    layers: frozenset[int] | None = None
    name: str | None = None

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of its trained vectors."""
        return (WEIGHT, BIAS) if self.biased else (WEIGHT,)

    def is_in(self, layer: int) -> bool:
        """Return whether a decoder layer has it."""
        return self.layers is None or layer in self.layers

    def logical(self, vector: str) -> str:
        """Return the logical name of one of its vectors, without that of the layer."""
        name = self.name or _leaf(self.path)
        return name if vector == WEIGHT else f"{name}_{vector}"


def is_of_heads(path: str) -> bool:
    """Return whether a norm is that of queries or keys, which PEFT's defaults leave alone."""
    return _OF_HEADS.fullmatch(_leaf(path)) is not None


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


RMS = (Norm(path="input_layernorm"), Norm(path="post_attention_layernorm"))
SANDWICH = (
    *RMS,
    Norm(path="pre_feedforward_layernorm"),
    Norm(path="post_feedforward_layernorm"),
)


def of_heads(query: str, key: str) -> tuple[Norm, Norm]:
    """Return the norms of queries and keys, of these sizes."""
    return Norm(path="self_attn.q_norm", size=query), Norm(path="self_attn.k_norm", size=key)


def norms_in(
    tensors: Mapping[str, TensorInfo], layers: str, numbers: Collection[int]
) -> tuple[tuple[Norm, ...], tuple[Norm, ...], dict[str, int]]:
    """Infer the norms of a model from the headers of its checkpoint.

    Args:
        tensors: header entries by name.
        layers: path of the list of decoder layers.
        numbers: indices of the decoder layers.

    Returns:
        The norms inside the layers, those outside of them, and their sizes by dimension. If two
        of a layer have the same last name, their logical names are their whole paths.
    """
    inside: dict[tuple[str, int, bool], list[int]] = defaultdict(list)
    outside: list[tuple[str, int, bool]] = []
    for name, info in tensors.items():
        path, _, vector = name.rpartition(".")
        if vector != WEIGHT or len(info.shape) != 1 or not _NAMED.search(_leaf(path)):
            continue
        biased = f"{path}.{BIAS}" in tensors
        match = _IN_LAYER.fullmatch(path.removeprefix(f"{layers}."))
        if not path.startswith(f"{layers}."):
            outside.append((path, info.shape[0], biased))
        elif match is not None:
            inside[match["path"], info.shape[0], biased].append(int(match["number"]))
    sizes = {_dimension(path, size): size for path, size, _ in [*inside, *outside]}
    names = _names({path for path, *_ in inside}) | _names({path for path, *_ in outside})
    in_layers = tuple(
        Norm(
            path=path,
            size=_dimension(path, size),
            biased=biased,
            layers=None if len(found) == len(numbers) else frozenset(found),
            name=names[path],
        )
        for (path, size, biased), found in inside.items()
    )
    others = tuple(
        Norm(path=path, size=_dimension(path, size), biased=biased, name=names[path])
        for path, size, biased in outside
    )
    return in_layers, others, sizes


def _dimension(path: str, size: int) -> str:
    return f"{path} {size} norm"


def _names(paths: Collection[str]) -> dict[str, str]:
    """Name norms by the last part of their paths, or by the whole path if that is ambiguous."""
    times = Counter(map(_leaf, paths))
    return {
        path: leaf if times[leaf := _leaf(path)] == 1 else path.replace(".", "_") for path in paths
    }


# ------------------------------------------------------------------ PEFT's form

PEFT_TYPE = "LN_TUNING"
METHOD = "ln_tuning"  # value of `lora.variant`
VALUES = "ln_tuning"  # the tensor of a logical layer in schema v3
_PREFIX = "base_model.model."
_TUNED = re.compile(
    rf"(?:{re.escape(_PREFIX)})?(?P<path>.+)\.ln_tuning_layers(?:\.default)?\.(?P<vector>weight|bias)"
)


def peft_name(path: str, vector: str) -> str:
    """Return the name of a norm's vector in a PEFT directory."""
    return f"{_PREFIX}{path}.ln_tuning_layers.{vector}"


def vector_of(name: str) -> tuple[str, str] | None:
    """Return the module path and the vector that a name of PEFT's names; None for another name."""
    match = _TUNED.fullmatch(name)
    return None if match is None else (match["path"], match["vector"])


def peft_config(
    targets: Sequence[str], *, base: str | None, revision: str | None
) -> dict[str, Any]:
    """Return adapter_config.json of tuned norms.

    Args:
        targets: names of the norms, as PEFT matches them.
        base: name of the base model.
        revision: its commit on the hub, if it is from there.
    """
    return {
        "peft_type": PEFT_TYPE,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "target_modules": list(targets),
        "exclude_modules": None,
        "modules_to_save": None,
    }
