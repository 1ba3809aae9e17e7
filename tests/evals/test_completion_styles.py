from __future__ import annotations

import ast

import pytest

from mens_exp.evals.completion_styles import Style, assemble

PROMPT = '''from typing import List

LIMIT = 10


def double(x):
    return 2 * x


def total(numbers: List[int]) -> int:
    """ Add numbers up.
    >>> total([1, 2])
    3
    """
'''
TOTAL = {"entry_point": "total", "prompt": PROMPT}
WHOLE = "def total(numbers):\n    return sum(numbers)\n"
CHAT = f"Sure!\n\n```python\n{WHOLE}```\n\nIt adds them up."

# By name: the completion, and how it is read. Each gives total([1, 2, 3]) == 6.
ACCEPTED = {
    "indented body": ("    return sum(numbers)\n", Style.CONTINUATION),
    "body after an empty line": ("\n    return sum(numbers)", Style.CONTINUATION),
    "first line flush": ("found = sum(numbers)\n    return found\n", Style.CONTINUATION),
    "whole body flush": (
        "found = 0\nfor n in numbers:\n    found += n\nreturn found",
        Style.CONTINUATION,
    ),
    "flush body of assignments": (
        "found = sum(numbers)\nif not found:\n    found = 0\nreturn found\n",
        Style.CONTINUATION,
    ),
    "body of the prompt's helper": (
        "    return sum(map(double, numbers)) // 2",
        Style.CONTINUATION,
    ),
    "body, then a print": ("    return sum(numbers)\n\nprint(total([]))\n", Style.CONTINUATION),
    "body, then a wrong example": (
        "    return sum(numbers)\n\nassert total([1]) == 7\nresult = total(None)\n",
        Style.CONTINUATION,
    ),
    "body, then a main block": (
        "    return sum(numbers)\n\nif __name__ == '__main__':\n    print(total(input()))\n",
        Style.CONTINUATION,
    ),
    "body, then a helper that it calls": (
        "    return add(numbers)\n\ndef add(many):\n    return sum(many) + ZERO\n\nZERO = 0\n",
        Style.CONTINUATION,
    ),
    "body, then prose": (
        "    return sum(numbers)\n\nThis adds them up, of course.\n",
        Style.CONTINUATION,
    ),
    "body, then a function that was cut": (
        "    return sum(numbers)\n\n\ndef other(x):\n    return (x +",
        Style.CONTINUATION,
    ),
    "body, then a closing fence": ("    return sum(numbers)\n```\nDone.\n", Style.CONTINUATION),
    "body in a fence": ("```python\n    return sum(numbers)\n```", Style.CONTINUATION),
    "flush body in a fence": ("```\nreturn sum(numbers)\n```\n", Style.CONTINUATION),
    "body in a fence after a word": (
        "Solution\n```py\n    return sum(numbers)\n```",
        Style.CONTINUATION,
    ),
    "fence that never closes": (
        "```python\ndef total(numbers):\n    return sum(numbers)",
        Style.WHOLE,
    ),
    "whole": (WHOLE, Style.WHOLE),
    "whole with the prompt repeated": (f"{PROMPT}    return sum(numbers)\n", Style.WHOLE),
    "whole, indented": ("    def total(numbers):\n        return sum(numbers)\n", Style.WHOLE),
    "whole that needs the prompt's names": (
        "def total(n: List[int]) -> int:\n    return sum(map(double, n)) // 2 + LIMIT - 10",
        Style.WHOLE,
    ),
    "whole with its own import": (
        f"from typing import List\nimport functools\n\n{WHOLE}",
        Style.WHOLE,
    ),
    "whole with a helper above": (
        (
            "def add(a, b):\n    return a + b\n\ndef total(numbers):\n"
            "    one = 0\n    for n in numbers:\n        one = add(one, n)\n    return one\n"
        ),
        Style.WHOLE,
    ),
    "whole with a table above": (
        (
            "table = {}\nfor n in range(9):\n    table[n] = n\n\n"
            "def total(numbers):\n    return sum(table[n] for n in numbers)\n"
        ),
        Style.WHOLE,
    ),
    "whole, decorated": (
        "import functools\n\n@functools.wraps(sum)\ndef total(numbers):\n    return sum(numbers)",
        Style.WHOLE,
    ),
    "whole as a lambda": ("total = lambda numbers: sum(numbers)", Style.WHOLE),
    "whole, wrapped below": (
        f"import functools\n{WHOLE}\ntotal = functools.partial(total)\n",
        Style.WHOLE,
    ),
    "whole, postponed annotations": (
        (
            "from __future__ import annotations\n\ndef total(numbers: Later) -> int:\n"
            "    return sum(numbers)\n\nclass Later: pass\n"
        ),
        Style.WHOLE,
    ),
    "whole in a conversation": (CHAT, Style.WHOLE),
    "whole between sentences": (
        f"Here is the function:\n\n{WHOLE}\nI hope it helps!\n",
        Style.WHOLE,
    ),
    "whole, then its use": (f"{WHOLE}\nprint(total([1]))\nassert total([2]) == 3\n", Style.WHOLE),
    "whole in one line": ("def total(numbers): return sum(numbers); print(1)", Style.WHOLE),
    "two fences, helper first": (
        f"```python\nZERO = 0\n```\nand\n```python\n{WHOLE.replace('sum(', 'ZERO + sum(')}```",
        Style.WHOLE,
    ),
    "two fences, helper second": (
        (
            f"```python\n{WHOLE.replace('sum(', 'add(')}```\nwith\n"
            "```python\ndef add(numbers):\n    return sum(numbers)\nprint(add([]))\n```"
        ),
        Style.WHOLE,
    ),
    "two fences, usage second": (
        f"```python\n{WHOLE}```\nUse it so:\n```python\nprint(total([1, 2]))\n```",
        Style.WHOLE,
    ),
    "shell first": (f"```bash\npip install numpy\n```\n```python\n{WHOLE}```", Style.WHOLE),
    "fence in a list": (
        "1. So:\n   ```python\n   def total(numbers):\n       return sum(numbers)\n   ```",
        Style.WHOLE,
    ),
    "two fences, corrected second": (
        f"```python\ndef total(numbers):\n    return 0\n```\nNo:\n```python\n{WHOLE}```",
        Style.WHOLE,
    ),
    "two bodies, corrected second": (
        "```\n    return 0\n```\nNo:\n```\n    return sum(numbers)\n```",
        Style.CONTINUATION,
    ),
    "body in a fence, usage second": (
        "```\n    return sum(numbers)\n```\nUse:\n```\nprint(total([1]))\n```",
        Style.CONTINUATION,
    ),
    "two fences, the second cut": (
        f"```python\n{WHOLE}```\nOr:\n```python\ndef total(numbers):\n    return 0\n",
        Style.WHOLE,
    ),
    "a fence that closes the prompt's, corrected": (
        f"    return 0\n```\nNo:\n```python\n{WHOLE}```",
        Style.WHOLE,
    ),
    "whole between sentences, corrected": (
        f"def total(numbers):\n    return 0\n\nThat is wrong.\n\n{WHOLE}\nIt adds them up.\n",
        Style.WHOLE,
    ),
    "class Solution": (
        (
            "class Solution:\n    def total(self, numbers: List[int]) -> int:\n"
            "        return self.add(numbers)\n\n    def add(self, many):\n"
            "        return sum(many)\n\nprint(Solution().total([1]))\n"
        ),
        Style.SOLUTION,
    ),
    "class Solution in a conversation": (
        (
            "Sure!\n```python\nclass Solution(object):\n    @staticmethod\n"
            "    def total(numbers):\n        return sum(numbers)\n```\nIt adds them up."
        ),
        Style.SOLUTION,
    ),
    "class Solution between sentences": (
        "Here it is:\n\nclass Solution:\n    def total(self, n):\n        return sum(n)\n\nDone.",
        Style.SOLUTION,
    ),
    "windows line ends": (WHOLE.replace("\n", "\r\n"), Style.WHOLE),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_style_gives_the_same_function(name, capsys):
    """Each style is recognized, and its function runs (these completions are trusted)."""
    completion, style = ACCEPTED[name]
    read = assemble(completion, entry_point="total", prompt=PROMPT)
    assert (read.error, read.style) == (None, style)
    space = {"__name__": "solution"}
    exec(compile(read.source, name, "exec"), space)  # as above
    assert space["total"]([1, 2, 3]) == 6
    if "one line" not in name:
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("completion", "error", "parses"),
    [
        ("    return sum(numbers", "SyntaxError", False),
        ("    found = \n    return found", "SyntaxError", False),
        ("  found = sum(numbers)\n  return found", "IndentationError", False),
        ("    if numbers:\n  return 1\n", "IndentationError", False),
        ("I do not know how to write it.", "SyntaxError", False),
        ("```python\ndef total(numbers)\n    return 1\n```", "SyntaxError", False),
        ("", "empty", True),
        (" \n\n", "empty", True),
    ],
)
def test_errors_of_a_completion_are_not_repaired(completion, error, parses):
    """A completion that does not parse is reported and left as it is."""
    read = assemble(completion, entry_point="total", prompt=PROMPT)
    assert read.style is None
    assert read.parses is parses
    assert error in str(read.error)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * 3_000,
        "def other(x):\n    return x\n\n" * 500 + "def total(",
        "x = 1\nThis is prose\n" * 500 + "def total(numbers):\n    return (",
        "    return sum(numbers\n" + "print(1)\n" * 2_000,
        "```python\n" * 1_000,
        "    return " + "(" * 3_000,
        "    return " + "-" * 20_000 + "1",
        "    return x" + ".x" * 20_000,
        "    x = '\\d' \x00",
        "    x = '\ud800'",
    ],
    ids=range(10),
)
def test_degenerate_text_is_read_a_hundred_times_at_most(monkeypatch, text):
    """Degenerate repetition: the text parsed is at most a hundred times as long as the input."""
    read, parse = [0], ast.parse

    def counted(source):
        read[0] += len(source)
        return parse(source)

    monkeypatch.setattr(ast, "parse", counted)
    assemble(text, entry_point="total", prompt=PROMPT)
    assert 0 < read[0] <= 100 * len(PROMPT + text)


def test_invalid_escape_is_no_warning():
    """Models write invalid escapes; Python accepts them, so no warning is raised."""
    read = assemble("    import re\n    return len(re.findall('\\d', numbers))", **TOTAL)
    assert read.style is Style.CONTINUATION


def test_other_function_is_no_answer_to_a_task_in_words():
    """If the prompt is prose, an answer must define the requested function."""
    read = assemble("def other():\n    return 1\n", entry_point="total")
    assert (read.error, read.parses) == ("no function total is defined", True)
    assert assemble(WHOLE, entry_point="total").style is Style.WHOLE


def test_nested_function_of_that_name_is_no_answer():
    """A nested function of that name cannot be called by the tests."""
    read = assemble("class A:\n    def total(self):\n        return 1\n", entry_point="total")
    assert read.error == "no function total is defined"


def test_lines_keep_their_places():
    """Removed code leaves empty lines, so that tracebacks keep the model's line numbers."""
    read = assemble("print(1)\n" + WHOLE + "print(2)\n\ndef last(): pass", entry_point="total")
    assert read.source == "print(1)\n" + WHOLE + "\n\ndef last(): pass"
