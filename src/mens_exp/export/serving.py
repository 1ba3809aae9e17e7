"""Serve a model directory with an OpenAI-compatible server (`serving_app.py`) in its own process.

The process starts in offline mode: it serves only local files. Requests are checked field by field,
and an unsupported field with a non-default value is refused instead of ignored (`n=2`, for
example). `serving_app.py` checks whether a conversation fits the model's template and context.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts import host as own_process
from mens_exp.errors import ConfigError, MissingExtra, RequestError, SetupError
from mens_exp.tokenizer.implementations import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mens_exp.errors import MensError

_NEEDED = ("fastapi", "openai", "pydantic", "uvicorn")
_ENTRY = "from mens_exp.export.serving_app import main; main()"
_POLL_S = 0.2
_STDERR = 2
TOKEN_ENV = "MENS_EXP_SERVE_TOKEN"  # noqa: S105  # the variable that holds it
_SHORTEST_TOKEN = 16  # characters; what openssl rand -hex 8 writes
_STOP_S = 10.0  # the server completes its answers before it ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server.

    Attributes:
        url: URL of its OpenAI-compatible API, ``http://<host>:<port>/v1``.
        model: name of the model in requests.
        is_chat: whether it has a chat template; otherwise it only completes texts.
        token_env: environment variable with the required token; None if no token is required.
        process: the server's process.
    """

    url: str
    model: str
    is_chat: bool
    process: subprocess.Popen[bytes]
    token_env: str | None = None

    @property
    def curl(self) -> str:
        """An example curl command for the server."""
        asked: dict[str, object] = {"prompt": "Hello"}
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": "Hello"}]}
        body = {"model": self.model, **asked, "max_tokens": 64}
        url = f"{self.url}/{'chat/' if self.is_chat else ''}completions"
        token = f'-H "Authorization: Bearer ${self.token_env}" ' if self.token_env else ""
        header = '-H "Content-Type: application/json"'
        return f"curl {url} {token}{header} -d {shlex.quote(json.dumps(body))}"


def missing_packages() -> list[MensError]:
    """List packages of the server that are not installed."""
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    return [
        MissingExtra(
            "the server's packages are not installed",
            where="task=serve",
            found=f"no {', '.join(absent)}",
            remedy="run: pip install 'mens-exp[serve]'",
        )
    ]


def address_problems(host: str, port: int) -> list[MensError]:
    """Report an address that cannot be listened on."""
    try:
        _free_port(host, port)
    except OSError as error:
        return [
            SetupError(
                "cannot listen on this address",
                where="serve.port" if port else "serve.host",
                found=f"{host}:{port} ({error.strerror or error})",
                expected="an address of this machine and a free port",
                remedy="drop serve.port for a free one, or serve.host for this machine alone",
            )
        ]
    return []


def token_problems(host: str, variable: str) -> list[MensError]:
    """List problems of the token; it is required if other machines can reach the host.

    Args:
        host: address to listen on; only this machine reaches a loopback address.
        variable: environment variable that holds the token.
    """
    token = os.environ.get(variable, "")
    remedy = f"run: export {variable}=$(openssl rand -hex 32)"
    if not token:
        missing = ConfigError(
            "other machines can reach this address, but no token is set",
            where="serve.host",
            found=host,
            expected=f"a token in the environment variable {variable}, or serve.host=127.0.0.1",
            remedy=remedy,
        )
        return [] if _is_loopback(host) else [missing]
    found = None
    if not token.isascii() or not token.isprintable() or " " in token:
        found = "spaces, or characters that are not printable ASCII"
    elif len(token) < _SHORTEST_TOKEN:
        found = f"{len(token)} characters"
    if found is None:
        return []
    return [
        ConfigError(
            "the token is not valid",
            where=f"${variable}",
            found=found,
            expected=f"at least {_SHORTEST_TOKEN} printable ASCII characters without spaces",
            remedy=remedy,
        )
    ]


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # `address_problems` reports it
    return bool(host) and all(ipaddress.ip_address(one[4][0]).is_loopback for one in found)


@contextmanager
def serving(model: Path, *, host: str, port: int, token_env: str = TOKEN_ENV) -> Iterator[Server]:
    """Serve a model for the duration of the block.

    Args:
        model: a complete Hugging Face directory.
        host: address to listen on.
        port: port to listen on; 0 selects a free one.
        token_env: environment variable with the token; if it is set, requests must contain it.

    Raises:
        RequestError: the directory's name has a special meaning to the server.
        SetupError: the server ended before it answered.
    """
    name = model.resolve().name
    if "@" in name or ":" in name:
        raise RequestError(
            "the server would read this name as a revision or a file",
            where="path",
            found=name,
            expected="a directory without @ and : in its name",
        )
    is_chat = HfTokenizer.from_directory(model).has_own_template
    port = _free_port(host, port)
    # The server names a model by the given text, so it starts in the parent directory.
    process = own_process.spawn_python(
        ["-P", "-c", _ENTRY, name, host, str(port), token_env],
        output=_STDERR,  # the server's log; standard output belongs to the task
        environment={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        cwd=model.resolve().parent,
    )
    try:
        shown = f"[{host}]" if ":" in host else host
        _wait(process, f"http://{shown}:{port}/health")
        yield Server(
            url=f"http://{shown}:{port}/v1",
            model=name,
            is_chat=is_chat,
            process=process,
            token_env=token_env if os.environ.get(token_env) else None,
        )
    finally:
        _stop(process)


def _free_port(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server answers; loading may take minutes, so only an exit is an error."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None:
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise SetupError(
        "the server ended before it answered",
        where="task=serve",
        found=f"exit code {process.returncode}; its own words stand above",
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and its child processes only."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


_SEEDS: Final = 2**63
_MOST_STOPS: Final = 16
_MOST_SHOWN: Final = 100  # characters of a value in a message
# Template variables that the server itself sets.
_RESERVED: Final = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "tokenize", "padding", "continue_final_message", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs", "load_audio_from_video", "num_frames"),
    )
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
    """Return the error response for an invalid request."""
    return HttpError(status=400, message=message, param=field, code=code)


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        HttpError: the body is not a JSON object.
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # fails for lone surrogates
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except ValueError as error:  # invalid JSON or UTF-8, or a number with too many digits
        raise invalid(None, f"the body must be JSON in UTF-8 ({_shown(str(error))})") from None
    if not isinstance(found, dict):
        raise invalid(None, f"the body must be a JSON object (got {_shown(found)})")
    return found


def checked(body: dict[str, Any], *, is_chat: bool, model: str, vocabulary: int) -> dict[str, Any]:
    """Return the fields that affect the answer, all of which the server supports.

    Args:
        body: body of the request.
        is_chat: whether it requests a chat completion.
        model: name of the served model.
        vocabulary: size of its vocabulary.

    Raises:
        HttpError: a field is unknown, has a wrong value, or is not supported.
    """
    fields = {**_FIELDS, **(_OF_CHAT if is_chat else _OF_TEXT)}
    check_model(body.get("model"), model)
    needed = "messages" if is_chat else "prompt"
    if body.get(needed) is None:
        raise invalid(needed, f"{needed} is required")
    found = {
        name: value
        for name, value in body.items()
        if name != "model" and _is_read(name, value, fields)
    }
    for token in found.get("logit_bias", ()):
        if int(token) >= vocabulary:
            raise invalid("logit_bias", f"the model has no token {_shown(token)}")
    if "stream_options" in found and not found.get("stream"):
        raise invalid("stream_options", "stream_options needs stream=true")
    if body.get("tool_choice") == "none":  # hide the tools, so that the model calls none
        found.pop("tools", None)
    return found


def _is_read(name: str, value: Any, fields: dict[str, _Field]) -> bool:
    """Return whether a field affects the answer; refuse unknown, wrong and unsupported values."""
    if name in fields and value is not None:
        expected, is_right = fields[name]
        if not is_right(value):
            raise invalid(name, f"{name} must be {expected} (got {_shown(value)})")
        return True
    if name in _NEUTRAL and not any(_is_same(value, one) for one in (None, *_NEUTRAL[name])):
        raise invalid(name, f"{name}={_shown(value)} is not supported; leave {name} out")
    if name not in fields and name not in _NEUTRAL and name not in _UNREAD:
        raise invalid(_shown(name), f"{_shown(name)} is not a field of this request")
    return False


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return type(value) is type(other) and bool(value == other)


def turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a request's messages as a chat template expects them.

    The parts of a text are joined without a separator, as in rows, and the arguments of a call are
    an object. Other fields are those of the request, without null ones.
    """
    found = []
    for message in messages:
        one = {name: value for name, value in message.items() if value is not None}
        content = one.get("content", "")
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        one["content"] = "".join(parts)
        calls = one.pop("tool_calls", [])
        if calls:
            one["tool_calls"] = [{**call, "function": _parsed(call["function"])} for call in calls]
        found.append(one)
    return found


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    """Return a called function with arguments that are an object."""
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    return {**function, "arguments": json.loads(arguments) if is_text else arguments}


def reductions(wanted: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a chat request without each of its parts that a template might drop.

    Yields:
        The field, a name of the part, and the request without the part.
    """
    if wanted.get("tools"):
        yield "tools", "tools", {**wanted, "tools": None}
    messages = wanted["messages"]
    for role in dict.fromkeys(one["role"] for one in messages if one.get("content")):
        others = [one for one in messages if one["role"] != role]
        yield "messages", f"{role} messages", {**wanted, "messages": others}
    if any(one.get("tool_calls") for one in messages):
        bare = [{**one, "tool_calls": None} for one in messages]
        yield "messages", "tool calls", {**wanted, "messages": bare}


def check_model(value: Any, model: str) -> None:
    """Refuse a request for a model other than the served one.

    Raises:
        HttpError: it names another model, or is not a name; None means the served model.
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
    raise ValueError(f"{text} is not JSON")


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
    calls = one.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return False
    content = one.get("content")
    if isinstance(content, list):
        return all(map(_is_part, content))
    is_left_out = content is None and one["role"] == "assistant"
    return isinstance(content, str) or (is_left_out and (bool(calls) or "content" in one))


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


def _are_stream_options(value: Any) -> bool:
    return isinstance(value, dict) and all(
        name == "include_usage" and isinstance(one, bool) for name, one in value.items()
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
    "stream_options": ("an object with include_usage, true or false", _are_stream_options),
    "frequency_penalty": ("a number from -2 to 2", _is_number(-2, 2)),
    "presence_penalty": ("a number from -2 to 2", _is_number(-2, 2)),
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
}
# Unsupported fields, with the default values that are accepted.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "suffix": ("",),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "generation_config": (),
}
# Client metadata, which does not affect answers.
_UNREAD: Final = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
