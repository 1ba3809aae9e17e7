"""A corpus as a document with histograms: a pure function of its record."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from markupsafe import escape

from mens_exp.report import wording
from mens_exp.report.document import (
    Cell,
    Document,
    Facts,
    Note,
    Plot,
    Section,
    Table,
    Tone,
    cells_of,
    next_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.artifacts.corpus_record import Constructs, CorpusReport, Histogram, Share
    from mens_exp.report.document import Part, Step

_SIDES = ("train", "val", "heldout")
_LENGTHS = {"prompt": "Length of a prompt", "answer": "Length of an answer"}
_LIKE_ALL = 2  # minimum number of sources for a table
_MOST_SHARES = 12


def document(report: CorpusReport, steps: Sequence[Step] = ()) -> Document:
    """Return the report of a corpus.

    Args:
        report: its record; null values are shown as absent, with the reason.
        steps: suggested next commands.
    """
    plots = _plots(report)
    drawn: list[Part] = [Note("There are no rows.", Tone.QUIET)]
    if plots:
        bins = (
            "Logarithmic bins; a median or p90 is the middle of a finer bin, off by 2.2 % at most."
        )
        drawn = [*plots, Note(bins, Tone.QUIET)]
    before = _before(report)
    made = Section("How it was made", [before, *_mixes(report)])
    tokens = _tokens(report)
    encoded: Part = Facts(tokens) if tokens else Note("The rows were not encoded.", Tone.QUIET)
    both = [Section("As encoded for training", [encoded]), Section("Diversity", _distinct(report))]
    unknown = Facts(cells_of(report.unknown.items()))
    parts = [
        Section("", [Facts(list(_cards(report)), cards=True)], name="figures"),
        next_steps(steps),
        made,
        Section("Lengths", drawn),
        Section("", both, side_by_side=True),
        Section("Code", [_parsed(report), *_kinds(report)]),
        *[Section("Sources", one) for one in [_sources(report)] if one],
        Section(
            "Safety screen",
            _screen(report),
            lead="A short list of patterns, which finds what is obvious.",
        ),
        *([Section("Unknown, and why", [unknown])] if report.unknown else []),
    ]
    return Document(
        title="Corpus",
        kind="report of a corpus",
        headline=_headline(report),
        parts=parts,
        source="corpus_report.json",
        steps=steps,
    )


def _headline(report: CorpusReport) -> str:
    rows = f"{wording.count(report.rows)} rows"
    if set(report.sides) - {"all"}:
        named = [name for name in _SIDES if name in report.sides]
        sides = ", ".join(f"{name} {wording.count(report.sides[name])}" for name in named)
        rows = f"{rows} ({sides})"
    tokens = report.tokens
    if tokens is None:
        return f"{rows}."
    about = "" if tokens["exact"] else "about "
    return (
        f"{rows} of {about}{wording.count(tokens['tokens'])} tokens, of which "
        f"{wording.percent(tokens['supervised_share'])} are learned."
    )


def _cards(report: CorpusReport) -> Iterator[Cell]:
    why = report.unknown
    tokens, rest, diversity = report.tokens, report.duplicates, report.diversity
    checked = [one for one in report.parse.values() if one["parsed"] is not None]
    asked = sum(one["rows"] for one in checked)
    parsed = sum(one["parsed"] or 0 for one in checked)
    yield Cell(wording.count(report.rows), label="Rows")
    if tokens is None:
        yield Cell(label="Tokens", absent=why["tokens"])
    else:
        error = f"± {wording.count(2 * tokens['tokens_se'])} (95 %)"
        lost = f"{wording.count(tokens['lost_tokens'])} tokens at {tokens['seq_len']}"
        learned, cut = (wording.percent(tokens[k]) for k in ("supervised_share", "lost_share"))
        count = wording.count(tokens["tokens"])
        yield Cell(count, label="Tokens", detail="counted" if tokens["exact"] else error)
        yield Cell(learned, label="Learned", detail="of the tokens")
        yield Cell(cut, label="Lost to truncation", detail=lost)
    if asked:
        share, of = wording.percent(parsed / asked), f"of {wording.count(asked)} rows"
        yield Cell(share, label="Code that parses", detail=of)
    else:
        none = "no row names a language that is parsed here"
        yield Cell(label="Code that parses", absent=none)
    if rest is None:
        yield Cell(label="Duplicates left", absent=why["duplicates"])
    else:
        left = wording.count(rest["exact"] + rest["near"])
        of = f"{wording.count(rest['exact'])} exact, {wording.count(rest['near'])} near"
        yield Cell(left, label="Duplicates left", detail=of)
    if diversity is None:
        yield Cell(label="Compression", absent=why["diversity"])
    else:
        ratio = f"{diversity['compression_ratio']:.2f}"
        yield Cell(ratio, label="Compression", detail="answers, zlib")
    secrets = sum(report.safety["secrets"].values())
    phrases = sum(report.safety["injections"].values())
    also = f"and {wording.count(phrases)} injection phrases"
    yield Cell(wording.count(secrets), label="Secrets", detail=also)


def _plots(report: CorpusReport) -> list[Plot]:
    plots = [
        histogram(title, "characters", report.lengths[name])
        for name, title in _LENGTHS.items()
        if name in report.lengths
    ]
    tokens = report.tokens
    if tokens is not None:
        marks = {"sequence length": float(tokens["seq_len"])}
        plots.append(histogram("Length of a document", "tokens", tokens["lengths"], marks))
    return plots


def _before(report: CorpusReport) -> Table:
    rows = []
    for step in report.before:
        dropped = ", ".join(f"{reason} {count}" for reason, count in step["dropped"].items())
        counts = [wording.count(step["rows_in"]), wording.count(step["rows_out"])]
        rows.append([step["step"], *counts, dropped or "nothing"])
    heads = ("step", "rows in", "rows out", "dropped")
    absent = "No step before the report: its rows were given."
    return Table(heads, rows, absent=absent)


def _mixes(report: CorpusReport) -> list[Table]:
    heads = ("source", "share asked for", "share", "rows", "passes")
    return [
        Table(
            heads,
            [
                [
                    name,
                    wording.percent(one["share_asked"]),
                    wording.percent(one["share"]),
                    wording.count(one["rows"]),
                    f"{one['passes']:.2f}",
                ]
                for name, one in step["sources"].items()
            ],
            title="The mix",
        )
        for step in report.before
        if step["sources"] is not None
    ]


def _parsed(report: CorpusReport) -> Table:
    rows = []
    for language, one in report.parse.items():
        parsed = one["parsed"]
        share = wording.percent(parsed / one["rows"]) if parsed is not None else "unknown"
        why = report.unknown.get(f"parse.{language}", "")
        rows.append([language or "none named", wording.count(one["rows"]), share, why])
    return Table(("language", "rows", "parse", ""), rows)


def _kinds(report: CorpusReport) -> list[Part]:
    """Return the node kinds of each language, with the share of rows that contain them."""
    return [part for name, one in report.constructs.items() for part in _of_language(name, one)]


def _of_language(language: str, one: Constructs) -> Iterator[Part]:
    occurring = sorted(one["occurring"].items(), key=lambda it: (-it[1], it[0]))
    every = len(occurring) + len(one["absent"])
    title = (
        f"{language}: {len(occurring)} of {every} kinds of nodes occur in "
        f"{wording.count(one['rows'])} rows"
    )
    shares = [(kind, wording.percent(count / one["rows"])) for kind, count in occurring]
    yield Facts(cells_of(shares), title=title, dense=True)
    if one["absent"]:
        yield Note(f"Never: {', '.join(one['absent'])}.", Tone.QUIET)


def _sources(report: CorpusReport) -> list[Table]:
    return [
        Table((by, "rows", "of rows", "of characters"), [_share(one) for one in _shown(shares)])
        for by, shares in report.sources.items()
        if len(shares) >= _LIKE_ALL
    ]


def _shown(shares: list[Share]) -> list[Share]:
    """Return the largest shares, and the sum of the others."""
    if len(shares) <= _MOST_SHARES:
        return shares
    rest = shares[_MOST_SHARES:]
    return [
        *shares[:_MOST_SHARES],
        {
            "name": f"{len(rest)} more",
            "rows": sum(one["rows"] for one in rest),
            "rows_share": sum(one["rows_share"] for one in rest),
            "characters": sum(one["characters"] for one in rest),
            "characters_share": sum(one["characters_share"] for one in rest),
        },
    ]


def _share(one: Share) -> list[str]:
    return [
        one["name"] or "none named",
        wording.count(one["rows"]),
        wording.percent(one["rows_share"]),
        wording.percent(one["characters_share"]),
    ]


def _tokens(report: CorpusReport) -> list[Cell]:
    """Return notes on how tokens were counted."""
    one = report.tokens
    if one is None:
        return []
    encoded = f"{wording.count(one['encoded_rows'])} of {wording.count(report.rows)} rows"
    how = "all rows" if one["exact"] else f"{encoded}, drawn evenly; totals are estimates"
    over = f"documents over {one['seq_len']} tokens, on the {one['truncation']}"
    cut = f"{wording.count(one['truncated_documents'])} {over}"
    unlearned = f"{wording.percent(one['lost_supervised_share'])} of the learned ones"
    return cells_of(
        [
            ("Encoded", how),
            ("Objective", one["objective"]),
            ("Documents", wording.count(one["documents"])),
            ("Learned tokens", wording.count(one["supervised_tokens"])),
            ("Cut", cut),
            ("Kept nothing to learn", f"{wording.count(one['dropped_documents'])} documents"),
            ("Lost", f"{wording.count(one['lost_tokens'])} tokens, and {unlearned}"),
            ("Tokenizer", one["tokenizer_sha256"][:12]),
            ("Chat template", one["template_sha256"][:12]),
        ]
    )


def _distinct(report: CorpusReport) -> list[Part]:
    found = {} if report.diversity is None else report.diversity["distinct"]
    rows = [
        [
            f"runs of {size}",
            wording.count(one["total"]),
            f"{'' if one['exact'] else 'about '}{wording.count(one['distinct'])}",
            wording.percent(one["share"]),
        ]
        for size, one in found.items()
    ]
    heads = ("tokens of the answers", "all", "distinct", "distinct-n")
    table = Table(heads, rows, absent="There are no rows.")
    note = (
        "Over 65,536 distinct runs are estimated, with a standard error of 0.4 %. Distinct-n falls "
        "as a corpus grows."
    )
    return [table, *([Note(note, Tone.QUIET)] if rows else [])]


def _screen(report: CorpusReport) -> list[Part]:
    safety = report.safety
    rows = [[name, "secret", wording.count(one)] for name, one in safety["secrets"].items()]
    rows += [[name, "phrase", wording.count(one)] for name, one in safety["injections"].items()]
    if not rows:
        return [Note("Nothing was found.")]
    found = [
        [one["place"] or "no place", one["kind"], one["field"], one["shown"] or ""]
        for one in safety["findings"]
    ]
    first = Table(("place", "kind", "in", "begins with"), found)
    fold = Section("The first findings of each kind", [first], count=len(found), folded=True)
    return [Table(("kind", "", "found"), rows), fold]


_WIDTH, _HEIGHT, _LEFT, _TOP, _FOOT, _RIGHT = 330, 150, 8, 20, 40, 8  # pixels
_GAP = 2
_LABEL = 42  # pixels per axis label
_INK, _MUTED = "var(--plot-ink, #777777)", "var(--plot-muted, #808080)"
_BAR, _MARK = "var(--plot-tuned, #1a83a8)", "var(--plot-heat, #b4471b)"


def histogram(
    title: str, unit: str, found: Histogram, marks: Mapping[str, float] | None = None
) -> Plot:
    """Draw a histogram of lengths on a logarithmic axis.

    Args:
        title: the title.
        unit: unit of the lengths.
        found: the histogram.
        marks: name -> length at which to draw a line, if it is in range.
    """
    caption = (
        f"{unit}; median {wording.count(found['p50'])}, "
        f"p90 {wording.count(found['p90'])}, longest {wording.count(found['largest'])}"
    )
    edges, counts = found["edges"], found["counts"]
    width = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    floor, most = _HEIGHT - _FOOT, max(counts)
    head = f'<svg role="img" aria-label="{escape(f"{title}: {caption}")}" '
    head += f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    parts = [f'{head} fill="currentColor" font-size="11">']
    for number, count in enumerate(counts):
        high = (floor - _TOP) * count / most
        said = (
            f"{wording.count(edges[number])} to {wording.count(edges[number + 1])}: "
            f"{wording.count(count)}"
        )
        parts.append(
            f'<rect x="{_LEFT + number * width:.1f}" y="{floor - high:.1f}" '
            f'width="{max(width - _GAP, 1):.1f}" height="{high:.1f}" fill="{_BAR}">'
            f"<title>{escape(said)}</title></rect>"
        )
    every = max(1, -(-_LABEL // int(width or 1)))
    parts += [
        _text(_LEFT + number * width, floor + 15, wording.count(edges[number]), "middle", _MUTED)
        for number in range(every, len(counts), every)
    ]
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 6, unit, "end", _MUTED))
    for label, value in (marks or {}).items():
        place = _place(value, edges)
        if place is not None:
            x = _LEFT + place * width
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{floor}" stroke="{_MARK}" '
                'stroke-width="1.5" stroke-dasharray="4 3"></line>'
            )
            parts.append(_text(x, 10, label, "middle", _INK))
    return Plot(name="", title=title, caption=caption, svg="".join([*parts, "</svg>"]))


def _place(value: float, edges: list[float]) -> float | None:
    """Return the position of a length, in bars from the left; None if out of range."""
    for number, (low, high) in enumerate(pairwise(edges)):
        if low <= value < high:
            return number + (value - low) / (high - low)
    return None


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
    )
