"""Training pairs from the documented functions, and classes, of one Python file.

The prompt is the signature and the docstring, the response the source without the
docstring: what the prompt has already said is not learnt as an answer.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.python_source import (
    DefinitionNode,
    FunctionNode,
    cut,
    parse,
    same_but_docstring,
    signature,
)
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

__all__ = ["pairs_of"]

MIN_BODY_LINES: Final = 2  # unverified guess: one line teaches little beyond its signature
MAX_RESPONSE_CHARS: Final = 4_000  # unverified guess: some 1,000 tokens, two packed sequences


def pairs_of(
    text: str,
    *,
    module: str,
    group: str,
    category: str,
    dropped: Counter[str],
    classes: bool = False,
    language: str | None = None,
) -> list[TrainingPair]:
    """Make a pair of every documented function and method of a file.

    Functions within functions are part of the outer one and make no pair of their own.

    Args:
        text: the file's source, line ends made newlines.
        module: its dotted name, for the prompts.
        group: the group of every pair.
        category: the category of every pair.
        dropped: counts, by reason, what was not taken; added to.
        classes: make a pair of every documented class too, before those of its methods.
        language: the language of every pair; None leaves it untold.

    Returns:
        The pairs, in the order of the file.
    """
    tree = parse(text)
    if tree is None:
        dropped["file_does_not_parse"] += 1
        return []
    lines = text.split("\n")
    pairs = []
    for node, owner in _definitions(tree, module, classes=classes):
        try:
            docstring = _docstring(node)
            response, bare = _response(lines, node)
        except _UnfitError as unfit:
            dropped[str(unfit)] += 1
            continue
        header = signature(response, bare)
        pairs.append(
            TrainingPair(
                prompt=f"{_task(node, owner, module)}\n\n```python\n{header}\n```\n\n{docstring}",
                response=response,
                category=category,
                language=language,
                group=group,
            )
        )
    return pairs


def _task(node: DefinitionNode, owner: str, module: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"Write the Python class `{owner}.{node.name}`."
    if owner == module:
        return f"Write the Python function `{owner}.{node.name}`."
    return f"Write the method `{node.name}` of the Python class `{owner}`."


class _UnfitError(Exception):
    """A definition makes no pair; the argument is the reason, a key of the counts."""


def _definitions(
    node: ast.AST, owner: str, *, classes: bool
) -> Iterator[tuple[DefinitionNode, str]]:
    """Yield definitions with the dotted name of their module or class, in source order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, owner
        elif isinstance(child, ast.ClassDef):
            if classes:
                yield child, owner
            yield from _definitions(child, f"{owner}.{child.name}", classes=classes)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            # a definition under an `if` or a `try`
            yield from _definitions(child, owner, classes=classes)


def _docstring(node: DefinitionNode) -> str:
    """Return the docstring of a definition that is one to learn from."""
    if node.name.lstrip("_").lower().startswith("test"):
        raise _UnfitError("test")
    docstring = (ast.get_docstring(node) or "").strip()
    if not docstring:
        raise _UnfitError("undocumented")
    if not _is_text(docstring):
        raise _UnfitError("docstring_is_not_text")
    if all(_is_stub(statement) for statement in node.body[1:]):
        raise _UnfitError("stub")
    return docstring


def _response(lines: list[str], node: DefinitionNode) -> tuple[str, DefinitionNode]:
    """Return the source without docstring, and the definition parsed from it."""
    response = cut(lines, node)
    if len(response) > MAX_RESPONSE_CHARS:
        raise _UnfitError("long")
    bare = same_but_docstring(response, node)
    if bare is None:
        raise _UnfitError("cut_changes_code")
    if ast.get_docstring(bare, clean=False) is not None:
        raise _UnfitError("second_docstring")
    if _body_lines(response, bare) < MIN_BODY_LINES:
        raise _UnfitError("short")
    return response, bare


def _is_text(docstring: str) -> bool:
    """Tell whether a file of UTF-8 lines can hold it: escapes may spell what none can."""
    return "\0" not in docstring and not any("\ud800" <= char <= "\udfff" for char in docstring)


def _is_stub(statement: ast.stmt) -> bool:
    """Tell whether a statement is ``pass``, ``...`` or ``raise NotImplementedError``."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and statement.value.value is Ellipsis
    if not isinstance(statement, ast.Raise):
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def _body_lines(text: str, node: DefinitionNode) -> int:
    """Count the lines of a definition's body that are neither blank nor only a comment."""
    body = text.split("\n")[node.body[0].lineno - 1 :]
    return sum(1 for line in body if line.strip() and not line.lstrip().startswith("#"))
