from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

from mens_exp.artifacts.corpus_record import CorpusReport, Histogram, NGrams, Tokens
from mens_exp.report import corpus_view, html

LENGTHS = Histogram(
    count=1200,
    mean=90.0,
    smallest=10,
    largest=900,
    p50=80.0,
    p90=200.0,
    p99=700.0,
    edges=[8, 64, 512, 1024],
    counts=[500, 650, 50],
)
TOKENS = Tokens(
    encoded_rows=1000,
    exact=False,
    tokenizer_sha256="a" * 64,
    template_sha256="b" * 64,
    objective="assistant",
    seq_len=512,
    truncation="right",
    documents=1200,
    tokens=123_456,
    tokens_se=1000.0,
    supervised_tokens=61_728,
    supervised_share=0.5,
    truncated_documents=7,
    dropped_documents=1,
    lost_tokens=1234,
    lost_share=0.01,
    lost_supervised_tokens=617,
    lost_supervised_share=0.02,
    lengths=LENGTHS,
)


def record(**fields):
    share = {"rows": 600, "rows_share": 0.5, "characters": 9, "characters_share": 0.25}
    usual = {
        "rows": 1200,
        "sides": {"heldout": 50, "train": 1100, "val": 50},
        "characters": {"prompts": 1, "answers": 2, "system prompts": 0},
        "lengths": {"prompt": LENGTHS, "answer": LENGTHS},
        "tokens": TOKENS,
        "parse": {"": {"rows": 200, "parsed": None}, "python": {"rows": 1000, "parsed": 990}},
        "constructs": {"python": {"rows": 990, "occurring": {"If": 495}, "absent": ["While"]}},
        "duplicates": {"exact": 2, "near": 3, "clusters": 4, "threshold": 0.8, "by": "response"},
        "diversity": {
            "distinct": {"1": NGrams(total=100, distinct=40, exact=False, share=0.4)},
            "compression_ratio": 3.456,
        },
        "safety": {
            "secrets": {"AWS access key": 1},
            "injections": {"do anything now": 2},
            "findings": [
                {
                    "kind": "AWS access key",
                    "place": "rows.jsonl:7",
                    "field": "answer",
                    "shown": "AKIA… (20 characters)",
                }
            ],
        },
        "sources": {"category": [{"name": "a", **share}, {"name": "b", **share}], "language": []},
        "before": [
            {
                "step": "mix",
                "rows_in": 5000,
                "rows_out": 1200,
                "dropped": {"bad": 3},
                "sources": {
                    "stdlib": {"share_asked": 0.7, "share": 0.69, "rows": 828, "passes": 1.5}
                },
            }
        ],
        "unknown": {"parse.": "these rows name no language"},
    }
    return CorpusReport(**usual | fields)


def render(report):
    return html.page(corpus_view.document(report))


def text(page):
    """Return the visible text in one line."""
    body = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_everything_in_the_record_is_on_the_page():
    """It shows rows, tokens, shares, kinds, duplicates, diversity, findings and unknown values."""
    seen = text(render(record()))
    for part in (
        "1,200 rows (train 1,100, val 50, heldout 50) of about 123,456 tokens",
        "of which 50.0% are learned",
        "± 2,000 (95 %)",
        "Lost to truncation 1.0% 1,234 tokens at 512",
        "Code that parses 99.0% of 1,000 rows",
        "Duplicates left 5 2 exact, 3 near",
        "Compression 3.46",
        "Secrets 1 and 2 injection phrases",
        "mix 5,000 1,200 bad 3",
        "stdlib 70.0% 69.0% 828 1.50",
        "1,000 of 1,200 rows, drawn evenly; totals are estimates",
        "7 documents over 512 tokens, on the right",
        "none named 200 unknown these rows name no language",
        "python: 1 of 2 kinds of nodes occur in 990 rows",
        "If 50.0%",
        "Never: While.",
        "a 600 50.0% 25.0%",
        "runs of 1 100 about 40 40.0%",
        "rows.jsonl:7 AWS access key answer AKIA… (20 characters)",
    ):
        assert part in seen, part


def test_what_is_null_is_absent_with_its_reason():
    """The other parts are shown."""
    why = {"tokens": "no tokenizer", "duplicates": "nobody looked", "diversity": "no rows at all"}
    empty = record(
        rows=0,
        sides={},
        lengths={},
        tokens=None,
        parse={},
        constructs={},
        duplicates=None,
        diversity=None,
        safety={"secrets": {}, "injections": {}, "findings": []},
        sources={},
        before=[],
        unknown=why,
    )
    seen = text(render(empty))
    for part in (*why.values(), "No step before the report", "Nothing was found", "0 rows."):
        assert part in seen, part


def test_text_of_rows_is_not_markup():
    """A category that looks like a script is escaped."""
    share = {"rows": 1, "rows_share": 0.5, "characters": 1, "characters_share": 0.5}
    names = [{"name": "<script>alert(1)</script>", **share}, {"name": "\x1b[2J", **share}]
    page = render(record(sources={"category": names}))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page


def test_small_sources_are_shown_as_one():
    """Twelve sources are shown, and the other three together."""
    share = {"rows": 1, "rows_share": 1 / 15, "characters": 2, "characters_share": 1 / 15}
    names = [{"name": f"name{n}", **share} for n in range(15)]
    seen = text(render(record(sources={"category": names})))
    assert "name11 1 6.7% 6.7% 3 more 3 20.0% 20.0%" in seen
    assert "name12" not in seen


def test_the_same_record_gives_the_same_page_that_asks_for_nothing():
    """The page is deterministic and well nested, without scripts or external links."""
    page = render(record())
    assert page == render(record())
    assert "http://" not in page
    assert "https://" not in page
    assert " src=" not in page

    class Nesting(HTMLParser):
        open: list[str]

        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Nesting()
    parser.open = []
    parser.feed(page)
    assert parser.open == []
