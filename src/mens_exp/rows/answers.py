"""An answer as the chat template renders it: what stands before it, itself, and what closes it.

Each answered turn is rendered three ways: up to where the assistant begins, which is all that
generation sees; with the answer; and with a probe in its place, which tells what the template
writes behind an answer. What is learned follows the first text, whatever the third has before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.rows.schema import TrainingPair

__all__ = ["Answer", "TextEncoder", "answer_of", "messages_of", "prompt_text"]

_PROBE = "mens_exp probe 7d1f"
_TAG = re.compile(r"\s*(</?think>)\s*")
# What may stand before an answer though nobody wrote it: white space (Mistral), and the empty
# reasoning that Qwen 3 puts before an answer without any. Generation has to write it too.
_LEAD = re.compile(r"\s*(?:<think>\s*</think>\s*)?")


class TextEncoder(Protocol):
    """The part of a tokenizer that encoding needs."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, where there is one."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, where there is one."""

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Render a conversation under the chat template."""

    def generated_spans(self, messages: list[dict[str, str]]) -> list[tuple[int, int]] | None:
        """Return what the template marks as generated, or None where it has no markers."""

    def guard(self, text: str) -> str:
        """Return a text as `render` pastes it into the template."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer in its context; the three texts follow each other without a gap.

    White space and empty reasoning that the template puts before an answer belong to it.
    """

    prompt: str
    body: str
    closing: str


def messages_of(pair: TrainingPair, exchange: int = -1) -> list[dict[str, str]]:
    """Return the turns before an answer.

    Args:
        pair: the row.
        exchange: which of its answers; the last by default.
    """
    exchanges = pair.exchanges
    last = exchange % len(exchanges)
    turns = [] if pair.system is None else [{"role": "system", "content": pair.system}]
    for user, assistant in exchanges[:last]:
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*turns, {"role": "user", "content": exchanges[last][0]}]


def prompt_text(pair: TrainingPair, encoder: TextEncoder) -> str:
    """Render everything before the last answer, the opening of the assistant's turn included."""
    return encoder.render(messages_of(pair), add_generation_prompt=True)


def answer_of(pair: TrainingPair, exchange: int, encoder: TextEncoder) -> Answer:
    """Render one answer of a row.

    Raises:
        DataError: the template refuses the row, alters or drops the answer, opens the
            assistant's turn otherwise than for generation, or marks other text as generated.
    """
    before = messages_of(pair, exchange)
    response = pair.exchanges[exchange][1]
    try:
        answer = _found(before, response, encoder, pair)
        _check_markers(before, response, answer, encoder, pair)
    except DataError as error:
        if error.where is not None:
            raise
        raise DataError(
            error.what,
            where=pair.name,
            found=error.found,
            expected=error.expected,
            remedy="change the row, or give another template with tokenizer.chat_template",
        ) from error
    return answer


def _answered(before: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    return [*before, {"role": "assistant", "content": text}]


def _found(
    before: list[dict[str, str]], response: str, encoder: TextEncoder, pair: TrainingPair
) -> Answer:
    prompt = encoder.render(before, add_generation_prompt=True)
    full = encoder.render(_answered(before, response), add_generation_prompt=False)
    probed = encoder.render(_answered(before, _PROBE), add_generation_prompt=False)
    context, found, closing = probed.rpartition(_PROBE)
    if found and full.endswith(closing):
        said = full.removesuffix(closing)
        if said.startswith(prompt):
            body = said.removeprefix(prompt)
        else:
            lead = _lead_elsewhere(before, encoder)
            rest = said.removeprefix(context.removesuffix(lead)) if lead is not None else ""
            body = rest if len(rest) < len(said) else ""
        if _same(body, encoder.guard(response)):
            return Answer(prompt=prompt, body=body, closing=closing)
    raise DataError(
        "the chat template does not keep prompt and answer as they are",
        where=pair.name,
        found=full[max(0, len(prompt) - 40) :][:120],
        expected="the prompt, then the answer",
    )


def _lead_elsewhere(before: list[dict[str, str]], encoder: TextEncoder) -> str | None:
    """Return what is put before an answer by a template that changes an answered prompt.

    Mistral's takes a system prompt out of an answered turn. Generation has no answer yet, so its
    prompt is the one to learn after, if nothing changes from the last user's text on.

    Returns:
        The text between where generation begins and the answer, or None where the template
        changes what stands there.
    """
    probing = [*before[:-1], {"role": "user", "content": _PROBE}]
    opened = encoder.render(probing, add_generation_prompt=True)
    other = _PROBE[::-1]
    answered = encoder.render(_answered(probing, other), add_generation_prompt=False)
    _, asked, opening = opened.rpartition(_PROBE)
    _, again, rest = answered.rpartition(_PROBE)
    context, found, _ = rest.rpartition(other)
    if not (asked and again and found and context.startswith(opening)):
        return None
    lead = context.removeprefix(opening)
    return lead if _LEAD.fullmatch(lead) else None


def _same(body: str, response: str) -> bool:
    """Tell whether a rendered answer is the row's, but for white space that templates trim.

    Around the tags of reasoning it counts as little as at the ends.
    """
    if not body or body.strip() == response.strip():  # nearly always, and quick
        return bool(body)
    return _normal(body) == _normal(response)


def _normal(text: str) -> str:
    return _TAG.sub(r"\1", text.strip()).removeprefix("<think></think>")


def _check_markers(
    before: list[dict[str, str]],
    response: str,
    answer: Answer,
    encoder: TextEncoder,
    pair: TrainingPair,
) -> None:
    """Hold the answer that was found against the template's own ``{% generation %}`` markers.

    They must begin where generation does or at the answer, and reach its end; whether the end
    marker is inside differs between templates, and it is learned either way.
    """
    messages = _answered(before, response)
    spans = encoder.generated_spans(messages)
    if spans is None:
        return
    full = encoder.render(messages, add_generation_prompt=False)
    end = len(full) - len(answer.closing)
    start = end - len(answer.body)
    lead = _LEAD.match(answer.body)
    assert lead is not None, "it matches nothing, too"
    said = end - (len(answer.body) - len(answer.body.rstrip()))
    begin, until = spans[-1] if spans else (0, 0)
    if not (start <= begin <= start + lead.end() and said <= until):
        raise DataError(
            "the template's generation markers are not around the answer",
            where=pair.name,
            found=repr(full[begin:until][:120]),
            expected=repr(answer.body[:120]),
            remedy="mend or drop the markers: the answer is found without them",
        )
