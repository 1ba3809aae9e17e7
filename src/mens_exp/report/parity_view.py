"""A certificate as people read it: a table for the terminal, a section for a model card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mens_exp.artifacts.certificate import Certificate, Comparison

__all__ = ["card_section", "parity_table", "verdict"]

_COLUMNS = ("mean KL", "max KL", "same top-1", "NLL", "worst layer")
_WORST = 5  # tensors shown


def parity_table(certificate: Certificate) -> Table:
    """Put every comparison beside the others, the one that decides marked."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    table.title = f"Parity: {verdict(certificate)}"
    table.add_column(f"against {certificate.reference}", overflow="fold")
    columns = _COLUMNS if certificate.comparisons else ("max error", "share")
    for name in columns:
        table.add_column(name, justify="right")
    for name, one in certificate.comparisons.items():
        mark = " ←" if name == certificate.judged else ""
        table.add_row(Text(f"{one['what']}{mark}"), *_figures(one))
    worst = sorted(certificate.tensors.items(), key=lambda item: -item[1]["relative"])
    for name, error in worst[: 1 if certificate.comparisons else _WORST]:
        apart = f"{error['relative']:.2g} of ΔW"
        cells = [apart] if certificate.comparisons else [f"{error['max_abs']:.2g}", apart]
        table.add_row(Text(f"worst of {len(worst)} tensors: {name}"), *cells)
    for name, reason in certificate.unknown.items():
        table.add_row(Text(f"{name}: not compared, {reason}", style="dim"), *[""] * len(columns))
    return table


def verdict(certificate: Certificate) -> str:
    """Say in a line whether what was written is what was trained."""
    if certificate.passed:
        return "within the budget"
    over = "; ".join(certificate.exceeded()[:_WORST])
    return f"over the budget ({over}){', and accepted' if certificate.accepted else ''}"


def card_section(certificate: Certificate) -> str:
    """Return the certificate as a section of a model card, Markdown."""
    lines = ["## Parity with the trained model", "", f"Verdict: {verdict(certificate)}.", ""]
    if certificate.comparisons:
        assert certificate.probe is not None, "graphs are compared on a text"
        lines.append(
            f"Compared on {certificate.probe['tokens']} tokens ({certificate.probe['source']}) "
            f"with {certificate.reference}; KL and NLL in nats."
        )
        lines += [
            "",
            f"| graph | {' | '.join(_COLUMNS)} |",
            f"|---|{'---:|' * len(_COLUMNS)}",
        ]
        lines += [
            f"| {one['what']} | {' | '.join(_figures(one))} |"
            for one in certificate.comparisons.values()
        ]
    if certificate.tensors:
        worst = max(one["relative"] for one in certificate.tensors.values())
        many = len(certificate.tensors)
        lines += ["", f"{many} tensors against W + ΔW in f64: at most {worst:.2g} of ΔW apart."]
    return "\n".join([*lines, "", "parity.json beside this card has every figure and hash.", ""])


def _figures(one: Comparison) -> tuple[str, ...]:
    worst = one["worst_layer"]
    return (
        f"{one['mean_kl']:.2g}",
        f"{one['max_kl']:.2g}",
        f"{one['top1_agreement']:.2%}",
        f"{one['nll_difference']:+.2g}",
        f"{worst['layer']} {worst['relative_error']:.2g}",
    )
