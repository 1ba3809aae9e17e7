from __future__ import annotations

from dataclasses import dataclass

import pytest

from mens_exp.evals.attempts import Plan, answer_all, repair_turns
from mens_exp.evals.completion_styles import outside_reasoning
from mens_exp.evals.engines import Completion, seed_of
from mens_exp.evals.suite import Item, Judgement


@dataclass
class Words:
    """A suite that accepts only `right`; `text` compiles, and nothing else does."""

    items: list[Item]
    name: str = "words"
    digest: str = "0" * 64
    needs_sandbox: bool = False

    def judge(self, answers, runner):
        del runner
        return [self._judged(one.text) for one in answers]

    def _judged(self, text):
        success = text == "right"
        return Judgement(
            compiles=text in {"right", "text"},
            success=success,
            semantic=success,
            errors=() if success else (f"{text} is wrong",),
            style=None if text == "x" else f"as {text}",
            unknown={"style": "nobody can read x"} if text == "x" else {},
        )

    def self_test(self, runner):
        del runner


class Replies:
    """An engine that gives each item its next scripted reply and records the requests."""

    def __init__(self, **replies):
        self.replies = replies
        self.asked = []

    def complete(self, requests):
        self.asked.append(list(requests))
        return [self._one(one) for one in requests]

    def _one(self, request):
        text = self.replies[request.messages[0]["content"]].pop(0)
        problem = "no room" if text == "long" else None
        return Completion(
            text="" if problem else text,
            tokens_in=10,
            tokens_out=0 if problem else 3,
            is_finished=problem is None,
            latency_ms=0.0 if problem else 100.0,
            problem=problem,
        )


def item(name):
    return Item(id=name, messages=({"role": "user", "content": name},), reference="right")


def answered(engine, *, retries=0, samples=1):
    suite = Words(items=[item(name) for name in engine.replies])
    plan = Plan(samples=samples, max_retries=retries, seed=5)
    return answer_all(suite, engine, None, plan, "base")


def test_a_right_answer_is_asked_for_once():
    """A first answer that is right is valid at depth 0, even if repairs are allowed."""
    engine = Replies(a=["right"])
    (event,) = answered(engine, retries=3)
    assert (event["attempts"], event["repair_depth"], event["task_success"]) == (1, 0, True)
    assert (event["error"], event["error_count"], event["repair_stalled"]) == (None, 0, False)
    assert event["time_to_first_valid_ms"] == pytest.approx(100, abs=50)


def test_errors_are_fed_back_until_the_answer_is_right():
    """The repair prompt contains the first answer and its errors."""
    engine = Replies(a=["junk", "text", "right"], b=["right"])
    first, second = answered(engine, retries=4)
    assert [len(batch) for batch in engine.asked] == [2, 1, 1]
    turns = engine.asked[2][0].messages
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert turns[1]["content"] == "junk"
    assert turns[2]["content"] == "Errors:\njunk is wrong\n\nRegenerate only corrected code."
    assert (first["compile_pass_1"], first["compile_pass_n"]) == (False, True)
    assert (first["pass_1"], first["task_success"], first["repair_depth"]) == (False, True, 2)
    assert (first["attempts"], first["error_count"], first["completion"]) == (3, 2, "right")
    assert (first["tokens_in"], first["tokens_out"], first["latency_ms"]) == (30, 9, 300.0)
    assert (second["attempts"], second["prompt"]) == (1, "b")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\n</think>\n\nright", "right"),
        ("because\nit is\n</think>\n\nright", "right"),
        ("<think>\nbecause\n</think>\n\n    right </think>", "    right </think>"),
        ("x = '<think>'\ny = '</think>'", "x = '<think>'\ny = '</think>'"),
        ("right", "right"),
        ("So:\n<thinking>because</thinking>\n\nright", "So:\nright"),
        ("<think>a</think>\none\n<think>b</think>\ntwo", "one\ntwo"),
        ("one <think>b</think> two", "one \n two"),
        ("<think>\nnever closed", ""),
        ("```\n<think>\n```\nright", "```\n<think>\n```\nright"),
        ("<think>\n```\nopen\n</think>\nright", "right"),
        ("x.split('</think>')", "x.split('</think>')"),
    ],
)
def test_what_a_model_thinks_first_is_no_part_of_its_answer(completion, answer):
    """Reasoning is removed whether the prompt or the model opened it."""
    assert outside_reasoning(completion) == answer


def test_an_answer_after_reasoning_is_judged_and_recorded_whole():
    """The event records the completion including its reasoning."""
    engine = Replies(a=["hm\n</think>\n\nright"])
    (event,) = answered(engine)
    assert event["completion"] == "hm\n</think>\n\nright"
    assert event["task_success"] is True


def test_repairs_end_at_their_number():
    """Two attempts with the same errors count as stalled; with different errors they do not."""
    stalled, moving = answered(Replies(a=["x", "x"], b=["x", "y"]), retries=1)
    assert (stalled["attempts"], stalled["repair_stalled"]) == (2, True)
    assert (moving["attempts"], moving["repair_stalled"]) == (2, False)
    assert stalled["task_success"] is False
    assert stalled["repair_depth"] is stalled["time_to_first_valid_ms"] is None
    assert stalled["unknown"]["repair_depth"] == "no attempt is valid"


def test_a_repair_without_room_leaves_the_answer_before_it():
    """A repair prompt that does not fit is not counted as an attempt and not retried."""
    (event,) = answered(Replies(a=["text", "long"]), retries=5)
    assert (event["attempts"], event["completion"], event["error"]) == (1, "text", "text is wrong")


def test_a_prompt_without_room_is_an_item_that_failed():
    """An item whose prompt does not fit still counts in the denominator."""
    (event,) = answered(Replies(a=["long"]), retries=2)
    assert (event["task_success"], event["error"], event["attempts"]) == (False, "no room", 1)


def test_samples_have_streams_of_their_own():
    """The seed of a sample depends only on run seed, item, sample and attempt."""
    engine = Replies(a=["text", "right", "right"])
    events = answered(engine, samples=2, retries=1)
    assert [event["sample"] for event in events] == [0, 1]
    assert [one.seed for one in engine.asked[0]] == [seed_of(5, "a", 0, 0), seed_of(5, "a", 1, 0)]
    assert engine.asked[1][0].seed == seed_of(5, "a", 0, 1)
    seeds = {
        seed_of(*of) for of in ((5, "a", 0, 0), (6, "a", 0, 0), (5, "b", 0, 0), (5, "a", 1, 0))
    }
    assert len(seeds) == 4


def test_what_a_suite_does_not_measure_is_null():
    """Every null field of an event has a reason."""
    (event,) = answered(Replies(a=["right"]))
    assert event["richness"] is event["outcome"] is None
    assert event["unknown"]["richness"] == "not measured by this suite"
    assert event["unknown"].keys() == {
        name for name, value in event.items() if value is None and name != "error"
    }


def test_the_style_of_an_event_is_that_of_its_last_answer():
    """If the style of the last answer is unknown, the reason is that of the last answer."""
    better, worse = answered(Replies(a=["x", "y"], b=["y", "x"]), retries=1)
    assert (better["style"], better["unknown"].get("style")) == ("as y", None)
    assert (worse["style"], worse["unknown"]["style"]) == (None, "nobody can read x")


def test_an_answer_without_errors_is_still_sent_back():
    """The repair prompt then says that the answer does not do the task."""
    assert "it does not do the task" in repair_turns("x", [])[1]["content"]
