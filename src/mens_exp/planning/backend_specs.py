"""Backend specifications: the graphs that can be trained, and what each asks of a contract.

The table holds those that are planned and those that are built; the config groups say which of
them are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.user_config import group_options

SUBSET_MERGE = "task=merge merge.mode=subset"
FULL_GRAPH = "full_graph"
PROXY = "lm_head_proxy"


_PLAIN = ("none",)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """One trainable graph.

    Attributes:
        name: the backend that computes it.
        method: adapter method, ``lora`` or ``qlora``; ``full`` has no adapter.
        bases: what the base weights may be stored as; ``none`` is as they are.
        targets: what the adapter sits on: the full causal graph, or the proxy stack.
        graph_id: name of the graph in records; the proxy's depends on its composition.
        depth: what of the model is computed, for people.
        needs_layout: whether it reads weights by name, so that the family has to be known.
        tokenizers: whose ids it takes; ids of its own mean nothing to pretrained weights.
    """

    name: str
    method: str
    bases: tuple[str, ...]
    targets: str
    graph_id: str
    depth: str
    needs_layout: bool
    tokenizers: tuple[str, ...] = ("hf",)

    @property
    def quantized(self) -> bool:
        """Whether the base weights are quantized."""
        return self.bases != _PLAIN


BACKEND_SPECS: dict[str, BackendSpec] = {
    kernel.name: kernel
    for kernel in (
        BackendSpec(
            name="qlora",
            method="qlora",
            bases=("nf4", "fp4", "int8"),
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model",
            needs_layout=False,
        ),
        BackendSpec(
            name="proxy",
            method="qlora",
            bases=("nf4", "fp4"),
            targets=PROXY,
            graph_id="proxy_stack_v1_residual",
            depth="embedding, one projection a layer, head: no attention",
            needs_layout=True,
        ),
        BackendSpec(
            name="lora",
            method="lora",
            bases=_PLAIN,
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model",
            needs_layout=False,
        ),
        BackendSpec(
            name="burn",
            method="lora",
            bases=_PLAIN,
            targets=FULL_GRAPH,
            graph_id="burn_full_causal",
            depth="full causal model, f32 research lane",
            needs_layout=True,
            tokenizers=("hf", "vox"),
        ),
        BackendSpec(
            name="full",
            method="full",
            bases=_PLAIN,
            targets=FULL_GRAPH,
            graph_id="full_causal",
            depth="full causal model, every weight trained",
            needs_layout=False,
        ),
    )
}


def spec_for(method: str, *, quantized: bool, targets: str) -> BackendSpec | None:
    """Return the kernel that computes a method on a base, the first of several; None without."""
    asked = (method, quantized, targets)
    fitting = (k for k in BACKEND_SPECS.values() if (k.method, k.quantized, k.targets) == asked)
    return next(fitting, None)


def available() -> frozenset[str]:
    """Return the backends that the config groups offer, ours and the user's own."""
    return frozenset(group_options().get("backend", ()))


def readers_of_names() -> tuple[str, ...]:
    """Return what is here and reads weights by name, as it is typed; they want a known family."""
    here = available()
    backends = (
        f"backend={one.name}" + (" with tokenizer=hf" if len(one.tokenizers) > 1 else "")
        for one in BACKEND_SPECS.values()
        if one.needs_layout and one.name in here
    )
    return (*backends, SUBSET_MERGE, "task=export format=gguf")
