"""Tasks on the bits of whole numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]

_NUMBER: Final = ("n", "number", "value", "x")


def _masked_bits(draw: Draw) -> Draft:
    name = draw.pick(("count_bits", "bits_set", "popcount", "weigh_bits"))
    arg, mask, width = draw.pick(_NUMBER), draw.number(3, 255), draw.number(2, 9)
    options: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
        (f"`{arg}` & {mask}", f"$x & {mask}", lambda n: n & mask),
        (f"`{arg}` ^ {mask}", f"$x ^ {mask}", lambda n: (n | mask) - (n & mask)),
        (f"`{arg}` | {mask}", f"$x | {mask}", lambda n: n + mask - (n & mask)),
        (f"`{arg}` >> {width}", f"$x >> {width}", lambda n: n // 2**width),
    )
    combined, how, apart = draw.pick(options)
    zeros = draw.chance()
    loop = f"""
        def $f($x):
            bits = {how}
            count = 0
            while bits:
                if bits & 1 == {0 if zeros else 1}:
                    count += 1
                bits >>= 1
            return count
    """
    short = f"""
        def $f($x):
            bits = {how}
            return bin(bits)[2:].count("{0 if zeros else 1}"){" if bits else 0" if zeros else ""}
    """

    def oracle(number: int) -> int:
        written = f"{apart(number):b}" if apart(number) else ""
        return len(written.replace("1" if zeros else "0", ""))

    digit = "zeros" if zeros else "ones"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns how many {digit} the binary form of {combined} has",
            f"counts the {digit} among the binary digits of {combined} and returns the count",
        ),
        note="The binary form has no leading zeros; that of 0 counts as empty.",
        solution=code(draw.pick((loop, short)), f=name, x=arg),
        cases=calls(name, [(each,) for each in [*draw.numbers(5, 1, 4095), 0]], oracle),
        difficulty=4,
    )


def _change_bit(draw: Draw) -> Draft:
    name = draw.pick(("change_bits", "apply_bits", "edit_bits", "switch_bits"))
    arg, places = draw.pick(("flags", "number", "state")), draw.pick(("places", "bits", "which"))
    what, done, sign = draw.pick(
        (("sets", "set", "|="), ("clears", "cleared", "&= ~"), ("inverts", "inverted", "^="))
    )
    offset, most = draw.number(0, 5), draw.number(4, 12)
    shift = f"place + {offset}" if offset else "place"
    shifted = f"({shift})" if offset else shift
    operator = f"{sign}(1 << {shifted})" if "~" in sign else f"{sign} 1 << {shifted}"
    solution = f"""
        def $f($x, $p):
            for place in $p:
                if {shift} < {most}:
                    $x {operator}
            return $x
    """

    def oracle(number: int, given: list[int]) -> int:
        digits = [int(digit) for digit in f"{number:020b}"][::-1]
        for place in (each + offset for each in given if each + offset < most):
            digits[place] = {"sets": 1, "clears": 0, "inverts": 1 - digits[place]}[what]
        return sum(2**place for place, digit in enumerate(digits) if digit)

    pairs = [(draw.number(0, 1023), draw.numbers(3, 0, most)) for _ in range(5)]
    bit = f"bit p + {offset}" if offset else "bit p"
    return Draft(
        signature=f"{name}({arg}, {places})",
        does=(
            (
                f"{what} {bit} of the whole number `{arg}` for every p in the list `{places}`, one "
                "after the other, and returns the number"
            ),
            f"returns the number `{arg}` with {bit} {done} for each p of the list `{places}`",
        ),
        note=f"Bit 0 is the lowest one; bits from {most} on are left alone.",
        solution=code(solution, f=name, x=arg, p=places),
        cases=calls(name, [*pairs, (draw.number(1, 99), [])], oracle),
        difficulty=5,
    )


FAMILIES: Final = (
    Family(name="masked_bits", theme="bits", side=Side.TRAIN, draft=_masked_bits),
    Family(name="change_bits", theme="bits", side=Side.TRAIN, draft=_change_bit),
)
