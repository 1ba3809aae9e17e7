"""docs/reference/capabilities.md: supported combinations, as determined by the planner.

``python -m mens_exp.planning.capabilities`` prints the page; a test compares it with the file.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING

from mens_exp.config.backend import BACKEND_SPECS, BackendSpec
from mens_exp.config.option_files import group_options
from mens_exp.config.quant import BUILT_IN, names_that_read
from mens_exp.layout.families import FAMILIES
from mens_exp.planning.contract import (
    AdapterPart,
    ArtifactPart,
    DataPart,
    ExecPart,
    FineTuneContract,
    ModelPart,
    QuantPart,
)
from mens_exp.planning.messages import COMPARISON
from mens_exp.planning.planner import Environment, Gate, available, readers_of_names, refusals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_TOKENIZERS = ("hf", "vox")
_TARGETS = ("workstation", "mobile_edge")


def page() -> str:
    """Return the whole page as Markdown."""
    lines = [
        "# What goes with what",
        "",
        "Generated from the planner by `make docs`; `task=plan` says the same about one command,",
        "with the reason for every refusal.",
        "",
        "## Backends",
        "",
        *_table(("", *BACKEND_SPECS), _backend_rows()),
        "",
        "What a contrast of them may conclude: " + COMPARISON + ".",
        "",
        "## Bases and tokenizers",
        "",
        "Each backend with each base and tokenizer, on a known model family. A number is the gate",
        "that refuses: "
        + ", ".join(str(gate) for gate in Gate if gate is not Gate.FLAGS)
        + ". Whether a backend is here already is the table above.",
        "",
        *_table(("base", "tokenizer", *BACKEND_SPECS), _combination_rows()),
        "",
        "## Model families",
        "",
        "Names and shapes of these are verified against checkpoints that transformers writes:",
        ", ".join(f"`{name}`" for name in sorted(FAMILIES)) + ".",
        "A causal model of any other `model_type` trains by the names in its headers. What reads",
        "weights by name needs one of these and refuses it, and a plan says so: "
        + ", ".join(f"`{what}`" for what in readers_of_names())
        + ".",
        "",
        *_table(("layout", *BACKEND_SPECS), _layout_rows()),
        "",
        "## Deployment targets",
        "",
        *_table(("target", "sequence", "rank", "micro-batch", "device"), _target_rows()),
        "",
    ]
    return "\n".join(lines)


def _backend_rows() -> Iterator[tuple[str, ...]]:
    here = available()
    kernels = list(BACKEND_SPECS.values())
    yield ("here", *("yes" if one.name in here else "not yet" for one in kernels))
    yield ("adapter method", *(one.method for one in kernels))
    yield ("graph", *(f"`{one.graph_id}`" for one in kernels))
    yield ("graph depth", *(one.depth for one in kernels))
    yield ("base quantization", *(", ".join(one.bases) for one in kernels))
    yield ("tokenizer", *(_accepted_tokenizers(one) for one in kernels))
    merges = here if "merge" in group_options()["task"] else frozenset()
    for label, said, where in (
        ("weight loading", attrgetter("loads"), here),
        ("artifacts", _artifacts, here),
        ("merge fidelity", attrgetter("merge"), merges),
        ("parity", attrgetter("parity"), here),
    ):
        yield (label, *(said(one) if one.name in where else "not yet" for one in kernels))


def _artifacts(kernel: BackendSpec) -> str:
    if not kernel.has_adapter:
        return "a whole model in f32"
    view = ", PEFT view" if kernel.is_causal else ""
    return f"adapter schema v3{view}"


def _accepted_tokenizers(kernel: BackendSpec) -> str:
    base = kernel.bases[0]
    return ", ".join(mode for mode in _TOKENIZERS if not _gates(kernel, base=base, tokenizer=mode))


def _combination_rows() -> Iterator[tuple[str, ...]]:
    for base in BUILT_IN:
        for mode in _TOKENIZERS:
            answers = (
                _answer(_gates(kernel, base=base, tokenizer=mode))
                for kernel in BACKEND_SPECS.values()
            )
            yield (base, mode, *answers)


def _layout_rows() -> Iterator[tuple[str, ...]]:
    for label, model_type in (("known family", "llama"), ("any other", None)):
        answers = (
            _answer(_gates(one, base=one.bases[0], model_type=model_type))
            for one in BACKEND_SPECS.values()
        )
        yield (label, *answers)


def _target_rows() -> Iterator[tuple[str, ...]]:
    """Yield the limits of each target, found by planning with increasing values."""
    for target in _TARGETS:
        limits = (
            _most(target, "seq_len", (512, 8192)),
            _most(target, "rank", (32, 256)),
            _most(target, "batch_size", (1, 64)),
        )
        gpu = _gates(BACKEND_SPECS["qlora"], base="nf4", deployment=target, device="gpu")
        yield (target, *limits, "CPU" if gpu else "any")


def _most(target: str, name: str, tried: tuple[int, int]) -> str:
    kernel = BACKEND_SPECS["qlora"]
    last = tried[1]
    while last > tried[0] and _gates(kernel, base="nf4", deployment=target, limits={name: last}):
        last -= 1
    return "any" if last == tried[1] else f"at most {last}"


def _gates(
    kernel: BackendSpec,
    *,
    base: str,
    tokenizer: str = "hf",
    deployment: str = "workstation",
    device: str = "cpu",
    model_type: str | None = "llama",
    limits: Mapping[str, int] | None = None,
) -> list[Gate]:
    asked = {"seq_len": 128, "rank": 8, "batch_size": 1, **(limits or {})}
    contract = FineTuneContract(
        model=ModelPart(),
        data=DataPart(tokenizer_mode=tokenizer),
        adapter=AdapterPart(
            method=kernel.method,
            rank=asked["rank"],
            alpha=asked["rank"],
            dropout=0.0,
            targets=kernel.targets,
        ),
        quant=QuantPart(base=base, double_quant=base in names_that_read("double_quant")),
        exec=ExecPart(
            seq_len=asked["seq_len"],
            batch_size=asked["batch_size"],
            grad_accum=1,
            learning_rate=1e-4,
            warmup_steps=0,
            seed=0,
        ),
        artifact=ArtifactPart(deployment_target=deployment),
    )
    around = Environment(
        kernels=frozenset(BACKEND_SPECS), model_type=model_type, device=device, forced=kernel.name
    )
    return [gate for gate, _ in refusals(contract, around)]


def _answer(gates: Iterable[Gate]) -> str:
    numbers = sorted({gate.partition(" ")[0] for gate in gates})
    return f"no ({', '.join(numbers)})" if numbers else "yes"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
