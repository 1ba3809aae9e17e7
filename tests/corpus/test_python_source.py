from __future__ import annotations

import ast
import copy
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.python_source import (
    FunctionNode,
    cut,
    decode,
    parse,
    same_but_docstring,
    signature,
)


def function_in(text):
    return next(node for node in ast.walk(ast.parse(text)) if isinstance(node, FunctionNode))


def cut_from(text):
    return cut(text.split("\n"), function_in(text))


def test_docstring_lines_go_and_comments_stay():
    """Comments above, beside and below the docstring are kept."""
    text = textwrap.dedent('''\
        def f(a):  # header
            # above
            """One.

            Two.
            """
            # below
            return a  # end
        ''')
    assert cut_from(text) == ("def f(a):  # header\n    # above\n    # below\n    return a  # end")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('def f():\n    """d"""  # why\n    return 1', "def f():\n    # why\n    return 1"),
        ('def f():\n    """d"""; a = 1\n    return a', "def f():\n    a = 1\n    return a"),
        ("def f(): 'd'; return 1", "def f(): return 1"),
        ('def f():\n    ("d"\n     "e")\n    return 1', "def f():\n    return 1"),
        ('def f():\n    """é"""; return "é"', 'def f():\n    return "é"'),
    ],
    ids=["comment beside", "statement beside", "one line", "in brackets", "not ASCII"],
)
def test_only_the_docstring_goes(text, expected):
    """Other code on the docstring's lines is kept."""
    assert cut_from(text) == expected


def test_method_is_dedented_with_its_decorators():
    """Decorators belong to the method, and each line loses the class's indentation."""
    text = textwrap.dedent('''\
        class A:
            @property
            @cached(
                size=1)
            def f(self):
                """d"""

          # indented less than the function
                return self.a
        ''')
    assert cut_from(text) == (
        "@property\n@cached(\n    size=1)\ndef f(self):\n\n"
        "# indented less than the function\n    return self.a"
    )


def test_lines_within_a_string_are_not_dedented():
    """White space inside a string is part of its value."""
    text = textwrap.dedent('''\
        class A:
            def f(self):
                """d"""
                a = f"""
                {self} two
                """
                return a, \'\'\'
              three\'\'\'
        ''')
    assert cut_from(text).split("\n") == [
        "def f(self):",
        '    a = f"""',
        "        {self} two",
        '        """',
        "    return a, '''",
        "      three'''",
    ]


def test_string_continued_by_a_backslash_is_not_dedented():
    """The second line of such a string starts inside the string."""
    text = "class A:\n    def f(self):\n        'd'\n        return 'a\\\n        b'\n"
    assert cut_from(text) == "def f(self):\n    return 'a\\\n        b'"


def test_tabs_are_dedented():
    """Indentation is any white space before the def."""
    assert cut_from("class A:\n\tdef f(self):\n\t\t'd'\n\t\treturn 1\n") == (
        "def f(self):\n\treturn 1"
    )


def test_form_feed_does_not_end_a_line():
    """Line numbers of the syntax tree ignore form feeds."""
    assert cut_from("\x0c\nx = 1\ndef f():\n    'd'\n    return 1") == "def f():\n    return 1"


def test_cut_that_says_the_same_is_accepted():
    """The function parsed from the text is returned."""
    node = function_in("def f():\n    'd'\n    return 1")
    bare = same_but_docstring("def f():\n    return 1", node)
    assert bare is not None
    assert (bare.name, len(bare.body)) == ("f", 1)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return 2",
        "def f():\n    'd'\n    return 1",
        "def f():\n    return 1\nx = 1",
        "def f(:",
        "x = 1",
        "",
    ],
)
def test_cut_that_says_something_else_is_refused(text):
    """Another value, a docstring, more code, a module, no function and nothing are refused."""
    assert same_but_docstring(text, function_in("def f():\n    'd'\n    return 1")) is None


def test_docstring_continued_by_backslashes_goes_whole():
    """The last backslash stays on an otherwise blank line, which is harmless."""
    text = "def f():\n    'd' \\\n    'e' \\\n\n    return 1"
    assert cut_from(text) == "def f():\n    \\\n\n    return 1"
    assert same_but_docstring(cut_from(text), function_in(text)) is not None


@pytest.mark.parametrize(
    "header",
    [
        "def f():",
        "async def f(a):",
        "def f(a, /, b: int = 1, *args: str, c={1: 2}, **kwargs: dict[str, int]) -> list[int]:",
        "def f(a, /):",
        "def f(a=lambda x: x, b=':'):",
        "def f(\n    a,  # first: the one\n    b,\n):",
        "def f(  # nothing: at all\n):",
        "def f() -> (\n    'é: x'\n):",
    ],
)
def test_signature_is_the_header_as_written(header):
    """The signature ends at its own colon, not at one in an annotation, comment or string."""
    text = f"@decorator(a=1)\n{header}  # after: this\n    return {{1: 2}}"
    assert signature(text, function_in(text)) == header


def test_source_is_decoded_as_it_declares():
    """PEP 263 declarations are followed; the default is UTF-8."""
    assert decode(b"# -*- coding: latin-1 -*-\r\nx = '\xe9'\r") == (
        "# -*- coding: latin-1 -*-\nx = 'é'\n"
    )
    assert decode("x = 'é'".encode()) == "x = 'é'"


@pytest.mark.parametrize("data", [b"x = '\xe9'", b"# coding: no-such-codec\n", b"\xff\xfe\x00"])
def test_source_that_cannot_be_decoded_is_none(data):
    """The standard library contains test files with broken encodings."""
    assert decode(data) is None


@pytest.mark.parametrize("text", ["def f(:", "x = '\0'", "(" * 5_000])
def test_text_that_is_no_python_is_none(text):
    """Syntax errors, NUL bytes and too deep nesting give None."""
    assert parse(text) is None


STATEMENTS = [
    "x = 1  # one: é",
    'z = f"""{x}\n    {y}"""',
    "if x:\n    return 'é'\nelse:\n    pass",
    "# a comment\nx = (1,\n  2)",
    "s = 'a\\\n   b'",
    "def g():\n    'inner'\n    return 2",
    "@d\nclass B:\n    '''inner\n    class'''",
    "",
]
# Their later lines begin inside a string and must not be dedented.
FLUSH = ["y = '''a\n        b\n  c'''", "return '''\n'''", "t = 'a\\\nb'"]
DOCSTRINGS = ["'d'", '"""One.\n\n    Two.\n"""', "('d' 'é')", "r'''\\d\n'''", "'a' \\\n'b'"]


def block(statements, docstring, beside, indent):
    """Return the source of a method in a class."""
    head = textwrap.indent("@d\ndef f(self, a=':'):", indent)
    body = [
        2 * indent + each if each in FLUSH else textwrap.indent(each, 2 * indent)
        for each in [f"{docstring}{beside}", *statements, "return x"]
    ]
    return "\n".join(["class A:", head, *body, ""])


@given(
    st.lists(st.sampled_from(STATEMENTS + FLUSH), max_size=5),
    st.sampled_from(DOCSTRINGS),
    st.sampled_from(["", "  # beside", "; w = 1"]),
    st.sampled_from(["  ", "    ", "\t"]),
)
def test_cutting_changes_nothing_but_the_docstring(statements, docstring, beside, indent):
    """The syntax tree equals the original's without its first statement."""
    text = block(statements, docstring, beside, indent)
    node = function_in(text)
    bare = copy.copy(node)
    bare.body = node.body[1:]
    again = ast.parse(cut_from(text)).body
    assert [ast.dump(each) for each in again] == [ast.dump(bare)]
