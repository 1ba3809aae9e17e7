from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from mens_exp.errors import ConfigError, DataError, Problems
from mens_exp.report import plan_view, run_page, terminal
from mens_exp.report.document import (
    Answer,
    Cell,
    Facts,
    Item,
    Note,
    Section,
    Step,
    Table,
    Tone,
    cells_of,
)
from mens_exp.report.summary import load


@pytest.fixture
def shown_plan(screen):
    return lambda plan, width=80: screen(plan_view.document(plan).parts, width)


@pytest.fixture
def outcome(screen):
    return lambda run, width=80: screen(run_page.outcome(load(run), most=3), width)


@pytest.mark.parametrize("width", [80, 120])
def test_plan_table_keeps_every_number_whole(plan, width, shown_plan):
    """Estimates are marked "≈" and give their basis."""
    text = shown_plan(plan, width)
    shown = (
        "r 16 · alpha 16",
        "4,884,480 trainable parameters",
        "≈ 402,000",
        "estimated from file sizes",
        "3 of 2,048 tokens = 6,144 tokens",
        "≈ 4 min 22 s",
        "467 tokens per second",
        "≈ 2.00 GiB",
    )
    assert [part for part in shown if part not in text] == []
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_plan_table_marks_only_estimates(plan, shown_plan):
    """Counts from a warm cache are exact."""
    plan["data"]["exact"] = True
    text = shown_plan(plan)
    assert "≈ 402,000" not in text
    assert "402,000" in text
    assert "estimated from file sizes" not in text


def test_plan_table_says_unknown_where_there_is_no_estimate(plan, shown_plan):
    """Null is shown with its basis and not as a number."""
    plan["time_s"] = {"estimate": None, "basis": "this machine was never measured"}
    plan["trainable_parameters"] = None
    text = shown_plan(plan)
    assert "unknown" in text
    assert "this machine was never measured" in text
    assert "trainable" not in text


def test_plan_table_shows_what_the_planner_says(plan, shown_plan):
    """All parts of the plan and its problems are shown."""
    plan |= {
        "graph_id": "proxy_stack_v1_residual",
        "layers": 30,
        "proxy": {"eligible": True, "complete": True, "matched": 30, "expected": 30},
        "effective_batch": 8,
        "warmup_steps": 5,
        "checkpoints": 3,
        "contract_digest": "ab" * 32,
        "notes": ["conversion is the operator's"],
        "warnings": ["it may fail"],
        "problems": ["not enough disk"],
        "disk_bytes": {
            "in_run": 2**20,
            "base": 2**21,
            "adapter": 2**10,
            "peft": 2**10,
            "checkpoint": 2**11,
            "checkpoints_kept": 2,
            "merged": 2**30,
        },
    }
    plan["memory_bytes"] |= {"low": 2**30, "high": 3 * 2**30, "free": 2**33}
    plan["time_s"] |= {"low": 1.0, "high": 2.0, "quantization": 9.0}
    text = shown_plan(plan, 120)
    shown = (
        "graph proxy_stack_v1_residual, 30 layers",
        "30 of 30 middle projections",
        "effective batch 8, warm-up 5, checkpoints 3",
        "(1.00 GiB to 3.00 GiB)",
        "8.00 GiB are free",
        "(1.0 s to 2.0 s)",
        "and 9.0 s to quantize",
        "1 MiB in the run directory",
        "2 MiB for a copy of the base model",
        "adapter in two formats 2 KiB, checkpoints 6 KiB, telemetry and reports 1016 KiB",
        "1.00 GiB for a merged model",
        "abababababab",
        "conversion is the operator's",
        "it may fail",
        "not enough disk",
    )
    assert [part for part in shown if part not in text] == []


def test_plan_table_shows_settings_beside_our_defaults(plan, shown_plan):
    """Only settings that both sides have are shown, without names and the model's dimensions."""
    plan["differs_from_default"] = {
        "lora.targets": {"default": ["all_linear"], "found": ["qv"]},
        "backend.name": {"default": "qlora", "found": "proxy"},
        "backend.max_layers": {"found": 3},
        "model.hidden_size": {"default": 576, "found": 64},
        "seed": {"default": 42, "found": 1337},
    }
    text = " ".join(shown_plan(plan, 120).split())
    assert 'not as usual lora.targets=["qv"] (["all_linear"]), seed=1337 (42)' in text
    assert all(name not in text for name in ("backend.name", "max_layers", "hidden_size"))
    plan["differs_from_default"] = {}
    assert "not as usual" not in shown_plan(plan)


def test_plan_table_leaves_a_stack_that_nobody_has_read_open(plan, shown_plan):
    """If the headers are not local, the table shows what is expected."""
    plan["proxy"] = {"eligible": True, "complete": None, "matched": None, "expected": 30}
    text = shown_plan(plan)
    assert "\n              30 middle projections" in text


@pytest.mark.parametrize("width", [80, 120])
def test_outcome_keeps_every_number_whole(write_run, outcome, width):
    """Base, tuned and the cost are shown in full."""
    text = outcome(write_run(), width)
    shown = ("2.0000", "1.5000", "\N{MINUS SIGN}25.0%", "62.5%", "87.5%", "+25.0 points")
    costs = ("10 of 16", "332 (441 counting every token)", "2.11 GiB", "6 min 40 s")
    assert [part for part in shown + costs if part not in text] == []
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_outcome_answers_what_a_reader_asks(write_run, outcome):
    """Answers are in words, with marks for readers without colour."""
    text = outcome(write_run())
    assert "✓ Did it learn?\nYes: validation loss \N{MINUS SIGN}25.0%" in text
    assert "! The code had uncommitted changes" in text
    assert "The plan said 4 min 22 s of training and 2.00 GiB." in text
    worse = write_run(results={"base_val_loss": 2.0, "tuned_val_loss": 2.5})
    worse.scorecard.unlink()
    assert "✗ Did it learn?\nNo, it got worse: validation loss +25.0%." in outcome(worse)


def test_outcome_says_that_training_ended_before_its_last_step(write_run, outcome, plan):
    """A callback may have stopped it, so the figures are those of a shorter run."""
    assert "Training ended" not in outcome(write_run(results={"steps": plan["steps"]}))
    text = outcome(write_run(results={"steps": plan["steps"] - 1}))
    assert f"! Training ended after step {plan['steps'] - 1} of {plan['steps']}." in text


def test_completions_stand_side_by_side(item, write_run, outcome):
    """Both are on one line with their outcomes."""
    events = [item("base", "left", parses=False, finished=False), item("tuned", "right")]
    text = outcome(write_run(events))
    assert re.search(r"^left +│ right$", text, re.MULTILINE)
    assert re.search(r"^base · ✗ does not parse · cut off.*┬ tuned · ✓ parses", text, re.MULTILINE)
    styled = outcome(write_run([item("tuned", "x", style="last block")]), 160)
    assert "tuned · ✓ parses · 12 tokens, read as: last block" in styled


def test_completions_are_below_each_other_in_a_pipe(item, screen):
    """In a pipe nothing is wrapped or placed side by side."""
    words = "word " * 60
    asked = Item(name="a", prompt="p", answers=[Answer(who="base", text=words)] * 2)
    assert screen([asked], 10_000, is_plain=True).splitlines()[2:] == [
        "base",
        words,
        "",
        "base",
        words,
    ]


def test_the_first_answers_are_shown_and_long_ones_are_cut(item, write_run, outcome):
    """Three items and 15 of 100 lines are shown; the report has the rest."""
    events = [item("base", f"text {n}", item_id=str(n)) for n in range(4)]
    text = outcome(write_run(events))
    assert "text 2" in text
    assert "text 3" not in text
    long = "\n".join(str(n) for n in range(100))
    text = outcome(write_run([item("base", long)]))
    assert "… 85 more lines" in text
    assert "15 " not in text


def test_answers_neither_obey_escapes_nor_markup(item, write_run, outcome):
    """A model's text cannot clear the screen or cause a markup error."""
    text = outcome(write_run([item("base", "\x1b[2J [/red] [bold]x[/bold]")]))
    assert "\x1b" not in text
    assert "\\x1b[2J [/red] [bold]x[/bold]" in text


def test_conditions_of_a_suite_s_own_are_shown_by_name(item, write_run, outcome):
    """They are neither base nor tuned, which were not run."""
    told = {"first": "one", "second": "two"}
    events = [{**item("base", said), "condition": name} for name, said in told.items()]
    text = outcome(write_run(events))
    assert "not asked" not in text
    assert all(word in text for word in ("first", "one", "second", "two"))


def test_an_answer_in_which_nothing_is_to_be_seen_is_described(item, write_run, outcome):
    """Blank and empty texts are described in words."""
    text = outcome(write_run([item("base", "\n\n"), item("tuned", "")]))
    assert "white space only" in text
    assert "empty" in text


def test_answers_of_random_weights_are_not_shown(item, write_run, outcome):
    """They are noise."""
    inputs = {"base_model": "tiny_llama", "base_source": "random"}
    text = outcome(write_run([item("base", "gibberish", parses=False)], inputs=inputs))
    assert "gibberish" not in text
    assert "random weights" in text


HEADS = ("arm", "difference", "verdict")
ROW = ("lora.r=16", "\N{MINUS SIGN}0.1468", "no difference found in these seeds")


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            80,
            [
                "arm        difference  verdict",
                "─" * 57,
                "lora.r=16     \N{MINUS SIGN}0.1468  no difference found in these seeds",
            ],
        ),
        (
            40,
            [
                "arm        difference  verdict",
                "─" * 40,
                "lora.r=16     \N{MINUS SIGN}0.1468  no difference",
                " " * 23 + "found in these",
                " " * 23 + "seeds",
            ],
        ),
        (
            30,
            [
                "lora.r=16",
                "  difference  \N{MINUS SIGN}0.1468",
                "  verdict     no difference",
                "              found in these",
                "              seeds",
            ],
        ),
    ],
)
def test_a_table_breaks_no_word(screen, width, lines):
    """Words share the width that numbers leave; if one does not fit, rows become lists."""
    assert screen([Table(HEADS, [ROW])], width).splitlines() == lines


@pytest.mark.parametrize("width", range(20, 100, 7))
def test_no_line_is_wider_than_the_screen_and_no_word_is_broken(screen, width):
    """This holds at any width that fits the longest word; wide characters count twice."""
    words = "équilibre 平衡 lora.targets=[q_proj] a"
    rows = [[Cell("name", detail=words), words, "12.5%"]] * 2
    parts = [Table(("a", "b", "c"), rows, title=words), Note(words, Tone.WARN)]
    text = screen([Section(words, parts, lead=words), Facts(cells_of([("a", words)]))], width)
    assert all(word in text for word in words.split())
    longest = max(map(cell_len, words.split()))
    most = max(map(cell_len, text.splitlines()))
    assert most <= max(width, longest + len("  b  "))


def test_nothing_is_ruled_or_wrapped_in_a_pipe(monkeypatch):
    """Each row is one line without colour, for grep and cut."""
    monkeypatch.delenv("COLUMNS", raising=False)
    on = terminal.console()
    on.file = io.StringIO()
    terminal.show(Table(("a", "b"), [("x", "word " * 50)]), on=on)
    lines = on.file.getvalue().splitlines()
    assert len(lines) == 2
    assert "─" not in lines[0]
    assert "\x1b" not in on.file.getvalue()


@pytest.mark.parametrize(("variable", "colours"), [(None, True), ("NO_COLOR", False)])
def test_colours_can_be_switched_off(monkeypatch, variable, colours):
    """NO_COLOR removes colours and keeps the marks (no-color.org)."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    on = terminal.console()
    on.file = io.StringIO()
    terminal.show(Note("fine", Tone.GOOD), Note("broken", Tone.BAD), on=on)
    text = on.file.getvalue()
    assert re.search(r"\x1b\[[0-9;]*3[0-7]", text) is not None if colours else "3" not in text
    assert "✓" in text
    assert "✗" in text


def test_the_next_command_stands_on_a_line_of_its_own():
    """Only the most likely command is shown, ready to copy."""
    on = Console(file=io.StringIO(), width=20)
    terminal.say_next(
        [Step("python -m mens_exp task=chat path=x", "ask it"), Step("b", "c")], on=on
    )
    assert on.file.getvalue() == "\nNext, to ask it:\n  python -m mens_exp task=chat path=x\n"


def test_facts_hang_behind_their_names(screen):
    """Values wrap at words, and missing ones show their reason."""
    facts = Facts([Cell("one two three", label="a"), Cell(label="long", absent="why")])
    assert screen([facts], 14).splitlines() == ["a     one two", "      three", "long  why"]


def problems(errors, width=80):
    return "\n".join(line.plain for line in terminal.problem_lines(errors, width))


def test_problems_are_each_spelled_out():
    """Each has place, problem, found, expected and remedy; bundles are split."""
    errors = [
        ConfigError("must be at least 1", where="lora.r", found=0, expected="1 or more"),
        Problems([DataError("not JSON", where="rows.jsonl:3", found="[red]", remedy="fix it")]),
    ]
    assert problems(errors) == (
        "lora.r: must be at least 1\n"
        "  found     0\n"
        "  expected  1 or more\n"
        "rows.jsonl:3: not JSON\n"
        "  found     [red]\n"
        "  next      fix it"
    )


def test_a_problem_is_wrapped_between_words():
    """The second line is indented below the first."""
    error = DataError("bad", remedy="put it back, or go on all the same")
    assert problems([error], 30).splitlines()[1:] == [
        "  next      put it back, or go",
        "            on all the same",
    ]


def test_a_long_path_in_a_problem_stays_one_word():
    """It can be copied at any terminal width."""
    path = "/data/" + "x" * 200
    assert f"{path}:\nno such file" == problems([DataError("no such file", where=path)])


def test_plan_table_says_how_rows_were_chosen(plan, shown_plan):
    """Quarantined and filtered rows are shown, and the rows drawn from each source."""
    plan["data"] |= {
        "quarantined": {"rows": 1000, "bad": 3, "reasons": {"the line is blank": 3}},
        "filtered": {"rows": 997, "kept": 900, "refused": {"min_rating": 97, "language": 0}},
        "mixed": {
            "sources": {
                "a.jsonl": {"rows": 1500, "of": 750, "share": 0.75, "share_asked": 0.7},
            }
        },
    }
    text = " ".join(shown_plan(plan).split())
    assert "3 of 1,000 rows quarantined: the line is blank (3)" in text
    assert "900 of 997 rows pass: min_rating refused 97, language refused 0" in text
    assert "a.jsonl: 1,500 rows drawn of 750, 75.00% (70.00% asked)" in text
