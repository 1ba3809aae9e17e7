"""Task families that parse or validate text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw

_TEXT: Final = ("text", "line", "source", "s")


def _key_values(draw: Draw) -> Draft:
    name = draw.pick(("parse_pairs", "read_settings", "parse_options", "to_dict"))
    arg, between, inside = draw.pick(_TEXT), draw.pick(";,&|"), draw.pick("=:~")
    kind, value = draw.pick((("whole numbers", "int(value)"), ("text", "value.strip()")))
    factor = draw.number(2, 9)
    if kind != "text" and draw.chance():
        kind, value = f"whole numbers multiplied by {factor}", f"{factor} * int(value)"
    first = draw.chance()
    lower = ".lower()" if draw.chance() else ""
    guard = " or key in result" if first else ""
    solution = f"""
        def $f($x):
            result = {{}}
            for part in $x.split("{between}"):
                key, sign, value = part.partition("{inside}")
                key = key.strip(){lower}
                if not sign{guard}:
                    continue
                result[key] = {value}
            return result
    """
    texts = []
    for _ in range(4):
        keys = draw.words(3)
        keys += [keys[0].upper() if lower else keys[0]]
        parts = [f" {key}{inside}{draw.number(1, 99)}" for key in keys]
        texts.append(f"{between}".join(parts) + between + draw.pick(keys))
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns a dict of the parts of `{arg}` that read key{inside}value and are "
                f"separated "
                f"by {between!r}, values being {kind}"
            ),
            (
                f"parses entries like a{inside}1{between}b{inside}2 in `{arg}` and returns them "
                f"as a "
                f"dict with {kind} as values"
            ),
        ),
        note="White space around keys and values does not count; "
        f"parts without {inside!r} are skipped."
        + (" Keys are put in lower case." if lower else "")
        + f" Of a repeated key the {'first' if first else 'last'} value is kept.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in [*texts, ""]]),
        difficulty=5,
    )


def _durations(draw: Draw) -> Draft:
    name = draw.pick(("parse_units", "to_smallest", "total_units", "read_measure"))
    arg, names = draw.pick(_TEXT), draw.some("abcdhkmqstuw", 3)
    sizes = sorted((draw.number(2, 99) for _ in range(2)), reverse=True)
    worth = dict(zip(names, [sizes[0] * sizes[1], sizes[1], 1], strict=True))
    sign = draw.pick(("+", "-"))
    table = ", ".join(f'"{unit}": {size}' for unit, size in worth.items())
    solution = f"""
        def $f($x):
            units = {{{table}}}
            total = 0
            number = ""
            for char in $x:
                if char.isdigit():
                    number += char
                elif char in units:
                    total {sign}= int(number) * units[char]
                    number = ""
                else:
                    raise ValueError(f"unknown unit {{char}}")
            return total
    """
    amounts = [draw.numbers(3, 0, 30) for _ in range(5)]
    pieces = [list(zip(each, names, strict=True)) for each in amounts]
    kept = [draw.some(each, draw.number(1, 3)) for each in pieces]

    def value(parts: list[tuple[int, str]]) -> int:
        total = sum(number * worth[unit] for number, unit in parts)
        return total if sign == "+" else -total

    cases = [
        call(name, "".join(f"{number}{unit}" for number, unit in parts), want=value(parts))
        for parts in kept
    ]
    shown = ", ".join(f"{unit} is worth {size}" for unit, size in worth.items())
    whole = "the sum" if sign == "+" else "the sum, with a minus sign before it,"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns {whole} of the amounts in `{arg}`, which are written one after the other "
                f"like '3{names[0]}12{names[1]}', where {shown}"
            ),
            (
                f"reads numbers, each followed by a unit letter, from `{arg}` and returns "
                f"{whole} of "
                f"their worth: {shown}"
            ),
        ),
        note="Any other letter raises ValueError.",
        solution=code(solution, f=name, x=arg),
        cases=[*cases, call(name, "", want=0), call(name, "5z", raises="ValueError")],
        difficulty=6,
    )


def _postfix(draw: Draw) -> Draft:
    name = draw.pick(("evaluate", "postfix", "rpn", "calculate"))
    arg, sign = draw.pick(("text", "tokens", "program")), draw.pick((" ", ",", ";"))
    table = {
        "+": ("first + second", "adds"),
        "-": ("first - second", "subtracts"),
        "*": ("first * second", "multiplies"),
        "<": ("min(first, second)", "takes the smaller of"),
        ">": ("max(first, second)", "takes the larger of"),
        "%": ("abs(first - second)", "takes the difference, without sign, of"),
    }
    chosen = draw.some(sorted(table), draw.number(2, 3))
    base = draw.number(0, 20)
    branches = "".join(
        f"""
                {"if" if not place else "elif"} token == "{each}":
                    second, first = stack.pop(), stack.pop()
                    stack.append({table[each][0]})"""
        for place, each in enumerate(chosen)
    )
    solution = f"""
        def $f($x):
            stack = []
            for token in $x.split("{sign}"):{branches}
                else:
                    stack.append(int(token))
            return stack.pop(){f" + {base}" if base else ""}
    """

    def term(depth: int) -> list[str]:
        if not depth:
            return [str(draw.number(0, 12))]
        return [*term(depth - 1), *term(draw.number(0, depth - 1)), draw.pick(chosen)]

    texts = [sign.join(term(depth)) for depth in (0, 1, 1, 2, 2, 3)]
    told = "; ".join(f"{each!r} {table[each][1]} the two numbers before it" for each in chosen)
    plus = f", plus {base}" if base else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the value of `{arg}`, an expression in postfix notation whose tokens are "
                f"separated by {sign!r}{plus}"
            ),
            (
                f"evaluates the reverse Polish expression in the string `{arg}`, with {sign!r} "
                f"between "
                f"tokens, and returns the number{plus}"
            ),
        ),
        note=f"The operators are these: {told}. All other tokens are whole numbers.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in texts]),
        difficulty=7,
    )


def _balanced(draw: Draw) -> Draft:
    name = draw.pick(("balanced", "check_brackets", "is_nested", "well_formed"))
    arg, kinds = draw.pick(_TEXT), draw.some(("()", "[]", "{}", "<>"), draw.number(2, 3))
    most = draw.number(2, 5)
    table = ", ".join(f'"{kind[1]}": "{kind[0]}"' for kind in kinds)
    opening = "".join(kind[0] for kind in kinds)
    depth = draw.chance()
    solution = f"""
        def $f($x):
            opened = {{{table}}}
            stack = []
            deepest = 0
            for char in $x:
                if char in "{opening}":
                    stack.append(char)
                    deepest = max(deepest, len(stack))
                elif char in opened:
                    if not stack or stack.pop() != opened[char]:
                        return {"-1" if depth else "False"}
            return {"-1 if stack else deepest" if depth else f"not stack and deepest <= {most}"}
    """

    def nest(levels: int) -> str:
        kind = draw.pick(kinds)
        inner = nest(levels - 1) if levels else draw.letters(1, "abc")
        return kind[0] + inner + kind[1] + ("" if draw.chance() else draw.pick(kinds))

    good = [nest(levels) for levels in (0, 1, most - 1, most)]
    bad = [good[0] + kinds[0][0], good[1].replace(kinds[0][1], kinds[1][1]), kinds[0][::-1]]
    listed = ", ".join(kinds)
    if depth:
        does = (
            (
                f"returns how deep the brackets {listed} are nested in `{arg}`, or -1 if they "
                f"do not "
                "match"
            ),
            (
                f"checks that every one of the brackets {listed} in `{arg}` is closed by its "
                f"partner "
                "in the right order and returns the greatest depth, or -1 where they are not"
            ),
        )
    else:
        does = (
            (
                f"returns True if the brackets {listed} in `{arg}` match and are nested at most "
                f"{most} deep, else False"
            ),
            (
                f"tells whether each of the brackets {listed} in `{arg}` is closed in the right "
                f"order, "
                f"with never more than {most} open"
            ),
        )
    return Draft(
        signature=f"{name}({arg})",
        does=does,
        note="Other characters do not count.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in [*good, *bad, ""]]),
        difficulty=6,
    )


def _csv_column(draw: Draw) -> Draft:
    name = draw.pick(("column_total", "read_column", "csv_value", "sum_field"))
    arg, sign, column = draw.pick(("text", "table", "lines")), draw.pick(",;|\t"), draw.number(0, 3)
    skipped, mark = draw.number(0, 2), draw.pick("#%!")
    what, how = draw.pick(
        (
            ("sum", "sum(values)"),
            ("largest", "max(values, default=0)"),
            ("number", "len(values)"),
            ("smallest", "min(values, default=0)"),
        )
    )
    start = f"[{skipped}:]" if skipped else ""
    solution = f"""
        def $f($x):
            values = []
            for line in $x.splitlines(){start}:
                if line.startswith("{mark}"):
                    continue
                cells = line.split({sign!r})
                if len(cells) > {column} and cells[{column}].strip().isdigit():
                    values.append(int(cells[{column}]))
            return {how}
    """
    texts = []
    for _ in range(4):
        rows = [[str(draw.number(1, 60)) for _ in range(draw.number(2, 5))] for _ in range(5)]
        rows.append([draw.pick(("x", "", " 7 ", "12"))] * 5)
        lines = [sign.join(row) for row in rows]
        texts.append("\n".join([*lines, mark + lines[0]]))
    header = f" The first {skipped} lines are skipped." if skipped else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the {what} of the whole numbers in column {column} (from 0) of `{arg}`, "
                f"whose lines have cells separated by {sign!r}"
            ),
            (
                f"reads the lines of `{arg}`, splits each at {sign!r} and returns the {what} of "
                f"the "
                f"numbers found at index {column}"
            ),
        ),
        note=f"Lines that begin with {mark!r}, short lines and cells that are not made of digits "
        f"do not count.{header} Without any number it returns 0.",
        solution=code(solution, f=name, x=arg),
        cases=[*calls(name, [(text,) for text in texts]), call(name, "", want=0)],
        difficulty=5,
    )


def _ranges(draw: Draw) -> Draft:
    name = draw.pick(("parse_ranges", "expand", "page_list", "read_ranges"))
    arg, between, dash = draw.pick(_TEXT), draw.pick((",", ";", " ", "/")), draw.pick("-:~_")
    step, offset = draw.number(1, 4), draw.number(0, 9)
    unique = draw.chance()
    end = "sorted(set(result))" if unique else "result"
    shown = f"number + {offset}" if offset else "number"
    solution = f"""
        def $f($x):
            result = []
            for part in $x.split("{between}"):
                first, dash, last = part.partition("{dash}")
                stop = int(last) if dash else int(first)
                for number in range(int(first), stop + 1{f", {step}" if step > 1 else ""}):
                    result.append({shown})
            return {end}
    """
    cases = []
    for _ in range(5):
        parts, wanted = [], []
        for _ in range(draw.number(1, 3)):
            low, width = draw.number(0, 30), draw.number(0, 6)
            parts.append(f"{low}{dash}{low + width}" if width else str(low))
            wanted += [low + more + offset for more in range(width + 1) if more % step == 0]
        wanted = sorted(set(wanted)) if unique else wanted
        cases.append(call(name, between.join(parts), want=wanted))
    every = f", of a range only every {step}th number from its first" if step > 1 else ""
    order = "Sorted, each once." if unique else "In the order of the text."
    plus = f", {offset} added to each" if offset else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the list of whole numbers that `{arg}` names, such as "
                f"1{dash}3{between}7 for "
                f"1, 2, 3 and 7{every}{plus}"
            ),
            (
                f"expands ranges like 4{dash}6, separated by {between!r}, in the string `{arg}` "
                f"and "
                f"returns all their numbers, both ends included{every}{plus}"
            ),
        ),
        note=order,
        solution=code(solution, f=name, x=arg),
        cases=cases,
        difficulty=5,
    )


PARSING: Final = (
    Family(name="key_values", theme="parsing", side=Side.TRAIN, draft=_key_values),
    Family(name="durations", theme="parsing", side=Side.TRAIN, draft=_durations),
    Family(name="postfix", theme="parsing", side=Side.HELDOUT, draft=_postfix),
    Family(name="balanced", theme="parsing", side=Side.TRAIN, draft=_balanced),
    Family(name="csv_column", theme="parsing", side=Side.TRAIN, draft=_csv_column),
    Family(name="ranges", theme="parsing", side=Side.VAL, draft=_ranges),
)


def _rules(draw: Draw) -> Draft:
    name = draw.pick(("is_valid", "check_code", "accepts", "valid_password"))
    arg = draw.pick(("text", "code", "password", "label"))
    least, most, signs = draw.number(3, 6), draw.number(8, 12), "".join(draw.some("!?#*+-_@", 3))
    table = {
        "at least one digit": "any(char.isdigit() for char in $x)",
        "at least one capital letter": "any(char.isupper() for char in $x)",
        f"at least one of {signs!r}": f'any(char in "{signs}" for char in $x)',
        "no blank": '" " not in $x',
        "a letter at its beginning": "$x[0].isalpha()",
        "no character twice in a row": "all(a != b for a, b in zip($x, $x[1:]))",
        "a digit at its end": "$x[-1].isdigit()",
    }
    chosen = draw.some(sorted(table), draw.number(2, 4))
    listed = draw.chance()
    guards = "".join(
        f"""
            if not ({table[rule]}):
                return {f'"{rule[:2]}{place}"' if listed else "False"}"""
        for place, rule in enumerate(chosen)
    )
    solution = f"""
        def $f($x):
            if len($x) < {least} or len($x) > {most}:
                return {'"length"' if listed else "False"}{guards}
            return {'"ok"' if listed else "True"}
    """
    pool = "abcXYZ0123" + signs
    texts = [draw.letters(draw.number(least, most), pool) for _ in range(6)]
    texts += ["aB" + signs[0] + "cd9", "a" * (most + 1), "Ab cd" + signs[1] + "12"[: most - 6]]
    wanted = ", ".join(chosen)
    if listed:
        words = ", ".join(f"'{rule[:2]}{place}' for {rule}" for place, rule in enumerate(chosen))
        does = (
            (
                f"returns 'ok', or the name of the first rule that `{arg}` breaks: 'length' for a "
                f"length from {least} to {most}, {words}"
            ),
            (
                f"checks the string `{arg}` rule by rule and returns the name of the first that "
                f"does "
                f"not hold, else 'ok'; the rules are 'length' (from {least} to {most} characters), "
                f"{words}"
            ),
        )
    else:
        does = (
            (
                f"returns True if the string `{arg}` has {least} to {most} characters and "
                f"{wanted}, "
                "else False"
            ),
            f"tells whether `{arg}` is valid: {least} to {most} characters long, with {wanted}",
        )
    return Draft(
        signature=f"{name}({arg})",
        does=does,
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in texts]),
        difficulty=5,
    )


def _checksum(draw: Draw) -> Draft:
    name = draw.pick(("checksum_ok", "valid_number", "verify_digits", "check_digits"))
    arg, weights = draw.pick(("digits", "text", "number")), draw.numbers(3, 1, 9)
    modulus, rest = draw.number(5, 13), draw.number(0, 4)
    left, given = draw.chance(), draw.chance()
    order = "$x" if left else "reversed($x)"
    solution = f"""
        def $f($x):
            if not $x.isdigit():
                return {"-1" if given else "False"}
            weights = {weights}
            total = 0
            for place, digit in enumerate({order}):
                total += int(digit) * weights[place % {len(weights)}]
            return {f"total % {modulus}" if given else f"total % {modulus} == {rest}"}
    """

    def total(text: str) -> int:
        ordered = text if left else text[::-1]
        return sum(
            weight * sum(map(int, ordered[place :: len(weights)]))
            for place, weight in enumerate(weights)
        )

    def oracle(text: str) -> Any:
        return total(text) % modulus if given else total(text) % modulus == rest

    texts = [draw.letters(draw.number(3, 8), "0123456789") for _ in range(5)]
    for _ in range(2):
        head = draw.letters(5, "0123456789")
        texts += [
            head + str(last) for last in range(10) if total(head + str(last)) % modulus == rest
        ][:1]
    side = "left" if left else "right"
    shown = ", ".join(map(str, weights))
    result = (
        f"the sum modulo {modulus}"
        if given
        else f"whether the sum leaves {rest} when divided by {modulus}, as a bool"
    )
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"adds up the digits of the string `{arg}`, weighted in turn by {shown} from the "
                f"{side}, and returns {result}"
            ),
            (
                f"multiplies the digits of `{arg}`, from the {side}, by {shown} over and over, "
                f"sums "
                f"the products and returns {result}"
            ),
        ),
        note=f"A string that is empty or has anything but digits gives {-1 if given else False}.",
        solution=code(solution, f=name, x=arg),
        cases=[
            *calls(name, [(text,) for text in texts], oracle),
            call(name, "12a", want=-1 if given else False),
        ],
        difficulty=6,
    )


VALIDATION: Final = (
    Family(name="rules", theme="validation", side=Side.TRAIN, draft=_rules),
    Family(name="checksum", theme="validation", side=Side.HELDOUT, draft=_checksum),
)
