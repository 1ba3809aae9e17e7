"""Task families on whole numbers and their bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.corpus.generator.family import Draw

_NUMBER: Final = ("n", "number", "value", "x")


def _multiples(draw: Draw) -> Draft:
    name = draw.pick(("sum_multiples", "multiples_total", "add_multiples", "multiples"))
    arg = draw.pick(("limit", "n", "bound", "top"))
    one, two = draw.some(range(2, 14), 2)
    both, sign = draw.pick((("or", "or"), ("and", "and"), ("but not of", "and not")))
    power = draw.number(1, 2)
    term = "number" if power == 1 else "number * number"
    second = f"number % {two} == 0"
    test = f"number % {one} == 0 {sign} {second}"
    loop = f"""
        def $f($x):
            total = 0
            for number in range(1, $x):
                if {test}:
                    total += {term}
            return total
    """
    short = f"""
        def $f($x):
            return sum({term} for number in range(1, $x) if {test})
    """

    def oracle(limit: int) -> int:
        ones, twos = (set(range(step, limit, step)) for step in (one, two))
        chosen = {"or": ones | twos, "and": ones & twos, "but not of": ones - twos}[both]
        return sum(number**power for number in chosen)

    what = "squares of the whole numbers" if power > 1 else "whole numbers"
    kind = f"multiples of {one} {both} {'' if both == 'but not of' else 'of '}{two}"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns the sum of the {what} from 1 up to, not including, `{arg}` that are {kind}",
            f"adds up the {what} below `{arg}` that are {kind} and returns the sum",
        ),
        solution=code(draw.pick((loop, short)), f=name, x=arg),
        cases=calls(
            name, [(each,) for each in [*draw.numbers(4, 10, 90), one * two + 1, 1]], oracle
        ),
        difficulty=2,
    )


def _digits(draw: Draw) -> Draft:
    name = draw.pick(("digit_sum", "digits_total", "add_digits", "digit_score"))
    arg, base, power = draw.pick(_NUMBER), draw.number(2, 16), draw.number(1, 3)
    odd, factor = draw.pick(((None, 1), (0, 1), (1, 1), (None, 2), (None, 3))), draw.number(1, 5)
    remainder, step = odd
    guard = (
        f"""
                if digit % 2 == {remainder}:
                    total += $term"""
        if remainder is not None
        else """
                total += $term"""
    )
    term = "digit" if power == 1 else f"digit ** {power}"
    if factor > 1:
        term = f"{factor} * {term}"
    solution = f"""
        def $f($x):
            total = 0
            while $x > 0:
                digit = $x % {base}{guard}
                $x //= {base**step}
            return total
    """

    def oracle(number: int) -> int:
        found = []
        while number:
            number, digit = divmod(number, base)
            found.append(digit)
        found = found[::step]
        return sum(factor * d**power for d in found if remainder in (None, d % 2))

    kinds = {None: "", 0: "even ", 1: "odd "}
    every = {1: "", 2: "every second one of ", 3: "every third one of "}[step]
    which = f"{every}the {kinds[remainder]}digits of `{arg}` in base {base}"
    powers = {1: "", 2: " of the squares", 3: " of the cubes"}[power]
    times = f"{factor} times the sum" if factor > 1 else "the sum"
    start = ", beginning with the last" if step > 1 else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns {times}{powers} of {which}{start}",
            (
                f"takes {which}{start} and returns {times}{powers.replace('the', 'their')}"
                f"{'' if powers else ' of them'}"
            ),
        ),
        note=f"`{arg}` is a whole number that is not negative.",
        solution=code(solution.replace("$term", term), f=name, x=arg),
        cases=calls(name, [(each,) for each in [*draw.numbers(5, 10, 99999), 0]], oracle),
        difficulty=4,
    )


def _common_divisor(draw: Draw) -> Draft:
    name = draw.pick(("common", "reduce_all", "divisor_or_multiple", "of_all"))
    arg, least, start = draw.pick(("numbers", "values", "sizes")), draw.number(1, 12), 0
    multiple, factor = draw.chance(), draw.number(1, 9)
    if multiple:
        step, start = "result = result * number // gcd", 1
        what = "least common multiple"
    else:
        step, what = "result = gcd", "greatest common divisor"
    scaled = f"{factor} * result" if factor > 1 else "result"
    solution = f"""
        def $f($x):
            result = {start}
            for number in $x:
                if number < {least}:
                    continue
                gcd, rest = result, number
                while rest:
                    gcd, rest = rest, gcd % rest
                {step}
            return {scaled}
    """
    unit = draw.number(2, 6)

    def oracle(numbers: list[int]) -> int:
        kept = [number for number in numbers if number >= least]
        return factor * (math.lcm if multiple else math.gcd)(*kept)

    lists = [[unit * each for each in draw.numbers(3, 1, 12)] for _ in range(5)]
    times = f"{factor} times the {what}" if factor > 1 else f"the {what}"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns {times} of the positive numbers in `{arg}` that are at least {least}",
            f"works out {times} of all numbers of `{arg}` not below {least}, and returns it",
        ),
        note=f"Without such a number it returns {factor * start}.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*lists, []]], oracle),
        difficulty=5,
    )


def _primes(draw: Draw) -> Draft:
    name = draw.pick(("primes", "prime_list", "find_primes", "select_primes"))
    arg, modulus = draw.pick(("limit", "n", "top")), draw.number(3, 12)
    rest = draw.pick([each for each in range(1, modulus) if math.gcd(each, modulus) == 1])
    first = draw.number(2, 9)
    shown, said = draw.pick(
        (("found", "the list of"), ("len(found)", "the number of"), ("sum(found)", "the sum of"))
    )
    solution = f"""
        def $f($x):
            found = []
            for number in range({first}, $x + 1):
                divisor = 2
                while divisor * divisor <= number and number % divisor != 0:
                    divisor += 1
                if divisor * divisor > number and number % {modulus} == {rest}:
                    found.append(number)
            return {shown}
    """

    def oracle(limit: int) -> int | list[int]:
        found = [
            n
            for n in range(first, limit + 1)
            if n % modulus == rest and all(n % d for d in range(2, n))
        ]
        if shown == "found":
            return found
        return len(found) if "len" in shown else sum(found)

    kind = f"primes from {first} to `{arg}` that leave {rest} when divided by {modulus}"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns {said} the {kind}",
            f"looks for {kind} and returns {said} them",
        ),
        note=f"`{arg}` itself belongs to the range.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*draw.numbers(4, 12, 70), 2]], oracle),
        difficulty=5,
    )


def _orbit(draw: Draw) -> Draft:
    name = draw.pick(("steps_to_end", "chain_length", "orbit", "countdown"))
    arg, factor, end = draw.pick(_NUMBER), draw.pick((3, 5, 7)), draw.number(1, 9)
    offset, divisor, most = draw.pick((1, 3, 5)), draw.number(2, 4), draw.number(8, 40)
    peak = draw.chance()
    solution = f"""
        def $f($x):
            steps = 0
            peak = $x
            while $x > {end} and steps < {most}:
                if $x % {divisor} == 0:
                    $x = $x // {divisor}
                else:
                    $x = {factor} * $x + {offset}
                peak = max(peak, $x)
                steps += 1
            return {"peak" if peak else "steps"}
    """
    if not peak:
        solution = "\n".join(line for line in solution.split("\n") if "peak" not in line)
    result = "the largest value met, the first one included" if peak else "the number of steps"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"repeats a step from the positive number `{arg}` and returns {result}",
            f"returns {result} when a step is repeated, beginning with the positive number `{arg}`",
        ),
        note=f"A step divides a multiple of {divisor} by {divisor}, and turns any other number n "
        f"into {factor} * n + {offset}. It stops at a number of at most {end}, or after {most} "
        "steps.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*draw.numbers(5, 2, 60), end]]),
        difficulty=5,
    )


def _brackets(draw: Draw) -> Draft:
    name = draw.pick(("fee", "price", "tariff", "total_cost"))
    arg = draw.pick(("amount", "units", "weight", "distance"))
    first, width = draw.number(5, 40), draw.number(5, 60)
    rates, base = draw.some(range(1, 12), 3), draw.number(0, 15)
    solution = f"""
        def $f($x):
            if $x < 0:
                raise ValueError("negative $x")
            total = {base}
            total += min($x, {first}) * {rates[0]}
            if $x > {first}:
                total += (min($x, {first + width}) - {first}) * {rates[1]}
            if $x > {first + width}:
                total += ($x - {first + width}) * {rates[2]}
            return total
    """

    def oracle(amount: int) -> int:
        return base + sum(
            rates[0] if unit < first else rates[1] if unit < first + width else rates[2]
            for unit in range(amount)
        )

    given = [first - 2, first, first + 3, first + width, first + width + 7, 0]
    fixed = f"a fixed {base} and, " if base else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the price of `{arg}` units: {fixed}for each of the first {first} units "
                f"{rates[0]}, for each of the next {width} units {rates[1]}, and for every further "
                f"one {rates[2]}"
            ),
            (
                f"charges {fixed}{rates[0]} a unit up to {first} units, {rates[1]} a unit from "
                f"there "
                f"to {first + width} units and {rates[2]} a unit beyond, and returns the total for "
                f"`{arg}` units"
            ),
        ),
        note="A negative number raises ValueError.",
        solution=code(solution, f=name, x=arg),
        cases=[
            *calls(name, [(each,) for each in given], oracle),
            call(name, -draw.number(1, 9), raises="ValueError"),
        ],
        difficulty=4,
    )


ARITHMETIC: Final = (
    Family(name="multiples", theme="arithmetic", side=Side.TRAIN, draft=_multiples),
    Family(name="digits", theme="arithmetic", side=Side.TRAIN, draft=_digits),
    Family(name="common_divisor", theme="arithmetic", side=Side.TRAIN, draft=_common_divisor),
    Family(name="primes", theme="arithmetic", side=Side.VAL, draft=_primes),
    Family(name="orbit", theme="arithmetic", side=Side.HELDOUT, draft=_orbit),
    Family(name="brackets", theme="arithmetic", side=Side.TRAIN, draft=_brackets),
)


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


BITS: Final = (
    Family(name="masked_bits", theme="bits", side=Side.TRAIN, draft=_masked_bits),
    Family(name="change_bits", theme="bits", side=Side.TRAIN, draft=_change_bit),
)
