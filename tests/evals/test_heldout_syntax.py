from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

from mens_exp.artifacts.scorecard import Condition
from mens_exp.config.suite import HeldoutSyntaxSuite
from mens_exp.evals.heldout_syntax import (
    Item,
    choose_items,
    code_of,
    evaluate,
    syntax_error,
    to_scorecard,
)
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.model.resolve import BaseModel


@pytest.fixture(scope="module")
def tokenizer(tiny_base: BaseModel) -> HfTokenizer:
    """One id a byte, so that lengths can be counted by hand."""
    return HfTokenizer.from_directory(tiny_base.directory)


def pairs(*answers: str) -> list[TrainingPair]:
    return [TrainingPair(prompt=f"P{n}", response=answer) for n, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("```python\ndef f(): pass\n```", "def f(): pass\n"),
        ("```\ndef f(): pass\n```\nThat is all.", "def f(): pass\n"),
        ("Here it is:\n```py\nx = 1\n```\n```py\ny = 2\n```", "x = 1\n"),
        ("```python\ndef f(): pass", "def f(): pass"),  # cut off before the fence closed
        ("```def f(): pass```", "def f(): pass"),
        ("    def f(self):\n        pass", "def f(self):\n    pass"),  # a method, indented
        ("```python\n    def f(self):\n        pass\n```", "def f(self):\n    pass\n"),
        ("", ""),
        ("```", ""),
    ],
)
def test_code_is_the_inside_of_the_first_fence_or_all_of_it(completion: str, code: str) -> None:
    """The language's name is dropped, and common indentation is taken away."""
    assert code_of(completion) == code


@pytest.mark.parametrize(
    "code",
    [
        "def f(): pass",
        "async def f(): pass",
        "class A:\n    def f(self): ...\n",
        "import os\n\n@cached\ndef f(x: int) -> int:\n    return x\n",
        "def f():\n    return '\\d'\n",  # an invalid escape is a warning, no error
    ],
)
def test_code_that_parses_and_defines_a_function_counts(code: str) -> None:
    """Wherever the function stands, and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert syntax_error(code) is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(:\n", "SyntaxError: "),
        ("def f():\n", "IndentationError: "),
        ("def f(): pass\n  x", "IndentationError: "),
        ("print 'hello'", "SyntaxError: "),
        ("def f(): pass\0", "source code string cannot contain null bytes"),
        ("", "no function is defined"),
        ("x = 1", "no function is defined"),
        ("f = lambda x: x", "no function is defined"),
        ("I cannot do that", "SyntaxError: "),
        ("def f(): return " + "(" * 400 + ")" * 400, "SyntaxError: too many nested"),
        ("def f(): return " + "-" * 100_000 + "1", "Error: "),  # deeper than the parser goes
    ],
)
def test_everything_else_says_why_it_does_not(code: str, said: str) -> None:
    """Also what makes the parser itself give up."""
    error = syntax_error(code)
    assert error is not None
    assert said in error


def test_items_do_not_depend_on_the_order_of_the_rows(tokenizer: HfTokenizer) -> None:
    """The choice is by content hash, so every seed and every machine has the same items."""
    rows = pairs(*(f"def f{n}(): pass" for n in range(20)))
    suite = HeldoutSyntaxSuite(items=5)
    forwards = choose_items(rows, tokenizer, suite, max_positions=2048)
    backwards = choose_items(rows[::-1], tokenizer, suite, max_positions=2048)
    assert forwards == backwards
    assert [item.id for item in forwards] == sorted(row.id for row in rows)[:5]


def test_more_items_keep_the_ones_there_were(tokenizer: HfTokenizer) -> None:
    """A larger suite holds the smaller one."""
    rows = pairs(*(f"def f{n}(): pass" for n in range(20)))
    few, many = (
        choose_items(rows, tokenizer, HeldoutSyntaxSuite(items=n), max_positions=2048)
        for n in (3, 8)
    )
    assert many[:3] == few


def test_an_answer_must_be_shorter_than_a_completion_may_be(tokenizer: HfTokenizer) -> None:
    """Nine bytes fit ten tokens with the end marker; ten do not."""
    rows = pairs("x" * 9, "x" * 10)
    suite = HeldoutSyntaxSuite(max_new_tokens=10)
    chosen = choose_items(rows, tokenizer, suite, max_positions=2048)
    assert [item.reference for item in chosen] == ["x" * 9]


def test_prompt_and_completion_must_fit_the_model(tokenizer: HfTokenizer) -> None:
    """At the limit it is in, one position less and it is out."""
    rows, suite = pairs("x"), HeldoutSyntaxSuite(max_new_tokens=10)
    (item,) = choose_items(rows, tokenizer, suite, max_positions=2048)
    room = len(item.prompt_ids) + 10
    assert choose_items(rows, tokenizer, suite, max_positions=room) == [item]
    assert choose_items(rows, tokenizer, suite, max_positions=room - 1) == []


def test_a_prompt_ends_where_the_answer_begins(tokenizer: HfTokenizer) -> None:
    """It is encoded as in training: the turn of the assistant is opened, and nothing is in it."""
    (item,) = choose_items(pairs("x"), tokenizer, HeldoutSyntaxSuite(), max_positions=2048)
    text = tokenizer.core.decode(item.prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nP0<|im_end|>\n<|im_start|>assistant\n"


class Scripted:
    """A backend that answers each prompt from a table, and remembers how it was asked."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        self.asked.append((len(prompts), options))
        return [self.answers[tuple(prompt)] for prompt in prompts]


def test_each_item_is_judged_by_its_own_completion(tokenizer: HfTokenizer) -> None:
    """Three items in batches of two: one ends well, one is cut off, one is broken."""
    suite = HeldoutSyntaxSuite(max_new_tokens=30, batch_size=2)
    items = choose_items(pairs("a", "b", "c"), tokenizer, suite, max_positions=2048)
    texts = ["```python\ndef f(): pass\n```<|im_end|>", "def f(): pass", "def f(<|im_end|>"]
    ids = tokenizer.encode_all(texts)
    backend: Any = Scripted({tuple(i.prompt_ids): a for i, a in zip(items, ids, strict=True)})
    events = evaluate(items, backend, tokenizer, suite, Condition.TUNED)
    assert [count for count, _ in backend.asked] == [2, 1]
    assert backend.asked[0][1] == {
        "max_new_tokens": 30,
        "end_ids": tokenizer.end_ids,
        "pad_id": tokenizer.pad_id,
    }
    assert [(e["parses"], e["finished"], e["tokens_out"]) for e in events] == [
        (True, True, 28),
        (True, False, 13),
        (False, True, 7),
    ]
    assert [e["item_id"] for e in events] == [item.id for item in items]
    assert events[0]["completion"] == "```python\ndef f(): pass\n```"
    assert events[2]["error"] is not None
    assert events[0]["error"] is events[1]["error"] is None
    assert {e["condition"] for e in events} == {"tuned"}
    assert [e["tokens_in"] for e in events] == [len(item.prompt_ids) for item in items]


def test_an_empty_completion_is_neither_parsed_nor_finished(tokenizer: HfTokenizer) -> None:
    """It still counts as an item."""
    items = choose_items(pairs("a"), tokenizer, HeldoutSyntaxSuite(), max_positions=2048)
    backend: Any = Scripted({tuple(items[0].prompt_ids): []})
    (event,) = evaluate(items, backend, tokenizer, HeldoutSyntaxSuite(), Condition.BASE)
    assert (event["parses"], event["finished"], event["tokens_out"]) == (False, False, 0)


def made_item(name: str) -> Item:
    return Item(id=name, prompt=f"Write {name}.", reference="def f(): pass", prompt_ids=[1])


def made_event(name: str, condition: Condition, *, parses: bool, tokens: int) -> Any:
    return {
        "item_id": name,
        "condition": condition,
        "parses": parses,
        "finished": not parses,
        "tokens_out": tokens,
    }


def test_the_denominator_is_always_all_items() -> None:
    """One of four parsed is a quarter, also where a condition lacks events."""
    items = [made_item(name) for name in "abcd"]
    events = [
        made_event("a", Condition.BASE, parses=True, tokens=10),
        made_event("b", Condition.BASE, parses=False, tokens=30),
        *(made_event(name, Condition.TUNED, parses=True, tokens=6) for name in "abcd"),
    ]
    card = to_scorecard(HeldoutSyntaxSuite(), items, events)
    assert card.items == 4
    assert card.conditions == {
        "base": {"parse_rate": 0.25, "parsed": 1, "completed": 1, "tokens_out_mean": 10.0},
        "tuned": {"parse_rate": 1.0, "parsed": 4, "completed": 0, "tokens_out_mean": 6.0},
    }


def test_the_digest_is_that_of_items_and_limit() -> None:
    """Another batch size is the same suite; another item, reference or limit is another one."""
    items = [made_item("a"), made_item("b")]
    events = [made_event("a", Condition.BASE, parses=True, tokens=1)]

    def digest_of(suite: HeldoutSyntaxSuite, of: list[Item]) -> str:
        return to_scorecard(suite, of, events).suite_digest

    first = digest_of(HeldoutSyntaxSuite(), items)
    assert digest_of(HeldoutSyntaxSuite(batch_size=1), items) == first
    others = {
        digest_of(HeldoutSyntaxSuite(max_new_tokens=99), items),
        digest_of(HeldoutSyntaxSuite(), items[:1]),
        digest_of(HeldoutSyntaxSuite(), [made_item("a"), made_item("c")]),
    }
    assert len(others | {first}) == 4
