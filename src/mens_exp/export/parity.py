"""Distance between two graphs on the same text: logits, and hidden states by layer.

One graph is in memory at a time: what the reference makes of each document is put on disk, and
each other graph is held against that.

Shapes: T tokens of a document, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import load_file, save_file

from mens_exp.artifacts.certificate import Comparison, WorstLayer
from mens_exp.backends.tracing import Trace
from mens_exp.errors import MensError
from mens_exp.evals.logit_comparison import LogitComparison

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.config.parity import BudgetConfig
    from mens_exp.evals.logit_comparison import LogitDifference
    from mens_exp.export.probe import Probe

__all__ = ["Forward", "Reference", "compare", "exceeded", "record"]

_LOGITS = "logits"  # no layer is called so


class Forward(Protocol):
    """A graph that takes one document."""

    def __call__(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits."""


class Reference:
    """The outputs of a graph on a probe, on disk."""

    def __init__(self, folder: Path, probe: Probe, nll: float) -> None:
        """Keep where it lies; :func:`record` makes it."""
        self.folder = folder
        self.probe = probe
        self.nll = nll

    def read(self, document: int) -> Trace:
        """Read what it made of one document."""
        tensors = load_file(self.folder / f"{document}.safetensors")
        logits_TV = tensors.pop(_LOGITS)
        return Trace(hidden=tensors, logits_TV=logits_TV)


def record(forward: Forward, probe: Probe, folder: Path) -> Reference:
    """Run the graph that others are held against, and keep its traces.

    Args:
        forward: the graph.
        probe: the text; its logits take ``tokens · V · 4`` bytes of disk.
        folder: an empty one.
    """
    total = 0.0
    for number, ids in enumerate(probe.documents):
        found = forward(ids)
        # Layers that change nothing hand on the very tensor, which would not be stored twice.
        tensors = {name: state.cpu().clone() for name, state in found.hidden.items()}
        logits_TV = found.logits_TV.cpu().clone()
        save_file({**tensors, _LOGITS: logits_TV}, folder / f"{number}.safetensors")
        log_probabilities = torch.log_softmax(logits_TV[:-1].double(), -1)
        targets = torch.tensor(ids[1:])
        total -= float(log_probabilities.gather(1, targets[:, None]).sum())
    return Reference(folder, probe, total / (probe.tokens - len(probe.documents)))


def compare(reference: Reference, forward: Forward, what: str, budget: BudgetConfig) -> Comparison:
    """Hold a graph against the reference, on every token of the probe.

    Args:
        reference: what the trained graph made of the probe.
        forward: the other graph; same vocabulary.
        what: the other graph in words.
        budget: the limits.

    Raises:
        MensError: a number of it is not finite, or its vocabulary is another one.
    """
    logits = LogitComparison()
    apart: defaultdict[str, float] = defaultdict(float)
    size: defaultdict[str, float] = defaultdict(float)
    for number, ids in enumerate(reference.probe.documents):
        theirs, ours = reference.read(number), forward(ids)
        for name, state_TD in theirs.hidden.items():
            other_TD = ours.hidden[name].cpu()
            apart[name] += float((other_TD.double() - state_TD.double()).square().sum())
            size[name] += float(state_TD.double().square().sum())
        logits.add(
            theirs.logits_TV[:-1],
            ours.logits_TV[:-1].cpu(),
            torch.tensor(ids[1:]),
            torch.arange(len(ids) - 1),
        )
    found = logits.result()
    errors = {name: math.sqrt(apart[name] / size[name]) if size[name] else 0.0 for name in size}
    worst = max(errors, key=lambda name: errors[name])
    if not math.isfinite(errors[worst]):
        raise MensError("a hidden state is not finite", where=what, found=worst)
    layer = WorstLayer(layer=worst, relative_error=errors[worst])
    return Comparison(
        what=what,
        tokens=found.tokens,
        mean_kl=found.mean_kl,
        p99_kl=found.p99_kl,
        max_kl=found.max_kl,
        top1_agreement=found.top1_agreement,
        nll_difference=found.nll_difference,
        worst_layer=layer,
        exceeded=exceeded(found, layer, budget),
    )


def exceeded(found: LogitDifference, worst: WorstLayer, budget: BudgetConfig) -> list[str]:
    """Name the limits that a comparison is over, each with the figure and the limit."""
    upper = {
        "mean_kl": (found.mean_kl, budget.mean_kl),
        "max_kl": (found.max_kl, budget.max_kl),
        "nll_difference": (abs(found.nll_difference), budget.nll_difference),
        "hidden_error": (worst["relative_error"], budget.hidden_error),
    }
    over = [
        f"{name} {value:.3g} > {limit:g}"
        for name, (value, limit) in upper.items()
        if limit is not None and value > limit
    ]
    least, agreement = budget.top1_agreement, found.top1_agreement
    if least is not None and agreement < least:
        over.append(f"top1_agreement {agreement:.4g} < {least:g}")
    return over
