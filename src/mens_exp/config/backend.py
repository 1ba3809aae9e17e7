"""Settings of `backend`, and the backends: what each requires of a contract.

The table lists the trainable graphs; the config groups determine which of them are available.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting, when
from mens_exp.config.quant import QUANTIZERS, names_for


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
        needs_layout: whether it reads weights by name, which requires a known model family.
        tokenizers: accepted tokenizers; pretrained weights do not know other token ids.
    """

    name: str
    method: str
    targets: str
    graph_id: str
    depth: str
    needs_layout: bool
    tokenizers: tuple[str, ...] = ("hf",)

    @property
    def bases(self) -> tuple[str, ...]:
        """Names of the quantizers of its base weights; ``none`` leaves them unquantized."""
        return names_for(self.name)

    @property
    def quantized(self) -> bool:
        """Whether the base weights are quantized."""
        return "none" not in self.bases

    def takes(self, base: str) -> bool:
        """Return whether a quantizer, built-in or installed, may store the base weights."""
        spec = QUANTIZERS.known(base)
        return spec is not None and self.name in spec.backends


BACKEND_SPECS: dict[str, BackendSpec] = {
    kernel.name: kernel
    for kernel in (
        BackendSpec(
            name="qlora",
            method="qlora",
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model",
            needs_layout=False,
        ),
        BackendSpec(
            name="proxy",
            method="qlora",
            targets=PROXY,
            graph_id="proxy_stack_v1_residual",
            depth="embedding, one projection a layer, head: no attention",
            needs_layout=True,
        ),
        BackendSpec(
            name="lora",
            method="lora",
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model",
            needs_layout=False,
        ),
        BackendSpec(
            name="burn",
            method="lora",
            targets=FULL_GRAPH,
            graph_id="burn_full_causal",
            depth="full causal model, f32 research lane",
            needs_layout=True,
            tokenizers=("hf", "vox"),
        ),
        BackendSpec(
            name="full",
            method="full",
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model, every weight trained",
            needs_layout=False,
        ),
    )
}


def spec_for(method: str, *, quantized: bool, targets: str) -> BackendSpec | None:
    """Return the first backend that supports a method on a base; None if there is none."""
    asked = (method, quantized, targets)
    fitting = (k for k in BACKEND_SPECS.values() if (k.method, k.quantized, k.targets) == asked)
    return next(fitting, None)
