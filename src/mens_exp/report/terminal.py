"""Terminal output of a run: its plan, results and problems.

Model output is never interpreted as markup, and control characters are displayed instead of
executed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mens_exp.errors import MensError, Problems
from mens_exp.report import sections, summary, wording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.report.summary import Cell, Pair, Records

_MOST_LINES = 16  # of a completion; the rest is in events.jsonl and the report
_MOST_PROMPT_LINES = 8
_CONDITIONS = ("base", "tuned")
_STYLES = {"better": "bold green", "worse": "bold red", "same": "dim", "unknown": "dim"}


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Show the planned run and its expected cost.

    Args:
        plan: the contents of ``plan.json``. A number that is no exact count carries "≈" and
            is followed by what it rests on.
    """
    table = _named_rows("Plan")
    for name, value in _plan_rows(plan):
        table.add_row(name, value)
    return table


def result_table(records: Records) -> RenderableType:
    """Show base next to tuned, followed by the cost of the run."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    table.title = "Result"
    table.add_column("")
    for name in _CONDITIONS:
        table.add_column(name, justify="right")
    table.add_column("change", justify="right")
    for pair in summary.pairs(records):
        table.add_row(*_pair_row(pair))
    lead = [] if records.status == "succeeded" else [Text(summary.headline(records)), Text()]
    warning = summary.unsafe(records)
    said = [Text(warning, style="yellow")] if warning else []
    return Group(*lead, table, *said, Text(), _costs(records))


def _costs(records: Records) -> Table:
    """List what the run cost, in a table of its own: no figure of it is base or tuned."""
    table = _named_rows("Cost of the run")
    for cell in summary.cost(records):
        text = _cell(dataclasses.replace(cell, detail=f"({cell.detail})" if cell.detail else ""))
        table.add_row(cell.label, Text(" ").join(text.split("\n")))
    return table


def _named_rows(title: str) -> Table:
    """Begin a table of names and values without a head."""
    table = Table(
        box=None,
        show_header=False,
        title=title,
        title_justify="left",
        pad_edge=False,
        padding=(0, 2),
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def completions(item_events: Sequence[ItemEvent], n: int = 3) -> RenderableType:
    """Show the first `n` items: the prompt, then base next to tuned.

    Args:
        item_events: one mapping per item and condition.
        n: how many items to show.
    """
    shown = [_item(item) for item in summary.by_item(item_events)[:n]]
    return Group(*shown) if shown else Text("No held-out item was completed.", style="dim")


def problems(errors: Sequence[MensError]) -> Text:
    """Spell out problems, each in lines of its own.

    Print it with ``soft_wrap=True``, so that a path stays one copyable word.

    Args:
        errors: the problems; a :class:`Problems` counts as those that it holds.
    """
    flat = [one for error in errors for one in _flatten(error)]
    return Text("\n").join(_problem(error) for error in flat)


def _plan_rows(plan: Mapping[str, Any]) -> Iterable[tuple[str, Text]]:
    yield "model", _text(plan.get("model"))
    if plan.get("download_bytes"):
        yield "download", Text(f"{wording.size(plan['download_bytes'])} of weights, first")
    yield "backend", _backend(plan)
    yield "quantization", _text(plan.get("quant"))
    yield "LoRA", _lora(plan)
    yield "objective", _text(plan.get("objective"))
    yield "tokenizer", _text(plan.get("tokenizer"))
    if plan.get("chat_template_date"):
        yield "date", Text(f"{plan['chat_template_date']} in every prompt (tokenizer.date)")
    yield "data", _data(plan.get("data") or {})
    yield "steps", _steps(plan)
    time, memory = (plan.get(key) or {} for key in ("time_s", "memory_bytes"))
    yield "time", _time(time)
    yield "memory", _memory(memory)
    if plan.get("processes"):
        yield "processes", _processes(plan["processes"])
    if plan.get("disk_bytes"):
        yield "disk", _disk(plan["disk_bytes"])
    if changed := _differences(plan.get("differs_from_default") or {}):
        yield "not as usual", Text(changed)
    if plan.get("contract_digest"):
        yield "contract", _text(plan["contract_digest"][:12])
    for key, style in (("notes", ""), ("warnings", "yellow"), ("problems", "red")):
        for line in plan.get(key) or ():
            yield key.removesuffix("s"), Text(wording.visible(line), style=style)
    if plan.get("measured"):
        yield "measured", _measured(plan["measured"])


_ANSWERS = {True: "fits", False: "does not fit", None: "may not fit"}


def _processes(shared: Mapping[str, Any]) -> Text:
    """Say who shares the work, and which way of sharing it fits the devices."""
    machines = shared["processes"] // shared["on_each_machine"]
    where = f" on {machines} machines" if machines > 1 else ""
    text = Text(f"{shared['processes']}{where}, {shared['strategy']}")
    if shared["device_bytes"] is None:
        return text.append("\nwhether they fit is unknown: no device says what it holds")
    for strategy, fits in shared["fits"].items():
        answer = f"{strategy} {_ANSWERS[fits]} in {wording.size(shared['device_bytes'])}"
        text.append(f"\n{answer}", style="red" if fits is False else "")
    return text


def _backend(plan: Mapping[str, Any]) -> Text:
    text = _text(plan.get("backend"))
    if plan.get("graph_id"):
        text.append(f", graph {wording.visible(plan['graph_id'])}")
    if plan.get("layers") is not None:
        text.append(f", {wording.count(plan['layers'])} layers")
    proxy = plan.get("proxy") or {}
    if proxy.get("expected") is not None:
        matched = proxy.get("matched")
        known = f"{proxy['expected']}" if matched is None else f"{matched} of {proxy['expected']}"
        text.append(f"\n{known} middle projections")
    return text


# What the lines above say: the model by its name, rows by their files.
_SAID = ("model.", "data.path", "data.val_path")
_NAMES = ("._target_", ".name")


def _differences(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Spell settings as they are typed, our defaults behind them.

    What only the chosen option has is left out: the lines above name the option.
    """
    return ", ".join(
        f"{path}={wording.typed(one['found'])} ({wording.typed(one['default'])})"
        for path, one in found.items()
        if "default" in one and not path.startswith(_SAID) and not path.endswith(_NAMES)
    )


def _text(value: Any) -> Text:
    return Text(wording.as_text(value)) if value is not None else Text("none", style="dim")


def _lora(plan: Mapping[str, Any]) -> Text:
    text = _text(plan.get("lora"))
    if plan.get("lora_modules"):
        text.append(f"\n{wording.visible(str(plan['lora_modules']))}")
    trainable = plan.get("trainable_parameters")
    if trainable is not None:
        text.append(f"\n{wording.count(trainable)} trainable parameters")
    return text


def _data(data: Mapping[str, Any]) -> Text:
    about = "" if data.get("exact") else "≈ "
    text = _text(data.get("source"))
    for path, file in (data.get("files") or {}).items():
        text.append(f"\n{path}: {_file(file)}")
    if data.get("quarantined"):
        text.append(f"\n{_quarantined(data['quarantined'])}")
    if data.get("filtered"):
        text.append(f"\n{_filtered(data['filtered'])}")
    for name, drawn in ((data.get("mixed") or {}).get("sources") or {}).items():
        text.append(f"\n{_drawn(name, drawn)}")
    for key, words in (
        ("train_rows", "rows to train on"),
        ("train_tokens", "tokens in them"),
        ("val_tokens", "tokens to validate on"),
    ):
        if data.get(key) is not None:
            text.append(f"\n{about}{wording.count(data[key])} {words}")
    if contract := data.get("contract"):
        for line in sections.contract_plan_lines(contract["tokens"], contract["unknown"]):
            text.append(f"\n{line}", style="dim")
    return text if not about else _with_basis(text, data.get("basis"))


def _quarantined(counts: Mapping[str, Any]) -> str:
    reasons = "; ".join(f"{wording.visible(why)} ({n})" for why, n in counts["reasons"].items())
    put = f"{wording.count(counts['bad'])} of {wording.count(counts['rows'])} rows put aside"
    return f"{put}: {reasons}" if reasons else put


def _drawn(name: str, drawn: Mapping[str, Any]) -> str:
    rows = f"{wording.count(drawn['rows'])} rows drawn of {wording.count(drawn['of'])}"
    return (
        f"{wording.visible(name)}: {rows}, {drawn['share']:.2%} ({drawn['share_asked']:.2%} asked)"
    )


def _filtered(counts: Mapping[str, Any]) -> str:
    gone = ", ".join(f"{name} refused {wording.count(n)}" for name, n in counts["refused"].items())
    return f"{wording.count(counts['kept'])} of {wording.count(counts['rows'])} rows pass: {gone}"


def _file(file: Mapping[str, Any]) -> str:
    """Say what a file of rows was taken for, and what of it is left out."""
    rows = f"{wording.count(file['rows'])} {file['form']} rows"
    to_validate = " to validate on" if file["role"] == "validation" else ""
    left = ", ".join(file.get("ignored") or ())
    return f"{rows}{to_validate}{f'; columns left out: {left}' if left else ''}"


def _steps(plan: Mapping[str, Any]) -> Text:
    steps, tokens, total = (plan.get(k) for k in ("steps", "tokens_per_step", "tokens_total"))
    parts = [] if steps is None else [wording.count(steps)]
    if tokens is not None:
        parts.append(f"of {wording.count(tokens)} tokens")
    if total is not None:
        parts.append(f"= {wording.count(total)} tokens")
    if (epochs := plan.get("epochs")) is not None:
        bound = f", bounded by {plan['bound']}" if plan.get("bound") else ""
        parts.append(f"\n{wording.epochs(epochs)}{bound}")
    more = [
        f"{words} {wording.count(plan[key])}"
        for key, words in (
            ("effective_batch", "effective batch"),
            ("warmup_steps", "warm-up"),
            ("checkpoints", "checkpoints"),
        )
        if plan.get(key) is not None
    ]
    if more:
        parts.append("\n" + ", ".join(more))
    return Text(" ".join(parts)) if parts else Text("unknown", style="dim")


def _time(values: Mapping[str, Any]) -> Text:
    text = _estimate(values, wording.duration)
    if values.get("quantization"):
        text.append(f"\nand {wording.duration(values['quantization'])} to quantize", style="dim")
    if values.get("comparison"):
        words = f"\nand {wording.duration(values['comparison'])} to compare it with transformers, "
        text.append(f"{words}the first time", style="dim")
    return text


def _disk(values: Mapping[str, Any]) -> Text:
    text = Text(f"{wording.size(values['in_run'])} in the run directory")
    if values.get("base"):
        text.append(f"\n{wording.size(values['base'])} for a copy of the base model")
    parts = (("adapter", "adapter"), ("checkpoint", "checkpoint"), ("merged", "merged model"))
    sizes = ", ".join(f"{words} {wording.size(values[key])}" for key, words in parts)
    text.append(f"\n{sizes}", style="dim")
    return text


def _estimate(values: Mapping[str, Any], spell: Callable[[float], str]) -> Text:
    estimate, low, high = (values.get(key) for key in ("estimate", "low", "high"))
    text = Text("unknown" if estimate is None else f"≈ {spell(estimate)}")
    if low is not None and high is not None:
        text.append(f" ({spell(low)} to {spell(high)})")
    return _with_basis(text, values.get("basis"))


def _memory(values: Mapping[str, Any]) -> Text:
    text = _estimate(values, wording.size)
    if values.get("free") is not None:
        text.append(f"\n{wording.size(values['free'])} are free", style="dim")
    for name, part in sections.components(values):
        text.append(f"\n{wording.size(part):>10}  {wording.label(name)}", style="dim")
    return text


def _measured(values: Mapping[str, Any]) -> Text:
    parts = []
    if values.get("time_s") is not None:
        parts.append(wording.duration(values["time_s"]))
    if values.get("peak_bytes") is not None:
        parts.append(f"{wording.size(values['peak_bytes'])} at the peak")
    return Text(", ".join(parts) or "nothing")


def _with_basis(text: Text, basis: Any) -> Text:
    if basis:
        text.append(f"\n{wording.visible(str(basis))}", style="dim italic")
    return text


def _pair_row(pair: Pair) -> tuple[Text, Text, Text, Text]:
    label = Text(pair.label)
    if pair.unit:
        label.append(f"\n{pair.unit}", style="dim")
    change = Text(pair.change or "unknown", style=_STYLES[pair.verdict])
    return label, _cell(pair.base), _cell(pair.tuned), change


def _cell(cell: Cell) -> Text:
    if cell.absent:
        return Text(wording.visible(cell.absent), style="dim italic")
    text = Text(cell.text)
    if cell.detail:
        text.append(f"\n{cell.detail}", style="dim")
    return text


def _item(item: summary.Item) -> RenderableType:
    prompt = Text(_clip(item.prompt, _MOST_PROMPT_LINES))
    beside = Table.grid(expand=True)
    for _ in item.conditions:
        beside.add_column(ratio=1)
    beside.add_row(*(_completion(name, item.completions.get(name)) for name in item.conditions))
    title = Text(item.item_id, style="bold")
    return Group(title, prompt, beside, Text())


def _completion(condition: str, event: ItemEvent | None) -> Panel:
    title = Text(wording.visible(condition))
    if event is None:
        return Panel(Text("not completed", style="dim italic"), title=title, title_align="left")
    outcome = summary.outcome_of(event)
    style = "dim" if outcome.good is None else "green" if outcome.good else "red"
    title.append(f" · {outcome.words}", style=style)
    if not event["finished"]:
        title.append(" · cut off", style="yellow")
    if event["style"] is not None:
        title.append(f" · {wording.visible(event['style'])}", style="dim")
    body = _clip(wording.visible(event["completion"]), _MOST_LINES)
    return Panel(
        Text(body) if body else Text("empty", style="dim italic"),
        title=title,
        title_align="left",
        box=box.ROUNDED,
        border_style="dim",
    )


def _clip(text: str, most: int) -> str:
    lines = text.expandtabs(4).strip("\n").splitlines()
    if len(lines) <= most:
        return "\n".join(lines)
    left = len(lines) - most + 1
    return "\n".join([*lines[: most - 1], f"… {left} more lines"])


def _flatten(error: MensError) -> list[MensError]:
    return list(error.problems) if isinstance(error, Problems) else [error]


def _problem(error: MensError) -> Text:
    where = f"{error.where}: " if error.where else ""
    text = Text()
    text.append(wording.visible(where), style="bold")
    text.append(wording.visible(error.what))
    if error.found is not None:
        found = error.found if isinstance(error.found, str) else repr(error.found)
        text.append(f"\n  found     {wording.visible(found)}")
    if error.expected is not None:
        text.append(f"\n  expected  {wording.visible(error.expected)}")
    if error.remedy is not None:
        text.append(f"\n  next      {wording.visible(error.remedy)}")
    return text
