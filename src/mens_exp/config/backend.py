"""Settings of `backend`, and the backends: what each requires of a contract.

The table lists the trainable graphs; the config groups determine which of them are available.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from omegaconf import MISSING

from mens_exp.config.fields import setting, when
from mens_exp.config.quant import QUANTIZERS, names_for

if TYPE_CHECKING:
    from collections.abc import Callable


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

    @property
    def spec(self) -> BackendSpec:
        """The backend's spec; a user's class trains an adapter on a graph of its own."""
        return BACKEND_SPECS.get(self.name) or dataclasses.replace(_OF_A_USER, name=self.name)


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
        "Train the base weights too. null: only for random models, because an adapter on frozen "
        "random weights learns little.",
    )


@dataclass(kw_only=True, slots=True)
class ProxyConfig(BackendConfig):
    """Projection stack of the seeds: predicts each token from the one before, without attention."""

    name: str = "proxy"
    composition: Composition = setting(
        Composition.residual,
        "residual: h + F(norm(h))/sqrt(n), as in the code of the Vox mens trainer; sequential: "
        "F(h), as in its decision records; residual_plain: h + F(h).",
    )
    max_layers: int | None = setting(
        None,
        "Number of middle projections to train, counted from the first. null: all; 0: only the "
        "head.",
        ge=0,
        only_if=when("backend.lm_head_only", False),
        idle=None,
    )
    lm_head_only: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Train only the head, without middle projections.",
    )
    require_full_stack: bool = setting(
        False,  # as above
        "Refuse a checkpoint that lacks a middle projection; false trains only the head then.",
    )


def has_frozen_base(backend: BackendConfig, source: str) -> bool:
    """Return whether the base weights are frozen; see :func:`trains_base`."""
    return not isinstance(backend, FullConfig) and not trains_base(backend, source)


def trains_base(backend: BackendConfig, source: str) -> bool:
    """Return whether base weights are trained in addition to the adapter.

    Args:
        backend: the `backend` group.
        source: the model's source; with ``random`` there are no pretrained weights to preserve.
    """
    if not isinstance(backend, BurnConfig):
        return False
    return source == "random" if backend.train_base is None else backend.train_base


FULL_GRAPH = "full_graph"
PROXY = "lm_head_proxy"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """One trainable graph.

    Attributes:
        name: the backend that implements it.
        method: adapter method, ``lora`` or ``qlora``; ``full`` has no adapter.
        targets: the adapted graph: the full causal graph, or the proxy stack.
        graph_id: name of the graph in records; the proxy's depends on its composition.
        depth: a human-readable description of the part of the model that is computed.
        loads: how it reads weights, for the page of capabilities.
        merge: how exact its merged weights are, for the same page.
        parity: how its parity is checked, for the same page.
        is_transformers: whether transformers' own decoder layers compute the model.
        needs_layout: whether it reads weights by name, which requires a known model family.
        needs_f32: whether it computes in f32 only.
        tokenizers: accepted tokenizers; pretrained weights do not know other token ids.
    """

    name: str
    method: str
    targets: str
    graph_id: str
    depth: str
    loads: str = ""
    merge: str = ""
    parity: str = ""
    is_transformers: bool = False
    needs_layout: bool = False
    needs_f32: bool = False
    tokenizers: tuple[str, ...] = ("hf",)

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the quantizers of its base weights; ``none`` leaves them unquantized."""
        return names_for(self.name)

    @property
    def quantized(self) -> bool:
        """Whether the base weights are quantized."""
        return "none" not in self.bases

    @property
    def has_adapter(self) -> bool:
        """Whether it trains an adapter, not every weight."""
        return self.method != "full"

    @property
    def is_causal(self) -> bool:
        """Whether it computes a whole causal model, not a stack of projections."""
        return self.targets == FULL_GRAPH

    @property
    def adapts_model(self) -> bool:
        """Whether it trains an adapter in a whole causal model."""
        return self.has_adapter and self.is_causal

    @property
    def adapts_transformers(self) -> bool:
        """Whether it trains an adapter in a frozen model of transformers."""
        return self.has_adapter and self.is_transformers

    def takes(self, base: str) -> bool:
        """Return whether a quantizer, built-in or installed, may store the base weights."""
        spec = QUANTIZERS.known(base)
        return spec is not None and self.name in spec.backends


_OF_A_USER = BackendSpec(name="", method="qlora", targets=FULL_GRAPH, graph_id="", depth="")
_SHARED_F32 = "tier A (shared f32 operations)"
BACKEND_SPECS: dict[str, BackendSpec] = {
    kernel.name: kernel
    for kernel in (
        BackendSpec(
            name="qlora",
            method="qlora",
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model",
            loads="whole checkpoint, by transformers",
            merge="exact on the quantized base; a bf16 base differs by the quantization error",
            parity="tier C against f32 (losses compared, not tensors)",
            is_transformers=True,
        ),
        BackendSpec(
            name="proxy",
            method="qlora",
            targets=PROXY,
            graph_id="proxy_stack_v1_residual",
            depth="embedding, one projection a layer, head: no attention",
            loads="embedding and one projection a layer, by name",
            merge="the merged projections alone",
            parity="tier B (NF4 round trip, then linear)",
            needs_layout=True,
        ),
        BackendSpec(
            name="lora",
            method="lora",
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model",
            loads="whole checkpoint, by transformers",
            merge="exact in f32",
            parity=_SHARED_F32,
            is_transformers=True,
        ),
        BackendSpec(
            name="burn",
            method="lora",
            targets=FULL_GRAPH,
            graph_id="burn_full_causal",
            depth="full causal model, f32 research lane",
            loads="warm start, by name",
            merge="exact in f32",
            parity=_SHARED_F32,
            needs_layout=True,
            needs_f32=True,
            tokenizers=("hf", "vox"),
        ),
        BackendSpec(
            name="full",
            method="full",
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model, every weight trained",
            loads="whole checkpoint, by transformers",
            merge="nothing to merge",
            parity=_SHARED_F32,
            is_transformers=True,
        ),
    )
}


def names_where(holds: Callable[[BackendSpec], bool]) -> tuple[str, ...]:
    """Return the names of the built-in backends whose spec meets a condition."""
    return tuple(one.name for one in BACKEND_SPECS.values() if holds(one))


def spec_for(method: str, *, quantized: bool, targets: str) -> BackendSpec | None:
    """Return the first backend that supports a method on a base; None if there is none."""
    asked = (method, quantized, targets)
    fitting = (k for k in BACKEND_SPECS.values() if (k.method, k.quantized, k.targets) == asked)
    return next(fitting, None)
