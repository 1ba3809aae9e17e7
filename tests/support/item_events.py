"""The event line of one answer, written by hand; a new field must be added only here."""

from __future__ import annotations


def item_event(**changes):
    """Return the event of a valid first answer in a suite that executes nothing."""
    return {
        "version": 3,
        "item_id": "a",
        "condition": "tuned",
        "sample": 0,
        "group": "",
        "prompt": "Write it.",
        "reference": "def f(): ...",
        "completion": "def f(): pass",
        "parses": True,
        "finished": True,
        "error": None,
        "tokens_in": 5,
        "tokens_out": 7,
        "attempts": 1,
        "compile_pass_1": True,
        "compile_pass_n": True,
        "canonical_pass": True,
        "strictness": True,
        "pass_1": None,
        "task_success": None,
        "semantic_task_success": None,
        "repair_depth": 0,
        "repair_stalled": False,
        "error_count": 0,
        "latency_ms": 10.0,
        "time_to_first_valid_ms": 10.0,
        "placeholder_marker_hits": 0,
        "trivial_placeholder_output": False,
        "richness": 1.0,
        "anti_stub_pass": True,
        "outcome": None,
        "style": None,
        "unknown": {},
        **changes,
    }
