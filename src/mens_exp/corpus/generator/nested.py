"""Task families on nested lists, matrices among them, and on recursion."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.corpus.generator.family import Draw


def _matrix(draw: Draw, rows: int, columns: int) -> list[list[int]]:
    return [draw.numbers(columns, 0, 20) for _ in range(rows)]


def _reshape(draw: Draw) -> Draft:
    name = draw.pick(("turn_matrix", "reshape", "flip_grid", "rearrange"))
    arg, offset, factor = (
        draw.pick(("matrix", "grid", "rows")),
        draw.number(-9, 9),
        draw.number(1, 5),
    )
    what, how = draw.pick(
        (
            ("transposed", "$x[j][i]"),
            ("turned clockwise by a quarter", "$x[len($x) - 1 - j][i]"),
            ("turned counterclockwise by a quarter", "$x[j][len($x[0]) - 1 - i]"),
            ("mirrored at its second diagonal", "$x[len($x) - 1 - j][len($x[0]) - 1 - i]"),
        )
    )
    value = f"{factor} * {how}" if factor > 1 else how
    if offset:
        value += f" {'+' if offset > 0 else '-'} {abs(offset)}"
    solution = f"""
        def $f($x):
            if not $x:
                return []
            result = []
            for i in range(len($x[0])):
                result.append([{value} for j in range(len($x))])
            return result
    """

    def oracle(rows: list[list[int]]) -> list[list[int]]:
        turned = {
            "transposed": [*zip(*rows, strict=True)],
            "turned clockwise by a quarter": [*zip(*rows[::-1], strict=True)],
            "turned counterclockwise by a quarter": [*zip(*rows, strict=True)][::-1],
            "mirrored at its second diagonal": [
                row[::-1] for row in [*zip(*rows, strict=True)][::-1]
            ],
        }[what]
        return [[factor * each + offset for each in row] for row in turned]

    changes = [f"multiplied by {factor}"] * (factor > 1) + [f"changed by {offset:+d}"] * (
        offset != 0
    )
    change = f", every number {' and then '.join(changes)}" if changes else ""
    cases = [(_matrix(draw, draw.number(1, 3), draw.number(1, 3)),) for _ in range(4)]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns `{arg}`, a list of equally long rows, {what}{change}",
            f"makes a new list of rows: those of `{arg}` {what}{change}; it returns the list",
        ),
        note="An empty list gives an empty list.",
        solution=code(solution, f=name, x=arg),
        cases=[*calls(name, cases, oracle), call(name, [], want=[])],
        difficulty=5,
    )


def _line_sums(draw: Draw) -> Draft:
    name = draw.pick(("line_totals", "matrix_report", "grid_sums", "sum_lines"))
    arg, modulus = draw.pick(("matrix", "grid", "rows")), draw.number(2, 12)
    options: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
        ("row", "$x", lambda rows: rows),
        ("column", "zip(*$x)", lambda rows: [[r[i] for r in rows] for i in range(len(rows))]),
        (
            "diagonal",
            "[[$x[i][i] for i in range(len($x))], [$x[i][-1 - i] for i in range(len($x))]]",
            lambda rows: [
                [row[i] for i, row in enumerate(rows)],
                [row[::-1][i] for i, row in enumerate(rows)],
            ],
        ),
    )
    shape, lines, picked = draw.pick(options)
    measures: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
        ("sum", "sum(line)", sum),
        (
            f"number of multiples of {modulus}",
            f"sum(1 for number in line if number % {modulus} == 0)",
            lambda line: len([n for n in line if n in range(0, 99, modulus)]),
        ),
        (
            f"sum of the numbers above {modulus}",
            f"sum(number for number in line if number > {modulus})",
            lambda line: (
                sum(max(n, modulus) - modulus for n in line)
                + modulus * len([n for n in line if n > modulus])
            ),
        ),
        ("largest number", "max(line)", lambda line: max(line[::-1])),
        (
            f"product modulo {modulus + 20}",
            f"math.prod(line) % {modulus + 20}",
            lambda line: math.prod(line) % (modulus + 20),
        ),
    )
    what, how, apart = draw.pick(measures)
    offset = draw.number(0, 9)
    value = f"{how} + {offset}" if offset else how
    imported = "\n        import math\n\n" if "math" in how else ""
    solution = f"""{imported}
        def $f($x):
            result = []
            for line in {lines}:
                result.append({value})
            return result
    """
    squares = [_matrix(draw, size, size) for size in (1, 2, 2, 3, 3)]
    plus = f", plus {offset}" if offset else ""
    both = "both diagonals (that from the top left first)" if shape == "diagonal" else ""
    every = both or f"every {shape}"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns a list with the {what}{plus} of {every} of the square matrix `{arg}`",
            (
                f"goes through {every} of `{arg}`, a list of as many rows as columns, and returns "
                f"the list of the {what}{plus} of each"
            ),
        ),
        solution=code(solution, f=name, x=arg),
        cases=calls(
            name,
            [(each,) for each in squares],
            lambda rows: [apart(x) + offset for x in picked(rows)],
        ),
        difficulty=5,
    )


def _product_matrix(draw: Draw) -> Draft:
    name = draw.pick(("multiply", "matmul", "product", "combine_matrices"))
    first, second = draw.pick((("a", "b"), ("left", "right"), ("m", "n"), ("p", "q")))
    modulus, sign = draw.number(5, 60), draw.pick("+-")
    extra = draw.number(1, 6)
    what, how = draw.pick((("times", "*"), ("plus", "+"), ("minus", "-")))
    solution = f"""
        def $f($x, $y):
            size = len($x)
            result = []
            for i in range(size):
                row = []
                for j in range(size):
                    total = sum($x[i][k] {how} $y[k][j] for k in range(size))
                    row.append((total {sign} {extra}) % {modulus})
                result.append(row)
            return result
    """

    def oracle(one: list[list[int]], two: list[list[int]]) -> list[list[int]]:
        columns = [*zip(*two, strict=True)]
        shift = extra if sign == "+" else -extra
        join = {"*": int.__mul__, "+": int.__add__, "-": int.__sub__}[how]
        return [
            [(sum(map(join, row, column)) + shift) % modulus for column in columns] for row in one
        ]

    pairs = [(_matrix(draw, size, size), _matrix(draw, size, size)) for size in (1, 2, 2, 3)]
    return Draft(
        signature=f"{name}({first}, {second})",
        does=(
            (
                f"returns the square matrix whose entry at i, j is the sum over k of {first}[i][k] "
                f"{what} {second}[k][j], {sign} {extra}, all modulo {modulus}"
            ),
            (
                f"takes two square matrices of one size and returns the one with, at row i and "
                f"column j, the sum over k of {first}[i][k] {how} {second}[k][j], then {sign} "
                f"{extra} "
                f"and the remainder by {modulus}"
            ),
        ),
        solution=code(solution, f=name, x=first, y=second),
        cases=calls(name, pairs, oracle),
        difficulty=7,
    )


MATRICES: Final = (
    Family(name="reshape", theme="matrices", side=Side.TRAIN, draft=_reshape),
    Family(name="line_sums", theme="matrices", side=Side.TRAIN, draft=_line_sums),
    Family(name="product_matrix", theme="matrices", side=Side.HELDOUT, draft=_product_matrix),
)


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


RECURSION: Final = (
    Family(name="nested_total", theme="recursion", side=Side.TRAIN, draft=_nested_total),
    Family(name="recurrence", theme="recursion", side=Side.TRAIN, draft=_recurrence),
    Family(name="ways", theme="recursion", side=Side.TRAIN, draft=_ways),
    Family(name="subsets", theme="recursion", side=Side.VAL, draft=_subsets),
    Family(name="bisect", theme="recursion", side=Side.HELDOUT, draft=_bisect),
)
