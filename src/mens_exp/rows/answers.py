"""An answer as the chat template renders it: what stands before it, itself, and what closes it.

Each answered turn is rendered three ways: up to where the assistant begins, which is all that
generation sees; with the answer; and with a probe in its place, which tells what the template
writes behind an answer. What is learned follows the first text, whatever the third has before it.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.rows.schema import TrainingPair

_PROBE = "mens_exp probe 7d1f"
_TAG = re.compile(r"\s*(</?think>)\s*")
_EMPTY = "<think></think>"
# What may stand before an answer though nobody wrote it, in a template that changes its prompt:
# white space (Mistral), and empty reasoning. Generation has to write it too.
_LEAD = re.compile(r"\s*(?:<think>\s*</think>\s*)?")
# A tag that a generation prompt opens, and that the model's answer closes.
_OPENED = re.compile(r"<([A-Za-z][\w:.-]*)>\s*\Z")


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

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render a conversation under the chat template."""

    def generated_spans(self, messages: list[dict[str, Any]]) -> list[tuple[int, int]] | None:
        """Return what the template marks as generated, or None where it has no markers."""

    def guard(self, text: str) -> str:
        """Return a text as `render` pastes it into the template."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer in its context; the three texts follow each other without a gap.

    White space and empty reasoning that the template puts before an answer belong to it.
    ``is_ended`` says that the body may end with the template's own control token, as calls of
    tools can.
    """

    prompt: str
    body: str
    closing: str
    is_ended: bool = False


def messages_of(pair: TrainingPair, exchange: int = -1) -> list[dict[str, Any]]:
    """Return the turns before an answer; the first has the tools on offer, where there are some.

    Args:
        pair: the row.
        exchange: which of its answers; the last by default.
    """
    last = exchange % len(pair.exchanges)
    system = [] if pair.system is None else [{"role": "system", "content": pair.system}]
    if pair.conversation is not None:
        turns, tools, places = _held(pair.conversation)
        known = [*system, *turns[: places[last]]]
        return known if tools is None else [{**known[0], "tools": tools}, *known[1:]]
    plain = [
        {"role": role, "content": text}
        for said in pair.exchanges[:last]
        for role, text in zip(("user", "assistant"), said, strict=True)
    ]
    return [*system, *plain, {"role": "user", "content": pair.exchanges[last][0]}]


@functools.lru_cache(maxsize=4)
def _held(
    conversation: str,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, list[int]]:
    """Return turns and tools of a row with tools, and the places of its answers; change none."""
    held = json.loads(conversation)
    turns = held["messages"]
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    return turns, held.get("tools"), answers


def answer_turn(pair: TrainingPair, exchange: int) -> dict[str, Any]:
    """Return the turn of an answer."""
    if pair.conversation is not None:
        turns, _, places = _held(pair.conversation)
        return turns[places[exchange]]
    return {"role": "assistant", "content": pair.exchanges[exchange][1]}


def prompt_text(pair: TrainingPair, encoder: TextEncoder) -> str:
    """Render everything before the last answer, the opening of the assistant's turn included."""
    return encoder.render(messages_of(pair), add_generation_prompt=True)


def answer_of(pair: TrainingPair, exchange: int, encoder: TextEncoder) -> Answer:
    """Render one answer of a row.

    Raises:
        DataError: the template refuses the row, drops its system prompt or tools, alters or drops
            the answer, opens the assistant's turn otherwise than for generation, or marks other
            text as generated.
    """
    before, turn = messages_of(pair, exchange), answer_turn(pair, exchange)
    try:
        prompt = encoder.render(before, add_generation_prompt=True)
        _check_prompt(before, prompt, encoder)
        answer, rendered = _found(before, turn, prompt, encoder, pair)
        _check_markers(before, turn, answer, rendered, encoder, pair)
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


def _check_prompt(before: list[dict[str, Any]], prompt: str, encoder: TextEncoder) -> None:
    """Refuse a prompt that lacks what the row says beside what the user asks."""
    first = before[0]
    dropped = [
        *(("system prompt", turn["content"]) for turn in before[:1] if turn["role"] == "system"),
        *(("tools", tool["function"]["name"]) for tool in first.get("tools", ())),
        *(("result of a tool", turn["content"]) for turn in before if turn["role"] == "tool"),
    ]
    for what, text in dropped:
        if not _is_in(text, prompt, encoder):
            raise DataError(
                f"the chat template drops the row's {what}",
                found=repr(text[:60]),
                expected=f"a template that renders it, or rows without {what}",
            )


def _is_in(text: str, rendered: str, encoder: TextEncoder) -> bool:
    """Return whether a rendered text has another, as it is or as a JSON text."""
    plain = encoder.guard(text).strip()
    return plain in rendered or _as_json(plain) in rendered


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _answered(before: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [*before, {"role": "assistant", "content": text}]


def _found(
    before: list[dict[str, Any]],
    turn: dict[str, Any],
    prompt: str,
    encoder: TextEncoder,
    pair: TrainingPair,
) -> tuple[Answer, str]:
    """Find an answer in its rendered conversation.

    Returns:
        The answer, and the part of the rendered conversation that it was found in.
    """
    full = encoder.render([*before, turn], add_generation_prompt=False)
    probed = encoder.render(_answered(before, _PROBE), add_generation_prompt=False)
    context, found, closing = probed.rpartition(_PROBE)
    if "tool_calls" in turn:
        return _calls(turn, prompt, full, closing if full.endswith(closing) else "", encoder)
    if found and full.endswith(closing):
        said, text = full.removesuffix(closing), encoder.guard(turn["content"])
        for body, rendered in _bodies(before, prompt, said, context, text, encoder):
            return Answer(prompt=prompt, body=body, closing=closing), rendered
    raise DataError(
        "the chat template does not keep prompt and answer as they are",
        where=pair.name,
        found=full[max(0, len(prompt) - 40) :][:120],
        expected="the prompt, then the answer",
    )


def _calls(
    turn: dict[str, Any], prompt: str, full: str, closing: str, encoder: TextEncoder
) -> tuple[Answer, str]:
    """Find an answer that calls tools: all that the template writes from where generation begins.

    Args:
        turn: the answer.
        prompt: all that generation sees.
        full: the rendered conversation.
        closing: what the template writes behind an answer of text; empty where it ends calls
            otherwise, with a control token that is then part of the answer.
        encoder: the tokenizer with its template.

    Raises:
        DataError: the calls are not all there, or do not follow the prompt.
    """
    said = full.removesuffix(closing) if closing else full.rstrip()
    tag = _OPENED.search(prompt)
    body = None
    if said.startswith(prompt):
        body = rendered = said.removeprefix(prompt)
    elif tag is not None and said.startswith(prompt[: tag.start()]):
        rendered = said.removeprefix(prompt[: tag.start()])
        body = _inside(tag, rendered)
    texts = [one for one in _TAG.split(turn["content"]) if not _TAG.fullmatch(one)]
    texts += [text for call in turn["tool_calls"] for text in _texts_in(call)]
    if body is None or not all(_is_in(text, body, encoder) for text in texts):
        raise DataError(
            "the chat template does not write the calls of an answer behind its prompt",
            found=repr(full[max(0, len(prompt) - 40) :][:120]),
            expected=", ".join(repr(text[:40]) for text in texts if text),
        )
    ended = not closing
    return Answer(prompt=prompt, body=body, closing=full[len(said) :], is_ended=ended), rendered


def _texts_in(call: dict[str, Any]) -> Iterator[str]:
    """Yield the name of a call, and each text of its arguments."""
    yield call["function"]["name"]
    left = [call["function"]["arguments"]]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _bodies(
    before: list[dict[str, Any]],
    prompt: str,
    said: str,
    context: str,
    text: str,
    encoder: TextEncoder,
) -> Iterator[tuple[str, str]]:
    """Yield what follows a prompt where a conversation has the answer, and the part that has it.

    Args:
        before: the turns before the answer.
        prompt: all that generation sees.
        said: the rendered conversation, without what closes the answer.
        context: what the template puts before another answer.
        text: the answer of the row.
        encoder: the tokenizer with its template.
    """
    tag = _OPENED.search(prompt)
    if said.startswith(prompt):
        body = said.removeprefix(prompt)
        lead = context.removeprefix(prompt)
        if _same(body, text) or (tag is not None and _same(tag[0] + body, text)):
            yield body, body
        elif body == lead + text and prompt != encoder.render(before, add_generation_prompt=False):
            # gpt-oss names a channel behind the opening of the turn; a template may also close a
            # tag before reasoning that it does not recognize.
            closes = tag is not None and f"</{tag[1]}>" in lead
            yield (_inside(tag, text) if tag is not None and closes else body), body
    elif tag is not None and said.startswith(prompt[: tag.start()]):
        rendered = said.removeprefix(prompt[: tag.start()])
        if _same(rendered, text) or _same(rendered, _halves(tag, text)[1]):
            yield _inside(tag, text), rendered
    else:
        moved = _lead_elsewhere(before, encoder)
        body = said.removeprefix(context.removesuffix(moved)) if moved is not None else said
        if len(body) < len(said) and _same(body, text):
            yield body, body


def _inside(tag: re.Match[str], response: str) -> str:
    """Return an answer as a model writes it behind a tag that its prompt has opened.

    The template leaves reasoning out of answered turns (DeepSeek-R1's). Generation has to close
    the tag first, at once where the row has no reasoning.
    """
    reasoning, answer = _halves(tag, response)
    newline = "" if tag[0].endswith("\n") else "\n"
    return f"{newline}{reasoning}\n</{tag[1]}>\n\n{answer}"


def _halves(tag: re.Match[str], response: str) -> tuple[str, str]:
    """Split a response into its reasoning, empty where it has none, and its answer."""
    reasoning, closed, answer = response.partition(f"</{tag[1]}>")
    if not closed:
        return "", response.lstrip("\n")
    return reasoning.strip().removeprefix(f"<{tag[1]}>").strip(), answer.lstrip("\n")


def _lead_elsewhere(before: list[dict[str, Any]], encoder: TextEncoder) -> str | None:
    """Return what is put before an answer by a template that changes an answered prompt.

    Mistral's takes a system prompt out of an answered turn. Generation has no answer yet, so its
    prompt is the one to learn after, if nothing changes from the last user's text on.

    Returns:
        The text between where generation begins and the answer, or None where the template
        changes what stands there.
    """
    probing = [*before[:-1], {**before[-1], "content": _PROBE}]
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
    """Return whether a rendered answer is the row's, but for white space that templates trim.

    Around the tags of reasoning it counts as little as at the ends; empty reasoning counts for
    nothing where the row has none.
    """
    if not body or body.strip() == response.strip():  # nearly always, and quick
        return bool(body)
    found, given = (_TAG.sub(r"\1", text.strip()) for text in (body, response))
    return found == given or (
        not given.removeprefix(_EMPTY).startswith("<think>")
        and found.removeprefix(_EMPTY) == given.removeprefix(_EMPTY)
    )


def _check_markers(
    before: list[dict[str, Any]],
    turn: dict[str, Any],
    answer: Answer,
    rendered: str,
    encoder: TextEncoder,
    pair: TrainingPair,
) -> None:
    """Compare the answer that was found with the template's own ``{% generation %}`` markers.

    They must begin where the template opens the turn or at the answer, and reach its end; what is
    learned begins where generation does. Whether the end marker is inside differs between
    templates, and it is learned either way.
    """
    messages = [*before, turn]
    spans = encoder.generated_spans(messages)
    if spans is None:
        return
    full = encoder.render(messages, add_generation_prompt=False)
    end = len(full) - len(answer.closing)
    start = end - len(rendered)
    asked = encoder.render(before, add_generation_prompt=False)
    opened = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(full, asked, strict=False)))
    latest = max(full.rfind(encoder.guard(turn["content"]).strip(), start, end), start)
    said = end - (len(rendered) - len(rendered.rstrip()))
    if not any(opened <= begin <= latest and said <= until for begin, until in spans):
        begin, until = spans[-1] if spans else (0, 0)
        raise DataError(
            "the template's generation markers are not around the answer",
            where=pair.name,
            found=repr(full[begin:until][:120]),
            expected=repr(answer.body[:120]),
            remedy="mend or drop the markers: the answer is found without them",
        )
