"""A model directory behind an OpenAI-compatible server (`serving_app.py`), in its own process.

The process is started without a network: it serves what is on this disk and asks nobody.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
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
from typing import TYPE_CHECKING

from mens_exp.artifacts import own_process
from mens_exp.errors import ConfigError, MissingExtra, RequestError, SetupError
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.errors import MensError

__all__ = ["Server", "address_problems", "missing_packages", "serving", "token_problems"]

_NEEDED = ("fastapi", "openai", "pydantic", "uvicorn")
_ENTRY = "from mens_exp.export.serving_app import main; main()"
_POLL_S = 0.2
_STDERR = 2
TOKEN_ENV = "MENS_EXP_SERVE_TOKEN"  # noqa: S105  # the variable that holds it
_SHORTEST_TOKEN = 16  # characters; what openssl rand -hex 8 writes
_STOP_S = 10.0  # a server that is asked to end finishes its answers first


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        url: of its OpenAI-compatible interface, ``http://<host>:<port>/v1``.
        model: what requests call the model.
        is_chat: whether it knows a chat template; else it only goes on with a text.
        token_env: environment variable that holds the token it asks for; None where it asks none.
        process: the server's own.
    """

    url: str
    model: str
    is_chat: bool
    process: subprocess.Popen[bytes]
    token_env: str | None = None

    @property
    def curl(self) -> str:
        """A command that asks it something."""
        asked: dict[str, object] = {"prompt": "Hello"}
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": "Hello"}]}
        body = {"model": self.model, **asked, "max_tokens": 64}
        url = f"{self.url}/{'chat/' if self.is_chat else ''}completions"
        token = f'-H "Authorization: Bearer ${self.token_env}" ' if self.token_env else ""
        return f"curl {url} {token}--json {shlex.quote(json.dumps(body))}"


def missing_packages() -> list[MensError]:
    """Say which packages of the server are not installed."""
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
    """Say that an address cannot be listened on."""
    try:
        _free_port(host, port)
    except OSError as error:
        return [
            SetupError(
                "this address cannot be listened on",
                where="serve.port" if port else "serve.host",
                found=f"{host}:{port} ({error.strerror or error})",
                expected="an address of this machine, and a port that is free",
                remedy="drop serve.port for a free one, or serve.host for this machine alone",
            )
        ]
    return []


def token_problems(host: str, variable: str) -> list[MensError]:
    """List what is wrong with the token, or that it is missing where other machines reach a host.

    Args:
        host: address to listen on; only this machine reaches a loopback address.
        variable: environment variable that holds the token.
    """
    token = os.environ.get(variable, "")
    remedy = f"run: export {variable}=$(openssl rand -hex 32)"
    if not token:
        missing = ConfigError(
            "other machines reach this address, and no token is set",
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
        return False  # `address_problems` says why
    return bool(host) and all(ipaddress.ip_address(one[4][0]).is_loopback for one in found)


@contextmanager
def serving(model: Path, *, host: str, port: int, token_env: str = TOKEN_ENV) -> Iterator[Server]:
    """Serve a model inside the block; the process ends with it.

    Args:
        model: a complete Hugging Face directory.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        token_env: environment variable that holds the token that requests must bring, if it is set.

    Raises:
        RequestError: the directory's name means something else to the server.
        SetupError: the server ended before it answered.
    """
    name = model.resolve().name
    if "@" in name or ":" in name:
        raise RequestError(
            "the server takes this name for a revision or a file",
            where="path",
            found=name,
            expected="a directory without @ and : in its name",
        )
    is_chat = HfTokenizer.from_directory(model).has_own_template
    port = _free_port(host, port)
    # The server calls a model by the text it was given, so it starts beside the directory.
    process = own_process.spawn(
        ["-P", "-c", _ENTRY, name, host, str(port), token_env],
        output=_STDERR,  # its log; what is asked for is printed by the task
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
    """Wait until the server answers; loading may take minutes, so only its end is an error."""
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
    """End the server and what it started, and nothing else."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
