"""Tasks that call themselves, or might."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


def _nest(draw: Draw, depth: int) -> list[Any]:
    """Return a list of numbers and lists, up to so many levels below it."""
    return [
        _nest(draw, depth - 1) if depth and draw.chance() else draw.number(-9, 30)
        for _ in range(draw.number(1, 4))
    ]


def _nested_total(draw: Draw) -> Draft:
    name = draw.pick(("nested_sum", "deep_total", "weigh", "tree_sum"))
    arg, weight, least = (
        draw.pick(("items", "tree", "nested")),
        draw.number(1, 7),
        draw.number(0, 9),
    )
    limited = draw.chance()
    deeper = f"{weight} * $f(item)" if weight > 1 else "$f(item)"
    solution = f"""
        def $f($x):
            total = 0
            for item in $x:
                if isinstance(item, list):
                    total += {deeper}
                elif item >= {least}:
                    total += item
            return total
    """
    largest = f"""
        def $f($x):
            best = {least}
            for item in $x:
                if isinstance(item, list):
                    item = $f(item){f" + {weight}" if weight > 1 else ""}
                if item > best:
                    best = item
            return best
    """
    if limited:
        does = (
            (
                f"returns the largest of {least} and the numbers in `{arg}`, a list of numbers "
                f"and of "
                "such lists"
            ),
            (
                f"searches the nested list `{arg}` and returns its largest number, or {least} "
                f"where "
                "none is larger"
            ),
        )
        note = f"An inner list counts as its own result plus {weight}." if weight > 1 else ""
    else:
        does = (
            f"returns the sum of the numbers in `{arg}`, a list of numbers and of such lists",
            f"adds up the numbers of the nested list `{arg}` on all levels and returns the sum",
        )
        note = f"Numbers below {least} are left out."
        note += f" The sum of an inner list counts {weight} times." if weight > 1 else ""
    return Draft(
        signature=f"{name}({arg})",
        does=does,
        note=note,
        solution=code(largest if limited else solution, f=name, x=arg),
        cases=calls(name, [([*_nest(draw, 2), [draw.number(1, 40)]],) for _ in range(5)] + [([],)]),
        difficulty=5,
    )


def _recurrence(draw: Draw) -> Draft:
    name = draw.pick(("sequence", "term", "nth", "recurrent"))
    arg, first, second = draw.pick(("n", "index", "k")), draw.number(0, 5), draw.number(1, 6)
    one, two, extra = draw.number(1, 4), draw.number(1, 4), draw.number(0, 5)
    added = f" + {extra}" if extra else ""
    loop = f"""
        def $f($x):
            a, b = {first}, {second}
            for _ in range($x):
                a, b = b, {one} * b + {two} * a{added}
            return a
    """
    recursive = f"""
        def $f($x):
            if $x == 0:
                return {first}
            if $x == 1:
                return {second}
            return {one} * $f($x - 1) + {two} * $f($x - 2){added}
    """

    def oracle(index: int) -> int:
        terms = [first, second]
        while len(terms) <= index:
            terms.append(one * terms[-1] + two * terms[-2] + extra)
        return terms[index]

    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns f({arg}), where f(0) = {first}, f(1) = {second} and "
                f"f(n) = {one} * f(n - 1) + {two} * f(n - 2){added} for larger n"
            ),
            (
                f"computes term number `{arg}` of the sequence that begins with {first} and "
                f"{second} "
                f"and goes on with {one} times the last term plus {two} times the one before"
                f"{f' plus {extra}' if extra else ''}, and returns it"
            ),
        ),
        note="Terms are counted from 0.",
        solution=code(draw.pick((loop, recursive)), f=name, x=arg),
        cases=calls(name, [(each,) for each in (0, 1, 2, 3, draw.number(4, 5), 7)], oracle),
        difficulty=4,
    )


def _ways(draw: Draw) -> Draft:
    name = draw.pick(("count_ways", "ways_to_climb", "compositions", "step_ways"))
    arg, steps = draw.pick(("n", "stairs", "height")), sorted(draw.some(range(1, 7), 3))
    steps = steps[: draw.number(2, 3)]
    bad = draw.number(3, 9)
    blocked = draw.chance()
    stop = f"$x < 0 or $x % {bad} == {bad - 1}" if blocked else "$x < 0"
    solution = f"""
        def $f($x):
            if {stop}:
                return 0
            if $x == 0:
                return 1
            return sum($f($x - step) for step in {tuple(steps)})
    """

    def oracle(height: int) -> int:
        ways = [1]
        for left in range(1, height + 1):
            barred = blocked and left % bad == bad - 1
            found = sum(ways[left - step] for step in steps if step <= left)
            ways.append(0 if barred else found)
        return ways[height]

    listed = ", ".join(map(str, steps))
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns in how many orders steps of {listed} add up to `{arg}`",
            (
                f"counts the ways of going down `{arg}` stairs to 0 in steps of {listed}, order "
                "counting, and returns the count"
            ),
        ),
        note="There is one way for 0."
        + (
            f" No way may pass a height, counted from 0, that leaves {bad - 1} when divided by "
            f"{bad}, nor begin there."
            if blocked
            else ""
        ),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in (0, 1, *draw.numbers(3, 3, 9))], oracle),
        difficulty=6,
    )


def _subsets(draw: Draw) -> Draft:
    name = draw.pick(("subsets", "choices", "pick_sum", "combinations_of"))
    arg, target = draw.pick(("numbers", "coins", "weights")), draw.number(6, 24)
    what, test = draw.pick(
        (
            (f"is exactly {target}", f"total == {target}"),
            (f"is at most {target}", f"total <= {target}"),
            (f"is a multiple of {target % 6 + 2}", f"total % {target % 6 + 2} == 0"),
        )
    )
    most = draw.number(2, 6)
    solution = f"""
        def $f($x, total=0, size=0):
            if not $x:
                return 1 if {test} and size <= {most} else 0
            without = $f($x[1:], total, size)
            return without + $f($x[1:], total + $x[0], size + 1)
    """

    def oracle(numbers: list[int]) -> int:
        scope: dict[str, Any] = {"exactly": target.__eq__, "at most": target.__ge__}
        kind = next((kind for kind in scope if kind in what), None)
        sums = [
            sum(chosen)
            for size in range(min(most, len(numbers)) + 1)
            for chosen in itertools.combinations(numbers, size)
        ]
        good = scope[kind] if kind else lambda each: each % (target % 6 + 2) == 0
        return len([each for each in sums if good(each)])

    lists = [draw.numbers(draw.number(2, 5), 1, max(3, target // 2)) for _ in range(5)]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns how many ways there are of choosing up to {most} positions of the list "
                f"`{arg}` so that the sum of the numbers there {what}"
            ),
            (
                f"counts the selections of at most {most} elements of `{arg}`, by position, "
                f"whose sum "
                f"{what}, and returns the count"
            ),
        ),
        note="Choosing nothing is one of the ways; its sum is 0.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in lists], oracle),
        difficulty=7,
    )


def _bisect(draw: Draw) -> Draft:
    name = draw.pick(("find_place", "bisect", "insertion_point", "locate"))
    arg, wanted = draw.pick(("numbers", "values", "ordered")), draw.pick(("target", "x", "wanted"))
    after, falling, factor = draw.chance(), draw.chance(), draw.number(1, 9)
    sign = {(0, 0): "<", (1, 0): "<=", (0, 1): ">", (1, 1): ">="}[after, falling]
    key = f"{factor} * $x[middle]" if factor > 1 else "$x[middle]"
    recursive = f"""
        def $f($x, $w, low=0, high=None):
            if high is None:
                high = len($x)
            if low >= high:
                return low
            middle = (low + high) // 2
            if {key} {sign} $w:
                return $f($x, $w, middle + 1, high)
            return $f($x, $w, low, middle)
    """
    loop = f"""
        def $f($x, $w):
            low, high = 0, len($x)
            while low < high:
                middle = (low + high) // 2
                if {key} {sign} $w:
                    low = middle + 1
                else:
                    high = middle
            return low
    """

    def oracle(numbers: list[int], target: int) -> int:
        scaled = [factor * number for number in numbers]
        before = [n for n in scaled if (n > target if falling else n < target)]
        return len(before) + (scaled.count(target) if after else 0)

    cases = []
    for _ in range(5):
        numbers = sorted(draw.numbers(6, 0, 9), reverse=falling)
        cases.append((numbers, factor * draw.pick(numbers)))
    way = "descending" if falling else "ascending"
    times = f"{factor} times its numbers" if factor > 1 else "its numbers"
    side = "after" if after else "before"
    return Draft(
        signature=f"{name}({arg}, {wanted})",
        does=(
            (
                f"returns the index in the {way} list `{arg}` at which `{wanted}` would have to be "
                f"inserted, {side} equal ones, comparing it with {times}"
            ),
            (
                f"finds by halving where `{wanted}` belongs in `{arg}`, which is in {way} order, "
                f"when it is compared with {times} and goes {side} those that equal it; returns "
                f"the "
                "index"
            ),
        ),
        note="It takes a number of comparisons in the order of the logarithm of the length.",
        solution=code(draw.pick((recursive, loop)), f=name, x=arg, w=wanted),
        cases=[*calls(name, cases, oracle), call(name, [], 3, want=0)],
        difficulty=6,
    )


FAMILIES: Final = (
    Family(name="nested_total", theme="recursion", side=Side.TRAIN, draft=_nested_total),
    Family(name="recurrence", theme="recursion", side=Side.TRAIN, draft=_recurrence),
    Family(name="ways", theme="recursion", side=Side.TRAIN, draft=_ways),
    Family(name="subsets", theme="recursion", side=Side.VAL, draft=_subsets),
    Family(name="bisect", theme="recursion", side=Side.HELDOUT, draft=_bisect),
)
