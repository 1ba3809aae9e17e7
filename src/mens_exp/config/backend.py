"""The graph to train."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting, when


class Composition(Enum):
    """Order in which the proxy stack applies its n projections; F is a single projection."""

    residual = "residual"
    sequential = "sequential"
    residual_plain = "residual_plain"


@dataclass(kw_only=True, slots=True)
class BackendConfig:
    """The graph to train: base model, quantizer and adapter."""

    _target_: str = setting(MISSING, "Class of the backend; set by the option.")
    name: str = setting(
        MISSING,
        "Its name in records; set by the option.",
        contract=("adapter.method", "adapter.targets"),
    )


@dataclass(kw_only=True, slots=True)
class QloraConfig(BackendConfig):
    """Full causal model with a frozen 4-bit base; only the LoRA adapter is trained."""

    name: str = "qlora"


@dataclass(kw_only=True, slots=True)
class LoraGraphConfig(BackendConfig):
    """Full causal model with a frozen, unquantized base; only the LoRA adapter is trained."""

    name: str = "lora"


@dataclass(kw_only=True, slots=True)
class FullConfig(BackendConfig):
    """Full causal model with every weight trained; this is the control arm."""

    name: str = "full"


@dataclass(kw_only=True, slots=True)
class BurnConfig(BackendConfig):
    """The research lane of the seeds: f32 throughout, LoRA on q, k and v, either tokenizer."""

    name: str = "burn"
    train_base: bool | None = setting(
        None,
        "Train the base weights too; null does so where the model is random, because an adapter "
        "on frozen random weights learns little.",
    )


@dataclass(kw_only=True, slots=True)
class ProxyConfig(BackendConfig):
    """Projection stack of the seeds: predicts each token from the one before, without attention."""

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
    """Return whether base weights are trained in addition to the adapter.

    Args:
        backend: the `backend` group.
        source: the model's source; with ``random`` there are no pretrained weights to preserve.
    """
    if not isinstance(backend, BurnConfig):
        return False
    return source == "random" if backend.train_base is None else backend.train_base
