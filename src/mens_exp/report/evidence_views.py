"""Inspections, certificates and decisions as documents."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.certificate import ArtifactKind, Link, Outcome
from mens_exp.artifacts.decision_ledger import Answer
from mens_exp.report import wording
from mens_exp.report.document import (
    MARKS,
    Cell,
    Document,
    Facts,
    Note,
    Section,
    Step,
    Table,
    Tone,
    bullets,
    markdown,
    next_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.certificate import (
        Ancestor,
        Certificate,
        Check,
        Comparison,
        Inspection,
        LayerRecord,
    )
    from mens_exp.artifacts.certificate import Replay as ReplayRecord
    from mens_exp.artifacts.decision_ledger import DecisionEntry, RuleRecord
    from mens_exp.report.document import Part

_SHORT = 12  # digits of a hash, enough to distinguish two by eye
_FIGURES = {
    "frobenius": "Frobenius",
    "spectral": "spectral",
    "effective_rank": "eff. rank",
    "stable_rank": "stable rank",
    "magnitude_change": "row lengths",
}
_SEVERITY = (Outcome.EQUAL, Outcome.CLOSE, Outcome.NOT_HERE, Outcome.DIFFERS)
_MARKS = {
    Outcome.EQUAL: ("=", Tone.GOOD),
    Outcome.CLOSE: ("≈", Tone.GOOD),
    Outcome.DIFFERS: ("≠", Tone.BAD),
    Outcome.NOT_HERE: ("-", Tone.QUIET),
}
_WORST = 5  # tensors shown


def inspection_document(found: Inspection) -> Document:
    """Return the findings of an inspection; for a verification, all mismatches."""
    parts: list[Part] = [Facts(list(_rows(found)))]
    if found.layers:
        parts += [
            Section("Layers", [_places(found.layers)]),
            Section("Deltas, scale · B A", [_sizes(found.layers)]),
        ]
    parts.append(Section("Lineage", [_lineage(found.lineage)]))
    inside: list[Part]
    if found.verification is not None:
        checks = found.verification["checks"]
        unequal = [one for one in checks if one["outcome"] != Outcome.EQUAL]
        title = f"Verified: {verification_verdict(checks)}"
        inside = [_chain(checks), _checks(unequal), *_unchecked(found.verification["unchecked"])]
        parts.append(Section(title, inside))
    if found.replay is not None:
        again = found.replay
        others = [f"other conditions: {one}" for one in again["conditions"]]
        inside = [_checks(again["checks"]), *bullets(others, Tone.WARN)]
        parts.append(Section(f"Replayed: {replay_verdict(again)}", inside))
    return Document(
        title=found.path,
        kind="inspection",
        parts=parts,
        source="inspection.json",
        steps=_after_inspection(found),
    )


def _unchecked(paths: Sequence[str]) -> list[Part]:
    names = sorted({path.rstrip("/").rpartition("/")[2] for path in paths})
    if not names:
        return []
    return [Note(f"Not checked, as no record states a hash: {', '.join(names)}.", Tone.QUIET)]


def _after_inspection(found: Inspection) -> list[Step]:
    path = ("path", found.path)
    if found.verification is None:
        command = wording.command("task=inspect", path, "inspect.verify=true")
        return [Step(command, "check every record against its files")]
    if found.kind != ArtifactKind.RUN:
        return []
    return [Step(wording.command("task=export", path), "pack it for a colleague")]


def verification_verdict(checks: Sequence[Check]) -> str:
    """Summarize in one line how many values match their records."""
    counts = dict.fromkeys(Outcome, 0)
    for check in checks:
        counts[Outcome(check["outcome"])] += 1
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)


def replay_verdict(replay: ReplayRecord) -> str:
    """State in one line how far a replay was identical."""
    if replay["first_difference"] is None:
        return f"identical through step {replay['identical_through']}"
    return f"first difference: {replay['first_difference']}"


def _rows(found: Inspection) -> Iterator[Cell]:
    for label, text in _named(found):
        yield Cell(text, label=label)


def _named(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "what", found.what
    base = found.base
    if base is not None:
        quant = base["base_quant"] or "quantization unknown"
        double = ", double quantized" if base["double_quant"] else ""
        revision = f" @ {base['revision']}" if base["revision"] else ""
        yield "base", f"{base['name'] or 'unknown'}{revision}, {quant}{double}"
        if base["weights_sha256"] is not None:
            yield "base sha256", base["weights_sha256"]
        if base["quantizer"] is not None:
            yield "quantizer", ", ".join(f"{k} {v}" for k, v in base["quantizer"].items())
    if found.layers:
        ranks = ", ".join(map(str, sorted({one["rank"] for one in found.layers.values()})))
        size = f"{len(found.layers)} layers, {found.parameters:,} parameters"
        yield "adapter", f"{found.variant or 'variant unknown'}, rank {ranks}, {size}"
    state = found.checkpoint
    if state is not None:
        optimizer = f"{state['optimizer_tensors']} tensors, {_mib(state['optimizer_bytes'])}"
        yield "state", f"step {state['step']}, {_mib(state['bytes'])}"
        yield "optimizer", optimizer if state["optimizer_tensors"] else "no state"
        yield "resumable", f"{'yes' if state['resumable'] else 'no'}: {state['why']}"
    if found.certificate is not None:
        yield "certificate", f"{found.certificate['evidence']}: {found.certificate['verdict']}"
        for one in found.certificate["comparisons"].values():
            figures = (
                f"mean KL {one['mean_kl']:.2g}, max KL {one['max_kl']:.2g}, same top-1 "
                f"{one['top1_agreement']:.2%}, NLL {one['nll_difference']:+.2g}"
            )
            yield "", f"{one['what']}: {figures}"
        for name, error in found.certificate["worst"].items():
            largest = f"largest relative error {error['relative']:.2g}, {name}"
            yield "", f"{found.certificate['tensors']} tensors, {largest}"
    for name, reason in found.unknown.items():
        yield "unknown", f"{name}: {reason}"


def _places(layers: dict[str, LayerRecord]) -> Table:
    rows = [
        (
            name,
            one["base_key"] or "-",
            f"{one['shape'][0]} × {one['shape'][1]}",
            str(one["rank"]),
            _number(one["scale"]),
        )
        for name, one in layers.items()
    ]
    heads = ("layer", "base key", "out × in", "rank", "scale")
    return Table(heads, rows)


def _sizes(layers: dict[str, LayerRecord]) -> Table:
    """Return the size of each layer's update; the magnitude column is for DoRA."""
    figures = dict(_FIGURES)
    if all(one["magnitude_change"] is None for one in layers.values()):
        del figures["magnitude_change"]
    rows = [
        (layer, *(_number(dict(one)[name]) for name in figures)) for layer, one in layers.items()
    ]
    return Table(("layer", *figures.values()), rows)


def _lineage(line: Sequence[Ancestor]) -> Facts:
    cells = []
    for number, one in enumerate(line):
        hashes = ", ".join(f"{name} {text[:_SHORT]}" for name, text in one["hashes"].items())
        note = "; ".join(part for part in (hashes, one["missing"]) if part)
        label = f"{'→ ' if number else ''}{one['role']}"
        cells.append(Cell(one["name"], label=label, detail=note))
    return Facts(cells)


def _chain(checks: Sequence[Check]) -> Table:
    """Count the outcomes of each link in the chain of evidence, in order."""
    rows = []
    for link in Link:
        own = [check for check in checks if check["link"] == link]
        if own:
            worst = max((Outcome(check["outcome"]) for check in own), key=_SEVERITY.index)
            mark, tone = _MARKS[worst]
            records = str(len({check["of"] for check in own}))
            rows.append((Cell(f"{mark} {link}", tone=tone), records, verification_verdict(own)))
    return Table(("link", "records", "values"), rows)


def _checks(checks: Sequence[Check]) -> Table:
    rows = []
    records = {check["of"] for check in checks}
    for check in sorted(checks, key=lambda one: one["outcome"] != Outcome.DIFFERS):
        outcome = Outcome(check["outcome"])
        mark, tone = _MARKS[outcome]
        step = "" if check["step"] is None else f"step {check['step']}: "
        step += f"{check['of']}: " if check["of"] and len(records) > 1 else ""
        found = check["note"] if outcome == Outcome.NOT_HERE else str(check["found"])
        whole = outcome not in {Outcome.NOT_HERE, Outcome.EQUAL}
        rows.append(
            (
                Cell(f"{mark} {step}{check['name']}", tone=tone),
                _short(check["recorded"], whole=whole),
                "same" if outcome == Outcome.EQUAL else found or "",
            )
        )
    heads = ("value", "recorded", "found")
    return Table(heads, rows)


def _short(value: object, *, whole: bool) -> str:
    text = "null" if value is None else str(value)
    return text if whole or len(text) <= 2 * _SHORT else f"{text[:_SHORT]}…"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


_OTHERS = " The row marked ← is the written model; the others show other ways to merge it."


def certificate_document(certificate: Certificate) -> Document:
    """Return all comparisons of a certificate side by side, and mark the deciding one."""
    said = verdict(certificate)
    parts: list[Part] = []
    if certificate.probe is not None:
        parts.append(
            Note(
                f"Compared on {certificate.probe['tokens']} tokens "
                f"({certificate.probe['source']}) with {certificate.reference}; KL and NLL in nats."
                + (_OTHERS if len(certificate.comparisons) > 1 else "")
            )
        )
    elif certificate.comparisons:
        parts.append(Note(f"Compared with {certificate.reference}."))
    rows = [
        (f"{one['what']}{' ←' if name == certificate.judged else ''}", *_compared(one))
        for name, one in sorted(
            certificate.comparisons.items(), key=lambda item: item[0] != certificate.judged
        )
    ]
    heads = ("graph", "mean KL", "max KL", "same top-1", "NLL", "worst layer")
    parts.append(Table(heads, rows))
    parts += _tensor_errors(certificate)
    parts += bullets(
        (f"{name}: not compared, {why}" for name, why in certificate.unknown.items()), Tone.QUIET
    )
    tone = Tone.GOOD if certificate.passed else Tone.WARN if certificate.accepted else Tone.BAD
    return Document(
        title=f"Parity: {said}",
        kind="certificate",
        parts=[Section(f"Parity: {said}", parts, name="parity", tone=tone)],
        source="parity.json",
    )


def _tensor_errors(certificate: Certificate) -> list[Part]:
    """State how many tensors were compared, and list the worst of those that differ."""
    count = len(certificate.tensors)
    differing = [item for item in certificate.tensors.items() if item[1]["max_abs"] != 0]
    if count and not differing:
        one = "The one tensor was" if count == 1 else f"All {count} tensors were"
        equal = "it is equal" if count == 1 else "they are equal"
        said = "read back and compared in f64 with what was to be written (W + ΔW of a merged model"
        return [Note(f"{one} {said}, ΔW of an adapter): {equal}.")]
    differing.sort(key=lambda item: -item[1]["relative"])
    worst = differing[: 1 if certificate.comparisons else _WORST]
    rows = [(key, f"{e['max_abs']:.2g}", f"{e['relative']:.2g}") for key, e in worst]
    title = f"Worst of {count} tensors, against W + ΔW in f64"
    return [Table(("tensor", "largest error", "of ΔW"), rows, title=title)]


def verdict(certificate: Certificate) -> str:
    """State in one line whether the output matches the trained model."""
    if certificate.passed:
        return "within the budget"
    over = "; ".join(certificate.exceeded()[:_WORST])
    return f"over the budget ({over}){', and accepted' if certificate.accepted else ''}"


def card_section(certificate: Certificate) -> str:
    """Return the certificate as a Markdown section of a model card."""
    (found,) = certificate_document(certificate).parts
    assert isinstance(found, Section), "a certificate is one section"
    said = Note(f"Verdict: {verdict(certificate)}.")
    last = Note("parity.json next to this card has every figure and hash.")
    return markdown([Section("Parity with the trained model", [said, *found.parts, last])])


def _compared(one: Comparison) -> tuple[str, ...]:
    worst = one["worst_layer"]
    return (
        f"{one['mean_kl']:.2g}",
        f"{one['max_kl']:.2g}",
        f"{one['top1_agreement']:.2%}",
        f"{one['nll_difference']:+.2g}".replace("-", wording.MINUS),
        f"{worst['layer']} {worst['relative_error']:.2g}",
    )


_TONES = {"passed": Tone.GOOD, "failed": Tone.BAD, "unknown": Tone.WARN}
_ANSWERED = {Answer.PROMOTE: Tone.GOOD, Answer.REJECT: Tone.BAD}


def decision_document(policy: str, made: DecisionEntry, steps: Sequence[Step] = ()) -> Document:
    """Return the decision of a policy, and the rules that led to it."""
    is_alone = len({rule["evidence"] for rule in made["rules"]} - {None}) <= 1
    rows = [_ruled(rule, is_alone=is_alone) for rule in made["rules"]]
    said = made["recommendation"]
    table = Table(("rule", "observed", "threshold", "outcome"), rows)
    parts: list[Part] = [table, *([] if said is None else [Note(f"Recommended: {said}")])]
    parts += bullets(made.get("unverifiable", []), Tone.WARN)
    title = f"{policy}: {made['decision']}"
    tone = _ANSWERED.get(Answer(made["decision"]), Tone.WARN)
    return Document(
        title=title,
        kind="decision",
        parts=[Section(title, parts, name="decision", tone=tone), next_steps(steps)],
        source="the ledger",
        steps=steps,
    )


def _ruled(rule: RuleRecord, *, is_alone: bool) -> list[Cell | str]:
    """Return a rule as a row; details other than numbers are below its name."""
    sides: dict[str, Any] = {name: dict(rule)[name] for name in ("observed", "threshold")}
    about = [f"{name} {said}" for name, said in sides.items() if isinstance(said, str)]
    about += [rule["note"]] if rule["note"] else []
    if rule["evidence"] is not None and not is_alone:
        about.insert(0, PurePath(rule["evidence"]).parent.name)
    outcome = str(rule["outcome"])
    tone = _TONES[outcome]
    name = f"{MARKS[tone]} {rule['rule']} {rule['kpi'] or ''}".strip()
    return [
        Cell(name, tone=tone, detail="; ".join(about)),
        *("" if isinstance(said, str) else wording.figure(said) for said in sides.values()),
        outcome,
    ]
