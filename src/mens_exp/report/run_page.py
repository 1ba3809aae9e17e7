"""The report of one run: a summary, its curves, the models' answers, and everything recorded.

The summary states whether the run learned something, whether to trust it, its cost, and the next
commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.suite import title_of
from mens_exp.report import attribution_view, sections, summary, wording
from mens_exp.report.document import (
    Cell,
    Code,
    Document,
    Facts,
    Item,
    Note,
    Part,
    Section,
    Step,
    Table,
    Tally,
    Tone,
    bullets,
    next_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from mens_exp.artifacts.attribution import Attribution
    from mens_exp.report.summary import Records

_CONDITIONS = ("base", "tuned")
_OPEN_ITEMS = 3  # completions initially expanded
_MOST_ITEMS = 100  # more would make a page of megabytes; the rest is in events.jsonl
_NOT_DRAWN = {"plan", "attribute", "compare", "promote", "rejection_sampling"}
_TRAINS_NOTHING = {"evaluate", "plan"}


def document(records: Records) -> Document:
    """Return the report of a run; missing results are shown as absent, with the reason.

    Args:
        records: the records of a run of any task.
    """
    manifest, found = records.manifest, records.attribution
    parts: list[Part] = [*_error(records)]
    if found is not None:
        parts += [*attribution_view.sections(found), next_steps(steps(records))]
        headline = attribution_view.headline(found)
    elif rounds := manifest.facts.get("rounds"):
        stopped = manifest.results.get("stopped")
        parts += [sections.rounds(rounds, stopped), next_steps(steps(records))]
        headline = f"Rounds of rejection sampling: {len(rounds)}."
    else:
        parts += [*sections.lr_range(records), questions(records), results(records)]
        parts += [*_training(records), answers(records)]
        parts.append(sections.planned(records))
        headline = summary.headline(records)
    parts += [
        Section("", [sections.ran(records), sections.went_in(records)], side_by_side=True),
        *sections.data_contract(records),
        *sections.notes(records),
        sections.record(records),
    ]
    return Document(
        title=_title(records),
        kind=f"report of task={manifest.task}",
        status=records.status,
        headline=headline if records.status == "succeeded" else summary.headline(records),
        command=summary.command(records),
        meta=list(_meta(records)),
        parts=parts,
        source="the JSON next to this file",
        steps=steps(records),
    )


def _title(records: Records) -> str:
    manifest = records.manifest
    model = str(manifest.inputs.get("base_model") or "").rsplit("/", 1)[-1]
    return manifest.experiment or (f"{manifest.task} · {model}" if model else manifest.run_id)


def _meta(records: Records) -> Iterator[Cell]:
    m = records.manifest
    yield Cell(m.run_id, label="Run", code=True)
    yield from [Cell(m.experiment, label="Experiment")] if m.experiment else []
    yield Cell(wording.moment(m.started_utc), label="Started")
    ended = wording.moment(m.ended_utc) if m.ended_utc else ""
    yield Cell(ended, label="Ended", absent="" if ended else "no end recorded")
    yield Cell(str(m.seed), label="Seed")
    commit = str(m.provenance.get("commit") or "")[:12]
    dirty = "with uncommitted changes" if commit and m.provenance.get("dirty") else ""
    why = "" if commit else m.unknown.get("provenance.commit", "not recorded")
    yield Cell(commit, label="Commit", code=True, detail=dirty, absent=why)
    if m.contract:
        yield Cell(m.contract["digest"][:12], label="Contract", code=True)
    yield Cell(m.config_digest[:12], label="Config", code=True)


def _error(records: Records) -> Iterator[Part]:
    error = records.manifest.error
    if error is None:
        return
    parts: list[Part] = [Code(str(error.get("message") or "no message was recorded"))]
    parts += [Note(f"Next: {error['remedy']}")] if error.get("remedy") else []
    yield Section(str(error.get("type") or "Error"), parts, name="error", tone=Tone.BAD)


def questions(records: Records) -> Section:
    """Return the summary."""
    is_over = records.status != "started"
    asked = [_learned(records), _trust(records), _cost(records)] if is_over else []
    return Section("", [*asked, next_steps(steps(records))], name="questions", side_by_side=True)


def _learned(records: Records) -> Section:
    title = "Is it better?" if records.manifest.task in _TRAINS_NOTHING else "Did it learn?"
    if records.status != "succeeded":
        text = f"Unknown: the run {'failed' if records.status == 'failed' else 'was cancelled'}."
        return Section(title, [Note(text)], tone=Tone.BAD)
    if records.manifest.results.get("lr_range") is not None:
        return Section(title, [Note("Not asked: the adapter of a range test is of no use.")])
    known = [pair for pair in summary.pairs(records) if pair.change]
    if not known:
        return Section(title, [Note("Unknown: nothing was measured of both models.")])
    tones = frozenset(pair.tone for pair in known)
    tone, said = {
        frozenset({Tone.GOOD}): (Tone.GOOD, "Yes"),
        frozenset({Tone.BAD}): (Tone.BAD, "No, it got worse"),
        frozenset({Tone.QUIET}): (Tone.WARN, "No, nothing changed"),
    }.get(tones, (Tone.WARN, "In part"))
    changes = "; ".join(f"{_lower(pair.label)} {pair.change}" for pair in known)
    return Section(title, [Note(f"{said}: {changes}."), *_shortened(records)], tone=tone)


def _shortened(records: Records) -> Iterator[Note]:
    """Yield a note if training ended before its last planned step."""
    planned = (records.plan or {}).get("steps")
    done = records.manifest.results.get("steps")
    if isinstance(planned, int) and isinstance(done, int) and done < planned:
        yield Note(f"Training ended after step {done:,} of {planned:,}.", Tone.WARN)


def _lower(label: str) -> str:
    return label[0].lower() + label[1:]


def _trust(records: Records) -> Section:
    """State what was checked in this run, and what is unknown."""
    held, doubts, refused = _checks(records)
    doubts = [*doubts, "One run with one seed: no difference on this page carries an interval."]
    tone = Tone.BAD if refused else Tone.WARN
    said = "No." if refused else "As far as it goes:"
    parts = [
        Note(said),
        *bullets(refused, Tone.BAD),
        *bullets(held, Tone.GOOD),
        *bullets(doubts, Tone.WARN),
    ]
    return Section("Can I trust it?", parts, tone=tone)


def _checks(records: Records) -> tuple[list[str], list[str], list[str]]:
    """Return the checks that passed, the warnings and the refusals."""
    m, held, doubts = records.manifest, [], []
    contract = m.data_contract
    refused = list(contract["violations"]) if contract else []
    if contract and not refused:
        probe = contract["probe"]
        reference = (probe or {}).get("reference")
        held.append("The data contract holds.")
        if reference:
            off = max(reference["loss"], reference["gradient"])
            held.append(
                f"Loss and gradient of a batch are those of transformers, to {off:.0e}.".replace(
                    "-", "−"
                )
            )
    if m.inputs.get("base_source") == "random":
        doubts.append("The base model has random weights: this run tries the machinery only.")
    if m.inputs.get("base_source") == "bundled":
        doubts.append("The base model is a 4-bit demonstration file.")
    if warning := summary.unsafe(records):
        doubts.append(warning)
    if m.provenance.get("dirty"):
        doubts.append("The code had uncommitted changes; their digest is recorded.")
    if len(m.attempts) > 1:
        doubts.append(f"It was resumed: {len(m.attempts)} attempts are listed under Notes.")
    return held, doubts, refused


def _cost(records: Records) -> Section:
    cells = summary.cost(records)
    known = [cell for cell in cells if cell.text]
    parts: list[Part] = [Facts(known or cells[-1:])]
    time, memory = ((records.plan or {}).get(key) or {} for key in ("time_s", "memory_bytes"))
    said = [
        spell(values["estimate"])
        for spell, values in ((wording.duration, time), (wording.size, memory))
        if values.get("estimate") is not None
    ]
    if said and records.manifest.task == "train":
        parts.append(Note(f"The plan said {' of training and '.join(said)}.", Tone.QUIET))
    return Section("What did it cost?", parts)


def steps(records: Records) -> list[Step]:
    """Return the next commands."""
    m, place = records.manifest, records.place
    if records.status != "succeeded":
        again = Step(
            wording.command(f"resume={place}"),
            "continue from its last checkpoint, once the cause is fixed",
        )
        return [again] if m.task == "train" and any(records.payloads("step")) else []
    if m.task == "evaluate":
        command = wording.command("task=compare", ("path", place))
        return [Step(command, "compare base and tuned model item by item")]
    if records.attribution is not None:
        return list(_after_attribution(m.overrides, records.attribution))
    if m.facts.get("rounds"):
        last = wording.path(Path(m.facts["rounds"][-1]["train"]))
        command = wording.command("task=chat", ("path", last))
        return [Step(command, "ask base and last model something")]
    return _after_training(records) if m.task == "train" else []


def _after_attribution(typed: Sequence[str], found: Attribution) -> Iterator[Step]:
    suggested = found.suggestion["overrides"]
    *_, targets = suggested
    choices = {"train with the suggested settings": suggested}
    mixture = found.suggestion.get("mixture")
    if mixture is not None and mixture["overrides"]:
        choices = {"train on the suggested mixture": [*mixture["overrides"], targets], **choices}
    if (ranks := found.suggestion.get("ranks")) is not None:
        choices["train with the suggested ranks"] = ranks["overrides"]
    for why, chosen in choices.items():
        keys = {text.partition("=")[0] for text in chosen}
        kept = [
            text
            for text in typed
            if not text.startswith(("task=", "attribute.", "hydra."))
            and text.partition("=")[0] not in keys
        ]
        yield Step(wording.command(*kept, *chosen), why)


def _after_training(records: Records) -> list[Step]:
    m, place = records.manifest, records.place
    if (tested := m.results.get("lr_range")) is not None:
        return [*_after_range_test(m.overrides, tested)]
    if m.inputs.get("base_source") == "random":
        rows = [text for text in m.overrides if text.startswith(("data=", "data."))]
        return [Step(wording.command(*rows), "fine-tune a real model")]
    kept = [text for text in m.overrides if not text.startswith(("seed=", "hydra."))]
    seeds = Step(
        wording.command("-m", "seed=1,2,3", *kept), "see whether the difference is more than chance"
    )
    if m.facts.get("artifact", "adapter and PEFT view") != "adapter and PEFT view":
        return [seeds]
    return [
        Step(wording.command("task=chat", ("path", place)), "ask both models something"),
        seeds,
        Step(
            wording.command("task=merge", ("path", place), "out=merged"),
            "make one model of base and adapter",
        ),
    ]


def _after_range_test(typed: Sequence[str], found: Mapping[str, Any]) -> Iterator[Step]:
    kept = [text for text in typed if not text.startswith(("schedule", "optim.lr=", "hydra."))]
    if found["proposed"] is not None:
        rate = f"optim.lr={found['proposed']:.2g}"
        yield Step(wording.command(*kept, rate), "train at the proposed rate")


def results(records: Records, *, notes: bool = True) -> Section:
    """Return base and tuned results side by side, with notes on the differences."""
    rows = [
        (
            Cell(pair.label, detail=pair.unit),
            pair.base,
            pair.tuned,
            summary.change_cell(pair, note=pair.note if notes else ""),
        )
        for pair in summary.pairs(records)
    ]
    warning = summary.unsafe(records)
    said = [Note(warning, Tone.WARN)] if warning else []
    table = Table(("", *_CONDITIONS, "change"), rows, cards=True)
    return Section("Result", [table, *said], name="results")


def _training(records: Records) -> Iterator[Section]:
    """Draw the telemetry; skipped for tasks without it, since importing matplotlib takes 1 s."""
    if records.manifest.task in _NOT_DRAWN:
        return
    from mens_exp.report import plots

    parts: list[Part] = [*plots.draw(records), *plots.draw_kpis(records), *plots.draw_own(records)]
    parts += [*sections.own_metrics(records), *sections.media(records)]
    yield Section("Training", parts)


def answers(records: Records) -> Section:
    """Return the answers of both models to the same prompts."""
    found = summary.items(records)
    parts: list[Part] = []
    is_noise = records.manifest.inputs.get("base_source") == "random"
    if is_noise and found:
        note = "The base model has random weights, so its answers are noise."
        parts.append(Note(note, Tone.QUIET))
    elif not found:
        parts.append(Note(_no_items(records), Tone.QUIET))
    parts += _crossed(records)
    parts += [
        Item(
            name=item.name,
            prompt=item.prompt,
            answers=item.answers,
            reference=item.reference,
            is_open=number < _OPEN_ITEMS and not is_noise,
        )
        for number, item in enumerate(found[:_MOST_ITEMS])
    ]
    if len(found) > _MOST_ITEMS:
        parts.append(
            Note(f"{len(found) - _MOST_ITEMS} more items are in events.jsonl.", Tone.QUIET)
        )
    lead = ""
    if records.samples is not None and found:
        lead = "Answers to held-out rows, always the likeliest token. Nobody has scored them."
    parts += _scores(records)
    return Section(_answers_title(records), parts, name="answers", lead=lead)


def outcome(records: Records, *, most: int) -> list[Part]:
    """Return the summary for a terminal: the first answers, the result and its meaning."""
    section = answers(records)
    is_noise = records.manifest.inputs.get("base_source") == "random"
    found = [] if is_noise else [part for part in section.parts if isinstance(part, Item)][:most]
    shown = [Section(section.title, found, lead=section.lead)] if found else []
    tested = [*sections.lr_range(records)]
    return [*shown, *tested, results(records, notes=False), *questions(records).parts[:-1]]


def _answers_title(records: Records) -> str:
    if records.samples is not None:
        return "What the models say now"
    return title_of(None if records.scorecard is None else records.scorecard.suite)


def _no_items(records: Records) -> str:
    if not summary.expects_answers(records):
        return "This run evaluated no held-out items."
    return "The run ended before any held-out item was completed."


def _crossed(records: Records) -> list[Tally]:
    """Cross-tabulate base and tuned outcomes of items for which both are known."""
    both: dict[str, dict[str, summary.Outcome]] = {}
    for event in records.items:
        outcome = summary.outcome_of(event)
        both.setdefault(event["item_id"], {}).setdefault(event["condition"], outcome)
    pairs = [tuple(map(one.get, _CONDITIONS)) for one in both.values() if {*_CONDITIONS} <= {*one}]
    known = [
        (base.tone is Tone.GOOD, tuned.tone is Tone.GOOD)
        for base, tuned in pairs
        if base and tuned and Tone.QUIET not in (base.tone, tuned.tone)
    ]
    if not known:
        return []
    verb = next(iter(next(iter(both.values())).values())).verb
    does = f"{verb}es" if verb.endswith("s") else f"{verb}s"
    counts = [
        ("both", f"both {verb}", known.count((True, True))),
        ("tuned", f"only tuned {does}", known.count((False, True))),
        ("base", f"only base {does}", known.count((True, False))),
        ("neither", f"neither {does}", known.count((False, False))),
    ]
    unknown = len(pairs) - len(known)
    return [Tally([*counts, *([("unknown", "unknown", unknown)] if unknown else [])])]


def _scores(records: Records) -> list[Part]:
    card = records.scorecard
    if card is None:
        return []
    conditions = list(card.conditions)
    every = [(key, values[key]) for values in card.conditions.values() for key in values]
    # The reasons for null values are listed under what is unknown.
    keys = sections.ordered(key for key, value in every if value is not None or key == "parse_rate")
    rows = [
        (
            wording.label(key),
            *(wording.as_text(card.conditions[c].get(key), key) or "unknown" for c in conditions),
        )
        for key in keys
    ]
    ran = f" · programs ran in sandbox={card.sandbox}" if card.sandbox else ""
    about = f"{card.items} items · suite {card.suite} {card.suite_digest[:12]}{ran}"
    return [Table(("KPI", *conditions), rows, title="Scorecard"), Note(about, Tone.QUIET)]
