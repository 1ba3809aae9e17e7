"""Tasks that play a process through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.draw import Draw

__all__ = ["FAMILIES"]


def _robot(draw: Draw) -> Draft:
    name = draw.pick(("walk", "move_robot", "follow", "run_commands"))
    arg, step = draw.pick(("commands", "path", "orders")), draw.number(1, 3)
    size = draw.number(2 * step + 1, 9)
    keys = draw.pick(("UDLR", "NSWE", "udlr", "nswe", "^v<>", "8246"))
    wraps, trail = draw.chance(), draw.chance()
    keep = f"% {size}" if wraps else ""
    bound = (
        ""
        if wraps
        else f"""
                if not (0 <= new_x < {size} and 0 <= new_y < {size}):
                    continue"""
    )
    solution = f"""
        def $f($x):
            x = y = 0
            moves = {{
                "{keys[0]}": (0, {step}),
                "{keys[1]}": (0, -{step}),
                "{keys[2]}": (-{step}, 0),
                "{keys[3]}": ({step}, 0),
            }}
            visited = {{(0, 0)}}  # trail
            for command in $x:
                dx, dy = moves[command]
                new_x, new_y = (x + dx) {keep}, (y + dy) {keep}{bound}
                x, y = new_x, new_y
                visited.add((x, y))  # trail
            return {"len(visited)" if trail else "(x, y)"}
    """
    solution = solution.replace("(x + dx) ,", "x + dx,").replace("(y + dy) \n", "y + dy\n")
    lines = [line for line in solution.split("\n") if trail or "# trail" not in line]
    solution = "\n".join(lines).replace("  # trail", "")
    texts = [draw.letters(draw.number(3, 8), keys + keys[0] + keys[3]) for _ in range(5)]
    edge = "going round at its edges" if wraps else "staying where it is if a step would leave it"
    result = "the number of different squares visited" if trail else "its final square (x, y)"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"moves a robot over a board of {size} by {size} squares, {edge}, and returns {result}",
            (
                f"returns {result} after a robot has followed the string `{arg}` on a board of "
                f"{size} "
                f"by {size} squares, {edge}"
            ),
        ),
        note=f"It starts on (0, 0). {keys[0]!r} adds {step} to y, {keys[1]!r} subtracts {step} "
        f"from y, {keys[2]!r} subtracts {step} from x and {keys[3]!r} adds {step} to x."
        + (" The first square counts as visited." if trail else ""),
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(text,) for text in [*texts, ""]]),
        difficulty=6,
    )


def _automaton(draw: Draw) -> Draft:
    name = draw.pick(("evolve", "next_cells", "generations", "automaton"))
    arg, steps, rule = draw.pick(("start", "state", "row")), draw.number(1, 4), draw.number(1, 254)
    ring, dead, alive = draw.chance(), *draw.pick((".#", "01", "_x", "-o"))
    if ring:
        left, right = "cells[index - 1]", "cells[(index + 1) % len(cells)]"
    else:
        left = "cells[index - 1] if index else 0"
        right = "cells[index + 1] if index + 1 < len(cells) else 0"
    solution = f"""
        def $f($x):
            cells = [1 if char == "{alive}" else 0 for char in $x]
            for _ in range({steps}):
                following = []
                for index, cell in enumerate(cells):
                    left = {left}
                    right = {right}
                    place = 4 * left + 2 * cell + right
                    following.append({rule} >> place & 1)
                cells = following
            return "".join("{alive}" if cell else "{dead}" for cell in cells)
    """

    def oracle(text: str) -> str:
        table = f"{rule:08b}"[::-1]
        for _ in range(steps):
            around = (text[-1:] + text + text[:1]) if ring else dead + text + dead
            digits = around.replace(dead, "0").replace(alive, "1")
            text = "".join(
                alive if table[int(digits[i : i + 3], 2)] == "1" else dead for i in range(len(text))
            )
        return text

    texts = [draw.letters(draw.number(3, 9), dead + alive) for _ in range(5)]
    ends = "The row is a ring." if ring else f"Beyond both ends all cells are {dead!r}."
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"returns the row of cells `{arg}`, a string of {dead!r} and {alive!r}, after "
                f"{steps} "
                f"steps of the cellular automaton with rule {rule}"
            ),
            (
                f"applies rule {rule} of the elementary cellular automata {steps} times to the "
                f"string "
                f"`{arg}` of {dead!r} (dead) and {alive!r} (alive), and returns the new string"
            ),
        ),
        note="A cell's next state is bit 4 * left + 2 * itself + right of the rule, where a living "
        f"cell is 1. {ends}",
        solution=code(solution, f=name, x=arg),
        cases=[*calls(name, [(text,) for text in texts], oracle), call(name, "", want="")],
        difficulty=8,
    )


def _change(draw: Draw) -> Draft:
    name = draw.pick(("give_change", "coins", "make_change", "pay_out"))
    arg, few = draw.pick(("amount", "rest", "sum_due")), draw.number(2, 6)
    coins = [*sorted(draw.some(range(2, 60), 3), reverse=True), 1]
    counted = draw.chance()
    limited = f"min(left // coin, {few})"
    solution = f"""
        def $f($x):
            left = $x
            given = {"0" if counted else "[]"}
            for coin in {tuple(coins)}:
                count = {limited}
                {"given += count" if counted else "given.extend([coin] * count)"}
                left -= coin * count
            return {"given if left == 0 else -1" if counted else "given if left == 0 else None"}
    """
    total = few * sum(coins)

    def oracle(amount: int) -> int | list[int] | None:
        given: list[int] = []
        for coin in coins:
            while amount - sum(given) >= coin and given.count(coin) < few:
                given.append(coin)
        if sum(given) < amount:
            return -1 if counted else None
        return len(given) if counted else given

    listed = ", ".join(map(str, coins))
    result = "how many coins that takes" if counted else "the list of coins"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            (
                f"pays `{arg}` with coins of {listed}, at most {few} of each, always taking the "
                f"largest that fits, and returns {result}"
            ),
            (
                f"returns {result} when `{arg}` is paid greedily, from the largest coin down, "
                f"in coins "
                f"of {listed} of which there are {few} each"
            ),
        ),
        note=f"If something is left it returns {-1 if counted else None}.",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(each,) for each in [*draw.numbers(5, 1, total), 0, total + 1]], oracle),
        difficulty=5,
    )


FAMILIES: Final = (
    Family(name="robot", theme="simulation", side=Side.TRAIN, draft=_robot),
    Family(name="automaton", theme="simulation", side=Side.TRAIN, draft=_automaton),
    Family(name="change", theme="simulation", side=Side.TRAIN, draft=_change),
)
