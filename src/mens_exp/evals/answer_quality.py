"""Static quality measures of an answer's code: strict, canonical, rich, or a stub.

Nothing is executed. Python is analysed through its syntax tree, other languages through their
tokens. All suites share this static part of a judgement.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
import warnings
from dataclasses import dataclass
from typing import Final

from mens_exp.evals.suite import Judgement

_MARKERS: Final = re.compile(
    r"\b(?:TODO|FIXME|XXX)\b|NotImplemented(?:Error)?\b|\b(?:todo|unimplemented)!|"
    r"\byour (?:code|implementation|solution)(?: goes)? here\b|\bimplement (?:me|this|here)\b|"
    r"\bplaceholder\b|\brest of (?:the|your) (?:code|implementation)\b",
    re.IGNORECASE,
)
_ENOUGH: Final = 5  # statements that make an answer rich; unverified guess
# A line of prose: at least four words, none of them code, that end like a sentence.
_SPEECH: Final = re.compile(r"[A-Za-z][\w'’-]*(?:[,;]? +[\w'’`*()-]+){3,}[^=]*[.:!?]\**")
_CODE_WORDS: Final = frozenset(
    [
        "def",
        "class",
        "if",
        "elif",
        "else",
        "for",
        "while",
        "with",
        "try",
        "except",
        "finally",
        "import",
        "from",
        "return",
        "raise",
        "assert",
        "async",
        "await",
        "match",
        "case",
        "lambda",
        "yield",
        "pass",
        "global",
        "nonlocal",
        "del",
        "fn",
        "let",
        "pub",
        "use",
        "impl",
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """The static quality of an answer; see `ItemEvent` for the fields."""

    strictness: bool
    canonical: bool | None
    placeholder_hits: int
    trivial: bool
    richness: float

    @property
    def anti_stub(self) -> bool:
        """Whether it is neither trivial nor marked."""
        return not self.trivial and self.placeholder_hits == 0


def quality_of(completion: str, code: str, *, is_python: bool = True) -> Quality:
    """Measure the static quality of an answer.

    Args:
        completion: the whole completion.
        code: its graded code.
        is_python: whether the code is Python.
    """
    return Quality(
        strictness=is_strict(completion),
        canonical=is_canonical(code) if is_python else None,
        placeholder_hits=placeholder_hits(code),
        trivial=is_trivial(code) if is_python else not code.strip(),
        richness=richness(code, is_python=is_python),
    )


def parsed(code: str) -> ast.Module | str:
    """Return the syntax tree, or the parser's error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # generated code may contain invalid escapes
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def is_strict(completion: str) -> bool:
    """Return whether an answer is only code: not empty, no fence, no prose around it."""
    lines = [line for line in completion.splitlines() if line.strip()]
    if not lines or "```" in completion:
        return False
    if not isinstance(parsed(textwrap.dedent(completion)), str):
        return True
    return not any(_is_speech(line) for line in (lines[0], lines[-1]))


def _is_speech(line: str) -> bool:
    is_code = line.startswith((" ", "\t", "#", "//")) or line.split(maxsplit=1)[0] in _CODE_WORDS
    return not is_code and _SPEECH.fullmatch(line.strip()) is not None


def is_canonical(code: str) -> bool:
    """Return whether Python code parses and has the layout of common formatters.

    Blocks are indented by four spaces, each line has one statement and no trailing blanks.
    """
    tree = parsed(code)
    if isinstance(tree, str):
        return False
    if "\t" in code or any(line != line.rstrip() for line in code.splitlines()):
        return False
    starts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return 0 < len(starts) == len(set(starts)) and _indented_by_four(code)


def _indented_by_four(code: str) -> bool:
    depths = [0]
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.INDENT:
                depths.append(len(token.string))
                if depths[-1] - depths[-2] != 4:  # noqa: PLR2004  # PEP 8
                    return False
            elif token.type == tokenize.DEDENT:
                depths.pop()
    except (tokenize.TokenError, SyntaxError):
        return False
    return True


def placeholder_hits(code: str) -> int:
    """Count placeholders, which mark unfinished code."""
    tree = parsed(code)
    ellipses = 0
    if not isinstance(tree, str):
        ellipses = sum(
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and node.value.value is ...
            for node in ast.walk(tree)
        )
    return len(_MARKERS.findall(code)) + ellipses


def is_trivial(code: str) -> bool:
    """Return whether Python code consists only of placeholders; it must parse."""
    tree = parsed(code)
    if isinstance(tree, str):
        return not code.strip()
    return not any(_does_something(node) for node in _statements(tree))


def richness(code: str, *, is_python: bool = True) -> float:
    """Return the effective statements as a share of the number for a rich answer, at most 1.

    Args:
        code: the code.
        is_python: whether it is Python. For other languages and for code that does not parse, the
            lines with more than brackets and comments are counted.
    """
    tree = parsed(code) if is_python else ""
    if isinstance(tree, str):
        lines = (line.strip() for line in code.splitlines())
        count = sum(bool(line.strip("{}()[];, ")) and line[:1] not in {"#", "/"} for line in lines)
    else:
        count = sum(map(_does_something, _statements(tree)))
    return min(1.0, count / _ENOUGH)


def _statements(tree: ast.Module) -> list[ast.stmt]:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and not isinstance(node, definitions)
    ]


def _does_something(node: ast.stmt) -> bool:
    if isinstance(node, ast.Pass):
        return False
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)  # a docstring, an ellipsis
    if isinstance(node, ast.Return):
        return not (node.value is None or _is_none(node.value))
    if isinstance(node, ast.Raise):
        return not any(_is_not_implemented(one) for one in ast.walk(node))
    return True


def _is_not_implemented(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return "NotImplemented" in str(name)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


NO_SANDBOX: Final = (
    "no sandbox: install bubblewrap, or say sandbox=unsafe to run generated code without one"
)


def judge_by_reading(completion: str, code: str, *, is_python: bool = True) -> Judgement:
    """Return the static part of a judgement; the suite adds the rest.

    Args:
        completion: the whole completion.
        code: its graded code.
        is_python: whether the code is Python; the layout of other languages is not judged.
    """
    quality = quality_of(completion, code, is_python=is_python)
    return Judgement(
        canonical=quality.canonical,
        strict=quality.strictness,
        placeholder_hits=quality.placeholder_hits,
        trivial=quality.trivial,
        richness=quality.richness,
        anti_stub=quality.anti_stub,
    )
