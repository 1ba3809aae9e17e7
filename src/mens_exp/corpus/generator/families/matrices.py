"""Tasks on matrices, lists of rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


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


FAMILIES: Final = (
    Family(name="reshape", theme="matrices", side=Side.TRAIN, draft=_reshape),
    Family(name="line_sums", theme="matrices", side=Side.TRAIN, draft=_line_sums),
    Family(name="product_matrix", theme="matrices", side=Side.HELDOUT, draft=_product_matrix),
)
