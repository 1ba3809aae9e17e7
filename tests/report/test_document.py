"""A document rendered as a page, as a fragment for notebooks and as Markdown."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from mens_exp.report import html
from mens_exp.report.document import (
    Answer,
    Cell,
    Code,
    Document,
    Facts,
    Item,
    Note,
    Plot,
    Section,
    Step,
    Table,
    Tally,
    Tone,
    markdown,
    next_steps,
)
from mens_exp.report.plots import ARMS, css_of

DOCS = Path(__file__).parents[2] / "docs"
EVIL = "</td></pre><script>alert(1)</script>|`[x](y)\x1b[2J"


def document(**changes):
    """Return a document with every kind of part, and text that is markup in some format."""
    parts = [
        Section(
            EVIL,
            [
                Table(("", EVIL), [(EVIL, Cell(EVIL, detail=EVIL))], title=EVIL),
                Table(("a", "b"), [("x", "1"), ("y", Cell(absent=EVIL))]),
                Facts([Cell(EVIL, label=EVIL, code=True)], title=EVIL),
                Note(EVIL, Tone.BAD),
                *(Note(EVIL, item=True) for _ in range(2)),
                Code(EVIL),
                Item(name=EVIL, prompt=EVIL, answers=[Answer(who=EVIL, text=EVIL, error=EVIL)]),
                Tally([("both", EVIL, 1)]),
                Plot(name="p", title=EVIL, caption=EVIL, absent=EVIL),
            ],
            lead=EVIL,
        ),
        next_steps([Step(EVIL, EVIL)]),
    ]
    usual = {"title": EVIL, "kind": EVIL, "parts": parts, "source": EVIL, "headline": EVIL}
    return Document(**usual | changes)


class Nesting(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def fragment(made):
    return html.fragment(*made.parts)


@pytest.mark.parametrize("render", [html.page, fragment])
def test_no_part_of_a_page_obeys_what_others_wrote(render):
    """All text is escaped, and control characters are made visible."""
    text = render(document())
    tags = {tag for tag, _ in Nesting(text).tags}
    assert "script" not in tags
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;") >= 20


def test_a_fragment_keeps_its_styles_to_itself():
    """Its styles are nested under its class, and it is not a whole page."""
    text = fragment(document())
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert re.fullmatch(r"\.mens-exp \{.*\}", style.strip(), re.DOTALL)
    assert style.count("{") == style.count("}")
    assert not {tag for tag, _ in Nesting(text).tags} & {"html", "body", "title", "meta"}


def test_a_term_is_linked_once_and_explained():
    """The first occurrence is linked, unless it is part of a longer term."""
    words = "The data contract holds. Contracts of two arms; the contract again."
    page = html.page(document(headline=words, parts=[Note("An arm, <contract>")], title="contract"))
    links = [attrs for tag, attrs in Nesting(page).tags if attrs.get("class") == "term"]
    assert [link["href"] for link in links] == [
        *("#word-data-contract", "#word-contract", "#word-arm")
    ]
    assert '<dt id="word-contract">contract</dt>' in page
    assert links[1]["title"] == "everything that changes what a run learns, as a digest"


def test_a_term_in_code_is_left_alone():
    """A command must be copied unchanged."""
    page = html.page(document(headline="", parts=[Code("python verdict")], title="", kind=""))
    assert "Words on this page" not in page


def test_every_term_has_a_meaning_and_a_page():
    """Terms are spelled as they are looked up."""
    text = files("mens_exp.report").joinpath("templates/terms.yaml").read_text("utf-8")
    for term, (meaning, page, *rest) in yaml.safe_load(text).items():
        assert term == term.lower()
        assert not meaning.endswith(".")
        assert (DOCS / page).is_file()
        assert rest in ([], ["head"])


def test_markdown_has_one_table_row_a_row_and_no_markup_of_others():
    """Numbers are right-aligned, and markup is escaped."""
    text = markdown(document().parts)
    assert "| a | b |\n| --- | ---: |\n| x | 1 |\n" in text
    plain = re.sub(r"```.*?```|(?<!\\)`.*?`", "", text, flags=re.DOTALL)
    assert re.search(r"(?<!\\)[<\[]", plain) is None
    assert all(line.count("|") - line.count("\\|") in {0, 3} for line in plain.splitlines())
    assert "\x1b" not in text


def test_items_of_a_list_follow_each_other_in_markdown():
    """Other parts are separated by blank lines."""
    notes = [Note("a"), Note("b", item=True), Note("c", item=True), Note("d")]
    assert markdown(notes) == "a\n\n- b\n- c\n\nd\n"


@pytest.mark.parametrize(
    ("text", "is_figure"),
    [
        *((text, True) for text in ("1.5000", "\N{MINUS SIGN}25.0%", "[+0.1, +0.2]", "1 h 05 min")),
        *((text, True) for text in ("5e-07", "about 40", "20.5 dB", "unknown", "12 of 16", "")),
        *(
            (text, False)
            for text in ("seed=1", "no difference found", "3 equal, 1 differs", "l0.q")
        ),
    ],
)
def test_a_column_of_figures_is_told_from_one_of_words(text, is_figure):
    """The values decide, so no declaration can be wrong."""
    table = Table(("name", "value"), [("x", text)])
    assert table.figures == ({1} if is_figure else frozenset())


# Machado, Oliveira and Fernandes (2009), severity 1.0, for linear RGB.
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)


def lab_of(color, seen):
    """Return CIELAB (D65) of a colour as seen with a colour vision deficiency."""
    srgb = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb]
    r, g, b = (min(1, max(0, sum(w * c for w, c in zip(row, linear, strict=True)))) for row in seen)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(first, second, seen):
    """Return the distance of two colours as seen with a colour vision deficiency."""
    pairs = zip(lab_of(first, seen), lab_of(second, seen), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


SEEN = pytest.mark.parametrize(
    "seen", [DEUTERANOPIA, PROTANOPIA], ids=["deuteranopia", "protanopia"]
)


@SEEN
@pytest.mark.parametrize("names", [("good", "bad"), ("base", "tuned")])
def test_colours_with_a_meaning_differ_for_the_colour_blind(seen, names):
    """They differ by over 20 in CIELAB in both themes; the earlier green and red did not."""
    style = files("mens_exp.report").joinpath("templates/report.css").read_text("utf-8")
    first, second = (re.findall(rf"--{name}: (#\w{{6}})", style) for name in names)
    assert len(first) == len(second) == 2
    assert all(apart(*pair, seen) > 20 for pair in zip(first, second, strict=True))
    assert apart("#15703c", "#b3261e", seen) < 20 or apart("#7fce9b", "#f2958c", seen) < 20


@SEEN
def test_arms_differ_for_the_colour_blind(seen):
    """All pairs of eight colours are checked; a just noticeable difference is 2.3."""
    colors = [re.search(r"#\w{6}", css_of(arm))[0] for arm in ARMS]
    assert len(set(colors)) == 8
    assert min(apart(*pair, seen) for pair in itertools.combinations(colors, 2)) > 12
