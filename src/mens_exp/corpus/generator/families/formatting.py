"""Tasks that lay out text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


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


FAMILIES: Final = (
    Family(name="pad_columns", theme="formatting", side=Side.TRAIN, draft=_pad_columns),
    Family(name="group_digits", theme="formatting", side=Side.TRAIN, draft=_group_digits),
)
