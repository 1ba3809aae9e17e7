"""Chat templates: their source, and rendering them as transformers does, without importing torch.

A template comes from a file that the configuration names, from the model, or is ChatML. The
environment follows the documented behaviour of ``apply_chat_template``
(https://huggingface.co/docs/transformers/chat_templating); a test compares the two. It differs in
one thing: a template that asks for the date gets the configured one (`tokenizer.date`), or the
same rows would be other ids tomorrow, and a run stopped today could not go on.
"""

from __future__ import annotations

import functools
import json
import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Output, Scope, TemplateData

from mens_exp.errors import ConfigError, DataError, ModelFileError, nearest_file
from mens_exp.tokenizer.control import MARK_BEGIN, MARK_END
from mens_exp.tokenizer.template_sandbox import CountingSandbox
from mens_exp.tokenizer.template_steps import allow

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

# ``role`` and ``content``; with tools also ``tool_calls``, and in the first message ``tools``.
Message = dict[str, Any]

# The default of "today": the date that Llama 3's template falls back to where it gets none.
DATE = "2024-07-26"
_ASKS_FOR_DATE = re.compile(r"\b(?:strftime_now|date_string)\b")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")

# The exact strings for tokenizers without a template: no newline after the last end marker.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# The seeds' plain text: `{system}\n{prompt}\n{response}`, nothing else before, between or behind.
# Without a system prompt its part is empty and its newline stays.
PLAIN = (
    "{% if messages[0]['role'] != 'system' %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)
SHIPPED = {"plain": PLAIN, "chatml": CHATML}  # templates that a configuration may name


class _GenerationMarkers(Extension):
    """Accept ``{% generation %}`` blocks and leave them out of the text."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own contract

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the body of the block; what it sets stays inside, as under transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


class _ShownMarkers(_GenerationMarkers):
    """Accept the same blocks, and put marks around each in the text."""

    def parse(self, parser: Parser) -> list[Node]:
        """Return the body of the block between its marks."""
        body = super().parse(parser)
        assert not isinstance(body, list), "one scope"
        begin, end = (Output([TemplateData(mark)]) for mark in (MARK_BEGIN, MARK_END))
        return [begin, body, end]


# Whatever a template does to itself is its own fault, and no bug of this program.
_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AttributeError, RecursionError, MemoryError, SyntaxError, NameError),  # 1e999 is a name
)
_MOST_SHOWN = 1_000  # characters of what a template says of itself


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=8)
def _compiled(template: str, *, marked: bool = False) -> Template:
    allow(None)  # constants are worked out here
    environment = CountingSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _ShownMarkers if marked else _GenerationMarkers],
    )
    environment.set_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


@functools.lru_cache(maxsize=8)
def _globals(template: str, *, marked: bool) -> dict[str, Any]:
    """Return the names that a template finds beside those that are given to it."""
    return dict(_compiled(template, marked=marked).globals)


def render(
    template: str,
    messages: list[Message],
    *,
    add_generation_prompt: bool,
    today: str = DATE,
    **tokens: Any,
) -> str:
    """Render a conversation.

    Args:
        template: Jinja source.
        messages: turns with ``role`` and ``content``; ``tools`` of the first are those on offer.
        add_generation_prompt: end with the opening of an assistant turn.
        today: the date that the template gets, YYYY-MM-DD.
        **tokens: variables such as ``bos_token`` and ``eos_token``.

    Raises:
        DataError: the template refuses the conversation or is no template.
    """
    return _rendered(template, messages, tokens, today, generate=add_generation_prompt)


def generated_spans(
    template: str, messages: list[Message], *, today: str = DATE, **tokens: Any
) -> list[tuple[int, int]] | None:
    """Return where a conversation's text is marked as generated.

    Args:
        template: Jinja source.
        messages: turns with ``role`` and ``content``.
        today: the date that the template gets, YYYY-MM-DD.
        **tokens: variables such as ``bos_token`` and ``eos_token``.

    Returns:
        Begin and end of each ``{% generation %}`` block, in characters of the text that `render`
        gives; None where the template has no such blocks.

    Raises:
        DataError: the template refuses the conversation.
    """
    if not _GENERATION.search(template):
        return None
    text = _rendered(template, messages, tokens, today, marked=True)
    places = [match.start() for match in re.finditer(f"[{MARK_BEGIN}{MARK_END}]", text)]
    bare = [place - number for number, place in enumerate(places)]  # each mark is one character
    return list(zip(bare[::2], bare[1::2], strict=False))


def check_syntax(template: str) -> None:
    """Compile a template without rendering anything.

    Raises:
        DataError: it is no template.
    """
    try:
        _compiled(template)
    except _FAILURES as error:
        raise DataError("is no chat template", found=_reason(error)) from error


def is_dated(template: str) -> bool:
    """Return whether a template asks for the date."""
    return _ASKS_FOR_DATE.search(template) is not None


@functools.lru_cache(maxsize=8)
def _dates(today: str) -> dict[str, Any]:
    """Return the two ways to a date that published templates know: a function, and Llama 3's."""
    day = date.fromisoformat(today)
    return {"strftime_now": day.strftime, "date_string": day.strftime("%d %b %Y")}


def _rendered(
    template: str,
    messages: list[Message],
    tokens: dict[str, Any],
    today: str,
    *,
    generate: bool = False,
    marked: bool = False,
) -> str:
    tools = messages[0].get("tools") if messages else None
    if tools is not None:
        first = {key: value for key, value in messages[0].items() if key != "tools"}
        messages = [first, *messages[1:]]
    try:
        compiled, names = _compiled(template, marked=marked), _globals(template, marked=marked)
        # What Template.render does, less merging the same global names anew for every text, which
        # takes longer than the text.
        context = compiled.new_context(
            {
                **names,
                "messages": messages,
                "tools": tools,  # defined, because templates ask `tools is not none`
                "documents": None,
                "add_generation_prompt": generate,
                **_dates(today),
                **tokens,
            },
            shared=True,
        )
        allow((messages, tools, tokens))
        return compiled.environment.concat(compiled.root_render_func(context))
    except _FAILURES as error:
        raise DataError(
            "the chat template refuses a conversation",
            found=_reason(error),
            expected="roles and order that the model's template accepts",
        ) from error


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_MOST_SHOWN]


TOKENIZERS_OWN = (
    "the tokenizer's own"  # what records call the source of a template that came with it
)


def template_in_force(
    directory: Path, config: dict[str, Any], named: str | None
) -> tuple[str, str]:
    """Return the chat template of a tokenizer, and what a record calls its source.

    Args:
        directory: the model directory.
        config: its tokenizer_config.json.
        named: what `tokenizer.chat_template` names, if anything.

    Raises:
        ConfigError: that file is absent or holds no template.
        ModelFileError: the directory has several templates and none called default.
    """
    if named is not None:
        return template_named(named)
    own = _own_template(directory, config)
    return (CHATML, "ChatML") if own is None else (own, TOKENIZERS_OWN)


def template_named(name: str) -> tuple[str, str]:
    """Return the chat template that `tokenizer.chat_template` names, and its source for records.

    Raises:
        ConfigError: there is no such file, or it holds no template.
    """
    return read_template(name), name if name in SHIPPED else "a file"


def read_template(name: str) -> str:
    """Read the chat template that `tokenizer.chat_template` names.

    Raises:
        ConfigError: there is no such file, or it holds no template.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    path = Path(name).expanduser()
    where = "tokenizer.chat_template"
    try:
        text = path.read_text(encoding="utf-8")
        check_syntax(text)
    except (OSError, UnicodeDecodeError) as error:
        near = nearest_file(path.parent, path.name, (".jinja", ".jinja2", ".j2"))
        raise ConfigError(
            f"the file cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}",
            where=where,
            found=str(path),
            expected=f"a file with a Jinja chat template{near}",
        ) from error
    except DataError as error:
        raise ConfigError(
            "the file is no chat template", where=where, found=f"{path}: {error.found}"
        ) from error
    return text


def _own_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = (one for one in template if isinstance(one, dict) and one.get("name") == "default")
        template = next(named, {}).get("template")
        if template is None:
            raise ModelFileError(
                "has chat templates, but none called default",
                where=str(directory / "tokenizer_config.json"),
                remedy="write the one to use into chat_template.jinja",
            )
    return template if isinstance(template, str) else None
