"""Task families on dates and times of day."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

from mens_exp.corpus.generator.family import Draft, Family, call, calls, code
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from mens_exp.corpus.generator.family import Draw

_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# Written out: the calendar module's are in the user's own language.
_YEAR: Final = (
    "January February March April May June July August September October November December"
)
_MONTHS: Final = _YEAR.split()


def _date(draw: Draw) -> dt.date:
    return dt.date(draw.number(1990, 2030), draw.number(1, 12), draw.number(1, 28))


def _shift_date(draw: Draw) -> Draft:
    name = draw.pick(("shift_date", "due_date", "move_date", "later"))
    arg, days = draw.pick(("date", "start", "day")), draw.number(2, 400)
    back = draw.chance()
    closed = sorted(draw.some(range(7), draw.number(1, 2))) if draw.chance() else []
    way, sign = ("before", "-") if back else ("after", "+")
    skip = (
        f"""
            while moved.weekday() in {tuple(closed)}:
                moved {sign}= datetime.timedelta(days=1)"""
        if closed
        else ""
    )
    solution = f"""
        import datetime


        def $f($x):
            moved = datetime.date.fromisoformat($x)
            moved {sign}= datetime.timedelta(days={days}){skip}
            return moved.isoformat()
    """

    def oracle(text: str) -> str:
        number = dt.date.fromisoformat(text).toordinal() + (-days if back else days)
        while number % 7 in {(day + 1) % 7 for day in closed}:
            number += -1 if back else 1
        return str(dt.date.fromordinal(number))

    names = " or ".join(_DAYS[day] for day in closed)
    further = "earlier" if back else "later"
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns the date {days} days {way} `{arg}`, both written like '2024-02-29'",
            (
                f"takes a date as a string like '2024-02-29' in `{arg}` and returns, in the "
                f"same form, "
                f"the date {days} days {way} it"
            ),
        ),
        note=f"From a {names} it goes on to the next {further} day that is none." if closed else "",
        solution=code(solution, f=name, x=arg),
        cases=calls(name, [(str(_date(draw)),) for _ in range(6)], oracle),
        difficulty=5 if closed else 4,
    )


def _count_weekdays(draw: Draw) -> Draft:
    name = draw.pick(("count_days", "weekdays_between", "working_days", "days_in_range"))
    first, last = draw.pick((("start", "end"), ("first", "last"), ("since", "until")))
    chosen = sorted(draw.some(range(7), draw.number(1, 4)))
    included, month = draw.chance(), draw.number(0, 12)
    only = f" and day.month != {month}" if month else ""
    solution = f"""
        import datetime


        def $f({first}, {last}):
            day = datetime.date.fromisoformat({first})
            final = datetime.date.fromisoformat({last})
            count = 0
            while day {"<=" if included else "<"} final:
                if day.weekday() in {tuple(chosen)}{only}:
                    count += 1
                day += datetime.timedelta(days=1)
            return count
    """

    def oracle(begins: str, ends: str) -> int:
        one, two = (dt.date.fromisoformat(each).toordinal() for each in (begins, ends))
        days = [dt.date.fromordinal(each) for each in range(one, two + included)]
        return len([day for day in days if day.isoweekday() - 1 in chosen and day.month != month])

    cases = []
    for width in (0, 3, 9, 20, 45):
        begins = _date(draw)
        cases.append((str(begins), str(begins + dt.timedelta(days=width))))
    names = ", ".join(_DAYS[day] for day in chosen)
    return Draft(
        signature=f"{name}({first}, {last})",
        does=(
            f"returns how many days from `{first}` to `{last}` fall on one of {names}",
            (
                f"counts the days of the week {names} between the dates `{first}` and `{last}` and "
                "returns the count"
            ),
        ),
        note=f"Dates are strings like '2024-02-29'; `{last}` is {'' if included else 'not '}"
        f"counted." + (f" Days in {_MONTHS[month - 1]} are left out." if month else ""),
        solution=code(solution, f=name),
        cases=calls(name, cases, oracle),
        difficulty=6,
    )


def _date_form(draw: Draw) -> Draft:
    name = draw.pick(("convert_date", "rewrite_date", "date_form", "normalise_date"))
    arg, old, new = draw.pick(("text", "date", "given")), draw.pick("./:"), draw.pick("-_ ")
    order = draw.some(("day", "month", "year"), 3)
    target = draw.some(("day", "month", "year"), 3)
    century = draw.number(1900, 2000)
    short = draw.chance()
    widen = (
        f"""
            year = {century} + year % 100"""
        if short
        else ""
    )
    shown = new.join(f"{{{part}:0{4 if part == 'year' else 2}d}}" for part in target)
    solution = f"""
        def $f($x):
            parts = [int(part) for part in $x.split("{old}")]
            {", ".join(order)} = parts{widen}
            if not 1 <= month <= 12 or not 1 <= day <= 31:
                raise ValueError("no such date")
            return f"{shown}"
    """

    def written(day: dt.date, parts: list[str], sign: str, *, full: bool) -> str:
        year = f"{day.year % 100:02d}" if not full else f"{day.year:04d}"
        values = {"day": f"{day.day:02d}", "month": f"{day.month:02d}", "year": year}
        return sign.join(values[part] for part in parts)

    days = [_date(draw) for _ in range(4)]
    cases = [
        call(
            name,
            written(day, order, old, full=not short),
            want=written(
                day.replace(year=century + day.year % 100) if short else day,
                target,
                new,
                full=True,
            ),
        )
        for day in days
    ]
    bad = {"day": "12", "month": "13", "year": "44"}
    added = f"A year is given by two digits, which are added to {century}. " if short else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns the date `{arg}`, written {old.join(order)}, in the form {new.join(target)}",
            f"converts a date from {old.join(order)} to {new.join(target)} and returns the string",
        ),
        note=f"{added}Day and month are given two digits, the year four. A month outside 1 to 12 "
        "or a day outside 1 to 31 raises ValueError.",
        solution=code(solution, f=name, x=arg),
        cases=[*cases, call(name, old.join(bad[part] for part in order), raises="ValueError")],
        difficulty=5,
    )


def _clock(draw: Draw) -> Draft:
    name = draw.pick(("add_minutes", "clock_after", "shift_time", "next_alarm"))
    arg, minutes, day = (
        draw.pick(("time", "clock", "now")),
        draw.number(5, 900),
        draw.pick((12, 24)),
    )
    sign, rounding = draw.pick(("+", "-")), draw.pick((1, 1, 5, 10, 15))
    rounded = (
        f"""
            total = total // {rounding} * {rounding}"""
        if rounding > 1
        else ""
    )
    solution = f"""
        def $f($x):
            hours, minutes = $x.split(":")
            total = int(hours) * 60 + int(minutes) {sign} {minutes}{rounded}
            total %= {day * 60}
            return f"{{total // 60:02d}}:{{total % 60:02d}}"
    """
    times = [(draw.number(0, day - 1), draw.number(0, 59)) for _ in range(6)]

    def want(hour: int, minute: int) -> str:
        start = dt.datetime(2000, 6, 1, hour, minute)  # noqa: DTZ001  # a clock has no zone
        after = start + dt.timedelta(minutes=minutes if sign == "+" else -minutes)
        after -= dt.timedelta(minutes=after.minute % rounding)
        return f"{after.hour % day:02d}:{after.minute:02d}"

    way = "later" if sign == "+" else "earlier"
    down = f", rounded down to a multiple of {rounding} minutes" if rounding > 1 else ""
    return Draft(
        signature=f"{name}({arg})",
        does=(
            f"returns what a {day}-hour clock shows {minutes} minutes {way} than `{arg}`{down}",
            (
                f"takes a time of day like '09:30' in `{arg}` and returns the time {minutes} "
                f"minutes "
                f"{way} on a clock of {day} hours{down}"
            ),
        ),
        note=f"Times are written like '09:30', from 00:00 to {day - 1}:59.",
        solution=code(solution, f=name, x=arg),
        cases=[call(name, f"{h:02d}:{m:02d}", want=want(h, m)) for h, m in times],
        difficulty=4,
    )


DATES: Final = (
    Family(name="shift_date", theme="dates", side=Side.TRAIN, draft=_shift_date),
    Family(name="count_weekdays", theme="dates", side=Side.HELDOUT, draft=_count_weekdays),
    Family(name="date_form", theme="dates", side=Side.TRAIN, draft=_date_form),
    Family(name="clock", theme="dates", side=Side.TRAIN, draft=_clock),
)
