"""The comparison of a merged or exported model with the model that was trained."""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.fields import section, setting
from mens_exp.config.task import RUNS_GRAPH

__all__ = ["BudgetConfig", "ParityConfig"]


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """The largest allowed difference of an output from the trained model; null sets no limit."""

    mean_kl: float | None = setting(
        0.005,
        "Mean KL(trained‖written) over the probe's tokens, nats (measured: a right merge of a "
        "bf16 run of SmolLM2 has 0.0016, its delta on the unquantized base 0.29).",
        gt=0,
    )
    max_kl: float | None = setting(None, "The same of the worst token, nats.", gt=0)
    top1_agreement: float | None = setting(
        0.95,
        "Least share of tokens whose likeliest next token is the same (measured: a right merge "
        "has 0.975, on the unquantized base 0.78).",
        gt=0,
        le=1,
    )
    nll_difference: float | None = setting(
        0.02, "Mean negative log likelihood, written less trained, either sign, nats.", gt=0
    )
    hidden_error: float | None = setting(
        None, "Relative error of the hidden states after any layer, Frobenius.", gt=0
    )
    weight_error: float | None = setting(
        0.05,
        "What a written tensor differs by from W + ΔW, rounded to its format, as a share of ΔW, "
        "Frobenius (an adapter's form: ΔW alone). A wrong scale, layer or side is near 1.",
        gt=0,
    )


@dataclass(kw_only=True, slots=True)
class ParityConfig:
    """The certificate that a merge or an export carries, parity.json."""

    tokens: int = setting(
        2048,
        "Tokens of real text to compare on, at least; held-out rows come first.",
        ge=2,
        only_if=RUNS_GRAPH,
    )
    text: str | None = setting(
        None,
        "A file of plain text to compare on; null takes the run's held-out rows.",
        only_if=RUNS_GRAPH,
    )
    accept: bool = setting(
        False, "Keep what is over the budget; the certificate and the card say that it was."
    )
    budget: BudgetConfig = section(BudgetConfig)
