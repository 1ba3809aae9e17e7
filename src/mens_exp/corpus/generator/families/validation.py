"""Tasks that check text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


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


FAMILIES: Final = (
    Family(name="rules", theme="validation", side=Side.TRAIN, draft=_rules),
    Family(name="checksum", theme="validation", side=Side.HELDOUT, draft=_checksum),
)
