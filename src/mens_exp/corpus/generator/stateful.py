"""Task families with a state: small classes, and processes played through step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Case, Draft, Family, Noun, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw


def _counter(draw: Draw) -> Draft:
    name = draw.pick(("Counter", "Meter", "Dial", "Gauge"))
    up, down = draw.pick((("up", "down"), ("raise_", "lower"), ("add", "take"), ("more", "less")))
    low, width, step = draw.number(-9, 9), draw.number(6, 40), draw.number(1, 5)
    high, wraps = low + width, draw.chance()
    if wraps:
        keep = f"self.value = {low} + (self.value - {low}) % {width + 1}".replace("- -", "+ ")
        told = f"A value beyond one end goes on at the other, as on a clock of {width + 1} hours."
    else:
        keep = f"self.value = max({low}, min({high}, self.value))"
        told = "A value beyond an end is set to that end."
    solution = f"""
        class $f:
            def __init__(self, value={low}):
                self.value = value
                self._keep()

            def _keep(self):
                {keep}

            def {up}(self, times=1):
                self.value += {step} * times
                self._keep()
                return self.value

            def {down}(self, times=1):
                self.value -= {step} * times
                self._keep()
                return self.value
    """

    def kept(value: int) -> int:
        return (
            range(low, high + 1)[(value - low) % (width + 1)]
            if wraps
            else (sorted((low, value, high))[1])
        )

    cases = []
    for _ in range(5):
        start, more, less = draw.number(low, high), draw.number(1, 6), draw.number(1, 9)
        setup = (f"it = {name}({start})", f"it.{up}({more})")
        want = kept(kept(start + step * more) - step * less)
        cases.append(Case(f"it.{down}({less})", setup=setup, want=want))
    cases.append(Case(f"{name}({high + 2}).value", want=kept(high + 2)))
    return Draft(
        signature=f"{name}(value={low})",
        does=(
            (
                f"keeps a whole number in its attribute `value`, always between {low} and "
                f"{high}, both "
                "included"
            ),
            (
                f"counts up and down from {low} to {high} and shows the number as its attribute "
                "`value`"
            ),
        ),
        note=f"Its methods `{up}(times=1)` and `{down}(times=1)` change the value by {step} for "
        f"each time and return it. {told} That holds for the first value too.",
        noun=Noun.CLASS,
        solution=code(solution, f=name),
        cases=cases,
        difficulty=5,
    )


def _account(draw: Draw) -> Draft:
    name = draw.pick(("Account", "Wallet", "Purse", "Savings"))
    put, take = draw.pick((("deposit", "withdraw"), ("put", "take"), ("pay_in", "pay_out")))
    credit, fee, most = draw.number(0, 50), draw.number(0, 5), draw.number(150, 400)
    error = draw.pick(("ValueError", "RuntimeError"))
    returned = draw.chance()
    cost = f"amount + {fee}" if fee else "amount"
    solution = f"""
        class $f:
            def __init__(self, balance=0):
                self.balance = balance

            def {put}(self, amount):
                if amount <= 0:
                    raise {error}("not a positive amount")
                self.balance = min(self.balance + amount, {most})
                return self.balance

            def {take}(self, amount):
                if amount <= 0:
                    raise {error}("not a positive amount")
                if {cost} > self.balance{f" + {credit}" if credit else ""}:
                    {"return False" if returned else f'raise {error}("not enough")'}
                self.balance -= {cost}
                return {"True" if returned else "self.balance"}
    """
    start, more = draw.number(20, 60), draw.number(5, 60)
    made = (f"it = {name}({start})",)
    full = start + more - fee + credit
    cases = [
        Case(f"it.{put}({more})", setup=made, want=start + more),
        Case(f"it.{put}({most})", setup=made, want=most),
        Case("it.balance", setup=(*made, f"it.{take}(7)"), want=start - 7 - fee),
        Case(f"it.{take}({full})", setup=(*made, f"it.{put}({more})")),
        Case(f"{name}().balance", want=0),
        Case(f"it.{put}(0)", setup=made, raises=error),
        Case(f"it.{take}(-1)", setup=made, raises=error),
    ]
    if returned:
        cases.append(Case(f"it.{take}({start + credit - fee + 1})", setup=made, want=False))
        gives, lacking = "whether it could", "it changes nothing and returns False"
    else:
        cases.append(Case(f"it.{take}({start + credit - fee + 1})", setup=made, raises=error))
        gives, lacking = "the new balance", f"it raises {error}"
    charged = f" and a fee of {fee}" if fee else ""
    return Draft(
        signature=f"{name}(balance=0)",
        does=(
            f"holds money in its attribute `balance`, from {-credit} to {most}",
            f"keeps a `balance` that may go down to {-credit} and up to {most}",
        ),
        note=f"`{put}(amount)` adds an amount and returns the new balance, which never passes "
        f"{most}. `{take}(amount)` subtracts the amount{charged} and returns {gives}; where that "
        f"would leave less than {-credit}, {lacking}. An amount that is not positive raises "
        f"{error}.",
        noun=Noun.CLASS,
        solution=code(solution, f=name),
        cases=cases,
        difficulty=6,
    )


def _stack(draw: Draw) -> Draft:
    name = draw.pick(("Stack", "MaxStack", "Pile", "Tower"))
    push, pop = draw.pick((("push", "pop"), ("put", "take"), ("add", "remove")))
    size, largest = draw.number(3, 12), draw.chance()
    best = "max" if largest else "min"
    look, none = draw.pick(("best", "extreme", "record")), draw.pick(("None", "-1", "0"))
    forget = draw.chance()
    full = "self.items.pop(0)" if forget else 'raise OverflowError("full")'
    solution = f"""
        class $f:
            def __init__(self):
                self.items = []

            def {push}(self, item):
                if len(self.items) == {size}:
                    {full}
                self.items.append(item)

            def {pop}(self):
                return self.items.pop() if self.items else {none}

            def {look}(self):
                return {best}(self.items, default={none})

            def __len__(self):
                return len(self.items)
    """
    numbers = draw.numbers(size, 0, 99)
    filled = (f"it = {name}()", f"for n in {numbers}:", f"    it.{push}(n)")
    given = None if none == "None" else int(none)
    cases = [
        Case(f"it.{look}()", setup=filled, want=max(numbers) if largest else min(numbers)),
        Case(f"it.{pop}()", setup=filled, want=numbers[-1]),
        Case(f"it.{look}()", setup=(*filled, f"it.{pop}()")),
        Case("len(it)", setup=(*filled, f"it.{pop}()"), want=size - 1),
        Case(f"{name}().{pop}()", want=given),
        Case(f"{name}().{look}()", want=given),
    ]
    if forget:
        over = (*filled, f"it.{push}({numbers[0]})", f"it.{push}(100)")
        cases.append(Case("(len(it), it.items[0])", setup=over))
    else:
        cases.append(Case(f"it.{push}(5)", setup=filled, raises="OverflowError"))
    beyond = "drops the oldest one first" if forget else "raises OverflowError"
    kind = "largest" if largest else "smallest"
    return Draft(
        signature=f"{name}()",
        does=(
            f"is a stack of at most {size} numbers that knows its {kind} one",
            f"stores up to {size} numbers, last in first out, and tells the {kind} of them",
        ),
        note=f"`{push}(item)` puts a number on top; on a full stack it {beyond}. `{pop}()` takes "
        f"the top one off and returns it, and `{look}()` returns the {kind} number; both return "
        f"{none} when it is empty. `len` gives how many there are, and the list `items` holds "
        "them, the oldest first.",
        noun=Noun.CLASS,
        solution=code(solution, f=name),
        cases=cases,
        difficulty=6,
    )


def _recent(draw: Draw) -> Draft:
    name = draw.pick(("Recent", "Window", "Average", "Recorder"))
    add, size = draw.pick(("add", "record", "see", "feed")), draw.number(2, 6)
    least = draw.number(-5, 20)
    what, how = draw.pick(
        (
            ("sum", "sum(self.kept)"),
            ("largest", "max(self.kept, default=0)"),
            (
                "range (largest less smallest)",
                "max(self.kept, default=0) - min(self.kept, default=0)",
            ),
            (
                "sum divided by their number and rounded down",
                "sum(self.kept) // max(1, len(self.kept))",
            ),
        )
    )
    look = draw.pick(("value", "result", "state"))
    solution = f"""
        class $f:
            def __init__(self):
                self.kept = []

            def {add}(self, number):
                if number < {least}:
                    return False
                self.kept.append(number)
                self.kept = self.kept[-{size}:]
                return True

            def {look}(self):
                return {how}
    """
    lists = [draw.numbers(draw.number(2, 9), least - 3, least + 40) for _ in range(5)]
    cases = [
        Case(f"it.{look}()", setup=(f"it = {name}()", f"for n in {each}:", f"    it.{add}(n)"))
        for each in lists
    ]
    return Draft(
        signature=f"{name}()",
        does=(
            f"remembers the last {size} numbers it was given that are at least {least}",
            f"keeps a window of the {size} latest numbers not below {least}",
        ),
        note=f"`{add}(number)` takes a number and returns True, or ignores one below {least} and "
        f"returns False. `{look}()` returns the {what} of the numbers kept, 0 if there are none.",
        noun=Noun.CLASS,
        solution=code(solution, f=name),
        cases=[
            *cases,
            Case(f"{name}().{look}()", want=0),
            Case(f"{name}().{add}({least})", want=True),
            Case(f"{name}().{add}({least - 1})", want=False),
        ],
        difficulty=5,
    )


CLASSES: Final = (
    Family(name="bounded_counter", theme="classes", side=Side.TRAIN, draft=_counter),
    Family(name="account", theme="classes", side=Side.TRAIN, draft=_account),
    Family(name="extreme_stack", theme="classes", side=Side.HELDOUT, draft=_stack),
    Family(name="recent_numbers", theme="classes", side=Side.VAL, draft=_recent),
)


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


SIMULATION: Final = (
    Family(name="robot", theme="simulation", side=Side.TRAIN, draft=_robot),
    Family(name="automaton", theme="simulation", side=Side.TRAIN, draft=_automaton),
    Family(name="change", theme="simulation", side=Side.TRAIN, draft=_change),
)
