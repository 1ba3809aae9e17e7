"""The process behind task=serve: it checks requests, and transformers generates.

The handlers of `transformers serve` answer requests that `serving.py` has accepted, with
their model and generation thread. Their own HTTP interface is not used, because it loads any model
on request, has no token, and does not limit bodies, queues or connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import h11
import uvicorn
from transformers.cli.serving.model_manager import ModelManager
from uvicorn.protocols.http.h11_impl import H11Protocol

from mens_exp.export.serving import (
    HttpError,
    check_model,
    checked,
    invalid,
    parsed,
    reductions,
    turns,
)
from mens_exp.export.serving_generation import (
    _MOST_NEW_TOKENS,
    CURRENT,
    Chat,
    Generation,
    State,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_CHAT: Final = "/v1/chat/completions"
_TEXT: Final = "/v1/completions"
_MODELS: Final = "/v1/models"
_HEALTH: Final = "/health"
_JSON: Final = (b"content-type", b"application/json")
_CLOSE: Final = (b"connection", b"close")
_GRACE_S: Final = 3  # for running answers when the server is stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of clients; unverified guesses, far above the needs of a well-behaved client.

    The environment variable ``MENS_EXP_SERVE_LIMIT_<NAME>`` changes a limit.
    """

    body_bytes: int = 4 * 2**20
    header_s: float = 10.0  # from the connection, or the end of an answer, to complete headers
    body_s: float = 30.0  # for the complete body
    write_s: float = 60.0  # for a client to receive a message
    connections: int = 128
    requests: int = 32  # running and waiting

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the defaults, overridden by environment variables."""
        named = {
            one.name: os.environ.get(f"MENS_EXP_SERVE_LIMIT_{one.name.upper()}")
            for one in fields(cls)
        }
        return cls(
            **{name: type(getattr(cls(), name))(text) for name, text in named.items() if text}
        )


_LIMITS: Final = Limits.from_environment()


class App:
    """The ASGI application: routes and request checks."""

    def __init__(self, name: str, *, token: str | None, host: str) -> None:
        """Load the model.

        Args:
            name: the model's directory, under the working directory.
            token: the token that requests must contain; None requires none.
            host: address to listen on.
        """
        self.name = name
        self.token = None if token is None else token.encode()
        self.hosts = None if token else {host.strip("[]"), "localhost", "127.0.0.1", "::1"}
        self.created = int(time.time())
        self.admitted = 0
        models = ModelManager(force_model=name)
        (loaded,) = models.loaded_models.values()
        self.model, self.processor = loaded.model, loaded.processor
        config = self.model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.context = getattr(config, "max_position_embeddings", None)
        # The first call may change truncation and padding, which is not safe in several threads.
        getattr(self.processor, "tokenizer", self.processor)("first")
        state = State()
        self.handlers: dict[str, Any] = {
            _CHAT: Chat(models, state),
            _TEXT: Text(models, state),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        reply = _Reply(send)
        try:
            await self._answer(scope, receive, reply)
        except HttpError as error:
            await reply.error(error)
        except _GoneError:
            return
        except Exception as error:
            if not reply.has_begun:
                said = f"the server failed ({type(error).__name__}); its log says more"
                with contextlib.suppress(_GoneError):
                    await reply.error(HttpError(status=500, message=said))
            raise  # logged by the server

    async def _answer(self, scope: Any, receive: Any, reply: _Reply) -> None:
        method, path = scope["method"], scope["path"]
        headers = dict(scope["headers"])
        allowed = _allowed(path)
        if allowed is None:
            raise _closing(404, f"{path[:100]} not found", code="not_found")
        if method not in allowed:
            allow = (b"allow", ", ".join(allowed).encode())
            raise _closing(405, f"{path[:100]} takes {' and '.join(allowed)}", headers=(allow,))
        if path == _HEALTH:
            await reply.json({"status": "ok"})
            return
        self._authorize(headers)
        if path.startswith(_MODELS):
            await reply.json(self._models(path))
            return
        body = parsed(await _body(headers, receive))
        options = body.get("stream_options")
        reply.with_usage = options.get("include_usage") if isinstance(options, dict) else None
        await self._complete(path, body, receive, reply)

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        if self.token is not None:
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self.token):
                raise _closing(
                    401,
                    "send the server's token: Authorization: Bearer <token>",
                    code="invalid_api_key",
                    headers=((b"www-authenticate", b"Bearer"),),
                )
        elif _hostname(headers.get(b"host", b"").decode("latin-1")) not in (self.hosts or ()):
            shown = headers.get(b"host", b"").decode("latin-1")[:100]
            said = f"without a token only localhost is served (got Host: {shown}); set a token"
            raise _closing(403, said)

    def _models(self, path: str) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "local"}
        asked = path.removeprefix(_MODELS).strip("/")
        if not asked:
            return {"object": "list", "data": [model]}
        check_model(asked, self.name)
        return model

    async def _complete(self, path: str, body: Any, receive: Any, reply: _Reply) -> None:
        is_chat = path == _CHAT
        wanted = checked(body, is_chat=is_chat, model=self.name, vocabulary=self.vocabulary)
        wanted.pop("stream_options", None)  # handled by _Reply
        if self.admitted >= _LIMITS.requests:
            raise HttpError(
                status=503,
                message=f"{self.admitted} requests are waiting; ask again",
                code="overloaded",
                headers=((b"retry-after", b"1"),),
            )
        self.admitted += 1
        stop = wanted.pop("stop", ())
        generation = Generation(
            frequency_penalty=wanted.pop("frequency_penalty", 0.0),
            presence_penalty=wanted.pop("presence_penalty", 0.0),
            seed=wanted.pop("seed", None),  # transformers' handlers would seed on arrival
            stops=tuple([stop] if isinstance(stop, str) else stop),
        )
        CURRENT.set(generation)
        try:
            tokens = await asyncio.to_thread(self._tokens_of, wanted, is_chat=is_chat)
            self._limit(wanted, tokens, is_chat=is_chat)
            answering = asyncio.ensure_future(self._generated(path, wanted, receive, reply))
            leaving = asyncio.ensure_future(_left(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    raise _GoneError
                await answering
            finally:
                generation.ended.set()
                for one in (answering, leaving):
                    one.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
        finally:
            self.admitted -= 1

    async def _generated(self, path: str, wanted: Any, receive: Any, reply: _Reply) -> None:
        response = await self.handlers[path].handle_request(wanted, f"cmpl-{uuid.uuid4().hex}")
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, reply)

    def _tokens_of(self, wanted: dict[str, Any], *, is_chat: bool) -> int:
        """Return the length of a prompt.

        Raises:
            HttpError: the prompt cannot be rendered or encoded, or the template drops a part of it.
        """
        if is_chat:
            ids = self._rendered(wanted)
            for field, part, reduced in reductions(wanted):
                if self._is_rendered_as(reduced, ids):
                    raise invalid(
                        field,
                        f"the chat template drops the request's {part}; leave them out, or serve a "
                        "model whose template renders them",
                    )
        else:
            tokenizer = getattr(self.processor, "tokenizer", self.processor)
            ids = tokenizer(wanted["prompt"])["input_ids"]
        if not ids:
            raise invalid("messages" if is_chat else "prompt", "the prompt has no tokens")
        return len(ids)

    def _rendered(self, wanted: dict[str, Any]) -> list[int]:
        """Return the token ids of a conversation."""
        if not getattr(self.processor, "chat_template", None):
            raise invalid("messages", f"this model has no chat template; ask {_TEXT}")
        try:
            ids = self.processor.apply_chat_template(
                turns(wanted["messages"]),
                add_generation_prompt=True,
                tools=wanted.get("tools"),
                tokenize=True,
                return_dict=True,
                **wanted.get("chat_template_kwargs", {}),
            )["input_ids"]
        except Exception as error:  # the model's template may raise any error
            said = f"the chat template refuses this conversation ({str(error)[:200]})"
            raise invalid("messages", said) from error
        return list(ids[0] if ids and isinstance(ids[0], list) else ids)  # a processor's batch

    def _is_rendered_as(self, wanted: dict[str, Any], ids: list[int]) -> bool:
        try:
            return ids == self._rendered(wanted)
        except HttpError:  # the template needs what was left out
            return False

    def _limit(self, wanted: dict[str, Any], tokens: int, *, is_chat: bool) -> None:
        """Set the maximum length of the answer if the request does not.

        Raises:
            HttpError: prompt and answer are longer than the model's context.
        """
        name = "max_completion_tokens" if "max_completion_tokens" in wanted else "max_tokens"
        room = _MOST_NEW_TOKENS if self.context is None else int(self.context) - tokens
        asked = wanted.get(name)
        if self.context is not None and room < (asked or 1):
            raise invalid(
                name if asked and room > 0 else "messages" if is_chat else "prompt",
                f"the model's context is {self.context} tokens; the prompt has {tokens}"
                + (f", and {asked} are asked for" if asked else ""),
                code="context_length_exceeded",
            )
        if asked is None:
            wanted[name] = min(room, _MOST_NEW_TOKENS)


class _GoneError(Exception):
    """The client has disconnected or does not read."""


class _Reply:
    """Sends one response, within the client's time limit.

    Attributes:
        has_begun: whether its headers were sent.
        is_stream: whether it is a stream of events.
        with_usage: whether a stream ends with a separate event with the usage and no choices, as in
            OpenAI's API; None leaves the usage in the event that ends the answer.
    """

    def __init__(self, send: Callable[[Any], Awaitable[None]]) -> None:
        self.send = send
        self.has_begun = False
        self.is_stream = False
        self.with_usage: bool | None = None

    async def __call__(self, message: Any) -> None:
        self.has_begun = True
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self.is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif self.is_stream:
            body = message.get("body", b"")
            if self.with_usage is not None and b'"usage"' in body:
                body = _with_usage_apart(body, is_wanted=self.with_usage)
            end = b"" if message.get("more_body", False) else b"data: [DONE]\n\n"
            message = {**message, "body": body + end}
        try:
            await asyncio.wait_for(self.send(message), _LIMITS.write_s)
        except TimeoutError as error:
            raise _GoneError from error

    async def json(self, value: Any) -> None:
        await self.whole(200, json.dumps(value).encode())

    async def error(self, error: HttpError) -> None:
        if not self.has_begun:
            await self.whole(error.status, error.body, error.headers)

    async def whole(
        self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        begun = {"type": "http.response.start", "status": status}
        await self({**begun, "headers": [_JSON, length, *headers]})
        await self({"type": "http.response.body", "body": body})


def _with_usage_apart(body: bytes, *, is_wanted: bool) -> bytes:
    """Remove the usage from a stream's events, and add it, if wanted, as a separate event."""
    events = []
    for text in body.removesuffix(b"\n\n").split(b"\n\n"):
        event = json.loads(text.removeprefix(b"data: "))
        usage = event.pop("usage", None)
        events.append(event)
        if usage is not None and is_wanted:
            events.append({**event, "choices": [], "usage": usage})
    return b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)


def _allowed(path: str) -> tuple[str, ...] | None:
    """Return the methods of a route; None if there is no such route."""
    if path in {_CHAT, _TEXT}:
        return ("POST",)
    is_model = path.startswith(f"{_MODELS}/") and path.count("/") == _MODELS.count("/") + 1
    return ("GET",) if path in {_MODELS, _HEALTH} or is_model else None


def _closing(
    status: int,
    message: str,
    *,
    code: str | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> HttpError:
    """Return a refusal after which further client data is not read."""
    return HttpError(status=status, message=message, code=code, headers=(*headers, _CLOSE))


def _hostname(host: str) -> str:
    """Return the name of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


async def _body(headers: dict[bytes, bytes], receive: Any) -> bytes:
    """Return a request's body.

    Raises:
        HttpError: it has a different content type, is too long, or does not arrive.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise _closing(415, "the body must be JSON, with Content-Type: application/json")
    most = _LIMITS.body_bytes
    too_long = _closing(413, f"the body must have at most {most} bytes")
    if int(headers.get(b"content-length", b"0")) > most:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(_LIMITS.body_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _GoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_long
                more = message.get("more_body", False)
    except TimeoutError:
        raise _closing(408, f"the body did not arrive in {_LIMITS.body_s:g} s") from None
    return b"".join(parts)


async def _left(receive: Any) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Any, send: Any) -> None:
    for name in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{name}.complete"})


class _Protocol(H11Protocol):
    """HTTP protocol with a deadline for headers, a connection limit, and JSON errors."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > _LIMITS.connections:
            self._refuse(503, "too many connections; ask again", (b"retry-after", b"1"))
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._refuse(400, msg)

    def _watch(self) -> None:
        """Start the deadline for headers unless they have arrived or it is already running."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self.deadline is None:
            self.deadline = self.loop.call_later(_LIMITS.header_s, self._late)

    def _unwatch(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _late(self) -> None:
        self.deadline = None
        self._refuse(408, f"no request arrived in {_LIMITS.header_s:g} s")

    def _refuse(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = HttpError(status=status, message=message).body
            length = (b"content-length", str(len(body)).encode())
            said = [_JSON, length, _CLOSE, *headers]
            for event in (
                h11.Response(status_code=status, headers=said),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def main() -> None:
    """Serve; the arguments are the model's name, host, port, and the token's variable."""
    name, host, port, variable = sys.argv[1:]
    app = App(name, token=os.environ.get(variable) or None, host=host)
    uvicorn.run(
        app,
        host=host,
        port=int(port),
        http=_Protocol,
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )


if __name__ == "__main__":
    main()
