"""Untrusted regular expressions: the results equal those of `re`, and nothing hangs."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
from attacks import attack

from mens_exp.artifacts import untrusted_input
from mens_exp.artifacts.untrusted_input import (
    first_match,
    pattern_matches,
    pattern_problem,
    pattern_problems,
    pattern_searches,
)
from mens_exp.errors import DataError

TEXT = "a" * 60 + "!"
ATTACKS = {
    "repetition of a repetition": "(a+)+$",
    "alternatives alike": "(a|a)*$",
    "many alternatives": "(a|a)" * 40 + "$",
    "optional parts": "a?" * 30 + "a" * 60 + "$",
    "a reference back": r"(a*)*\1$",
    "a wide set, often": "(?i)" + "[\U00000001-\U0010ffff]" * 10_000,
}


@pytest.fixture
def brief(monkeypatch):
    """Limit matching to 0.3 seconds."""
    monkeypatch.setattr(untrusted_input, "_MOST_S", 0.3)
    untrusted_input._WORKER.end()
    yield
    untrusted_input._WORKER.end()


@pytest.mark.parametrize("pattern", ATTACKS.values(), ids=ATTACKS)
def test_a_pattern_that_takes_too_long_is_refused(pattern, brief):
    """The message names file and pattern, and later patterns are still matched."""
    end = attack(pattern_matches, pattern, TEXT, "attack.json")
    assert end.how == "refused", end
    assert "attack.json: the regular expression takes too long" in end.message
    assert "(a+)+" in end.message
    assert pattern_searches("b[0-9]", "ab1", "good.json")


def test_a_search_of_a_long_text_for_any_characters_is_limited(brief):
    """Even a pattern without repetition is tried at every position of the text."""
    end = attack(pattern_searches, "." * 4_000 + "x", "a" * 400_000, "attack.json")
    assert end.how == "refused", end
    assert "attack.json: the regular expression takes too long" in end.message


def test_patterns_of_a_file_share_their_time(brief):
    """The time limit applies to a file: many slow patterns are as bad as one that hangs."""
    slow = "(a+)+$"
    begun = time.monotonic()

    def match_all():
        for number in range(200):  # 40 ms each
            pattern_matches(f"(?:{number})?{slow}", "a" * 20 + "!", "many.json")

    with pytest.raises(DataError, match="takes too long"):
        match_all()
    assert time.monotonic() - begun < 20
    with pytest.raises(DataError, match="takes too long"):
        pattern_matches("[a]", "a", "many.json")
    assert pattern_matches("[a]", "a", "other.json")


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(?i", "(" * 5_000, "[z-a]"])
def test_what_is_no_pattern_is_told(pattern):
    """An invalid pattern is reported even if Python raises another error than `re.error`."""
    assert pattern_problem(pattern, "x.json")
    with pytest.raises((re.error, OverflowError, RecursionError)):
        re.compile(pattern)


def test_a_pattern_is_not_longer_than_any_real_one():
    """Compiling a long pattern takes time too."""
    assert "100,000" in pattern_problem("a" * 100_001, "x.json")


PATTERNS = ["q_proj", r"layers\.0\.q", "^model", "a.c", "x$", "(q|k)_proj", r"\d+", "[ab]*c", "é"]
PATTERNS += [rf"(.*\.)?({one})$" for one in PATTERNS]
TEXTS = ["q_proj", "model.layers.0.q_proj", "model.layers.0.q", "abc", "a\nc", "x\n", "é", ""]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_are_those_of_re(pattern):
    """The oracle is `re`, whether matching runs in this process or in the worker."""
    assert pattern_problem(pattern, "x.json") is None
    for text in TEXTS:
        assert pattern_matches(pattern, text, "x.json") == bool(re.match(pattern, text))
        assert pattern_searches(pattern, text, "x.json") == bool(re.search(pattern, text))


def test_names_start_no_process(monkeypatch):
    """Patterns as PEFT writes them are matched without a worker process."""
    monkeypatch.setattr(untrusted_input._Worker, "ask", None)
    assert pattern_matches(
        r"(.*\.)?(layers.0.self_attn.q_proj)$", "model.layers.0.self_attn.q_proj", "x"
    )
    assert pattern_problem("^model.layers.10.mlp.down_proj", "x") is None


def test_a_fork_has_a_process_of_its_own():
    """Two processes that read from one pipe would get each other's answers."""
    assert pattern_searches("[a]", "a", "x.json")
    ours = untrusted_input._WORKER._process.pid

    def theirs():
        assert pattern_searches("[a]", "a", "x.json")
        own = untrusted_input._WORKER._process.pid
        untrusted_input._WORKER.end()
        return json.dumps([own, os.getpid()])

    end = attack(theirs)
    assert end.how == "returned", end
    assert json.loads(end.message)[0] != ours
    assert pattern_searches("[b]", "b", "x.json")
    assert untrusted_input._WORKER._process.pid == ours


def test_the_first_pattern_that_matches_is_told():
    """The file's order decides, though plain names are matched here and the rest in the worker."""
    patterns = ["b", "[x]b", "a$", "[a]", "a", "(.*)"]
    for text in ("a", "b", "xb", "c", "ab", ""):
        expected = next((n for n, one in enumerate(patterns) if re.match(one, text)), None)
        assert first_match(patterns, text, "order.json") == expected


def test_a_file_of_many_patterns_is_one_question(monkeypatch):
    """Asking about each of 3,000 patterns separately, for 16 modules, took minutes."""
    asked = []
    real = untrusted_input._WORKER.ask
    monkeypatch.setattr(
        untrusted_input._WORKER, "ask", lambda *told: asked.append(told[0]) or real(*told)
    )
    patterns = [f".*[{n % 10}]{n}_proj$" for n in range(1_000)]
    assert pattern_problems([*patterns, "("], "many.json") == [None] * 1_000 + [
        "missing ), unterminated subpattern at position 0"
    ]
    assert first_match(patterns, "layers.77_proj", "many.json") == 7
    assert first_match(patterns, "layers", "many.json") is None
    assert asked == ["compile", "match", "match"]


def test_more_patterns_than_any_model_has_modules_are_refused():
    """The file is refused by the number of patterns, before any is compiled."""
    with pytest.raises(DataError, match="too many patterns") as refused:
        pattern_problems(["[a]"] * 10_001, "most.json")
    assert refused.value.found == "10,001"
