"""Requests of OpenAI's completions and chat completions, checked field by field.

A field that would be ignored, and whose value asks for something, is refused: `n=2` gives no two
answers here. Whether a conversation fits the model's template and context is for `serving_app.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HttpError", "check_model", "checked", "invalid", "parsed"]

_SEEDS: Final = 2**63
_MOST_STOPS: Final = 16
_MOST_SHOWN: Final = 100  # characters of a value in a message
# What a template is called with by the server itself.
_RESERVED: Final = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "tokenize",
        "padding",
        "continue_final_message",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
        "load_audio_from_video",
        "num_frames",
    }
)


@dataclass(kw_only=True, eq=False)
class HttpError(Exception):
    """An error response in OpenAI's form."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        """The response's body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        said = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": said}).encode()


def invalid(field: str | None, message: str, code: str | None = None) -> HttpError:
    """Return the refusal of a request's content."""
    return HttpError(status=400, message=message, param=field, code=code)


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        HttpError: it is none.
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # half a surrogate is no text
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except ValueError as error:  # of JSON, of UTF-8, and of a number without end
        raise invalid(None, f"the body must be JSON in UTF-8 ({_shown(str(error))})") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body must be a JSON object (got {_shown(found)})")
    return found


def checked(body: dict[str, Any], *, is_chat: bool, model: str, vocabulary: int) -> dict[str, Any]:
    """Return the fields that change the answer, all of which the server honours.

    Args:
        body: of the request.
        is_chat: whether it asks for a chat completion.
        model: name of the one that is served.
        vocabulary: how many tokens it has.

    Raises:
        HttpError: a field is unknown, has a wrong value, or asks for what is not done here.
    """
    fields = {**_FIELDS, **(_OF_CHAT if is_chat else _OF_TEXT)}
    check_model(body.get("model"), model)
    needed = "messages" if is_chat else "prompt"
    if body.get(needed) is None:
        raise invalid(needed, f"{needed} is required")
    found: dict[str, Any] = {}
    for name, value in body.items():
        if name == "model":
            continue
        if name not in fields and name not in _NEUTRAL and name not in _UNREAD:
            raise invalid(_shown(name), f"{_shown(name)} is not a field of this request")
        if name in _NEUTRAL and value not in (None, *_NEUTRAL[name]):
            raise invalid(name, f"{name}={_shown(value)} is not supported; leave {name} out")
        if name in fields and value is not None:
            expected, is_right = fields[name]
            if not is_right(value):
                raise invalid(name, f"{name} must be {expected} (got {_shown(value)})")
            found[name] = value
    for token in found.get("logit_bias", ()):
        if int(token) >= vocabulary:
            raise invalid("logit_bias", f"the model has no token {_shown(token)}")
    return found


def check_model(value: Any, model: str) -> None:
    """Refuse a request for another model than the one that is served.

    Raises:
        HttpError: it names another, or no name at all; None asks for the one that there is.
    """
    if value is not None and not isinstance(value, str):
        raise invalid("model", f"model must be a text (got {_shown(value)})")
    if value not in (None, model):
        raise HttpError(
            status=404,
            message=f"this server has only the model {model} (got {_shown(value)})",
            param="model",
            code="model_not_found",
        )


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _is_whole(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(low: float, high: float, *, above: bool = False) -> Callable[[Any], bool]:
    def is_right(value: Any) -> bool:
        return type(value) in {int, float} and low <= value <= high and not (above and value == low)

    return is_right


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_stops(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= _MOST_STOPS and all(map(_is_text, value))
    return _is_text(value)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_message, value))


def _is_message(one: Any) -> bool:
    if not isinstance(one, dict) or not _is_text(one.get("role")):
        return False
    if one.get("tool_calls") is None:
        one.pop("tool_calls", None)
    elif not isinstance(one["tool_calls"], list) or not all(map(_is_call, one["tool_calls"])):
        return False
    content = one.get("content")
    if isinstance(content, list):
        return all(map(_is_part, content))
    is_call = bool(one.get("tool_calls"))
    return isinstance(content, str) or (content is None and (is_call or "content" in one))


def _is_part(one: Any) -> bool:
    return isinstance(one, dict) and one.get("type") == "text" and isinstance(one.get("text"), str)


def _is_call(one: Any) -> bool:
    function = one.get("function") if isinstance(one, dict) else None
    if not isinstance(function, dict) or not _is_text(function.get("name")):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    return isinstance(arguments, dict)


def _are_tools(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _are_biases(value: Any) -> bool:
    is_bias = _is_number(-100, 100)
    return isinstance(value, dict) and all(
        key.isascii() and key.isdigit() and len(key) < 10 and is_bias(one)  # noqa: PLR2004
        for key, one in value.items()
    )


def _are_template_arguments(value: Any) -> bool:
    return isinstance(value, dict) and not _RESERVED & set(value)


_Field = tuple[str, "Callable[[Any], bool]"]
_FIELDS: Final[dict[str, _Field]] = {
    "max_tokens": ("a whole number of at least 1", _is_whole(1)),
    "temperature": ("a number from 0 to 2", _is_number(0, 2)),
    "top_p": ("a number above 0, at most 1", _is_number(0, 1, above=True)),
    "seed": ("a whole number of 64 bits", _is_whole(-_SEEDS, _SEEDS - 1)),
    "stop": (f"a text or a list of at most {_MOST_STOPS} texts, none empty", _are_stops),
    "stream": ("true or false", lambda value: isinstance(value, bool)),
    "frequency_penalty": ("a number above -1, at most 2", _is_number(-1, 2, above=True)),
}
_OF_CHAT: Final[dict[str, _Field]] = {
    "messages": (
        "a list of at least one message, each with a role, and a content of text",
        _are_messages,
    ),
    "max_completion_tokens": _FIELDS["max_tokens"],
    "logit_bias": ("an object of token numbers, each with a bias from -100 to 100", _are_biases),
    "tools": ("a list of objects", _are_tools),
    "chat_template_kwargs": (
        "an object, without what the server sets itself",
        _are_template_arguments,
    ),
}
_OF_TEXT: Final[dict[str, _Field]] = {
    "prompt": ("one text that is not empty", _is_text),
    "suffix": ("a text", lambda value: isinstance(value, str)),
}
# Not done here: these values ask for nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "generation_config": (),
}
# Notes of the client's, which change no answer.
_UNREAD: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "stream_options",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
    }
)
