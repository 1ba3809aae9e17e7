from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.scorecard import Samples, Scorecard
from mens_exp.report import write
from mens_exp.report.summary import load

_VOID = {"meta", "link", "img", "br", "input", "hr"}
_HOSTILE = "<script>alert(1)</script> & </pre> \x1b[2J {{ 7 * 7 }}"


class _Page(HTMLParser):
    """Collects the tags and checks that they nest."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.seen = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_shows_base_beside_tuned(write_run):
    """The page has losses, parse rates with counts, and both completions."""
    page = write.render_page(load(write_run()))
    shown = ("2.0000", "1.5000", "62.5%", "14 of 16", "def f(:", "def f(): pass", "this run used")
    assert [text for text in shown if text not in page] == []


def test_rendering_twice_gives_the_same_bytes(write_run):
    """The page depends only on the records."""
    run = write_run()
    assert write.render_page(load(run)) == write.render_page(load(run))


@pytest.mark.draws
@pytest.mark.parametrize("kind", ["finished", "failed"])
def test_page_nests_and_asks_for_nothing(write_run, failed_run, kind):
    """It has no script, stylesheet, image or external link."""
    page = write.render_page(load(write_run() if kind == "finished" else failed_run))
    seen = _Page(page).seen
    links = [v or "" for _, attrs in seen for k, v in attrs.items() if k.endswith(("href", "src"))]
    assert not {tag for tag, _ in seen} & {"script", "link", "img", "iframe", "object"}
    assert all(link.startswith("#") for link in links)
    assert re.search(r"url\(|@import|https?:", page.replace("url(#", "")) is None


def test_answers_of_random_weights_are_folded(write_run, item):
    """They are noise, so they start collapsed; blank answers are described."""
    said = [item("base", "\n \n"), item("tuned", "gibberish")]
    inputs = {"base_model": "tiny_llama", "base_source": "random"}
    shown = {}
    for source in ("random", "bundled"):
        run = load(write_run(said, inputs=inputs | {"base_source": source}))
        shown[source] = _Page(write.render_page(run)).seen
        assert "white space only" in write.render_page(run)
    items = {
        source: [attrs for tag, attrs in seen if tag == "details" and attrs.get("class") == "item"]
        for source, seen in shown.items()
    }
    assert ["open" in one for one in items["random"]] == [False]
    assert ["open" in one for one in items["bundled"]] == [True]


def test_after_random_weights_the_next_command_keeps_the_rows(write_run):
    """A real model should be trained on the user's own rows."""
    run = write_run(
        inputs={"base_source": "random"},
        overrides=["model=tiny_llama", "data=jsonl", "data.path=shop.jsonl", "trainer.max_steps=2"],
    )
    assert "python -m mens_exp data=jsonl data.path=shop.jsonl<" in write.render_page(load(run))


def test_hostile_text_is_shown_not_obeyed(write_run, item):
    """Completions, prompts, file names, overrides and notes are escaped."""
    hostile = item("tuned", _HOSTILE, prompt=_HOSTILE, reference=_HOSTILE, item_id=_HOSTILE)
    run = write_run(
        [hostile, item("base", "", item_id=_HOSTILE)],
        overrides=[_HOSTILE],
        notes=[_HOSTILE],
        experiment=_HOSTILE,
        choices={_HOSTILE: _HOSTILE},
        facts={_HOSTILE: _HOSTILE},
        provenance={"packages": {_HOSTILE: _HOSTILE}},
    )
    page = write.render_page(load(run))
    assert "<script" not in page
    assert "\x1b" not in page
    assert "{{ 7 * 7 }}" in page
    assert "&lt;script&gt;" in page
    _Page(page)


def test_failed_run_opens_with_its_error(failed_run):
    """Type, message and remedy come first, and missing parts are marked as missing."""
    page = write.render_page(load(failed_run))
    shown = (
        "DataError",
        "rows.jsonl:3: not JSON",
        "fix the line",
        "not reached: the run failed",
        "There is no plan next to this run.",
        "no training step was recorded",
        "The run ended before any held-out item was completed.",
        "config.yaml is not in the run directory",
    )
    assert [text for text in shown if text not in page] == []


def test_a_run_without_a_suite_judges_no_answers(finished):
    """With `suite=none` the page has the losses and no card of parse rates."""
    page = (finished.path / "report.html").read_text("utf-8")
    assert "<h3>Validation loss" in page
    assert "that parse" not in page
    assert "This run evaluated no held-out items." in page
    assert "parse" not in (finished.path / "MODEL_CARD.md").read_text("utf-8")


@pytest.mark.parametrize(("suite", "shown"), [("none", 0), ("heldout_syntax", 1)])
def test_a_run_that_failed_before_its_suite_says_what_it_did_not_reach(write_run, suite, shown):
    """With `suite=none` nothing is reported as missing."""
    run = write_run(status=Status.FAILED, results={}, choices={"suite": suite})
    run.scorecard.unlink()
    run.events.unlink()
    page = write.render_page(load(run))
    assert page.count("Held-out completions that parse") == shown
    assert page.count("The run ended before any held-out item was completed.") == shown


def test_each_setting_that_differs_has_one_line(finished):
    """The rows are named by path only; other settings of the option are implied."""
    page = (finished.path / "report.html").read_text("utf-8")
    lines = re.findall(r"<dt>differs from default: (.*?)</dt><dd>(.*?)\s*</dd>", page)
    paths = [path for path, _ in lines]
    assert len(paths) == len(set(paths))
    (rows,) = [path for path in paths if path.startswith("data.path")]
    assert dict(lines)[rows].endswith("rows.jsonl")
    assert ("data.source", "jsonl (default stdlib)") in lines
    assert ("trainer.max_steps", "4 (default 60)") in lines
    assert not any("columns" in path or "not recorded" in text for path, text in lines)


def test_an_item_of_one_condition_is_shown_alone(write_run, item):
    """The other condition is shown as not run."""
    page = write.render_page(load(write_run([item("base", "x")])))
    assert "not asked under this condition" in page


def test_an_answer_says_in_which_style_it_was_read(write_run, item):
    """The style is shown if recorded, and escaped like everything else."""
    events = [item("base", "x", style="class <Solution>"), item("tuned", "y")]
    page = write.render_page(load(write_run(events)))
    assert page.count("read as: ") == 1
    assert "read as: class &lt;Solution&gt;" in page


def test_items_beyond_a_hundred_are_counted(write_run, item):
    """The page stays small; the record has all items."""
    page = write.render_page(
        load(write_run([item("base", "x", item_id=str(n)) for n in range(103)]))
    )
    assert page.count('<details class="item"') == 100
    assert "3 more items are in events.jsonl." in page


def test_an_answer_that_nobody_could_judge_is_no_failure(write_run, item):
    """Of three items one is known for both conditions; unknown ones do not count as failed."""
    told = {"a": (True, False), "b": (None, None), "c": (True, None)}
    events = [
        item(condition, "answer", item_id=name, parses=None, task_success=value)
        for name, both in told.items()
        for condition, value in zip(("base", "tuned"), both, strict=True)
    ]
    text = write.render_page(load(write_run(events)))
    for words in ("both pass: 0", "only base passes: 1", "neither passes: 0", "unknown: 2"):
        assert words in text


def test_answers_to_a_suite_are_called_so(write_run):
    """Only the suite of held-out rows calls its answers so."""
    run = write_run()
    card = Scorecard.read(run.scorecard)
    assert "<h2>Held-out completions</h2>" in write.render_page(load(run))
    card.suite = "jsonl"
    card.write(run.scorecard)
    assert "<h2>Answers to jsonl</h2>" in write.render_page(load(run))


def test_a_suite_that_brings_its_own_models_shows_their_answers(write_run, item):
    """Two conditions that are neither base nor tuned are shown by name."""
    names = ("first", "second")
    events = [{**item("base", f"answer of {name}"), "condition": name} for name in names]
    text = write.render_page(load(write_run(events)))
    assert "answer of first" in text
    assert "answer of second" in text
    assert "not asked under this condition" not in text


def test_the_page_opens_with_four_answers(write_run):
    """It begins with: did it learn, can I trust it, what did it cost, what next."""
    run = write_run()
    page = write.render_page(load(run))
    asked = ("Did it learn?", "Can I trust it?", "What did it cost?", "What next?", "<h2>Result")
    places = [page.index(text) for text in asked]
    assert places == sorted(places)
    assert f"task=chat path={run.path}" in page
    assert "-m seed=1,2,3 optim.lr=2e-4" in page


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": Status.FAILED, "error": None}, "Unknown: the run failed."),
        ({"results": {"base_val_loss": 2.0, "tuned_val_loss": 2.0}}, "In part"),
        ({"results": {}, "task": "evaluate"}, "Is it better?"),
    ],
)
def test_what_a_run_learned_is_said_as_far_as_it_is_known(write_run, changes, expected):
    """An unchanged loss with better answers counts as partly learned."""
    run = write_run(**changes)
    run.telemetry.unlink()
    assert expected in write.render_page(load(run))


def test_answers_that_nobody_scored_are_shown(write_run):
    """Without a suite, base, tuned and the row's answer are shown expanded."""
    run = write_run()
    run.scorecard.unlink()
    run.events.unlink()
    answers = {
        "base": {"text": "I am a model.", "tokens": 64, "finished": False},
        "tuned": {"text": "def f(): pass", "tokens": 5, "finished": True},
    }
    one = {"item_id": "x", "prompt": "Write f.", "reference": "def f(): ...", "answers": answers}
    Samples(max_new_tokens=64, items=[one]).write(run.samples)
    page = write.render_page(load(run))
    assert "<h2>What the models say now</h2>" in page
    for text in ("I am a model.", "cut off, 64 tokens", "def f(): pass", "def f(): ..."):
        assert text in page
    assert "badge" not in page.partition("What the models say now")[2].partition("Planned")[0]
