"""Task families on dicts and sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw

_DICTS: Final = ("stock", "scores", "prices", "table", "mapping")


def _group_by(draw: Draw) -> Draft:
    name = draw.pick(("group_words", "sort_into", "bucket", "index_words"))
    arg, modulus = draw.pick(("words", "names", "items")), draw.number(2, 5)
    what, key = draw.pick(
        (
            ("its length", "len(word)"),
            ("its first letter", "word[0]"),
            ("its last letter", "word[-1]"),
            (f"the remainder of its length by {modulus}", f"len(word) % {modulus}"),
            (f"its first {modulus} letters", f"word[:{modulus}]"),
        )
    )
    least = draw.number(3, 7)
    kept = draw.chance()
    guard = (
        f"""
                if len(word) < {least}:
                    continue"""
        if kept
        else ""
    )
    value = draw.pick(("word", "word.upper()", "len(word)", "word[::-1]"))
    solution = f"""
        def $f($x):
            groups = {{}}
            for word in $x:{guard}
                groups.setdefault({key}, []).append({value})
            return groups
    """
    told = {
        "word": "the list of its words",
        "word.upper()": "the list of its words in capital letters",
        "len(word)": "the list of the lengths of its words",
        "word[::-1]": "the list of its words, each reversed",
    }[value]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns a dict that maps each group to {told}, where a word's group is {what}",
            (
                f"groups the strings of the list `{arg}` by a key, which for a word is {what}, and "
                f"returns a dict from the key to {told}"
            ),
        ),
        note="Order within a group is that of the list."
        + (f" Words shorter than {least} letters are left out." if kept else ""),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(draw.words(draw.number(3, 6)),) for _ in range(4)] + [([],)]),
        difficulty=4,
    )


def _merge(draw: Draw) -> Draft:
    name = draw.pick(("merge", "combine", "join_tables", "unite"))
    first, second = draw.pick((("a", "b"), ("left", "right"), ("old", "new"), ("one", "two")))
    what, how = draw.pick(
        (
            ("the sum of both", "merged[key] + value"),
            ("the larger of both", "max(merged[key], value)"),
            ("the smaller of both", "min(merged[key], value)"),
            (f"the value in `{first}` less that in `{second}`", "merged[key] - value"),
            (f"the value in `{second}`", "value"),
        )
    )
    factor = draw.number(1, 9)
    times = f"{factor} * value" if factor > 1 else "value"
    solution = f"""
        def $f({first}, {second}):
            merged = dict({first})
            for key, value in {second}.items():
                if key in merged:
                    merged[key] = {how}
                else:
                    merged[key] = {times}
            return merged
    """

    def table() -> dict[str, int]:
        return {word: draw.number(1, 30) for word in draw.words(3)}

    cases = []
    for _ in range(4):
        one, two = table(), table()
        two[next(iter(one))] = draw.number(1, 30)
        cases.append((one, two))
    alone = f", times {factor}" if factor > 1 else ""
    return Draft(
        signature=f"{name}({first}, {second})",
        does=(
            f"returns a new dict with the keys of both dicts; a key that both have gets {what}",
            (
                f"merges the dicts `{first}` and `{second}` into a new one in which a shared "
                f"key has "
                f"{what}"
            ),
        ),
        note=f"A key of `{first}` alone keeps its value; one of `{second}` alone gets its "
        f"value{alone}.",
        solution=code(solution, f=name),
        cases=[*calls(name, cases), call(name, {}, {}, want={})],
        difficulty=3,
    )


def _invert(draw: Draw) -> Draft:
    name = draw.pick(("invert", "by_value", "reverse_index", "flip"))
    arg, least = draw.pick(_DICTS), draw.number(1, 9)
    many = draw.chance()
    put, told = draw.pick(
        (
            ("append(key)", "in the order of the dict"),
            ("insert(0, key)", "the latest first"),
        )
    )
    solution = f"""
        def $f($x):
            inverted = {{}}
            for key, value in $x.items():
                if value >= {least}:
                    inverted.setdefault(value, []).{put}
            return inverted
    """
    single = f"""
        def $f($x):
            inverted = {{}}
            for key, value in $x.items():
                if value >= {least} and value not in inverted:
                    inverted[value] = {"key" if "append" in put else "key.upper()"}
            return inverted
    """
    upper = "" if "append" in put else ", in capital letters"
    what = f"the list of its keys, {told}" if many else f"the first key that has it{upper}"
    tables = [
        {word: draw.number(1, 12) for word in draw.words(draw.number(3, 6))} for _ in range(4)
    ]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns a dict that maps each value of `{arg}` to {what}",
            f"inverts the dict `{arg}`: every value becomes a key, and goes with {what}",
        ),
        note=f"Values below {least} are left out.",
        solution=code(solution if many else single, f=name, x=arg),
        cases=calls(name, [(table,) for table in [*tables, {}]]),
        difficulty=4,
    )


def _frequent(draw: Draw) -> Draft:
    name = draw.pick(("frequent", "common_items", "repeated", "at_least"))
    arg, least = draw.pick(("items", "votes", "names", "tokens")), draw.number(2, 3)
    most = draw.chance()
    sign, told = ("<=", "at most") if most else (">=", "at least")
    shown, what = draw.pick(
        (
            ("sorted(kept)", "sorted"),
            ("sorted(kept, reverse=True)", "sorted in descending order"),
            ("kept", "in the order in which they first come"),
            ("len(kept)", ""),
        )
    )
    cased = draw.chance()
    item = "item.lower()" if cased else "item"
    solution = f"""
        def $f($x):
            counts = {{}}
            for item in $x:
                key = {item}
                counts[key] = counts.get(key, 0) + 1
            kept = [key for key, count in counts.items() if count {sign} {least}]
            return {shown}
    """
    lists = []
    for _ in range(4):
        few = draw.words(3)
        few += [few[0].upper(), few[1].capitalize()]
        lists.append([draw.pick(few) for _ in range(9)])

    def oracle(xs: list[str]) -> Any:
        xs = [x.lower() for x in xs] if cased else xs
        enough = [x for x in xs if (xs.count(x) <= least if most else xs.count(x) >= least)]
        found = list(dict.fromkeys(enough))
        if not what:
            return len(found)
        return sorted(found, reverse="reverse" in shown) if "sorted" in shown else found

    said = "the list of the strings" if what else "the number of different strings"
    order = f", {what}" if what else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns {said} that occur {told} {least} times in `{arg}`{order}",
            (
                f"counts each string of `{arg}` and returns {said} with a count of {told} "
                f"{least}{order}"
            ),
        ),
        note="Strings are compared, and given, in lower case." if cased else "Case matters.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]], oracle),
        difficulty=4,
    )


def _select_entries(draw: Draw) -> Draft:
    name = draw.pick(("select", "keep_entries", "filtered", "cheap_ones"))
    arg, low, width = draw.pick(_DICTS), draw.number(1, 40), draw.number(5, 40)
    prefix, factor = draw.pick(("", "x_", "new_", "my_", "item-")), draw.number(1, 9)
    value = f"value * {factor}" if factor > 1 else "value"
    inside = draw.chance()
    test = f"{low} <= value <= {low + width}"
    solution = f"""
        def $f($x):
            result = {{}}
            for key, value in $x.items():
                if {test if inside else f"value < {low} or value > {low + width}"}:
                    result[{f'"{prefix}" + key' if prefix else "key"}] = {value}
            return result
    """
    tables = [{word: draw.number(0, 80) for word in draw.words(5)} for _ in range(4)]

    def oracle(table: dict[str, int]) -> dict[str, int]:
        return {
            prefix + key: value * factor
            for key, value in table.items()
            if (value in range(low, low + width + 1)) is inside
        }

    named = f" with {prefix!r} put before each key" if prefix else ""
    times = f" and each value multiplied by {factor}" if factor > 1 else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the entries of the dict `{arg}` whose value is "
                f"{'between' if inside else 'not between'} {low} and {low + width}, both "
                f"included, as "
                f"a new dict{named}{times}"
            ),
            (
                f"makes a new dict of those entries of `{arg}` whose value lies "
                f"{'in' if inside else 'outside'} the closed interval from {low} to {low + width}"
                f"{named}{times}"
            ),
        ),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(table,) for table in [*tables, {}]], oracle),
        difficulty=3,
    )


DICTS: Final = (
    Family(name="group_by", theme="dicts", side=Side.TRAIN, draft=_group_by),
    Family(name="merge", theme="dicts", side=Side.TRAIN, draft=_merge),
    Family(name="invert", theme="dicts", side=Side.TRAIN, draft=_invert),
    Family(name="frequent", theme="dicts", side=Side.HELDOUT, draft=_frequent),
    Family(name="select_entries", theme="dicts", side=Side.VAL, draft=_select_entries),
)


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


SETS: Final = (
    Family(name="shared", theme="sets", side=Side.TRAIN, draft=_shared),
    Family(name="first_repeat", theme="sets", side=Side.TRAIN, draft=_first_repeat),
)
