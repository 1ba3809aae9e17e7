from __future__ import annotations

import warnings

import pytest

from mens_exp.artifacts.digest import digest
from mens_exp.config.suite import HeldoutSyntaxSuite
from mens_exp.evals import attempts
from mens_exp.evals.attempts import Plan, answer_all, to_scorecard
from mens_exp.evals.completion_styles import code_of
from mens_exp.evals.engines import Completion, Generation, GraphEngine
from mens_exp.evals.scorecard_spec import HeldoutSyntax, choose_items, syntax_error
from mens_exp.evals.suite import Answer, Item
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import HfTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_base):
    """Return a byte tokenizer, so that lengths can be counted by hand."""
    return HfTokenizer.from_directory(tiny_base.directory)


def pairs(*answers):
    return [TrainingPair(prompt=f"P{n}", response=answer) for n, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("def f(): pass", "def f(): pass"),
        ("```python\ndef f(): pass\n```", "def f(): pass\n"),
        ("```\ndef f(): pass\n```\nThat is all.", "def f(): pass\n"),
        ("Here it is:\n```py\nx = 1\n```\n```py\ny = 2\n```", "y = 2\n"),
        ("```python\ndef f(): pass", "def f(): pass"),  # truncated before the fence closes
        ("```def f(): pass```", "def f(): pass"),
        ("    def f(self):\n        pass", "def f(self):\n    pass"),  # a method, indented
        ("```python\n    def f(self):\n        pass\n```", "def f(self):\n    pass\n"),
        ("", ""),
        ("```", ""),
    ],
)
def test_code_is_the_inside_of_the_last_fence_or_all_of_it(completion, code):
    """The code is the dedented content of the last fence without its language tag."""
    assert code_of(completion) == code


@pytest.mark.parametrize(
    "code",
    [
        "def f(): pass",
        "async def f(): pass",
        "class A:\n    def f(self): ...\n",
        "import os\n\n@cached\ndef f(x: int) -> int:\n    return x\n",
        "def f():\n    return '\\d'\n",  # an invalid escape is only a warning
    ],
)
def test_code_that_parses_and_defines_a_function_counts(code):
    """The function may be defined at any level; parsing it emits no warning."""
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
        ("def f(): return " + "-" * 100_000 + "1", "Error: "),  # beyond the parser's depth
    ],
)
def test_everything_else_says_why_it_does_not(code, said):
    """Every rejected answer has a reason, even if the parser itself gives up."""
    error = syntax_error(code)
    assert error is not None
    assert said in error


def test_items_do_not_depend_on_the_order_of_the_rows(tokenizer):
    """Items are chosen by content hash, so every seed and every machine gets the same ones."""
    rows = pairs(*(f"def f{n}(): pass" for n in range(20)))
    suite = HeldoutSyntaxSuite(items=5)
    forwards = choose_items(rows, tokenizer, suite, max_positions=2048)
    backwards = choose_items(rows[::-1], tokenizer, suite, max_positions=2048)
    assert forwards == backwards
    assert [item.id for item in forwards] == sorted(row.id for row in rows)[:5]


def test_more_items_keep_the_ones_there_were(tokenizer):
    """A larger suite contains the items of a smaller one."""
    rows = pairs(*(f"def f{n}(): pass" for n in range(20)))
    few, many = (
        choose_items(rows, tokenizer, HeldoutSyntaxSuite(items=n), max_positions=2048)
        for n in (3, 8)
    )
    assert many[:3] == few


def test_an_answer_must_be_shorter_than_a_completion_may_be(tokenizer):
    """Nine bytes and the end marker fit a limit of ten tokens; ten bytes do not."""
    rows = pairs("x" * 9, "x" * 10)
    suite = HeldoutSyntaxSuite(max_new_tokens=10)
    chosen = choose_items(rows, tokenizer, suite, max_positions=2048)
    assert [item.reference for item in chosen] == ["x" * 9]


def test_rows_that_do_not_fit_are_passed_over_until_there_are_items_enough(
    tokenizer,
):
    """Rows that are too long are skipped; rows are encoded in batches of the number of items."""
    rows = pairs(*("x" * (5 if n % 5 == 0 else 50) for n in range(40)))
    suite = HeldoutSyntaxSuite(max_new_tokens=10, items=6)
    chosen = choose_items(rows, tokenizer, suite, max_positions=2048)
    fitting = sorted(row.id for row in rows if len(row.response) == 5)
    assert [item.id for item in chosen] == fitting[:6]


def test_prompt_and_completion_must_fit_the_model(tokenizer):
    """A row at the limit is included; a row one position longer is not."""
    rows, suite = pairs("x"), HeldoutSyntaxSuite(max_new_tokens=10)
    (item,) = choose_items(rows, tokenizer, suite, max_positions=2048)
    room = len(prompt_ids(item, tokenizer)) + 10
    assert choose_items(rows, tokenizer, suite, max_positions=room) == [item]
    assert choose_items(rows, tokenizer, suite, max_positions=room - 1) == []


def test_a_prompt_ends_where_the_answer_begins(tokenizer):
    """The prompt ends with the opened assistant turn, encoded as in training."""
    (item,) = choose_items(pairs("x"), tokenizer, HeldoutSyntaxSuite(), max_positions=2048)
    ids = prompt_ids(item, tokenizer)
    text = tokenizer.core.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nP0<|im_end|>\n<|im_start|>assistant\n"


def prompt_ids(item, tokenizer):
    return tokenizer.encode_prompts([list(item.messages)])[0]


def answered(items, backend, tokenizer, config):
    """Answer the suite's items once as the tuned condition."""
    suite = HeldoutSyntax(items=items, max_new_tokens=config.max_new_tokens)
    generation = Generation(max_new_tokens=config.max_new_tokens, batch_size=config.batch_size)
    engine = GraphEngine(backend, tokenizer, generation)
    return answer_all(suite, engine, None, Plan(), "tuned")


class Scripted:
    """A backend that answers each prompt from a table and records its arguments."""

    max_positions = 2048

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def generate(self, prompts, *, on_end, **options):
        self.asked.append((len(prompts), options))
        for at in range(len(prompts)):
            on_end(at, 0.25)
        return [self.answers[tuple(prompt)] for prompt in prompts]


def test_each_item_is_judged_by_its_own_completion(tokenizer):
    """Of three items in batches of two, one finishes, one is truncated and one does not parse."""
    suite = HeldoutSyntaxSuite(max_new_tokens=30, batch_size=2)
    items = choose_items(pairs("a", "b", "c"), tokenizer, suite, max_positions=2048)
    texts = ["```python\ndef f(): pass\n```<|im_end|>", "def f(): pass", "def f(<|im_end|>"]
    ids = tokenizer.encode_all(texts)
    prompts = tokenizer.encode_prompts([list(item.messages) for item in items])
    backend = Scripted({tuple(p): a for p, a in zip(prompts, ids, strict=True)})
    events = answered(items, backend, tokenizer, suite)
    expected = {"max_new_tokens": 30, "end_ids": tokenizer.end_ids, "batch_size": 2}
    assert backend.asked == [(3, expected)]
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
    assert {e["latency_ms"] for e in events} == {250.0}
    assert [e["tokens_in"] for e in events] == [len(prompt) for prompt in prompts]


def test_an_empty_completion_is_neither_parsed_nor_finished(tokenizer):
    """An empty completion counts as an item that fails both."""
    items = choose_items(pairs("a"), tokenizer, HeldoutSyntaxSuite(), max_positions=2048)
    backend = Scripted({tuple(prompt_ids(items[0], tokenizer)): []})
    (event,) = answered(items, backend, tokenizer, HeldoutSyntaxSuite())
    assert (event["parses"], event["finished"], event["tokens_out"]) == (False, False, 0)


def made_item(name):
    return Item(
        id=name,
        messages=({"role": "user", "content": f"Write {name}."},),
        reference="def f(): pass",
    )


class Says:
    """An engine that gives each item a fixed answer and token count."""

    def __init__(self, answers):
        self.answers = answers

    def complete(self, requests):
        said = [self.answers[one.messages[-1]["content"]] for one in requests]
        return [
            Completion(
                text=text, tokens_in=1, tokens_out=tokens, is_finished="(:" in text, latency_ms=1.0
            )
            for text, tokens in said
        ]


def test_the_denominator_is_always_all_items():
    """One parsed answer of four is 0.25, even if a condition lacks events."""
    suite = HeldoutSyntax(items=[made_item(name) for name in "abcd"], max_new_tokens=160)
    good, bad = ("def f(): pass", 6), ("def f(:", 30)
    says = Says({"Write a.": good, "Write b.": bad, "Write c.": good, "Write d.": good})
    tuned = answer_all(suite, says, None, Plan(), "tuned")
    base = [{**event, "condition": "base"} for event in tuned[:2]]
    events = [*base, *tuned]
    card = to_scorecard(suite, events, Plan(), {})
    assert card.items == 4
    names = ("parse_rate", "parsed", "completed", "tokens_out_mean", "compile_at_1", "strictness")
    assert {c: [kpis[n] for n in names] for c, kpis in card.conditions.items()} == {
        "base": [0.25, 1, 1, 9.0, 0.25, 0.5],
        "tuned": [0.75, 3, 1, 12.0, 0.75, 1.0],
    }


def test_another_version_of_grading_is_another_suite(monkeypatch):
    """The grading version is recorded and changes the suite's digest."""
    suite = HeldoutSyntax(items=[made_item("a")], max_new_tokens=160)
    events = answer_all(suite, Says({"Write a.": ("def f(): pass", 6)}), None, Plan(), "base")
    card = to_scorecard(suite, events, Plan(), {})
    assert card.generation["grading"] == 5
    monkeypatch.setattr(attempts, "GRADING", 6)
    other = to_scorecard(suite, events, Plan(), {})
    assert other.generation["grading"] == 6
    assert len({suite.digest, card.suite_digest, other.suite_digest}) == 3


def test_of_several_blocks_the_last_with_a_function_counts():
    """A corrected draft is not read, and a block that only calls the function changes nothing."""
    suite = HeldoutSyntax(items=[made_item("a")], max_new_tokens=160)
    said = "```\ndef f(\n```\nNo:\n```\ndef f(): pass\n```\nUse:\n```\nf()\n```"
    good, bad = suite.judge(
        [Answer(item=suite.items[0], text=text) for text in (said, f"<think>{said}</think>")], None
    )
    assert (good.compiles, bad.compiles) == (True, False)


@pytest.mark.parametrize(
    ("completion", "style"),
    [
        ("def f(): pass", "completion"),
        ("```\ndef f(\n```\nNo:\n```\ndef f(): pass\n```", "last block"),
        ("```python\ndef f(): pass", "open block"),
        ("Use `` ```def f(): pass``` ``.", "last block"),
        ("Use ```def f(): pass", "open block"),
        ("", "completion"),
    ],
)
def test_the_record_of_an_answer_says_which_part_of_it_was_read(completion, style):
    """The event of each answer in events.jsonl records the style that was read."""
    suite = HeldoutSyntax(items=[made_item("a")], max_new_tokens=160)
    (event,) = answer_all(suite, Says({"Write a.": (completion, 6)}), None, Plan(), "base")
    assert event["style"] == style
    assert "style" not in event["unknown"]


def test_what_needs_execution_is_null_with_its_reason():
    """The suite executes nothing, so metrics of task success are null."""
    suite = HeldoutSyntax(items=[made_item("a")], max_new_tokens=160)
    events = answer_all(suite, Says({"Write a.": ("def f(): pass", 6)}), None, Plan(), "base")
    card = to_scorecard(suite, events, Plan(), {})
    for name in ("task_success", "semantic_task_success", "pass_at_1"):
        assert card.conditions["base"][name] is None
        assert card.unknown[f"conditions.base.{name}"] == "suite=heldout_syntax runs nothing"
    assert card.sandbox is None
    assert suite.self_test(None) is None


def test_the_digest_is_that_of_items_and_limit():
    """Items, references and the limit enter the digest; its value is that of earlier versions."""
    items = [made_item("a"), made_item("b")]

    def digest_of(of, limit=160):
        return HeldoutSyntax(items=of, max_new_tokens=limit).digest

    first = digest_of(items)
    frozen = [
        {"id": name, "prompt": f"Write {name}.", "reference": "def f(): pass"} for name in "ab"
    ]
    assert first == digest({"items": frozen, "max_new_tokens": 160})
    others = {
        digest_of(items, 99),
        digest_of(items[:1]),
        digest_of([made_item("a"), made_item("c")]),
    }
    assert len(others | {first}) == 4


def test_an_answer_is_judged_by_reading_alone():
    """A stub parses but is trivial; a fenced answer parses but is not strict."""
    suite = HeldoutSyntax(items=[made_item("a")], max_new_tokens=160)
    said = ["def f(): pass", "def f(x):\n    return x + 1", "Sure.\n```\ndef f(): pass\n```"]
    stub, code, fenced = suite.judge(
        [Answer(item=suite.items[0], text=text) for text in said], None
    )
    assert (stub.compiles, stub.trivial, stub.anti_stub) == (True, True, False)
    assert (code.compiles, code.trivial, code.anti_stub) == (True, False, True)
    assert (code.strict, fenced.strict, fenced.compiles) == (True, False, True)
