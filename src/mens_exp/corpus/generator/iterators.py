"""Task families on the order of items: generator functions, sorting and merging."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Case, Draft, Family, Noun, calls, code, literal
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw

_SERIES: Final = ("values", "numbers", "items", "stream")


def _listed(name: str, *arguments: Any, want: list[Any]) -> Case:
    """Return the case of a generator function, read to its end."""
    return Case(f"list({name}({', '.join(map(literal, arguments))}))", want=want)


def _stepping(draw: Draw) -> Draft:
    name = draw.pick(("count_up", "stepping", "progression", "ladder"))
    start, stop = draw.pick((("start", "stop"), ("low", "high"), ("first", "limit")))
    step, grow = draw.number(1, 9), draw.number(0, 5)
    skipped = draw.number(2, 7)
    skips = draw.chance()
    body = (
        f"""
                if $a % {skipped} != 0:
                    yield $a"""
        if skips
        else """
                yield $a"""
    )
    growing = (
        f"""
                step += {grow}"""
        if grow
        else ""
    )
    solution = f"""
        def $f($a, $b):
            step = {step}
            while $a < $b:{body}
                $a += step{growing}
    """

    def want(low: int, high: int) -> list[int]:
        jumps = itertools.count(step, grow)
        terms = itertools.accumulate(jumps, initial=low)
        below = itertools.takewhile(lambda term: term < high, terms)
        return [term for term in below if not skips or term % skipped]

    pairs = [(draw.number(-9, 20), draw.number(15, 70)) for _ in range(5)] + [(4, 4)]
    more = f", then {step + grow}, {step + 2 * grow} and so on" if grow else " each time"
    but = f" Multiples of {skipped} are passed over." if skips else ""
    return Draft(
        signature=f"{name}({start}, {stop})",
        does=(
            (
                f"yields numbers from `{start}` as long as they are below `{stop}`, going up by "
                f"{step}{more}"
            ),
            (
                f"gives, one by one, `{start}` and what follows it by adding {step}{more}, ending "
                f"before `{stop}`"
            ),
        ),
        note=but.strip(),
        noun=Noun.GENERATOR,
        solution=code(solution, f=name, a=start, b=stop),
        cases=[_listed(name, low, high, want=want(low, high)) for low, high in pairs],
        difficulty=4,
    )


def _interleave(draw: Draw) -> Draft:
    name = draw.pick(("interleave", "alternate", "zip_lists", "weave"))
    first, second = draw.pick((("a", "b"), ("left", "right"), ("xs", "ys"), ("one", "two")))
    many, few, factor = draw.number(1, 3), draw.number(1, 3), draw.number(1, 9)
    rest = draw.chance()
    test = "or" if rest else "and"
    shown = f"{factor} * each" if factor > 1 else "each"
    solution = f"""
        def $f($x, $y):
            i = j = 0
            while i < len($x) {test} j < len($y):
                yield from $x[i : i + {many}]
                for each in $y[j : j + {few}]:
                    yield {shown}
                i += {many}
                j += {few}
    """

    def want(one: list[int], two: list[int]) -> list[int]:
        ones = [one[i : i + many] for i in range(0, len(one), many)]
        twos = [two[i : i + few] for i in range(0, len(two), few)]
        turns: list[Any] = list(itertools.zip_longest(ones, twos, fillvalue=[]))
        if not rest:
            turns = turns[: min(len(ones), len(twos))]
        return [n for x, y in turns for n in (*x, *(factor * each for each in y))]

    pairs = [
        (draw.numbers(draw.number(1, 5), 0, 9), draw.numbers(draw.number(1, 5), 10, 19))
        for _ in range(5)
    ]
    ends = (
        "When one list is used up the other goes on alone."
        if rest
        else "It ends before a turn at whose beginning one of the lists is used up."
    )
    times = f", each multiplied by {factor}" if factor > 1 else ""
    return Draft(
        signature=f"{name}({first}, {second})",
        does=(
            (
                f"yields {many} of the list `{first}`, then {few} of the list "
                f"`{second}`{times}, and "
                "so on in turns"
            ),
            (
                f"goes through two lists in turns, {many} from `{first}` and {few} from "
                f"`{second}`{times}, and yields each value"
            ),
        ),
        note=f"A turn takes what is left where that is less. {ends}",
        noun=Noun.GENERATOR,
        solution=code(solution, f=name, x=first, y=second),
        cases=[_listed(name, *pair, want=want(*pair)) for pair in [*pairs, ([], [3, 4])]],
        difficulty=5,
    )


def _differences(draw: Draw) -> Draft:
    name = draw.pick(("differences", "changes", "steps_between", "deltas"))
    arg, gap, least = draw.pick(_SERIES), draw.number(1, 3), draw.number(1, 12)
    what, how = draw.pick(
        (
            ("less the earlier one", "value - earlier"),
            ("less the earlier one, without its sign", "abs(value - earlier)"),
            ("plus the earlier one", "value + earlier"),
        )
    )
    filtered = draw.chance()
    guard = (
        f"""
                    if abs(value - earlier) >= {least}:
                        yield {how}"""
        if filtered
        else f"""
                    yield {how}"""
    )
    solution = f"""
        def $f($x):
            seen = []
            for value in $x:
                if len(seen) == {gap}:
                    earlier = seen.pop(0){guard}
                seen.append(value)
    """

    def want(values: list[int]) -> list[int]:
        pairs = list(zip(values[gap:], values[:-gap], strict=True))
        kept = [(a, b) for a, b in pairs if not filtered or not b - least < a < b + least]
        if "+" in how:
            return [sum(pair) for pair in kept]
        return [max(a, b) - min(a, b) if "abs" in how else a - b for a, b in kept]

    lists = [draw.numbers(draw.number(4, 7), 0, 30) for _ in range(5)]
    before = "the one before it" if gap == 1 else f"the one {gap} places before it"
    only = f" Pairs that differ by less than {least} give nothing." if filtered else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"yields, for each number of the iterable `{arg}` and {before}, the number {what}",
            f"reads `{arg}` once and yields every number {what}, the earlier one being {before}",
        ),
        note=f"Numbers without an earlier one give nothing.{only}",
        noun=Noun.GENERATOR,
        solution=code(solution, f=name, x=arg),
        cases=[_listed(name, each, want=want(each)) for each in [*lists, [1]]],
        difficulty=5,
    )


def _until(draw: Draw) -> Draft:
    name = draw.pick(("take_until", "read_until", "head", "up_to"))
    arg, bound, most = draw.pick(_SERIES), draw.number(10, 60), draw.number(2, 7)
    what, test = draw.pick(
        (
            (f"the sum of the numbers taken would pass {bound}", f"total + value > {bound}"),
            (f"a number above {bound // 2} comes", f"value > {bound // 2}"),
            (f"a multiple of {most} comes", f"value % {most} == 0"),
        )
    )
    last, limit = draw.chance(), draw.number(3, 6)
    solution = f"""
        def $f($x):
            total = 0
            taken = 0
            for value in $x:
                if {test}:
                    {"yield value" if last else "return"}
                    {"return" if last else ""}
                if taken == {limit}:
                    return
                yield value
                total += value
                taken += 1
    """
    lines = [line for line in solution.split("\n") if line.strip()]
    if "total" not in test:
        lines = [line for line in lines if "total" not in line]

    def want(values: list[int]) -> list[int]:
        for end, value in enumerate(values):
            scope = {"value": value, "total": sum(values[:end])}
            if eval(test, scope):  # noqa: S307  # one of the three above
                return values[: end + last]
            if end == limit:
                return values[:end]
        return values

    lists = [draw.numbers(8, 1, draw.pick((12, 25, 40))) for _ in range(5)]
    ends = "that number being the last one given" if last else "that number not being given"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"yields the numbers of `{arg}` until {what}, {ends}",
            f"gives the numbers of the iterable `{arg}` one by one and stops when {what}, {ends}",
        ),
        note=f"It also stops after {limit} numbers"
        + (f", not counting one at which {what}." if last else "."),
        noun=Noun.GENERATOR,
        solution=code("\n".join(lines), f=name, x=arg),
        cases=[_listed(name, each, want=want(each)) for each in [*lists, []]],
        difficulty=5,
    )


ITERATORS: Final = (
    Family(name="stepping", theme="iterators", side=Side.TRAIN, draft=_stepping),
    Family(name="interleave", theme="iterators", side=Side.TRAIN, draft=_interleave),
    Family(name="differences", theme="iterators", side=Side.TRAIN, draft=_differences),
    Family(name="until", theme="iterators", side=Side.HELDOUT, draft=_until),
)


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


SORTING: Final = (
    Family(name="sort_by", theme="sorting", side=Side.TRAIN, draft=_sort_by),
    Family(name="partial_sort", theme="sorting", side=Side.TRAIN, draft=_partial_sort),
    Family(name="merge_sorted", theme="sorting", side=Side.VAL, draft=_merge_sorted),
)
