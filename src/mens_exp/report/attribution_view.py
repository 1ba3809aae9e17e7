"""The cost of quantizing a base model, module by module: tables, and heat maps as inline SVG."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from mens_exp.report import wording
from mens_exp.report.document import Code, Note, Plot, Section, Table, Tone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.attribution import Attribution

_CELL, _HEIGHT, _LEFT, _TOP, _GAP = 26, 22, 62, 6, 2  # pixels
_FOOT, _LEGEND, _LEAST_WIDTH = 54, 120, 330
_EVERY = 5  # columns per label
_FAINTEST = 0.06  # opacity of the lowest value, which keeps it distinct from a missing one
_INK, _MUTED = "var(--plot-ink, #777777)", "var(--plot-muted, #808080)"
_HEAT = "var(--plot-heat, #b4471b)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values by kind (row) and layer (column).

    Attributes:
        kinds: the rows, from top to bottom.
        layers: number of columns.
        values: (kind, layer) -> value; a missing entry or None is drawn as an empty cell.
    """

    kinds: Sequence[str]
    layers: int
    values: Mapping[tuple[str, int], float | None]


def heat_map(
    name: str,
    title: str,
    caption: str,
    grid: Grid,
    *,
    spell: Callable[[float], str],
    scale: Callable[[float], float] = float,
    high_is_dark: bool = True,
) -> Plot:
    """Draw a heat map in which darker cells are worse.

    Args:
        name: the drawing's identifier.
        title: the title.
        caption: an explanation of the drawing.
        grid: the values.
        spell: formats a value with its unit.
        scale: transforms values before shading, such as a logarithm.
        high_is_dark: whether high values are worse.
    """
    known = [value for value in grid.values.values() if value is not None]
    if not known:
        return Plot(name=name, title=title, caption=caption, absent="no value is known")
    low, high = min(known), max(known)
    shades = scale(low), scale(high)

    def opacity(value: float) -> float:
        spread = shades[1] - shades[0]
        part = (scale(value) - shades[0]) / spread if spread else 1.0
        return _FAINTEST + (1 - _FAINTEST) * (part if high_is_dark else 1 - part)

    width = _LEFT + grid.layers * _CELL
    bottom = _TOP + len(grid.kinds) * _HEIGHT
    wide, high_px = max(width, _LEAST_WIDTH), bottom + _FOOT
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {wide} {high_px}" '
    head += f'width="{wide}" height="{high_px}"'
    parts = [f'{head} fill="currentColor" font-size="12">']
    for row, kind in enumerate(grid.kinds):
        y = _TOP + row * _HEIGHT
        parts.append(_text(_LEFT - 8, y + 15, kind, _INK, "end"))
        for layer in range(grid.layers):
            value = grid.values.get((kind, layer))
            if value is not None:
                said = f"{kind}, layer {layer}: {spell(value)}"
                parts.append(_cell(_LEFT + layer * _CELL, y, opacity(value), said))
    parts += [
        _text(_LEFT + (layer + 0.5) * _CELL, bottom + 15, str(layer), _MUTED)
        for layer in range(0, grid.layers, _EVERY)
    ]
    parts += _legend(bottom + 28, spell(low), spell(high), opacity(low), opacity(high))
    return Plot(name=name, title=title, caption=caption, svg="".join([*parts, "</svg>"]))


def _cell(x: float, y: float, opacity: float, said: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL - _GAP}" height="{_HEIGHT - _GAP}" rx="2" '
        f'fill="{_HEAT}" fill-opacity="{opacity:.3f}"><title>{escape(said)}</title></rect>'
    )


def _text(x: float, y: float, text: str, color: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(y: float, low: str, high: str, first: float, last: float) -> list[str]:
    """Draw six shades between the lowest and the highest value, and label the columns."""
    steps = 6
    drawn = [
        _text(_LEFT - 8, y - 13, "layer", _MUTED, "end"),
        _text(_LEFT, y + 13, low, _MUTED, "start"),
    ]
    start = _LEFT + 8 * len(low) + 6
    for step in range(steps):
        opacity = first + (last - first) * step / (steps - 1)
        x = start + step * _LEGEND / steps
        drawn.append(
            f'<rect x="{x:g}" y="{y + 2:g}" width="{_LEGEND / steps - _GAP:g}" height="13" '
            f'fill="{_HEAT}" fill-opacity="{opacity:.3f}"></rect>'
        )
    return [*drawn, _text(start + _LEGEND + 6, y + 13, high, _MUTED, "start")]


_WORST = 10
_LEAST_KL = 1e-9  # nats; below, a logarithm would amplify rounding


def sections(record: Attribution) -> list[Section]:
    """Return the sections of an attribution; the first one is the summary for a terminal."""
    one = record.suggestion
    return [
        Section(
            "Attribution",
            [worst(record), *map(Note, _said(record))],
            name="worst",
            lead="The unquantized model in f32, of which weights alone are quantized.",
        ),
        Section("Maps", [*_maps(record), _whole(record)], name="maps"),
        Section(
            "Suggested overrides",
            [Code("\n".join(one["overrides"])), Note(f"Rule: {one['rule']}.", Tone.QUIET)],
        ),
        *_mixture(record),
        *_ranks(record),
        Section("4 bits against f32", [_positions(record)], lead="A report, not a tolerance."),
    ]


def _said(record: Attribution) -> Iterator[str]:
    yield headline(record)
    yield _parity(record)
    yield _cost(record)
    mixture = record.suggestion.get("mixture")
    if mixture is not None:
        before, after = record.whole[record.configured], mixture["whole"]
        many = Counter(mixture["variants"].values())
        parts = ", ".join(f"{count} modules in {name}" for name, count in many.most_common())
        yield (
            f"Suggested mixture: {parts}. It takes "
            f"{after['bits_per_parameter']:.3f} bits a parameter and has KL {_nats(after['kl'])}; "
            f"{record.configured} takes {before['bits_per_parameter']:.3f} and has "
            f"{_nats(before['kl'])}. Both KLs are of the tokens that it was chosen on."
        )
    ranks = record.suggestion.get("ranks")
    if ranks is not None:
        yield (
            f"Suggested ranks: {min(ranks['ranks'].values())} to {max(ranks['ranks'].values())}. "
            f"Adapters of these ranks can take away {wording.percent(ranks['share'])} of the "
            f"summed KL by the rule below, and {wording.percent(ranks['share_uniform'])} with one "
            "rank everywhere. Train with both before you rely on the difference."
        )


def _mixture(record: Attribution) -> Iterator[Section]:
    mixture = record.suggestion.get("mixture")
    if mixture is None:
        return
    chosen = mixture["variants"]
    bits = {
        (one["kind"], one["layer"]): one["variants"][chosen[one["path"]]]["bits_per_parameter"]
        for one in record.modules
    }
    overrides = mixture["overrides"]
    none = f"Every module keeps {record.configured}: no other choice has a smaller sum."
    yield Section(
        "Suggested mixture",
        [
            heat_map(
                "bits",
                "Bits per parameter of each module",
                "with the scales; dark is many",
                Grid(kinds=_kinds(record), layers=_layers(record), values=bits),
                spell=lambda value: f"{value:.2f} bits",
            ),
            Code("\n".join(overrides)) if overrides else Note(none),
            Note(f"Rule: {mixture['rule']}.", Tone.QUIET),
        ],
        lead="Instead of quant.skip above; its cost is in the table of all modules at once.",
    )


def _ranks(record: Attribution) -> Iterator[Section]:
    found = record.suggestion.get("ranks")
    if found is None:
        return
    ranks = {(one["kind"], one["layer"]): found["ranks"][one["path"]] for one in record.modules}
    yield Section(
        "Suggested ranks",
        [
            heat_map(
                "ranks",
                "Rank of each module's adapter",
                "dark is high",
                Grid(kinds=_kinds(record), layers=_layers(record), values=ranks),
                spell=lambda value: f"{value:.0f}",
            ),
            Code("\n".join(found["overrides"])),
            Note(f"Rule: {found['rule']}.", Tone.QUIET),
        ],
        lead="Instead of the lora.targets above, with as many adapter parameters as one rank "
        "everywhere.",
    )


def worst(record: Attribution) -> Table:
    """Return the modules with the highest cost."""
    heads = ("module", "KL", "share", "loss change", "lost output", "SQNR")
    rows = [
        (
            one["logical"],
            _nats(one["kl"]),
            wording.percent(one["share"]),
            f"{_signed(one['loss_change'])} ± {_nats(one['loss_change_se'])}",
            _known(one["variants"][record.configured]["activation_error"], ".2%"),
            _known(one["variants"][record.configured]["sqnr_db"], ".1f", " dB"),
        )
        for one in sorted(record.modules, key=lambda one: one["rank"])[:_WORST]
    ]
    return Table(heads, rows, title=f"Cost of {record.configured}, each module alone")


def headline(record: Attribution) -> str:
    """State the cost of quantizing all modules together, and the sum of their separate costs."""
    whole, parts = record.whole[record.configured], record.sum_of_parts
    return (
        f"All {len(record.modules)} modules in {record.configured}: KL {_nats(whole['kl'])}, loss "
        f"{_signed(whole['loss_change'])} ± {_nats(whole['loss_change_se'])} nats per token; each "
        f"alone, summed: KL {_nats(parts['kl'])}, loss {_signed(parts['loss_change'])}."
    )


def _maps(record: Attribution) -> list[Plot]:
    def grid(value: Any) -> Grid:
        values = {(one["kind"], one["layer"]): value(one) for one in record.modules}
        return Grid(kinds=_kinds(record), layers=_layers(record), values=values)

    def error(key: str) -> Any:
        return lambda one: one["variants"][record.configured][key]

    return [
        heat_map(
            "kl",
            "KL, each module alone",
            "nats per token; the shade is logarithmic",
            grid(lambda one: one["kl"]),
            spell=lambda value: f"{value:.2g}",
            scale=lambda value: math.log(max(value, _LEAST_KL)),
        ),
        heat_map(
            "loss_change",
            "Loss change, each module alone",
            "nats per token; dark is a higher loss",
            grid(lambda one: one["loss_change"]),
            spell=_signed,
        ),
        heat_map(
            "activation_error",
            "Activation-weighted error",
            "share of the output's energy that is lost",
            grid(error("activation_error")),
            spell=lambda value: f"{value:.2%}",
        ),
        heat_map(
            "sqnr",
            "Weight SQNR",
            "decibels; dark is low",
            grid(error("sqnr_db")),
            spell=lambda value: f"{value:.1f} dB",
            high_is_dark=False,
        ),
    ]


def _kinds(record: Attribution) -> list[str]:
    return list(dict.fromkeys(one["kind"] for one in record.modules))


def _layers(record: Attribution) -> int:
    return max(one["layer"] for one in record.modules) + 1


def _whole(record: Attribution) -> Table:
    heads = ("all modules at once", "bits", "KL", "loss change", "mean SQNR", "mean lost output")
    rows = []
    for name in record.variants:
        one = record.whole[name]
        rows.append(
            [
                f"{name}, as configured" if name == record.configured else name,
                f"{one['bits_per_parameter']:.3f}",
                _nats(one["kl"]),
                f"{_signed(one['loss_change'])} ± {_nats(one['loss_change_se'])}",
                _known(_mean(record, name, "sqnr_db"), ".2f", " dB"),
                _known(_mean(record, name, "activation_error"), ".3%"),
            ]
        )
    mixture = record.suggestion.get("mixture")
    if mixture is not None:
        one = mixture["whole"]
        change = f"{_signed(one['loss_change'])} ± {_nats(one['loss_change_se'])}"
        bits = f"{one['bits_per_parameter']:.3f}"
        rows.append(["suggested mixture", bits, _nats(one["kl"]), change, "", ""])
    parts = record.sum_of_parts
    rows.append(
        ["sum of the modules alone", "", _nats(parts["kl"]), _signed(parts["loss_change"]), "", ""]
    )
    return Table(heads, rows)


def _mean(record: Attribution, variant: str, key: str) -> float | None:
    values: list[Any] = [dict(one["variants"][variant])[key] for one in record.modules]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _positions(record: Attribution) -> Table:
    heads = ("positions", "tokens", "mean KL", "same top token", "loss change")
    rows = [
        [
            f"{one['first']} and on" if one["last"] is None else f"{one['first']} to {one['last']}",
            wording.count(one["tokens"]),
            _nats(one["mean_kl"]),
            wording.percent(one["top1_agreement"]),
            _signed(one["nll_difference"]),
        ]
        for one in record.parity["by_position"]
    ]
    return Table(heads, rows)


def _parity(record: Attribution) -> str:
    found = record.parity
    return (
        f"The 4-bit model as training loads it ({record.compute_dtype}) against f32, over "
        f"{wording.count(found['tokens'])} tokens: KL {_nats(found['mean_kl'])} in the mean, "
        f"{_nats(found['p99_kl'])} at the 99th percentile, {_nats(found['max_kl'])} at most; the "
        f"likeliest token is the same in {wording.percent(found['top1_agreement'])}; loss "
        f"{_signed(found['nll_difference'])} on {wording.loss(found['reference_nll'])}."
    )


def _cost(record: Attribution) -> str:
    one = record.suggestion
    before, after = one["bits_per_parameter"], one["bits_per_parameter_after"]
    skip = "no module fits into the extra bits of quant.skip"
    if after > before:
        skip = (
            f"quant.skip takes {before:.3f} to {after:.3f} bits a parameter and leaves out "
            f"{wording.percent(one['skip_share'])} of the summed KL"
        )
    return (
        f"Suggested: {skip}; lora.targets cover "
        f"{wording.percent(one['targets_share'])} with {wording.percent(one['targets_cost'])} of "
        "all modules' adapter parameters."
    )


def _nats(value: float) -> str:
    return f"{value:.2g}" if value < 0.1 else f"{value:.3f}"  # noqa: PLR2004 - three digits either way


def _signed(value: float) -> str:
    return f"{value:+.5f}".replace("-", wording.MINUS)


def _known(value: float | None, form: str, unit: str = "") -> str:
    return "none" if value is None else f"{value:{form}}{unit}"
