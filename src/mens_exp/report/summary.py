"""The records of a run, read once, and its headline readings: base next to tuned, and the cost.

Every renderer takes its numbers from here, so that a report, a card and a terminal can never
disagree.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.record import parse_json
from mens_exp.artifacts.scorecard import ItemEvent, Scorecard, read_item_events
from mens_exp.artifacts.telemetry import Event, read_events
from mens_exp.config.suite import SUITES, title_of
from mens_exp.errors import DataError
from mens_exp.report import wording

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir

_NOT_REACHED = {
    "failed": "not reached: the run failed",
    "cancelled": "not reached: the run was cancelled",
    "started": "not reached so far",
    "succeeded": "not recorded",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """The records that a run left; a part that it never reached is empty or None.

    Attributes:
        manifest: identity, inputs, facts, results and status of the run.
        events: the telemetry, one mapping an event, in the order they were written.
        scorecard: the KPIs, None when the run was not evaluated.
        items: one mapping per evaluated item and condition.
        plan: the execution plan, None when the run failed before it was made.
        config: the composed configuration as YAML text, None when there is none.
        attribution: what quantizing the base costs, None when it was not measured.
    """

    manifest: Manifest
    events: tuple[Event, ...] = ()
    scorecard: Scorecard | None = None
    items: tuple[ItemEvent, ...] = ()
    plan: dict[str, Any] | None = None
    config: str | None = None
    attribution: Attribution | None = None

    @property
    def status(self) -> str:
        """The run's status as a plain word."""
        return str(self.manifest.status)

    def payloads(self, event: str) -> list[dict[str, Any]]:
        """Payloads of every telemetry event of one kind, oldest first."""
        return [record["payload"] for record in self.events if record["event"] == event]

    def why_absent(self, dotted: str) -> str:
        """Say why a field of the manifest or scorecard holds no value.

        Args:
            dotted: the field, as ``results.peak_cuda_bytes`` or ``conditions.base.parse_rate``.

        Returns:
            The recorded reason, or what the run's status says about it.
        """
        for unknown in (self.manifest.unknown, self.scorecard.unknown if self.scorecard else {}):
            if dotted in unknown:
                return unknown[dotted]
        return _NOT_REACHED.get(self.status, "not recorded")


def load(run: RunDir) -> Records:
    """Read a run directory.

    Args:
        run: the directory; only its manifest has to be there.

    Raises:
        MensError: the manifest is missing, or a record is damaged or of a newer version.
    """
    return Records(
        manifest=Manifest.read(run.manifest),
        events=tuple(read_events(run.telemetry)) if run.telemetry.is_file() else (),
        scorecard=Scorecard.read(run.scorecard) if run.scorecard.is_file() else None,
        items=tuple(read_item_events(run.events)) if run.events.is_file() else (),
        plan=_read_plan(run.plan) if run.plan.is_file() else None,
        config=run.config.read_text(encoding="utf-8") if run.config.is_file() else None,
        attribution=Attribution.read(run.attribution) if run.attribution.is_file() else None,
    )


def _read_plan(path: Path) -> dict[str, Any]:
    plan = parse_json(path.read_bytes(), str(path))
    if not isinstance(plan, dict):
        raise DataError(
            "the plan is no object",
            where=str(path),
            found=type(plan).__name__,
            expected="an object",
            remedy="delete the file; the report is rendered without it",
        )
    return plan


Verdict: TypeAlias = Literal["better", "worse", "same", "unknown"]
_CONDITIONS = ("base", "tuned")
_UNKNOWN: Verdict = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One value as text, or the reason why there is none.

    Attributes:
        label: what it is, in words.
        text: the value; empty when there is none.
        absent: why there is no value; empty when there is one.
        detail: a second, quieter line.
        code: the text is a digest, a path or a version, better in monospace.
    """

    label: str
    text: str = ""
    absent: str = ""
    detail: str = ""
    code: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A KPI, base next to tuned.

    Attributes:
        label: the KPI's name.
        unit: its unit, empty for a share.
        base: the base model's value.
        tuned: the tuned model's value.
        change: the difference in words, empty unless both values are known.
        verdict: whether the tuned value is better in the metric's direction.
        note: what the reader has to know to weigh it.
    """

    label: str
    unit: str
    base: Cell
    tuned: Cell
    change: str = ""
    verdict: Verdict = "unknown"
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One evaluated prompt with its completions.

    Attributes:
        item_id: the suite's name for it.
        prompt: what both models were given.
        reference: the data's own answer.
        completions: the item event of each condition that completed it.
    """

    item_id: str
    prompt: str
    reference: str
    completions: dict[str, ItemEvent]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Base and tuned, or the conditions of a suite that brings models of its own."""
        own = self.completions.keys() - set(_CONDITIONS)
        return tuple(self.completions) if own else _CONDITIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of an answer.

    Attributes:
        good: whether it does the task or, where nothing was run, parses; None where unknown.
        words: the same in words.
        words_of_good: what a good one does, of one answer and of several.
    """

    good: bool | None
    words: str
    words_of_good: tuple[str, str]


def outcome_of(event: ItemEvent) -> Outcome:
    """Return the strongest known outcome of an answer: solves the task, or parses."""
    success, parses = event["task_success"], event["parses"]
    if success is not None:
        words = "passes" if success else event["outcome"] or "does not pass"
        good = ("passes", "pass")
        return Outcome(good=success, words=words.replace("_", " "), words_of_good=good)
    said = "answered" if parses is None else "parses" if parses else "does not parse"
    return Outcome(good=parses, words=said, words_of_good=("parses", "parse"))


def val_loss(records: Records) -> Pair:
    """Validation loss in nats per token; lower is better.

    A run that ended before its results were written is read from telemetry.
    """
    base, tuned = (_val_loss(records, name) for name in _CONDITIONS)
    change, verdict = "", _UNKNOWN
    if base is not None and tuned is not None and base > 0:
        change, verdict = wording.percent(tuned / base - 1, signed=True), _verdict(base - tuned)
    return Pair(
        label="Validation loss",
        unit="nats per token",
        base=_loss_cell(records, "base", base),
        tuned=_loss_cell(records, "tuned", tuned),
        change=change,
        verdict=verdict,
        note="lower is better",
    )


def pairs(records: Records) -> list[Pair]:
    """Every figure that base and tuned both have.

    Bits a byte where the run could tell them, and shares of answers unless none was asked for.
    """
    found = [val_loss(records)]
    if records.manifest.results.get("val_text_bytes") is not None:
        found.append(_bits_per_byte(records))
    if records.scorecard is None and not expects_answers(records):
        return found
    return [*found, *_of_tasks(records), parse_rate(records)]


def expects_answers(records: Records) -> bool:
    """Tell whether a run without a scorecard may have one yet, or was to have one."""
    spec = SUITES.known(records.manifest.choices.get("suite") or "")
    return records.status != "succeeded" and (spec is None or spec.scores)


def _of_tasks(records: Records) -> list[Pair]:
    """Share of tasks done, where answers were run or compared; higher is better."""
    card = records.scorecard
    rates = [
        card.conditions.get(name, {}).get("task_success") if card else None for name in _CONDITIONS
    ]
    base, tuned = rates
    if card is None or (base is None and tuned is None):
        return []
    known = base is not None and tuned is not None
    gain = (tuned or 0) - (base or 0)
    cells = [
        Cell(label=name, text=wording.percent(rate))
        if rate is not None
        else Cell(label=name, absent=records.why_absent(f"conditions.{name}.task_success"))
        for name, rate in zip(_CONDITIONS, rates, strict=True)
    ]
    return [
        Pair(
            label=f"Tasks of {card.suite} done",
            unit="",
            base=cells[0],
            tuned=cells[1],
            change=wording.points(gain) if known else "",
            verdict=_verdict(gain) if known else _UNKNOWN,
            note=_worth(card),
        )
    ]


def _worth(card: Scorecard) -> str:
    return f"{card.items} items: each is worth {100 / card.items:.3g} points" if card.items else ""


def _bits_per_byte(records: Records) -> Pair:
    """Validation loss in bits per byte of text; lower is better, across tokenizers too."""
    results = records.manifest.results
    base, tuned = (results[f"{name}_val_bits_per_byte"] for name in _CONDITIONS)
    return Pair(
        label="Validation bits per byte",
        unit="",
        base=Cell(label="base", text=wording.loss(base)),
        tuned=Cell(label="tuned", text=wording.loss(tuned)),
        change=wording.percent(tuned / base - 1, signed=True) if base > 0 else "",
        verdict=_verdict(base - tuned),
        note="lower is better; comparable across tokenizers",
    )


def parse_rate(records: Records) -> Pair:
    """Share of held-out completions that parse; higher is better."""
    card = records.scorecard
    rates = [
        card.conditions.get(name, {}).get("parse_rate") if card else None for name in _CONDITIONS
    ]
    base, tuned = rates
    change, verdict = "", _UNKNOWN
    if base is not None and tuned is not None:
        change, verdict = wording.points(tuned - base), _verdict(tuned - base)
    return Pair(
        label=f"{title_of(None if card is None else card.suite)} that parse",
        unit="",
        base=_parse_cell(records, "base", base),
        tuned=_parse_cell(records, "tuned", tuned),
        change=change,
        verdict=verdict,
        note=_worth(card) if card else "",
    )


def peft_view(records: Records) -> str:
    """Describe the difference of the PEFT directory from the trained model, and rounding."""
    results, form = records.manifest.results, records.manifest.facts.get("compute_dtype")
    own, kernels = (results.get(f"peft_view_{name}") for name in ("difference", "kernels"))
    if own is None or kernels is None:
        return ""
    exact = results.get("peft_view_difference_f32")
    return (
        "Loaded with PEFT and transformers alone, adapter/peft has a loss that differs from the "
        f"trained model's by {own:.1e} in {wording.visible(str(form))}"
        + (f", and by {exact:.1e} in f32" if exact is not None and form != "float32" else "")
        + " (relative, on short validation documents). Two attention kernels of transformers "
        f"differ by {kernels:.1e} from each other there: rounding alone goes so far."
    )


def unsafe(records: Records) -> str:
    """Return a warning if programs ran without isolation."""
    if records.scorecard is None or records.scorecard.sandbox != "unsafe":
        return ""
    return "Programs ran without isolation (sandbox=unsafe): no evidence for a promotion."


def cost(records: Records) -> list[Cell]:
    """Throughput, peak memory, peak GPU memory and time, in this order."""
    results = records.manifest.results
    every = results.get("tokens_per_s")
    train_s = results.get("train_s")
    return [
        _result(
            records,
            "supervised_tokens_per_s",
            "Supervised tokens per second",
            f"{wording.rate(every)} counting every token" if every is not None else "",
        ),
        _result(records, "peak_rss_bytes", "Peak memory", "resident, the whole process"),
        _result(records, "peak_cuda_bytes", "Peak GPU memory", "allocated"),
        _result(
            records,
            "wall_s",
            "Wall time",
            f"{wording.duration(train_s)} of it training" if train_s is not None else "",
        ),
    ]


def headline(records: Records) -> str:
    """A one-sentence summary of the run's result."""
    loss = val_loss(records)
    if loss.base.text and loss.tuned.text and records.status == "succeeded":
        steps = records.manifest.results.get("steps")
        after = f"After {wording.count(steps)} steps the" if steps is not None else "The"
        return (
            f"{after} validation loss is {loss.tuned.text} {loss.unit}; "
            f"the base model's is {loss.base.text} ({loss.change})."
        )
    return {
        "succeeded": "The run succeeded; it measured no validation loss.",
        "failed": "The run failed; what follows is what it recorded until then.",
        "cancelled": "The run was cancelled; what follows is what it recorded until then.",
    }.get(
        records.status,
        "The run has not ended, or was killed; what follows is what it recorded so far.",
    )


def command(records: Records) -> str:
    """The command that starts this run again, quoted for a shell."""
    words = [wording.visible(word) for word in records.manifest.overrides]
    return shlex.join(["python", "-m", "mens_exp", *words])


def by_item(events: Sequence[ItemEvent]) -> list[Item]:
    """Put the conditions of each item side by side, in the order of first appearance."""
    items: dict[str, Item] = {}
    for event in events:
        item = items.setdefault(
            event["item_id"],
            Item(
                item_id=wording.visible(event["item_id"]),
                prompt=wording.visible(event["prompt"]),
                reference=wording.visible(event["reference"] or ""),
                completions={},
            ),
        )
        item.completions.setdefault(event["condition"], event)  # of samples, the first
    return list(items.values())


def _verdict(gain: float) -> Verdict:
    if gain == 0:
        return "same"
    return "better" if gain > 0 else "worse"


def _val_loss(records: Records, condition: str) -> float | None:
    recorded: float | None = records.manifest.results.get(f"{condition}_val_loss")
    if recorded is not None:
        return recorded
    seen = [p for p in records.payloads("validation") if p.get("condition") == condition]
    return seen[-1].get("val/loss") if seen else None


def _loss_cell(records: Records, condition: str, value: float | None) -> Cell:
    if value is None:
        return Cell(label=condition, absent=records.why_absent(f"results.{condition}_val_loss"))
    detail = _selected(records) if condition == "tuned" else ""
    return Cell(label=condition, text=wording.loss(value), detail=detail)


def _selected(records: Records) -> str:
    """Say which step the adapter is of, where it is not the last one."""
    step, steps = (records.manifest.results.get(name) for name in ("adapter_step", "steps"))
    if step is None or steps is None or step == steps:
        return ""
    return f"adapter of step {step} of {steps}"


def _parse_cell(records: Records, condition: str, value: float | None) -> Cell:
    card = records.scorecard
    if card is None:
        return Cell(label=condition, absent=records.why_absent("scorecard"))
    if value is None:
        return Cell(
            label=condition, absent=records.why_absent(f"conditions.{condition}.parse_rate")
        )
    parsed = card.conditions[condition].get("parsed")
    detail = f"{parsed} of {card.items}" if parsed is not None else ""
    return Cell(label=condition, text=wording.percent(value), detail=detail)


def _result(records: Records, key: str, label: str, detail: str) -> Cell:
    value = records.manifest.results.get(key)
    if value is None:
        return Cell(label=label, absent=records.why_absent(f"results.{key}"))
    return Cell(label=label, text=wording.as_text(value, key), detail=detail)
