from __future__ import annotations

import ast
import builtins

import pytest

from mens_exp.corpus import rust
from mens_exp.corpus.measures import KINDS_IN, all_kinds
from mens_exp.errors import MissingExtra


def test_kinds_of_python_are_those_of_its_tree():
    """By hand for one statement; contexts such as Load and Store are not counted."""
    assert KINDS_IN["python"]("x = [a for a in b if not a]") == {
        *("Assign", "Name", "ListComp", "comprehension", "UnaryOp", "Not"),
    }


def test_every_kind_listed_can_occur():
    """A program that uses every construct of Python has exactly the listed kinds."""
    code = """
import a.b as c
from d import e as f
@g
class H(i, metaclass=j):
    k: int = 1
    k += +1 - -1 * 2 / 3 // 4 % 5 ** 6 @ 7 << 8 >> 9 | 10 ^ 11 & ~12
async def l(m, /, n=None, *o, p, **q) -> r:
    global s
    async for t in u: await v
    async with w as x: pass
    return [y async for y in z]
def aa():
    nonlocal_ = 1
    def inner():
        nonlocal nonlocal_
        yield nonlocal_
        yield from aa
    try: raise ab from ac
    except ad as ae: del af[ag:ah]
    else: assert ai, aj
    try: pass
    except* ak: pass
    while not al and am or an:
        if ao < ap <= aq > ar >= ass == at != au is av is not aw in ax not in ay: break
        else: continue
    for az in {ba: bb}: lambda: ...
    with bc: f"{bd!r}"
    (be := {*bf, 1}, {bg for bg in bh}, {bi: bj for bi, bj in bk}, (bl for bl in bm))
    x = [bn] if bo else bp.bq(**br)
    match bs:
        case 1 | None: ...
        case [bt, *bu]: ...
        case {"a": bv, **bw}: ...
        case bx(by=1): ...
"""
    found = KINDS_IN["python"](code)
    assert found is not None
    later = {"TypeAlias", "TypeVar", "ParamSpec", "TypeVarTuple", "TemplateStr", "Interpolation"}
    assert all_kinds("python") - found <= later
    assert found <= all_kinds("python")
    assert all(hasattr(ast, name) for name in found)


@pytest.mark.parametrize(
    ("language", "good", "bad"),
    [
        ("python", "x = 1", "x ="),
        ("rust", "fn f() {}", "fn f( {"),
        ("json", '{"a": [1]}', "{a: 1}"),
    ],
)
def test_code_that_does_not_parse_has_no_kinds(language, good, bad):
    """The result is None, unlike that of code without constructs."""
    assert KINDS_IN[language](good) is not None
    assert KINDS_IN[language](bad) is None


def test_kinds_of_rust_are_named_by_its_grammar():
    """By hand; the grammar has over a hundred kinds, and an unlisted language has none."""
    found = KINDS_IN["rust"]("struct A(u8);")
    assert found == {
        *("source_file", "struct_item", "type_identifier"),
        *("ordered_field_declaration_list", "primitive_type"),
    }
    assert len(all_kinds("rust")) > 100
    assert all_kinds("json") == frozenset()


def test_missing_grammar_is_no_bad_code(monkeypatch):
    """A missing grammar is distinguished from code that does not parse."""
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("tree_sitter"):
            raise ImportError(name)
        return real(name, *rest)

    rust._parser.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra):
        KINDS_IN["rust"]("fn f() {}")
