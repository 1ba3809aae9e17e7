"""The graph to train."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting, when


class Composition(Enum):
    """The order of the proxy stack's projections; F is one of n projections."""

    residual = "residual"
    sequential = "sequential"
    residual_plain = "residual_plain"


@dataclass(kw_only=True, slots=True)
class BackendConfig:
    """The trained graph: base model, quantizer and adapter put together."""

    _target_: str = setting(MISSING, "Class of the backend; set by the option.")
    name: str = setting(
        MISSING,
        "Its name in records; set by the option.",
        contract=("adapter.method", "adapter.targets"),
    )


@dataclass(kw_only=True, slots=True)
class QloraConfig(BackendConfig):
    """The full causal model, its base in 4 bits and frozen, LoRA trained."""

    name: str = "qlora"


@dataclass(kw_only=True, slots=True)
class LoraGraphConfig(BackendConfig):
    """The full causal model, its base unquantized and frozen, LoRA trained."""

    name: str = "lora"


@dataclass(kw_only=True, slots=True)
class FullConfig(BackendConfig):
    """The full causal model, every weight trained: the control arm."""

    name: str = "full"


@dataclass(kw_only=True, slots=True)
class BurnConfig(BackendConfig):
    """The seeds' research lane: f32 throughout, LoRA on q, k and v, either tokenizer."""

    name: str = "burn"
    train_base: bool | None = setting(
        None,
        "Train the base weights too; null does so where the model is random, because an adapter "
        "on frozen random weights learns little.",
    )


@dataclass(kw_only=True, slots=True)
class ProxyConfig(BackendConfig):
    """The seeds' projection stack: the next token from the last one alone, without attention."""

    name: str = "proxy"
    composition: Composition = setting(
        Composition.residual,
        "residual: h + F(norm(h))/sqrt(n), the seeds' code; sequential: F(h), their decision "
        "records; residual_plain: h + F(h).",
    )
    max_layers: int | None = setting(
        None,
        "Middle projections from the first on; null is all of them, 0 the head alone.",
        ge=0,
        only_if=when("backend.lm_head_only", False),
        idle=None,
    )
    lm_head_only: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Train the head alone, without a middle projection.",
    )
    require_full_stack: bool = setting(
        False,  # as above
        "Refuse a checkpoint that lacks a middle projection; false trains the head alone then.",
    )


def trains_base(backend: BackendConfig, source: str) -> bool:
    """Tell whether base weights learn beside the adapter.

    Args:
        backend: the `backend` group.
        source: of the model; from scratch, ``random``, there is nothing to keep.
    """
    if not isinstance(backend, BurnConfig):
        return False
    return source == "random" if backend.train_base is None else backend.train_base
