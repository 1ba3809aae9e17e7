"""Tasks on order."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


def _sort_by(draw: Draw) -> Draft:
    name = draw.pick(("order", "sort_words", "ranked_words", "arrange"))
    arg, letter, many = (
        draw.pick(("words", "names", "labels")),
        draw.pick("aeirnt"),
        draw.number(1, 4),
    )
    keys = {
        "length": "len(word)",
        "last letter": "word[-1]",
        f"number of times {letter!r} occurs": f'word.count("{letter}")',
        f"first {many + 1} letters": f"word[:{many + 1}]",
        "number of different letters": "len(set(word))",
        f"length modulo {many + 1}": f"len(word) % {many + 1}",
    }
    first, second = draw.some(sorted(keys), 2)
    reverse, top = draw.chance(), draw.number(2, 9)
    cut = draw.chance()
    solution = f"""
        def $f($x):
            chosen = sorted($x, key=lambda word: ({keys[first]}, {keys[second]}, word){
        ", reverse=True" if reverse else ""
    })
            return chosen{f"[:{top}]" if cut else ""}
    """
    order = "descending" if reverse else "ascending"
    only = f" and cut to its first {top}" if cut else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the strings of `{arg}` sorted in {order} order by {first}, then by "
                f"{second}, "
                f"then alphabetically{only}"
            ),
            (
                f"sorts the words of `{arg}` by {first}; equal ones by {second}, and then by the "
                f"alphabet, all in {order} order{only}; it returns the new list"
            ),
        ),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(draw.words(draw.number(4, 7)),) for _ in range(4)] + [([],)]),
        difficulty=4,
    )


def _partial_sort(draw: Draw) -> Draft:
    name = draw.pick(("bubble", "sort_passes", "partly_sorted", "sweep"))
    arg, passes, falling = (
        draw.pick(("numbers", "values", "data")),
        draw.number(1, 4),
        draw.chance(),
    )
    modulus, by = draw.number(3, 12), draw.chance()
    counted = draw.chance()
    sign = "<" if falling else ">"
    one, two = ("result[i] % {m}", "result[i + 1] % {m}") if by else ("result[i]", "result[i + 1]")
    test = f"{one} {sign} {two}".format(m=modulus)
    solution = f"""
        def $f($x):
            result = list($x)
            swaps = 0
            for _ in range({passes}):
                for i in range(len(result) - 1):
                    if {test}:
                        result[i], result[i + 1] = result[i + 1], result[i]
                        swaps += 1
            return {"swaps" if counted else "result"}
    """
    if not counted:
        solution = "\n".join(line for line in solution.split("\n") if "swaps" not in line)
    lists = [draw.numbers(draw.number(3, 7), 0, 40) for _ in range(5)]
    than = "smaller" if falling else "larger"
    what = f"its remainder by {modulus} is {than}" if by else f"it is {than}"
    result = "the number of swaps" if counted else "the new list"
    times = "once" if passes == 1 else f"{passes} times"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"goes {times} from left to right through a copy of `{arg}`, swaps a number "
                f"with its "
                f"right neighbour where {what}, and returns {result}"
            ),
            (
                f"returns {result} of {passes} {'pass' if passes == 1 else 'passes'} of bubble "
                f"sort "
                f"over the list `{arg}`, in which a number and the next one change places where "
                f"{what}"
            ),
        ),
        note=f"`{arg}` itself is not changed.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]]),
        difficulty=5,
    )


def _merge_sorted(draw: Draw) -> Draft:
    name = draw.pick(("merge", "merge_sorted", "join_sorted", "zip_sorted"))
    first, second = draw.pick((("a", "b"), ("left", "right"), ("xs", "ys"), ("p", "q")))
    falling, unique, factor = draw.chance(), draw.chance(), draw.number(1, 9)
    sign = ">=" if falling else "<="
    other = f"{factor} * $y[j]" if factor > 1 else "$y[j]"
    put = (
        """
                if not result or result[-1] != number:
                    result.append(number)"""
        if unique
        else """
                result.append(number)"""
    )
    solution = f"""
        def $f($x, $y):
            result = []
            i = j = 0
            while i < len($x) or j < len($y):
                if j == len($y) or (i < len($x) and $x[i] {sign} {other}):
                    number = $x[i]
                    i += 1
                else:
                    number = {other}
                    j += 1{put}
            return result
    """

    def oracle(one: list[int], two: list[int]) -> list[int]:
        merged = [*heapq.merge(one, [factor * n for n in two], reverse=falling)]
        return [n for n, _ in itertools.groupby(merged)] if unique else merged

    pairs = []
    for _ in range(5):
        lists = (draw.numbers(draw.number(1, 5), 0, 20 * factor), draw.numbers(4, 0, 20))
        one, two = (sorted(each, reverse=falling) for each in lists)
        pairs.append((one, two))
    way = "descending" if falling else "ascending"
    times = f", its numbers multiplied by {factor}," if factor > 1 else ""
    once = " in which every number comes once" if unique else ""
    return Draft(
        signature=f"{name}({first}, {second})",
        does=(
            (
                f"merges the {way} lists `{first}` and `{second}`{times} into one {way} "
                f"list{once} and "
                "returns it"
            ),
            (
                f"returns the {way} list{once} of the numbers of `{first}` and of "
                f"`{second}`{times} "
                f"both of which are {way}"
            ),
        ),
        note="It takes one pass and calls no sorting function.",
        solution=code(solution, f=name, x=first, y=second),
        cases=calls(name, [*pairs, ([], [])], oracle),
        difficulty=6,
    )


FAMILIES: Final = (
    Family(name="sort_by", theme="sorting", side=Side.TRAIN, draft=_sort_by),
    Family(name="partial_sort", theme="sorting", side=Side.TRAIN, draft=_partial_sort),
    Family(name="merge_sorted", theme="sorting", side=Side.VAL, draft=_merge_sorted),
)
