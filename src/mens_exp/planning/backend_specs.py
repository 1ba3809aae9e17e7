"""Backend specifications: the trainable graphs, and what each requires of a contract.

The table lists both planned and implemented backends; the config groups determine which of them
are available.
"""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.quant import known, names_for
from mens_exp.config.user_config import group_options

SUBSET_MERGE = "task=merge merge.mode=subset"
FULL_GRAPH = "full_graph"
PROXY = "lm_head_proxy"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """One trainable graph.

    Attributes:
        name: the backend that implements it.
        method: adapter method, ``lora`` or ``qlora``; ``full`` has no adapter.
        targets: what the adapter sits on: the full causal graph, or the proxy stack.
        graph_id: name of the graph in records; the proxy's depends on its composition.
        depth: a human-readable description of the part of the model that is computed.
        needs_layout: whether it reads weights by name, which requires a known family.
        tokenizers: accepted tokenizers; other token ids mean nothing to pretrained weights.
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
        """Names of the quantizers of its base weights; ``none`` leaves them as they are."""
        return names_for(self.name)

    @property
    def quantized(self) -> bool:
        """Whether the base weights are quantized."""
        return "none" not in self.bases

    def takes(self, base: str) -> bool:
        """Tell whether the base weights may be stored by a quantizer, installed ones included."""
        spec = known(base)
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


def available() -> frozenset[str]:
    """Return the backends that the config groups offer, built-in and user-defined."""
    return frozenset(group_options().get("backend", ()))


def readers_of_names() -> tuple[str, ...]:
    """Return the settings, as typed, that read weights by name and so require a known family."""
    here = available()
    backends = (
        f"backend={one.name}" + (" with tokenizer=hf" if len(one.tokenizers) > 1 else "")
        for one in BACKEND_SPECS.values()
        if one.needs_layout and one.name in here
    )
    return (*backends, SUBSET_MERGE, "task=export format=gguf")
