"""Task families on strings and on text layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw

_TEXT: Final = ("text", "s", "word", "line", "phrase")
_LOWER: Final = "abcdefghijklmnopqrstuvwxyz"


def _count_characters(draw: Draw) -> Draft:
    letters = "".join(sorted(draw.some(_LOWER, draw.number(3, 6))))
    name = draw.pick(("count_letters", "letter_total", "count_chosen", "tally_letters"))
    arg = draw.pick(_TEXT)
    cased = draw.chance()
    start = draw.number(0, 3)
    seen = f"{arg}[{start}:]" if start else arg
    each = "char.lower()" if cased else "char"
    loop = f"""
        def $f($x):
            count = 0
            for char in {seen}:
                if {each} in "$letters":
                    count += 1
            return count
    """
    short = f"""
        def $f($x):
            return sum(1 for char in {seen} if {each} in "$letters")
    """
    texts = [draw.letters(12, letters + letters.upper() + "xyz ") for _ in range(5)] + [""]

    def oracle(text: str) -> int:
        text = text[start:].lower() if cased else text[start:]
        return sum(text.count(letter) for letter in letters)

    ignoring = "Upper and lower case count alike." if cased else "Case matters."
    skipped = f" Characters before index {start} are not looked at." if start else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns how many characters of `{arg}` are among the letters {letters!r}",
            f"counts the characters of `{arg}` that occur in {letters!r} and returns the count",
        ),
        note=ignoring + skipped,
        solution=code(draw.pick((loop, short)), f=name, x=arg, letters=letters),
        cases=calls(name, [(text,) for text in texts], oracle),
        difficulty=2,
    )


def _replace_characters(draw: Draw) -> Draft:
    old, new = "".join(draw.some(_LOWER, draw.number(2, 4))), draw.pick("*-_#.")
    name = draw.pick(("mask_letters", "hide_letters", "censor", "blank_out"))
    arg = draw.pick(_TEXT)
    most = draw.number(1, 4)
    limited = draw.chance()
    plain = """
        def $f($x):
            result = ""
            for char in $x:
                result += "$new" if char in "$old" else char
            return result
    """
    bounded = """
        def $f($x):
            result = ""
            replaced = 0
            for char in $x:
                if char in "$old" and replaced < $most:
                    result += "$new"
                    replaced += 1
                else:
                    result += char
            return result
    """
    texts = [draw.letters(9, old + "xyz") for _ in range(5)]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns `{arg}` with every letter among {old!r} replaced by {new!r}",
            (
                f"puts {new!r} in place of each character of `{arg}` that is in {old!r} "
                "and returns the new string"
            ),
        ),
        note=f"Only the first {most} such characters are replaced." if limited else "",
        solution=code(bounded if limited else plain, f=name, x=arg, old=old, new=new, most=most),
        cases=calls(name, [(text,) for text in [*texts, ""]]),
        difficulty=3 if limited else 2,
    )


def _transform_words(draw: Draw) -> Draft:
    name = draw.pick(("change_words", "rewrite_words", "transform", "edit_words"))
    arg = draw.pick(("sentence", "text", "phrase"))
    least, sign = draw.number(3, 6), draw.pick((" ", "-", "_", "/"))
    what, how = draw.pick(
        (
            ("reversed", "word[::-1]"),
            ("in capital letters", "word.upper()"),
            ("without its first letter", "word[1:]"),
            ("written twice", "word + word"),
            ("with its first letter moved to its end", "word[1:] + word[0]"),
        )
    )
    which, test = draw.pick(
        (
            (f"longer than {least} letters", f"len(word) > {least}"),
            (f"of at most {least} letters", f"len(word) <= {least}"),
            ("at an even position, counted from 0", "index % 2 == 0"),
        )
    )
    solution = f"""
        def $f($x):
            words = $x.split()
            changed = []
            for index, word in enumerate(words):
                changed.append({how} if {test} else word)
            return "{sign}".join(changed)
    """
    if "index" not in test:
        solution = solution.replace("index, word in enumerate(words)", "word in words")
    texts = [" ".join(draw.words(draw.number(2, 5))) for _ in range(5)] + [""]
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns the words of `{arg}`, joined by {sign!r}, each word {which} being {what}",
            (
                f"splits `{arg}` at white space, makes every word {which} appear {what}, "
                f"and returns all words joined by {sign!r}"
            ),
        ),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in texts]),
        difficulty=3,
    )


def _shift_letters(draw: Draw) -> Draft:
    name = draw.pick(("shift_letters", "caesar", "encode", "rotate_alphabet"))
    arg, shift, back = draw.pick(_TEXT), draw.number(1, 25), draw.chance()
    step = -shift if back else shift
    skipped = draw.pick("aeiou") if draw.chance() else ""
    solution = """
        def $f($x):
            result = ""
            for char in $x:
                if "a" <= char <= "z"$skip:
                    place = (ord(char) - ord("a") $sign $shift) % 26
                    result += chr(ord("a") + place)
                else:
                    result += char
            return result
    """
    skip = f' and char != "{skipped}"' if skipped else ""
    texts = [draw.letters(6, _LOWER) + " " + draw.letters(3, "aeiouXYZ.!") for _ in range(5)]

    def oracle(text: str) -> str:
        turned = _LOWER[step % 26 :] + _LOWER[: step % 26]
        table = dict(zip(_LOWER, turned, strict=True))
        return "".join(char if char == skipped else table.get(char, char) for char in text)

    way = "back" if back else "forward"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns `{arg}` with each lower-case letter moved {shift} places {way} in the "
                "alphabet, going round at its ends"
            ),
            (
                f"moves every letter from a to z in `{arg}` {way} by {shift} in the alphabet, "
                "cyclically, and returns the result"
            ),
        ),
        note="All other characters stay."
        + (f" The letter {skipped!r} stays too." if skipped else ""),
        solution=code(solution, f=name, x=arg, sign="-" if back else "+", shift=shift, skip=skip),
        cases=calls(name, [(text,) for text in texts], oracle),
        difficulty=4,
    )


def _palindrome(draw: Draw) -> Draft:
    name = draw.pick(("is_palindrome", "reads_backwards", "is_mirrored", "same_both_ways"))
    arg, ignored = draw.pick(_TEXT), "".join(draw.some(" .-,!?'_:;", draw.number(1, 4)))
    least, cased = draw.number(1, 6), draw.chance()
    kept = "char.lower()" if cased else "char"
    solution = f"""
        def $f($x):
            kept = [{kept} for char in $x if char not in {ignored!r}]
            if len(kept) < {least}:
                return False
            return kept == kept[::-1]
    """
    texts = []
    for length in (3, 4, 5, 2):
        half = draw.letters(length, _LOWER) + draw.pick(ignored)
        texts += [half + half[::-1], half.upper() + half[::-1]]
    texts += ["", "ab" + draw.letters(6, "cd"), draw.letters(1, _LOWER)]

    def oracle(text: str) -> bool:
        table = str.maketrans("", "", ignored)
        text = (text.lower() if cased else text).translate(table)
        return len(text) >= least and all(a == b for a, b in zip(text, reversed(text), strict=True))

    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns True if `{arg}` reads the same backwards once the characters {ignored!r} "
                "are taken out, else False"
            ),
            f"tells, as a bool, whether `{arg}` without any of {ignored!r} is a palindrome",
        ),
        note=f"With fewer than {least} characters left the answer is False. "
        + ("Case is ignored." if cased else "Case matters."),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in texts], oracle),
        difficulty=3,
    )


def _run_lengths(draw: Draw) -> Draft:
    name = draw.pick(("compress", "run_lengths", "squeeze", "encode_runs"))
    arg, sign, least = draw.pick(_TEXT), draw.pick(("", "x", ":", "*", "=")), draw.number(2, 4)
    first = draw.chance()
    piece = f'f"{{size}}{sign}{{char}}"' if first else f'f"{{char}}{sign}{{size}}"'
    solution = f"""
        def $f($x):
            parts = []
            start = 0
            while start < len($x):
                char = $x[start]
                size = 1
                while start + size < len($x) and $x[start + size] == char:
                    size += 1
                parts.append({piece} if size >= {least} else char * size)
                start += size
            return "".join(parts)
    """
    texts = ["".join(draw.pick("abc") * draw.number(1, 5) for _ in range(4)) for _ in range(5)]
    shown = f"4{sign}a" if first else f"a{sign}4"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns `{arg}` with each run of at least {least} equal characters shortened, "
                f"'aaaa' to {shown!r}"
            ),
            (
                f"replaces every run of {least} or more equal characters in `{arg}` the way 'aaaa' "
                f"becomes {shown!r}, and returns the string"
            ),
        ),
        note="Shorter runs stay as they are.",
        solution=code(solution, f=name, x=arg),
        cases=[*calls(name, [(text,) for text in texts]), call(name, "", want="")],
        difficulty=6,
    )


STRINGS: Final = (
    Family(name="count_characters", theme="strings", side=Side.TRAIN, draft=_count_characters),
    Family(name="replace_characters", theme="strings", side=Side.TRAIN, draft=_replace_characters),
    Family(name="transform_words", theme="strings", side=Side.TRAIN, draft=_transform_words),
    Family(name="shift_letters", theme="strings", side=Side.TRAIN, draft=_shift_letters),
    Family(name="palindrome", theme="strings", side=Side.VAL, draft=_palindrome),
    Family(name="run_lengths", theme="strings", side=Side.HELDOUT, draft=_run_lengths),
)


def _pad_columns(draw: Draw) -> Draft:
    name = draw.pick(("format_row", "table_line", "pad_cells", "columns"))
    arg, width = draw.pick(("cells", "fields", "row")), draw.number(4, 9)
    fill, gap = draw.pick(".-_ "), draw.pick(("|", " ", " | ", "/", ""))
    side, method = draw.pick((("left", "ljust"), ("right", "rjust")))
    cut = draw.chance()
    shown = f"str(cell)[:{width}]" if cut else "str(cell)"
    solution = f"""
        def $f($x):
            padded = []
            for cell in $x:
                padded.append({shown}.{method}({width}, "{fill}"))
            return "{gap}".join(padded)
    """
    rows = [[draw.pick(draw.words(2)), draw.number(0, 9999), draw.pick("xyz")] for _ in range(4)]

    def oracle(row: list[object]) -> str:
        texts = [str(cell)[:width] if cut else str(cell) for cell in row]
        pads = [fill * max(0, width - len(text)) for text in texts]
        both = zip(texts, pads, strict=True)
        return gap.join(text + pad if side == "left" else pad + text for text, pad in both)

    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the values of the list `{arg}` as one string, each padded to {width} "
                f"characters with {fill!r} and aligned {side}, with {gap!r} between them"
            ),
            (
                f"joins the cells of `{arg}` by {gap!r}, every cell turned into text, aligned "
                f"{side} "
                f"and filled up with {fill!r} to {width} characters"
            ),
        ),
        note=f"Longer text is cut to {width} characters." if cut else "Longer text is not cut.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(row,) for row in [*rows, []]], oracle),
        difficulty=3,
    )


def _group_digits(draw: Draw) -> Draft:
    name = draw.pick(("group_digits", "pretty_number", "format_amount", "with_separators"))
    arg, size = draw.pick(("number", "n", "amount", "value")), draw.number(2, 4)
    sign, unit = draw.pick((",", ".", "_", " ", "'")), draw.pick(("", " EUR", " km", "%", " pts"))
    solution = f"""
        def $f($x):
            digits = str(abs($x))
            groups = []
            while digits:
                groups.insert(0, digits[-{size}:])
                digits = digits[:-{size}]
            text = "{sign}".join(groups)
            return ("-" if $x < 0 else "") + text + "{unit}"
    """
    numbers = [draw.number(-(10**power), 10**power) for power in (2, 4, 5, 7, 9)]
    after = f", followed by {unit!r}" if unit else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the whole number `{arg}` as text, its digits in groups of {size} from "
                f"the "
                f"right with {sign!r} between them{after}"
            ),
            (
                f"writes the integer `{arg}` with {sign!r} between groups of {size} digits, "
                f"counted "
                f"from the right{after}, and returns the string"
            ),
        ),
        note="A negative number begins with a minus sign.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(number,) for number in [*numbers, 0]]),
        difficulty=4,
    )


FORMATTING: Final = (
    Family(name="pad_columns", theme="formatting", side=Side.TRAIN, draft=_pad_columns),
    Family(name="group_digits", theme="formatting", side=Side.TRAIN, draft=_group_digits),
)
