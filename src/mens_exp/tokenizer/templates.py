"""Chat templates: their source, and rendering as in transformers, without importing torch.

A template comes from a file named in the configuration, from the model, or is ChatML. The
environment follows the documented behaviour of ``apply_chat_template``
(https://huggingface.co/docs/transformers/chat_templating); a test compares the two. There is one
difference: a template that uses the date gets the configured one (`tokenizer.date`). Otherwise the
same rows would have different ids tomorrow, and a run stopped today could not be resumed.
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

# The default of "today": the fallback date of Llama 3's template.
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


# The Vox trainer's plain text: `{system}\n{prompt}\n{response}`, without anything else. Without a
# system prompt, its part is empty and its newline stays.
PLAIN = (
    "{% if messages[0]['role'] != 'system' %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
)
SHIPPED = {"plain": PLAIN, "chatml": CHATML}  # templates that a configuration may name


class _GenerationMarkers(Extension):
    """Jinja extension that accepts ``{% generation %}`` blocks and omits the markers."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own contract

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the body of the block; its assignments stay local, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


class _ShownMarkers(_GenerationMarkers):
    """Jinja extension that accepts ``{% generation %}`` blocks, and puts marks around each."""

    def parse(self, parser: Parser) -> list[Node]:
        """Return the body of the block between its marks."""
        body = super().parse(parser)
        assert not isinstance(body, list), "one scope"
        begin, end = (Output([TemplateData(mark)]) for mark in (MARK_BEGIN, MARK_END))
        return [begin, body, end]


# Errors raised by a template are the template's fault, not a bug of this program.
_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AttributeError, RecursionError, MemoryError, SyntaxError, NameError),  # 1e999 is a name
)
_MOST_SHOWN = 1_000  # characters of a template's own error message


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
    allow(None)  # constants are evaluated here
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
    """Return the names available to a template in addition to its variables."""
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
        messages: turns with ``role`` and ``content``; ``tools`` of the first are available tools.
        add_generation_prompt: end with the start of an assistant turn.
        today: the date passed to the template, YYYY-MM-DD.
        **tokens: variables such as ``bos_token`` and ``eos_token``.

    Raises:
        DataError: the template refuses the conversation or is invalid.
    """
    return _rendered(template, messages, tokens, today, generate=add_generation_prompt)


def generated_spans(
    template: str, messages: list[Message], *, today: str = DATE, **tokens: Any
) -> list[tuple[int, int]] | None:
    """Return the spans of a conversation's text that are marked as generated.

    Args:
        template: Jinja source.
        messages: turns with ``role`` and ``content``.
        today: the date passed to the template, YYYY-MM-DD.
        **tokens: variables such as ``bos_token`` and ``eos_token``.

    Returns:
        Start and end of each ``{% generation %}`` block, in characters of the text returned by
        `render`; None if the template has no such blocks.

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
        DataError: it is not a valid template.
    """
    try:
        _compiled(template)
    except _FAILURES as error:
        raise DataError("is not a chat template", found=_reason(error)) from error


def is_dated(template: str) -> bool:
    """Return whether a template asks for the date."""
    return _ASKS_FOR_DATE.search(template) is not None


@functools.lru_cache(maxsize=8)
def _dates(today: str) -> dict[str, Any]:
    """Return the date's function and Llama 3's variable, which published templates use."""
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
        # As in Template.render, but without merging the same global names again for every text,
        # which takes longer than rendering.
        context = compiled.new_context(
            {
                **names,
                "messages": messages,
                "tools": tools,  # defined, because templates test `tools is not none`
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


TOKENIZERS_OWN = "the tokenizer's own"  # its own template, in records


def template_in_force(
    directory: Path, config: dict[str, Any], named: str | None
) -> tuple[str, str]:
    """Return the effective chat template of a tokenizer, and its source for records.

    Args:
        directory: the model directory.
        config: its tokenizer_config.json.
        named: the value of `tokenizer.chat_template`, if any.

    Raises:
        ConfigError: that file is missing or contains no template.
        ModelFileError: the directory has several templates, none of them named default.
    """
    if named is not None:
        return template_named(named)
    own = _own_template(directory, config)
    return (CHATML, "ChatML") if own is None else (own, TOKENIZERS_OWN)


def template_named(name: str) -> tuple[str, str]:
    """Return the chat template that `tokenizer.chat_template` names, and its source for records.

    Raises:
        ConfigError: the file is missing or contains no template.
    """
    return read_template(name), name if name in SHIPPED else "a file"


def read_template(name: str) -> str:
    """Read the chat template that `tokenizer.chat_template` names.

    Raises:
        ConfigError: the file is missing or contains no template.
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
            "the file is not a chat template", where=where, found=f"{path}: {error.found}"
        ) from error
    return text


def _own_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = (one for one in template if isinstance(one, dict) and one.get("name") == "default")
        template = next(named, {}).get("template")
        if template is None:
            raise ModelFileError(
                "has chat templates, but none called default",
                where=str(directory / "tokenizer_config.json"),
                remedy="write the one to use into chat_template.jinja",
            )
    return template if isinstance(template, str) else None
