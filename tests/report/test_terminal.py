from __future__ import annotations

import pytest
from rich.console import Console

from mens_exp.errors import ConfigError, DataError, Problems
from mens_exp.report import terminal
from mens_exp.report.summary import load


def _shown(what, width=80, *, soft_wrap=False):
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(what, soft_wrap=soft_wrap)
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_plan_table_keeps_every_number_whole(plan, width):
    """Estimates carry "≈" and what they rest on."""
    text = _shown(terminal.plan_table(plan), width)
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


def test_plan_table_marks_only_estimates(plan):
    """Counts from a warm cache are exact."""
    plan["data"]["exact"] = True
    text = _shown(terminal.plan_table(plan))
    assert "≈ 402,000" not in text
    assert "402,000" in text
    assert "estimated from file sizes" not in text


def test_plan_table_says_unknown_where_there_is_no_estimate(plan):
    """Null is shown with its basis, not as a number."""
    plan["time_s"] = {"estimate": None, "basis": "this machine was never measured"}
    plan["trainable_parameters"] = None
    text = _shown(terminal.plan_table(plan))
    assert "unknown" in text
    assert "this machine was never measured" in text
    assert "trainable" not in text


def test_plan_table_shows_what_the_planner_says(plan):
    """Graph, layers, coverage, batch, intervals, disk, contract, notes and problems."""
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
            "checkpoint": 2**11,
            "merged": 2**30,
        },
    }
    plan["memory_bytes"] |= {"low": 2**30, "high": 3 * 2**30, "free": 2**33}
    plan["time_s"] |= {"low": 1.0, "high": 2.0, "quantization": 9.0}
    text = _shown(terminal.plan_table(plan), 120)
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
        "merged model 1.00 GiB",
        "abababababab",
        "conversion is the operator's",
        "it may fail",
        "not enough disk",
    )
    assert [part for part in shown if part not in text] == []


def test_plan_table_shows_settings_beside_our_defaults(plan):
    """As typed; names, the model and what our defaults lack are said elsewhere."""
    plan["differs_from_default"] = {
        "lora.targets": {"default": ["all_linear"], "found": ["qv"]},
        "backend.name": {"default": "qlora", "found": "proxy"},
        "backend.max_layers": {"found": 3},
        "model.hidden_size": {"default": 576, "found": 64},
        "seed": {"default": 42, "found": 1337},
    }
    text = " ".join(_shown(terminal.plan_table(plan), 120).split())
    assert 'not as usual lora.targets=["qv"] (["all_linear"]), seed=1337 (42)' in text
    assert all(name not in text for name in ("backend.name", "max_layers", "hidden_size"))
    plan["differs_from_default"] = {}
    assert "not as usual" not in _shown(terminal.plan_table(plan))


def test_plan_table_leaves_a_stack_that_nobody_has_read_open(plan):
    """Where the headers are not here, what is expected is all that is known."""
    plan["proxy"] = {"eligible": True, "complete": None, "matched": None, "expected": 30}
    text = _shown(terminal.plan_table(plan))
    assert "\n                30 middle projections" in text


@pytest.mark.parametrize("width", [80, 120])
def test_result_table_keeps_every_number_whole(write_run, width):
    """Base beside tuned, and what it cost."""
    text = _shown(terminal.result_table(load(write_run())), width)
    shown = ("2.0000", "1.5000", "\N{MINUS SIGN}25.0%", "62.5%", "87.5%", "+25.0 points")
    costs = ("10 of 16", "332", "2.11 GiB", "6 min 40 s", "this run used no GPU")
    assert [part for part in shown + costs if part not in text] == []
    assert "…" not in text


def test_costs_are_neither_base_nor_tuned(write_run):
    """They have a table of their own, and their second figures stand in brackets."""
    text = _shown(terminal.result_table(load(write_run())))
    results, _, costs = text.partition("Cost of the run")
    assert "Supervised tokens per second" not in results
    line = next(line for line in costs.splitlines() if line.startswith("Supervised"))
    assert line.rstrip().endswith("  332 (441 counting every token)")


def test_result_table_of_a_failed_run_has_reasons(failed_run):
    """It opens with the failure and leaves no cell empty."""
    text = _shown(terminal.result_table(load(failed_run)), 120)
    assert text.startswith("The run failed")
    assert "not reached: the run failed" in text


def test_completions_stand_side_by_side(item):
    """Both on one line of the terminal, each with its outcome."""
    events = [item("base", "left", parses=False, finished=False), item("tuned", "right")]
    lines = _shown(terminal.completions(events)).splitlines()
    assert any("left" in line and "right" in line for line in lines)
    assert any("base · does not parse · cut off" in line for line in lines)
    assert any("tuned · parses" in line for line in lines)
    styled = _shown(terminal.completions([item("tuned", "x", style="last block")]))
    assert "tuned · parses · last block" in styled


def test_completions_shows_the_first_n(item):
    """The report has the others."""
    events = [item("base", f"text {n}", item_id=str(n)) for n in range(4)]
    text = _shown(terminal.completions(events, n=2))
    assert "text 1" in text
    assert "text 2" not in text


def test_completions_clips_what_is_long(item):
    """15 of 100 lines, and how many are left."""
    long = "\n".join(str(n) for n in range(100))
    text = _shown(terminal.completions([item("base", long)]))
    assert "… 85 more lines" in text
    assert "15 " not in text


def test_completions_neither_obeys_escapes_nor_markup(item):
    """A model's text cannot clear the screen, nor end in an error of markup."""
    text = _shown(terminal.completions([item("base", "\x1b[2J [/red] [bold]x[/bold]")]))
    assert "\x1b" not in text
    assert "\\x1b[2J [/red] [bold]x[/bold]" in text


def test_conditions_of_a_suite_s_own_are_shown_by_name(item):
    """They are neither base nor tuned, which nobody asked."""
    told = {"first": "one", "second": "two"}
    events = [{**item("base", said), "condition": name} for name, said in told.items()]
    text = _shown(terminal.completions(events))
    assert "not completed" not in text
    assert all(word in text for word in ("first", "one", "second", "two"))


def test_no_completions_is_said(item):
    """An empty list is not an empty screen."""
    assert "No held-out item" in _shown(terminal.completions([]))


def test_problems_are_each_spelled_out():
    """Where, what, found, expected and next; a bundle is taken apart."""
    errors = [
        ConfigError("must be at least 1", where="lora.r", found=0, expected="1 or more"),
        Problems([DataError("not JSON", where="rows.jsonl:3", found="[red]", remedy="fix it")]),
    ]
    assert _shown(terminal.problems(errors)) == (
        "lora.r: must be at least 1\n"
        "  found     0\n"
        "  expected  1 or more\n"
        "rows.jsonl:3: not JSON\n"
        "  found     [red]\n"
        "  next      fix it\n"
    )


def test_a_long_path_in_a_problem_stays_one_word():
    """It can be copied from a terminal of any width."""
    path = "/data/" + "x" * 200
    text = _shown(terminal.problems([DataError("no such file", where=path)]), soft_wrap=True)
    assert f"{path}: no such file\n" == text


def test_plan_table_says_how_rows_were_chosen(plan):
    """What was put aside, what filters refused, and what of each source was drawn."""
    plan["data"] |= {
        "quarantined": {"rows": 1000, "bad": 3, "reasons": {"the line is blank": 3}},
        "filtered": {"rows": 997, "kept": 900, "refused": {"min_rating": 97, "language": 0}},
        "mixed": {
            "sources": {
                "a.jsonl": {"rows": 1500, "of": 750, "share": 0.75, "share_asked": 0.7},
            }
        },
    }
    text = " ".join(_shown(terminal.plan_table(plan)).split())
    assert "3 of 1,000 rows put aside: the line is blank (3)" in text
    assert "900 of 997 rows pass: min_rating refused 97, language refused 0" in text
    assert "a.jsonl: 1,500 rows drawn of 750, 75.00% (70.00% asked)" in text
