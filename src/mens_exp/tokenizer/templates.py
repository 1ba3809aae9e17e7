"""Chat templates, rendered the way transformers renders them, without importing torch.

The environment below follows the documented behaviour of ``apply_chat_template``
(https://huggingface.co/docs/transformers/chat_templating); a test compares the two.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

__all__ = ["CHATML", "Message", "render"]

Message = dict[str, str]

# The exact strings for tokenizers without a template: no newline after the last end marker.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class _GenerationMarkers(Extension):
    """Accept ``{% generation %}`` blocks; what is trained is found from the text instead."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own contract

    def parse(self, parser: Parser) -> Node:
        """Return the body of the block; what it sets stays inside, as under transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


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


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # local time, as transformers has it


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationMarkers],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def render(
    template: str, messages: list[Message], *, add_generation_prompt: bool, **tokens: Any
) -> str:
    """Render a conversation.

    Args:
        template: Jinja source.
        messages: turns with ``role`` and ``content``.
        add_generation_prompt: end with the opening of an assistant turn.
        **tokens: variables such as ``bos_token`` and ``eos_token``.

    Raises:
        DataError: the template refuses the conversation or is no template.
    """
    try:
        return _compiled(template).render(
            messages=messages,
            tools=None,  # defined, because templates ask `tools is not none`
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokens,
        )
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise DataError(
            "the chat template refuses a conversation",
            found=str(error),
            expected="roles and order that the model's template accepts",
        ) from error
