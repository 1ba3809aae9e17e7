"""Tasks on sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


def _shared(draw: Draw) -> Draft:
    name = draw.pick(("shared", "set_report", "compare", "overlap"))
    first, second = draw.pick((("a", "b"), ("left", "right"), ("xs", "ys"), ("mine", "yours")))
    what, sign = draw.pick(
        (
            (f"are in both `{first}` and `{second}`", "&"),
            (f"are in exactly one of `{first}` and `{second}`", "^"),
            (f"are in `{first}` but not in `{second}`", "-"),
            (f"are in `{first}` or `{second}`", "|"),
        )
    )
    modulus, reverse = draw.number(1, 6), draw.chance()
    rest = draw.number(0, modulus - 1)
    only = f" if each % {modulus} == {rest}" if modulus > 1 else ""
    solution = f"""
        def $f({first}, {second}):
            found = set({first}) {sign} set({second})
            chosen = [each for each in found{only}]
            return sorted(chosen{", reverse=True" if reverse else ""})
    """

    def oracle(xs: list[int], ys: list[int]) -> list[int]:
        rules = {
            "&": lambda n: n in xs and n in ys,
            "^": lambda n: (n in xs) != (n in ys),
            "-": lambda n: n in xs and n not in ys,
            "|": lambda n: n in xs or n in ys,
        }
        found = [n for n in range(31) if rules[sign](n) and n % modulus == rest]
        return found[::-1] if reverse else found

    pairs = [(draw.numbers(9, 0, 15), draw.numbers(9, 5, 20)) for _ in range(4)]
    kept = f" and leave the remainder {rest} when divided by {modulus}" if modulus > 1 else ""
    order = "descending" if reverse else "ascending"
    return Draft(
        signature=f"{name}({first}, {second})",
        does=(
            f"returns the numbers that {what}{kept}, each once, in {order} order",
            (
                f"compares two lists and returns an {order} list, free of repetitions, of the "
                f"numbers "
                f"that {what}{kept}"
            ),
        ),
        solution=code(solution, f=name),
        cases=calls(name, [*pairs, ([], [])], oracle),
        difficulty=3,
    )


def _first_repeat(draw: Draw) -> Draft:
    name = draw.pick(("first_repeat", "duplicate_at", "seen_before", "find_repeat"))
    arg, none = draw.pick(("numbers", "values", "items")), draw.pick(("None", "-1", "0"))
    modulus, place = draw.number(3, 30), draw.chance()
    alike = draw.chance()
    key = f"number % {modulus}" if alike else "number"
    solution = f"""
        def $f($x):
            seen = set()
            for index, number in enumerate($x):
                key = {key}
                if key in seen:
                    return {"index" if place else "number"}
                seen.add(key)
            return {none}
    """
    if not place:
        solution = solution.replace("index, number in enumerate($x)", "number in $x")
    top = modulus * 2 if alike else 9
    lists = [draw.numbers(draw.number(4, 8), 0, top) for _ in range(5)]

    def oracle(xs: list[int]) -> int | None:
        keys = [x % modulus if alike else x for x in xs]
        for index, x in enumerate(xs):
            if keys.index(keys[index]) < index:
                return index if place else x
        return None if none == "None" else int(none)

    same = f"leaves the same remainder by {modulus} as" if alike else "equals"
    given = "the position (from 0) of the first number" if place else "the first number"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns {given} of `{arg}` that {same} an earlier one",
            f"goes through `{arg}` and returns {given} that {same} one met before",
        ),
        note=f"Where there is none it returns {none}.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]], oracle),
        difficulty=4,
    )


FAMILIES: Final = (
    Family(name="shared", theme="sets", side=Side.TRAIN, draft=_shared),
    Family(name="first_repeat", theme="sets", side=Side.TRAIN, draft=_first_repeat),
)
