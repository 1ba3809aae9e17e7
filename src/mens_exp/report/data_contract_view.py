"""The data contract in words: one line a figure, for the report and the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.report import wording
from mens_exp.report.summary import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.report.records import Records

__all__ = ["cells", "plan_lines", "violations"]


def cells(records: Records) -> list[Cell]:
    """Return the certificate of a run; nothing where it has none."""
    node = records.manifest.data_contract
    if node is None:
        return []
    unknown = node["unknown"]
    return [
        *_tokens(node["tokens"], unknown),
        *_rows(node["rows"]),
        *_overlap(node["overlap"], unknown),
        *_probe(node["probe"], unknown),
    ]


def violations(records: Records) -> list[str]:
    """Return what the certificate refused."""
    node = records.manifest.data_contract
    return [wording.visible(line) for line in node["violations"]] if node else []


def plan_lines(tokens: Mapping[str, Any], unknown: Mapping[str, str]) -> list[str]:
    """Return the token part in lines; nulls with their reasons."""
    return [f"{one.label}: {one.text or one.absent}" for one in _tokens(tokens, unknown)]


def _tokens(part: Mapping[str, Any], unknown: Mapping[str, str]) -> Iterator[Cell]:
    for key, words in (("tokens_by_role", "tokens by role"), ("trained_by_role", "trained")):
        counts = part[key]
        text = "" if counts is None else ", ".join(map(_of_role, counts, counts.values()))
        yield _cell(words, text, unknown.get(f"tokens.{key}"))
    yield _cell(
        "trained share", f"{_frac(part['trained_frac'])} of {wording.count(part['tokens'])} tokens"
    )
    yield _cell("end marker trained", _end(part), unknown.get("tokens.end_marker_trained"))
    lost = f"{wording.count(part['trained_tokens_lost'])} tokens"
    yield _cell("lost to truncation", f"{lost} ({_frac(part['trained_tokens_lost_frac'])})")
    nothing = f"{wording.count(part['nothing_to_learn'])} documents"
    yield _cell("nothing to learn", f"{nothing} ({_frac(part['nothing_to_learn_frac'])})")
    cut = f"{wording.count(part['truncated'])} documents cut"
    yield _cell("longest", f"{wording.count(part['longest'])} tokens, {cut}")


def _end(part: Mapping[str, Any]) -> str:
    trained = part["end_marker_trained"]
    if trained is None:
        return ""
    of = f"{wording.count(part['ends_trained'])} of {wording.count(part['ends'])} within the limit"
    share = f"{_frac(part['end_marker_trained_frac'])} of the documents"
    return f"{'yes' if trained else 'no'}, {of}, {share}"


def _rows(part: Mapping[str, Any]) -> Iterator[Cell]:
    both = part["rows_on_two_sides"] + len(part["groups_on_two_sides"])
    yield _cell("on two sides of the split", wording.count(both) if both else "nothing")
    if part["conversations"]:
        again = f"{wording.count(part['repeated_answers'])} of "
        yield _cell("answers given again", f"{again}{wording.count(part['conversations'])} talks")
    checked, otherwise = part["prompts_checked"], part["prompts_otherwise"]
    yield _cell("prompts as in evaluation", f"{checked - otherwise} of {checked} compared")


def _overlap(parts: Sequence[Mapping[str, Any]], unknown: Mapping[str, str]) -> Iterator[Cell]:
    if not parts:
        yield _cell("overlap", "", unknown.get("overlap"))
    for part in parts:
        items = wording.count(part["items"])
        yield _cell(
            f"overlap with {part['against']}",
            f"{wording.count(part['contained'])} of {items} items are half or more in one row; "
            f"{wording.count(part['sharing'])} share a {part['ngram_words']}-gram of words with "
            f"{wording.count(part['rows_sharing'])} rows",
        )


def _probe(part: Mapping[str, Any] | None, unknown: Mapping[str, str]) -> Iterator[Cell]:
    if part is None:
        yield _cell("probe", "", unknown.get("probe"))
        return
    yield _cell("probe", f"{part['documents']} documents, {part['seconds']:.1f} s")
    shifted = "yes" if part["targets_follow"] else "no"
    yield _cell("labels shifted by one", f"{shifted}; {_moved(part['peek'])} by a last token")
    for key, words in (
        ("together", "batch against its documents"),
        ("accumulation", "batch against micro-batches"),
    ):
        last = "hidden" if key == "together" else "gradient"
        loss, other = part[f"{key}_loss"], part[f"{key}_{last}"]
        text = "" if loss is None else f"loss {loss:.1e}, {last} {other:.1e} (relative)"
        yield _cell(words, text, "there was one document")
    known = part.get("reference")
    text = (
        f"loss {known['loss']:.1e}, gradient {known['gradient']:.1e} (relative, f32)"
        if known
        else ""
    )
    absent = part.get("reference_unknown") or "recorded by an earlier version"
    yield _cell("batch against transformers alone", text, absent)


def _moved(peek: float | None) -> str:
    return "not tried" if peek is None else f"moved {peek:.1e}"


def _of_role(role: str, count: int) -> str:
    return f"{wording.label(role).lower()} {wording.count(count)}"


def _frac(value: float) -> str:
    return wording.percent(value)


def _cell(words: str, text: str, absent: str | None = None) -> Cell:
    return Cell(
        label=words,
        text=wording.visible(text),
        absent="" if text else wording.visible(absent or ""),
    )
