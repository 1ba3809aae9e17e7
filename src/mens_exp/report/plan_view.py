"""A plan as named facts, rows as encoded for training, and the findings of task=doctor.

Supervised tokens are marked by colour on a terminal, and also by brackets for pipes, files and
readers who cannot distinguish the colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from rich.text import Text

from mens_exp.report import sections, wording
from mens_exp.report.document import MARKS, Cell, Document, Facts, Section, Step, Tone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Settings already shown in other lines: the model by name, rows by their files.
_SAID = ("model.", "data.path", "data.val_path")
_NAMES = ("._target_", ".name")
_SMALL = 0.01  # fraction of the memory; smaller parts are summed
_ANSWERS = {True: "fits", False: "does not fit", None: "may not fit"}


def document(plan: Mapping[str, Any], steps: Sequence[Step] = ()) -> Document:
    """Return the planned run and its expected cost.

    Args:
        plan: the contents of ``plan.json``. A number that is not an exact count is marked "≈" and
            followed by its basis.
        steps: suggested next commands.
    """
    cells = [
        Cell("\n".join(lines), label=label, tone=tone)
        for label, lines, tone in _rows(plan)
        if lines
    ]
    return Document(
        title="Plan",
        kind="plan",
        parts=[Section("Plan", [Facts(cells)], name="plan")],
        source="plan.json",
        steps=steps,
    )


def _rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, list[str], Tone]]:
    for label, lines in _facts(plan):
        yield label, list(lines), Tone.PLAIN
    for key, tone in (("notes", Tone.PLAIN), ("warnings", Tone.WARN), ("problems", Tone.BAD)):
        for line in plan.get(key) or ():
            yield key.removesuffix("s"), [line], tone
    if plan.get("measured"):
        yield "measured", [_measured(plan["measured"])], Tone.PLAIN


def _facts(plan: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[str]]]:
    time, memory = (plan.get(key) or {} for key in ("time_s", "memory_bytes"))
    download, date = plan.get("download_bytes"), plan.get("chat_template_date")
    yield "model", [_said(plan.get("model"))]
    yield "download", [f"{wording.size(download)} of weights, first"] if download else []
    yield "backend", _backend(plan)
    yield "quantization", [_said(plan.get("quant"))]
    yield "LoRA", _lora(plan)
    yield "objective", [_said(plan.get("objective"))]
    yield "tokenizer", [_said(plan.get("tokenizer"))]
    yield "date", [f"{date} in every prompt (tokenizer.date)"] if date else []
    yield "data", _data(plan.get("data") or {})
    yield "steps", _steps(plan)
    yield "time", _time(time)
    yield "memory", _memory(memory)
    yield "kernels", _kernels(plan.get("kernels") or {})
    compiled = plan.get("compile") or {}
    is_compiled = compiled.get("layers") == "compiled"
    yield "compile", [f"decoder layers: {compiled['reason']}"] if is_compiled else []
    yield "processes", _processes(plan["processes"]) if plan.get("processes") else []
    yield "disk", _disk(plan["disk_bytes"]) if plan.get("disk_bytes") else []
    changed = _differences(plan.get("differs_from_default") or {})
    yield "not as usual", [changed] if changed else []
    digest = plan.get("contract_digest")
    yield "contract", [digest[:12]] if digest else []


def _said(value: Any) -> str:
    return wording.as_text(value) if value is not None else "none"


def _processes(shared: Mapping[str, Any]) -> Iterator[str]:
    """Describe how processes share the work, and the strategy that fits the devices."""
    machines = shared["processes"] // shared["on_each_machine"]
    where = f" on {machines} machines" if machines > 1 else ""
    yield f"{shared['processes']}{where}, {shared['strategy']}"
    if shared["device_bytes"] is None:
        yield "whether they fit is unknown: no device says what it holds"
        return
    for strategy, fits in shared["fits"].items():
        yield f"{strategy} {_ANSWERS[fits]} in {wording.size(shared['device_bytes'])}"


def _backend(plan: Mapping[str, Any]) -> Iterator[str]:
    parts = [_said(plan.get("backend"))]
    parts += [f"graph {plan['graph_id']}"] if plan.get("graph_id") else []
    layers, proxy = plan.get("layers"), plan.get("proxy") or {}
    parts += [] if layers is None else [f"{wording.count(layers)} layers"]
    yield ", ".join(parts)
    if proxy.get("expected") is not None:
        matched = proxy.get("matched")
        known = f"{proxy['expected']}" if matched is None else f"{matched} of {proxy['expected']}"
        yield f"{known} middle projections"


def _differences(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Format settings as typed, each with our default.

    Settings that only the chosen option has are omitted, because other lines name the option.
    """
    return ", ".join(
        f"{path}={wording.typed(one['found'])} ({wording.typed(one['default'])})"
        for path, one in found.items()
        if "default" in one and not path.startswith(_SAID) and not path.endswith(_NAMES)
    )


def _kernels(found: Mapping[str, str]) -> Iterator[str]:
    """Name the kernels of a step, unless all are torch's."""
    if all(library.startswith("torch") for library in found.values()):
        return
    for library in dict.fromkeys(found.values()):
        parts = ", ".join(part for part, one in found.items() if one == library)
        yield f"{parts}: {library}"


def _lora(plan: Mapping[str, Any]) -> Iterator[str]:
    yield _said(plan.get("lora"))
    yield from [str(plan["lora_modules"])] if plan.get("lora_modules") else []
    trainable = plan.get("trainable_parameters")
    yield from [] if trainable is None else [f"{wording.count(trainable)} trainable parameters"]


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    about = "" if data.get("exact") else "≈ "
    yield _said(data.get("source"))
    for path, file in (data.get("files") or {}).items():
        yield f"{path}: {_file(file)}"
    yield from [_quarantined(data["quarantined"])] if data.get("quarantined") else []
    yield from [_filtered(data["filtered"])] if data.get("filtered") else []
    for name, drawn in ((data.get("mixed") or {}).get("sources") or {}).items():
        rows = f"{wording.count(drawn['rows'])} rows drawn of {wording.count(drawn['of'])}"
        yield f"{name}: {rows}, {drawn['share']:.2%} ({drawn['share_asked']:.2%} asked)"
    for key, words in (
        ("train_rows", "rows to train on"),
        ("train_tokens", "tokens in them"),
        ("val_tokens", "tokens to validate on"),
    ):
        if data.get(key) is not None:
            yield f"{about}{wording.count(data[key])} {words}"
    if data.get("shared_frac"):
        yield f"≈ {data['shared_frac']:.0%} of the tokens left out: pairs have their prompt once"
    if contract := data.get("contract"):
        for one in sections.token_cells(contract["tokens"], contract["unknown"]):
            yield f"{one.label}: {one.text or one.absent}"
    yield from _basis(data) if about else []


def _basis(values: Mapping[str, Any]) -> list[str]:
    return [str(values["basis"])] if values.get("basis") else []


def _quarantined(counts: Mapping[str, Any]) -> str:
    reasons = "; ".join(f"{why} ({n})" for why, n in counts["reasons"].items())
    put = f"{wording.count(counts['bad'])} of {wording.count(counts['rows'])} rows quarantined"
    return f"{put}: {reasons}" if reasons else put


def _filtered(counts: Mapping[str, Any]) -> str:
    gone = ", ".join(f"{name} refused {wording.count(n)}" for name, n in counts["refused"].items())
    return f"{wording.count(counts['kept'])} of {wording.count(counts['rows'])} rows pass: {gone}"


def _file(file: Mapping[str, Any]) -> str:
    """Describe the detected format of a file of rows, and its ignored columns."""
    rows = f"{wording.count(file['rows'])} {file['form']} rows"
    to_validate = " to validate on" if file["role"] == "validation" else ""
    left = ", ".join(file.get("ignored") or ())
    return f"{rows}{to_validate}{f'; columns left out: {left}' if left else ''}"


def _steps(plan: Mapping[str, Any]) -> Iterator[str]:
    by_epochs = plan.get("bound") == "trainer.max_epochs"
    counted = (plan.get("data") or {}).get("train_blocks") is not None
    about = "≈ " if by_epochs and not counted else ""
    yield _tokens(plan, about, is_exact=counted and by_epochs)
    if (epochs := plan.get("epochs")) is not None:
        bound = f", bounded by {plan['bound']}" if plan.get("bound") else ""
        yield f"{'' if counted or by_epochs else '≈ '}{wording.epochs(epochs)}{bound}"
    more = [
        f"{words} {about if key != 'effective_batch' else ''}{wording.count(plan[key])}"
        for key, words in (
            ("effective_batch", "effective batch"),
            ("warmup_steps", "warm-up"),
            ("checkpoints", "checkpoints"),
        )
        if plan.get(key) is not None
    ]
    yield from [", ".join(more)] if more else []


def _tokens(plan: Mapping[str, Any], about: str, *, is_exact: bool) -> str:
    """State the number of training tokens; steps are not full if blocks have room left."""
    steps, tokens, total = (plan.get(k) for k in ("steps", "tokens_per_step", "tokens_total"))
    parts = [] if steps is None else [f"{about}{wording.count(steps)}"]
    is_full = steps is None or tokens is None or steps * tokens == total
    up_to = "" if is_full else "up to "
    parts += [] if tokens is None else [f"of {up_to}{wording.count(tokens)} tokens"]
    equals = "=" if is_exact or (is_full and not about) else "≈"
    parts += [] if total is None else [f"{equals} {wording.count(total)} tokens"]
    return " ".join(parts) if parts else "unknown"


def _time(values: Mapping[str, Any]) -> Iterator[str]:
    yield from _estimate(values, wording.duration)
    if values.get("quantization"):
        yield f"and {wording.duration(values['quantization'])} to quantize"
    if values.get("comparison"):
        first = wording.duration(values["comparison"])
        yield f"and {first} to compare it with transformers, the first time"
    if values.get("reference"):
        once = wording.duration(values["reference"])
        yield f"and {once} for log-likelihoods before training, if they are not in the cache"
    if values.get("estimate") is not None:
        yield "not counted: loading, and the answers of a suite"


def _disk(values: Mapping[str, Any]) -> Iterator[str]:
    kept = values["checkpoints_kept"]
    states = values["checkpoint"] * (kept + 1) if kept else 0  # plus the one being written
    adapter = values["adapter"] + values["peft"]
    records = values["in_run"] - states - adapter
    yield f"{wording.size(values['in_run'])} in the run directory, at most"
    yield (
        f"adapter in two formats {wording.size(adapter)}, checkpoints {wording.size(states)}, "
        f"telemetry and reports {wording.size(records)}"
    )
    if values.get("base"):
        yield f"{wording.size(values['base'])} for a copy of the base model"
    if values["merged"]:
        yield f"{wording.size(values['merged'])} for a merged model, if you make one"


def _estimate(values: Mapping[str, Any], spell: Callable[[float], str]) -> Iterator[str]:
    estimate, low, high = (values.get(key) for key in ("estimate", "low", "high"))
    text = "unknown" if estimate is None else f"≈ {spell(estimate)}"
    known = low is not None and high is not None
    yield f"{text} ({spell(low)} to {spell(high)})" if known else text  # type: ignore[arg-type]
    yield from _basis(values)


def _memory(values: Mapping[str, Any]) -> Iterator[str]:
    yield from _estimate(values, wording.size)
    if values.get("free") is not None:
        yield f"{wording.size(values['free'])} are free"
    parts = sections.components(values)
    shown = [part for part in parts if abs(part[1]) >= _SMALL * sum(size for _, size in parts)]
    rest = sum(size for _, size in parts) - sum(size for _, size in shown)
    for name, part in [*shown, *([("others", rest)] if rest else [])]:
        yield f"{wording.size(part):>10}  {wording.label(name)}"


def _measured(values: Mapping[str, Any]) -> str:
    parts = []
    if values.get("time_s") is not None:
        parts.append(wording.duration(values["time_s"]))
    if values.get("peak_bytes") is not None:
        parts.append(f"{wording.size(values['peak_bytes'])} at the peak")
    return ", ".join(parts) or "nothing"


_BOUND = "│"  # between tokens
_OPEN, _CLOSE = "⟦", "⟧"  # around supervised tokens
_NEWLINE, _TAB, _SPACE = "⏎\n", "⇥", "·"
_TRAINED, _CONTROL, _QUIET = "cyan underline", "bold magenta", "dim"
_WINDOW = 8  # tokens of context for decoders that look back
_MOST_PARTS = 8  # a character has at most four bytes; a decoder that never settles stops here


class Speller(Protocol):
    """The part of the tokenizer interface that this view needs."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, including control tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDocument:
    """One document of a row.

    Attributes:
        title: the row's name, and the number of the document within it.
        ids: its token ids.
        supervised: mask of supervised tokens.
        cut: tokens lost to truncation.
    """

    title: str
    ids: Sequence[int]
    supervised: Sequence[bool]
    cut: int


def token_legend() -> Text:
    """Return the legend of `shown_document`."""
    text = Text("Rows as they are trained: ")
    text.append(f"{_OPEN}trained{_CLOSE}", style=_TRAINED)
    text.append("  read only  ")
    text.append("<control token>", style=_CONTROL)
    text.append(f"  {_BOUND} ends a token, {_SPACE} is a space at its edge, ⏎ a newline")
    return text


def shown_document(document: ShownDocument, speller: Speller) -> Text:
    """Draw a document.

    Args:
        document: the document.
        speller: its tokenizer.

    Returns:
        A line of counts, then each token between bars, with supervised tokens in brackets. Tokens
        that together form one character are joined, with their number.
    """
    learned = sum(document.supervised)
    text = Text()
    text.append(f"{document.title}: ", style="bold")
    text.append(f"{len(document.ids)} tokens, {learned} trained")
    if document.cut:
        text.append(f", {document.cut} cut off", style="yellow")
    text.append("\n")
    inside = False
    control = speller.special_ids
    for start, end, piece in _pieces(document.ids, document.supervised, speller):
        is_learned = bool(document.supervised[start])
        if is_learned is not inside:
            text.append(_CLOSE if inside else _OPEN, style=_TRAINED)
        elif start:
            text.append(_BOUND, style=_QUIET)
        inside = is_learned
        text.append_text(
            _cell(piece, end - start, learned=is_learned, control=document.ids[start] in control)
        )
    if inside:
        text.append(_CLOSE, style=_TRAINED)
    return text.append("\n")


def dropped_row(title: str, documents: int, seq_len: int) -> Text:
    """State that a row, or some of its documents, are not used for training."""
    what = "a document of it is" if documents == 1 else f"{documents} documents of it are"
    text = Text()
    text.append(f"{title}: ", style="bold")
    text.append(f"{what} dropped: nothing learned is within {seq_len} tokens", style="yellow")
    return text.append("\n")


def _cell(piece: str, tokens: int, *, learned: bool, control: bool) -> Text:
    style = " ".join([_TRAINED] * learned + [_CONTROL] * control)
    cell = Text(_visible(piece), style=style)
    if tokens > 1:
        cell.append(f"‥{tokens}", style=_QUIET)
    return cell


def _visible(piece: str) -> str:
    """Make white space at a token's edges, and invisible characters, visible."""
    body = piece.strip(" ")
    if not body:
        return _SPACE * len(piece)
    before = len(piece) - len(piece.lstrip(" "))
    after = len(piece) - len(piece.rstrip(" "))
    shown_body = "".join(map(_character, body))
    return f"{_SPACE * before}{shown_body}{_SPACE * after}"


def _character(character: str) -> str:
    if character == "\n":
        return _NEWLINE
    if character == "\t":
        return _TAB
    if character.isprintable():
        return character
    return ascii(character)[1:-1]


def _pieces(
    ids: Sequence[int], supervised: Sequence[bool], speller: Speller
) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and text of each token, or of tokens that form text only together."""
    start = 0
    for end in range(1, len(ids) + 1):
        before = list(ids[max(0, start - _WINDOW) : start])
        context = speller.spell(before)
        text = speller.spell([*before, *ids[start:end]])
        is_settled = text.startswith(context) and len(text) > len(context)
        is_whole = is_settled and not text.endswith("\ufffd")
        parts = end < len(ids) and supervised[end] == supervised[start]
        if is_whole or end - start == _MOST_PARTS or not parts:
            yield start, end, text.removeprefix(context)
            start = end


class State(StrEnum):
    """The meaning of a finding for a run."""

    GOOD = "good"
    NOTE = "note"  # a limitation
    BAD = "bad"  # prevents something


_TONES = {State.GOOD: Tone.GOOD, State.NOTE: Tone.WARN, State.BAD: Tone.BAD}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check, and the remedy if it did not pass."""

    name: str
    state: State
    found: str
    remedy: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the finding as a JSON object."""
        return {
            "name": self.name,
            "state": self.state.value,
            "found": self.found,
            "remedy": self.remedy,
        }


def findings_part(findings: Iterable[Finding]) -> Facts:
    """Return each finding with its mark and its remedy."""
    return Facts(
        [
            Cell(
                one.found + (f"\nNext: {one.remedy}" if one.remedy is not None else ""),
                label=f"{MARKS[_TONES[one.state]]} {one.name}",
                tone=_TONES[one.state] if one.state is not State.GOOD else Tone.PLAIN,
            )
            for one in findings
        ]
    )
