from __future__ import annotations

import textwrap
from collections import Counter

import pytest

from mens_exp.corpus.extraction import python_pairs
from mens_exp.rows.schema import TrainingPair


def extracted(text):
    dropped = Counter()
    pairs = python_pairs(
        textwrap.dedent(text), module="pkg.mod", group="pkg/mod.py", category="c", dropped=dropped
    )
    return pairs, dict(dropped)


def test_function_makes_a_pair_of_signature_docstring_and_source():
    """The expected pair is written out in full."""
    pairs, dropped = extracted('''
        @cache
        def fill(text, width=70):
            """Fill a paragraph.

            Returns one string.
            """
            # join them
            lines = wrap(text, width)
            return "\\n".join(lines)
        ''')
    assert pairs == [
        TrainingPair(
            prompt=(
                "Write the Python function `pkg.mod.fill`.\n\n"
                "```python\ndef fill(text, width=70):\n```\n\n"
                "Fill a paragraph.\n\nReturns one string."
            ),
            response=(
                "@cache\ndef fill(text, width=70):\n    # join them\n"
                '    lines = wrap(text, width)\n    return "\\n".join(lines)'
            ),
            category="c",
            group="pkg/mod.py",
        )
    ]
    assert dropped == {}


def test_method_prompt_names_its_class():
    """A nested class is named by its full path."""
    pairs, _ = extracted('''
        class A:
            class B:
                async def get(self):
                    """Get it."""
                    a = 1
                    return a
        ''')
    assert pairs[0].prompt == (
        "Write the method `get` of the Python class `pkg.mod.A.B`.\n\n"
        "```python\nasync def get(self):\n```\n\nGet it."
    )


def test_functions_come_in_the_order_of_the_file():
    """Functions under `if`, `try` and `match` are included."""
    body = '"""d"""\n{0}    a = 1\n{0}    return a'
    text = (
        f"def one():\n    {body.format('')}\n"
        f"if x:\n    def two():\n        {body.format('    ')}\n"
        f"else:\n    def three():\n        {body.format('    ')}\n"
        f"try:\n    import a\nexcept ImportError:\n    def four():\n        {body.format('    ')}\n"
        f"match x:\n    case 1:\n        def five():\n            {body.format(' ' * 8)}\n"
    )
    pairs, _ = extracted(text)
    assert [pair.response.split("(")[0] for pair in pairs] == [
        "def one",
        "def two",
        "def three",
        "def four",
        "def five",
    ]


def test_function_within_a_function_makes_no_pair_of_its_own():
    """It is part of the outer function's response."""
    pairs, dropped = extracted('''
        def outer():
            """d"""
            def inner():
                """e"""
                a = 1
                return a
            return inner
        ''')
    assert len(pairs) == 1
    assert "def inner" in pairs[0].response
    assert dropped == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f():\n    a = 1\n    return a", "undocumented"),
        ("def f():\n    '  '\n    a = 1\n    return a", "undocumented"),
        ("def f():\n    f'{x}'\n    a = 1\n    return a", "undocumented"),
        ("def f():\n    'd'", "stub"),
        ("def f():\n    'd'\n    pass", "stub"),
        ("def f():\n    'd'\n    ...", "stub"),
        ("def f():\n    'd'\n    raise NotImplementedError", "stub"),
        ("def f():\n    'd'\n    pass\n    raise NotImplementedError('no')", "stub"),
        ("def f():\n    'd'\n    return 1", "short"),
        ("def f():\n    'd'\n    # a\n\n    # b\n    return 1", "short"),
        ("def f():\n    'd'\n    a = 1\n    return '" + "x" * 4_000 + "'", "long"),
        ("def test_f():\n    'd'\n    a = 1\n    return a", "test"),
        ("class A:\n    def testF(self):\n        'd'\n        a = 1\n        return a", "test"),
        ("def _test():\n    'd'\n    a = 1\n    return a", "test"),
        ("def f():\n    'd'\n    'e'\n    a = 1\n    return a", "second_docstring"),
        ("def f():\n    '\\ud800'\n    a = 1\n    return a", "docstring_is_not_text"),
        ("def f():\n    'a\\0b'\n    a = 1\n    return a", "docstring_is_not_text"),
        ("def f(:", "file_does_not_parse"),
    ],
)
def test_unfit_function_is_dropped_and_counted(text, reason):
    """Each function has one reason."""
    assert extracted(text) == ([], {reason: 1})


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    'd'\n    a = 1\n    return a",
        "def f():\n    'd'\n    raise ValueError(\n        1)",
        "def f():\n    'd'\n    a = 1\n    raise NotImplementedError",
        "def latest():\n    'd'\n    a = 1\n    return a",
    ],
)
def test_function_just_fit_is_taken(text):
    """Boundary cases: two lines, another error, a stub with a statement, a name ending in test."""
    pairs, dropped = extracted(text)
    assert (len(pairs), dropped) == (1, {})


def test_response_at_the_limit_is_taken():
    """4,000 characters are accepted, 4,001 are not."""
    code = "def f():\n{}    a = 1\n    return '{}'"
    fill = 4_000 - len(code.format("", ""))
    assert len(extracted(code.format("    'd'\n", "x" * fill))[0]) == 1
    assert extracted(code.format("    'd'\n", "x" * (fill + 1)))[1] == {"long": 1}
