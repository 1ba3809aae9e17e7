"""Task families on lists of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw

_LISTS: Final = ("numbers", "values", "items", "data", "nums")


def _filter_and_map(draw: Draw) -> Draft:
    name = draw.pick(("select_and_scale", "pick_numbers", "process", "keep_and_change"))
    arg, modulus = draw.pick(_LISTS), draw.number(2, 7)
    rest, factor, offset = draw.number(0, modulus - 1), draw.number(2, 9), draw.number(1, 9)
    loop = """
        def $f($x):
            result = []
            for number in $x:
                if number % $m == $r:
                    result.append(number * $a + $b)
            return result
    """
    short = """
        def $f($x):
            return [number * $a + $b for number in $x if number % $m == $r]
    """
    lists = [[modulus * draw.number(0, 9) + rest, *draw.numbers(7, 0, 60)] for _ in range(4)]
    what = f"a multiple of {modulus}" if not rest else f"{rest} more than a multiple of {modulus}"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns a list with {factor} * n + {offset} for every n in `{arg}` that is {what}",
            (
                f"takes the numbers of `{arg}` whose remainder by {modulus} is {rest}, "
                f"multiplies each "
                f"by {factor}, adds {offset}, and returns the list"
            ),
        ),
        note="The order is kept.",
        solution=code(
            draw.pick((loop, short)), f=name, x=arg, m=modulus, r=rest, a=factor, b=offset
        ),
        cases=calls(
            name,
            [(each,) for each in [*lists, []]],
            lambda xs: [factor * x + offset for x in xs if (x - rest) % modulus == 0],
        ),
        difficulty=2,
    )


def _chunks(draw: Draw) -> Draft:
    name = draw.pick(("split_into", "chunk", "in_groups", "portions"))
    arg, size, fill = draw.pick(_LISTS), draw.number(2, 6), draw.number(-3, 3)
    step = draw.number(1, size)
    end, told = draw.pick(
        (
            ("parts", "The last part may be shorter."),
            (f"[part for part in parts if len(part) == {size}]", "Shorter parts are left out."),
            (
                f"[part + [{fill}] * ({size} - len(part)) for part in parts]",
                f"A shorter part is filled up with {fill}.",
            ),
        )
    )
    solution = f"""
        def $f($x):
            parts = []
            for start in range(0, len($x), {step}):
                parts.append($x[start : start + {size}])
            return {end}
    """
    lists = [draw.numbers(count, 0, 50) for count in (size, size + 1, 2 * size + 1, 1)]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the parts of {size} numbers of the list `{arg}` that begin at every "
                f"position that is a multiple of {step}"
            ),
            (
                f"cuts `{arg}` into a list of lists: {size} consecutive numbers from each of the "
                f"positions 0, {step}, {2 * step} and so on"
            ),
        ),
        note=told,
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]]),
        difficulty=4,
    )


def _rotate(draw: Draw) -> Draft:
    name = draw.pick(("rotate", "turn", "shift_list", "cycle_by"))
    arg, steps, left = draw.pick(_LISTS), draw.number(1, 12), draw.chance()
    factor = draw.number(1, 9)
    scaled = f"[{factor} * number for number in turned]" if factor > 1 else "turned"
    solution = f"""
        def $f($x):
            if not $x:
                return []
            cut = {steps if left else -steps} % len($x)
            turned = $x[cut:] + $x[:cut]
            return {scaled}
    """
    lists = [draw.numbers(count, 0, 30) for count in (1, 3, 5, 6)]
    way = "left" if left else "right"
    times = f", each number multiplied by {factor}" if factor > 1 else ""

    def oracle(xs: list[int]) -> list[int]:
        turned = list(xs)
        for _ in range(steps if xs else 0):
            turned = [*turned[1:], turned[0]] if left else [turned[-1], *turned[:-1]]
        return [factor * x for x in turned]

    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns a new list: `{arg}` rotated by {steps} places to the {way}{times}",
            (
                f"moves every number of `{arg}` {steps} positions to the {way}, going round at the "
                f"end, and returns the new list{times}"
            ),
        ),
        note="An empty list gives an empty list.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]], oracle),
        difficulty=3,
    )


def _running(draw: Draw) -> Draft:
    name = draw.pick(("running", "accumulated", "prefix_values", "so_far"))
    arg, start, bound = draw.pick(_LISTS), draw.number(0, 40), draw.number(30, 90)
    what, step = draw.pick(
        (
            (f"the sum of {start} and all numbers up to there", "total + number"),
            (f"the largest of {start} and all numbers up to there", "max(total, number)"),
            (f"the smallest of {start} and all numbers up to there", "min(total, number)"),
            (f"{start} less all numbers up to there", "total - number"),
        )
    )
    capped = draw.chance() and "sum" in what
    solution = f"""
        def $f($x):
            total = {start}
            result = []
            for number in $x:
                total = {f"min({step}, {bound})" if capped else step}
                result.append(total)
            return result
    """
    lists = [draw.numbers(draw.number(3, 6), -9, 45) for _ in range(4)]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns a list as long as `{arg}` that holds, for each position, {what}",
            f"goes through `{arg}` and returns, for every number in turn, {what}",
        ),
        note=f"A sum above {bound} is set to {bound} before going on." if capped else "",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]]),
        difficulty=4 if capped else 3,
    )


def _pairs(draw: Draw) -> Draft:
    name = draw.pick(("count_pairs", "pairs", "matching_pairs", "pair_total"))
    arg, target, gap = draw.pick(_LISTS), draw.number(4, 30), draw.number(1, 3)
    what, test = draw.pick(
        (
            (f"whose sum is {target}", f"first + second == {target}"),
            (f"whose sum is above {target}", f"first + second > {target}"),
            (f"that differ by {target % 7}", f"abs(first - second) == {target % 7}"),
            (f"whose product is below {target * 4}", f"first * second < {target * 4}"),
            (
                f"whose sum is a multiple of {target % 7 + 2}",
                f"(first + second) % {target % 7 + 2} == 0",
            ),
        )
    )
    solution = f"""
        def $f($x):
            count = 0
            for i in range(len($x)):
                for j in range(i + {gap}, len($x)):
                    first, second = $x[i], $x[j]
                    if {test}:
                        count += 1
            return count
    """
    lists = [draw.numbers(6, 0, max(4, target // 2 + 3)) for _ in range(5)]
    apart = f" that stand at least {gap} positions apart" if gap > 1 else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns how many pairs of numbers of `{arg}`{apart} there are {what}",
            f"counts the pairs of positions i < j of `{arg}`{apart} with two numbers {what}",
        ),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]]),
        difficulty=4,
    )


def _windows(draw: Draw) -> Draft:
    name = draw.pick(("window_values", "sliding", "moving", "windows"))
    arg, size, factor = draw.pick(_LISTS), draw.number(2, 5), draw.number(1, 9)
    what, how = draw.pick(
        (
            ("sum", "sum(window)"),
            ("largest number", "max(window)"),
            ("smallest number", "min(window)"),
            ("range (largest less smallest)", "max(window) - min(window)"),
            ("last less first number", "window[-1] - window[0]"),
        )
    )
    inner = f"({how})" if " - " in how else how
    shown = how if factor == 1 else f"{factor} * {inner}"
    solution = f"""
        def $f($x):
            result = []
            for end in range({size}, len($x) + 1):
                window = $x[end - {size} : end]
                result.append({shown})
            return result
    """
    lists = [draw.numbers(count, 0, 40) for count in (size, size + 2, size + 3, size - 1)]
    times = f"{factor} times the {what}" if factor > 1 else f"the {what}"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns the list of {times} of each {size} consecutive numbers of `{arg}`",
            f"slides a window of {size} numbers over `{arg}` and returns {times} of each window",
        ),
        note=f"Fewer than {size} numbers give an empty list.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in lists]),
        difficulty=4,
    )


def _ranked(draw: Draw) -> Draft:
    name = draw.pick(("ranked", "nth_value", "kth_distinct", "pick_rank"))
    arg, rank, none = draw.pick(_LISTS), draw.number(2, 4), draw.pick(("None", "-1", "0"))
    largest, below = draw.chance(), draw.number(15, 60)
    bounded = draw.chance()
    solution = f"""
        def $f($x):
            different = []
            for number in $x:
                if {f"number <= {below} and " if bounded else ""}number not in different:
                    different.append(number)
            if len(different) < {rank}:
                return {none}
            different.sort({"reverse=True" if largest else ""})
            return different[{rank - 1}]
    """
    lists = [draw.numbers(7, 0, 20) * 2 for _ in range(4)] + [[below + 1] * 3, [4, 4, 4]]
    kind = "largest" if largest else "smallest"

    def oracle(xs: list[int]) -> int | None:
        left = {x for x in xs if x <= below or not bounded}
        for _ in range(rank - 1):
            left -= {(max if largest else min)(left, default=0)}
        if left:
            return (max if largest else min)(left)
        return None if none == "None" else int(none)

    only = f" up to {below}" if bounded else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns number {rank} of the different values of `{arg}`{only}, counted from "
                f"the {kind}"
            ),
            (
                f"ignores repetitions in `{arg}` and returns the value{only} of rank {rank}, where "
                f"rank 1 is the {kind}"
            ),
        ),
        note=f"With fewer than {rank} different values it returns {none}.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in lists], oracle),
        difficulty=4,
    )


def _plateau(draw: Draw) -> Draft:
    name = draw.pick(("longest_run", "best_streak", "longest_stretch", "streak"))
    arg, bound, step = draw.pick(_LISTS), draw.number(5, 40), draw.number(1, 9)
    what, test = draw.pick(
        (
            (f"all numbers are at least {bound}", f"number >= {bound}"),
            (f"all numbers are below {bound}", f"number < {bound}"),
            (f"no number is a multiple of {step + 1}", f"number % {step + 1} != 0"),
            (
                f"every number differs from {bound} by at most {step}",
                f"abs(number - {bound}) <= {step}",
            ),
        )
    )
    solution = f"""
        def $f($x):
            best = current = 0
            for number in $x:
                current = current + 1 if {test} else 0
                best = max(best, current)
            return best
    """
    lists = [draw.numbers(9, max(0, bound - 12), bound + 12) for _ in range(4)]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns the length of the longest stretch of `{arg}` in which {what}",
            f"finds the most consecutive numbers of `{arg}` such that {what}, and returns how many",
        ),
        note="An empty list gives 0.",
        solution=code(solution, f=name, x=arg),
        cases=[*calls(name, [(each,) for each in lists]), call(name, [], want=0)],
        difficulty=4,
    )


LISTS: Final = (
    Family(name="filter_and_map", theme="lists", side=Side.TRAIN, draft=_filter_and_map),
    Family(name="chunks", theme="lists", side=Side.TRAIN, draft=_chunks),
    Family(name="rotate", theme="lists", side=Side.TRAIN, draft=_rotate),
    Family(name="running", theme="lists", side=Side.TRAIN, draft=_running),
    Family(name="pairs", theme="lists", side=Side.TRAIN, draft=_pairs),
    Family(name="windows", theme="lists", side=Side.TRAIN, draft=_windows),
    Family(name="ranked", theme="lists", side=Side.HELDOUT, draft=_ranked),
    Family(name="streak", theme="lists", side=Side.VAL, draft=_plateau),
)
