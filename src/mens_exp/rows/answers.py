"""An answer as rendered by the chat template: the text before it, the answer, and its closing.

Each answered turn is rendered three ways: up to the start of the assistant's turn, which is the
prompt that generation sees; with the answer; and with a probe instead of it, which reveals the text
that the template writes after an answer. Supervised text always follows the first rendering.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from mens_exp.errors import DataError
from mens_exp.rows.schema import strings_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.rows.schema import TrainingPair

_PROBE = "mens_exp probe 7d1f"
_TAG = re.compile(r"\s*(</?think>)\s*")
_EMPTY = "<think></think>"
# Text that a template may insert before an answer when it re-renders an answered prompt: white
# space (Mistral), and empty reasoning. Generation has to produce it too.
_LEAD = re.compile(r"\s*(?:<think>\s*</think>\s*)?")
# A tag that is opened by a generation prompt and closed by the model's answer.
_OPENED = re.compile(r"<([A-Za-z][\w:.-]*)>\s*\Z")


class TextEncoder(Protocol):
    """The part of the tokenizer interface that encoding uses."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sequence token, if there is one."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, if there is one."""

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render a conversation with the chat template."""

    def generated_spans(self, messages: list[dict[str, Any]]) -> list[tuple[int, int]] | None:
        """Return the spans that the template marks as generated; None if it has no markers."""

    @property
    def text_start(self) -> str:
        """The control token that the tokenizer puts before every text; empty if none."""

    def guard(self, text: str) -> str:
        """Return a text in the form that `render` inserts into the template."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, including the text of control tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer in its context; the three texts are contiguous.

    White space and empty reasoning that the template writes before an answer belong to the answer.
    ``is_ended`` means that the body may end with the template's own control token, as tool calls
    can.
    """

    prompt: str
    body: str
    closing: str
    is_ended: bool = False


def messages_of(pair: TrainingPair, exchange: int = -1) -> list[dict[str, Any]]:
    """Return the turns before an answer; the first carries the available tools, if any.

    Args:
        pair: the row.
        exchange: index of the answer; the last by default.
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
    """Copy the turns and tools of a row with tools; also return the positions of its answers."""
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
    """Render everything before the last answer, including the start of the assistant's turn."""
    return encoder.render(messages_of(pair), add_generation_prompt=True)


def answer_of(pair: TrainingPair, exchange: int, encoder: TextEncoder) -> Answer:
    """Render one answer of a row; a plain text follows the token that the tokenizer prepends.

    Raises:
        DataError: a plain text begins with a control token, or the template refuses the row, drops
            its prompt, system prompt, tools or calls, alters or drops the answer, starts the
            assistant's turn differently than for generation, or marks other text as generated.
    """
    if pair.is_text:
        return _plain(pair, encoder)
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


def _plain(pair: TrainingPair, encoder: TextEncoder) -> Answer:
    text, body, start = pair.response, encoder.guard(pair.response), encoder.text_start
    lead = len(text) - len(text.lstrip())
    if body[lead] != text[lead] or (start and text.startswith(start)):
        raise DataError(
            "a plain text begins with a control token, as if a chat template had rendered it",
            where=pair.name,
            found=repr(text[lead : lead + 60]),
            expected="a text without the control tokens of a template",
            remedy="give the conversation itself, as 'messages'",
        )
    return Answer(prompt=start, body=body, closing="")


def _check_prompt(before: list[dict[str, Any]], prompt: str, encoder: TextEncoder) -> None:
    """Refuse a prompt that lacks any content of the row; of the user's texts, the last counts."""
    first = before[0]
    asked = [turn["content"] for turn in before if turn["role"] == "user"]
    dropped = [
        *(("prompt", text) for text in asked[-1:]),
        *(("system prompt", turn["content"]) for turn in before[:1] if turn["role"] == "system"),
        *(("tools", tool["function"]["name"]) for tool in first.get("tools", ())),
        *(("result of a tool", turn["content"]) for turn in before if turn["role"] == "tool"),
        *(
            ("call of a tool", text)
            for turn in before
            for call in turn.get("tool_calls", ())
            for text in _texts_in(call)
        ),
    ]
    for what, text in dropped:
        if not _is_in(text, prompt, encoder):
            raise DataError(
                f"the chat template drops the row's {what}",
                found=repr(text[:60]),
                expected="a template that renders it",
            )


def _is_in(text: str, rendered: str, encoder: TextEncoder) -> bool:
    """Return whether a rendered text contains another, verbatim or JSON-escaped."""
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
        The answer, and the part of the rendered conversation in which it was found.
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
    """Find an answer with tool calls: all rendered text after the generation prompt.

    Args:
        turn: the answer.
        prompt: the prompt that generation sees.
        full: the rendered conversation.
        closing: the text that the template writes after a text answer; empty if it ends calls
            differently, with a control token that is then part of the answer.
        encoder: the tokenizer with its template.

    Raises:
        DataError: calls are missing, or do not follow the prompt.
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
    """Yield the name of a call, and each string in its arguments."""
    yield call["function"]["name"]
    yield from strings_in(call["function"]["arguments"])


def _bodies(
    before: list[dict[str, Any]],
    prompt: str,
    said: str,
    context: str,
    text: str,
    encoder: TextEncoder,
) -> Iterator[tuple[str, str]]:
    """Yield candidate answers after a prompt, each with the rendered part that contains it.

    Args:
        before: the turns before the answer.
        prompt: the prompt that generation sees.
        said: the rendered conversation, without the closing of the answer.
        context: the text that the template writes before a different answer.
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
            # gpt-oss names a channel after the start of the turn; a template may also close a
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
    """Return an answer as a model writes it after a tag opened by the prompt.

    The template drops reasoning from answered turns (as DeepSeek-R1's does). Generation must close
    the tag first, immediately if the row has no reasoning.
    """
    reasoning, answer = _halves(tag, response)
    newline = "" if tag[0].endswith("\n") else "\n"
    return f"{newline}{reasoning}\n</{tag[1]}>\n\n{answer}"


def _halves(tag: re.Match[str], response: str) -> tuple[str, str]:
    """Split a response into its reasoning, empty if there is none, and its answer."""
    reasoning, closed, answer = response.partition(f"</{tag[1]}>")
    if not closed:
        return "", response.lstrip("\n")
    return reasoning.strip().removeprefix(f"<{tag[1]}>").strip(), answer.lstrip("\n")


def _lead_elsewhere(before: list[dict[str, Any]], encoder: TextEncoder) -> str | None:
    """Return the text before an answer, for a template that changes an answered prompt.

    Mistral's removes the system prompt from an answered turn. Generation has no answer yet, so its
    prompt is the one to train on, provided that nothing changes from the last user text on.

    Returns:
        The text between the start of generation and the answer; None if the template changes that
        text.
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
    """Return whether a rendered answer is the row's, up to white space that templates trim.

    White space around reasoning tags is ignored as at the ends; empty reasoning is ignored if the
    row has none.
    """
    if not body or body.strip() == response.strip():  # the usual case, and fast
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

    A marked span must start at the start of the turn or at the answer, and reach its end;
    supervision starts where generation does. Templates differ in whether the end marker is inside,
    and it is supervised in either case.
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
            remedy="fix or drop the markers: the answer is found without them",
        )
