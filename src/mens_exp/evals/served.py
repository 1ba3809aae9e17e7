"""``eval.engine=openai``: answers of an OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ConfigError, SetupError
from mens_exp.evals.generation import Completion, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.evals.generation import Generation, Request
    from mens_exp.tokenizer.templates import Message

__all__ = ["ServerEngine"]

_TIMEOUT_S = 600.0  # of one answer; a CPU writes 512 tokens of an 8B model in less


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEngine:
    """A model behind ``<base_url>/chat/completions``.

    Attributes:
        base_url: ``http://<host>:<port>/v1``.
        model: the server's name of it.
        generation: how answers are made; `batch_size` requests are under way at once.
        api_key_env: the environment variable that holds the key; None sends none.
    """

    base_url: str
    model: str
    generation: Generation
    api_key_env: str | None = None

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer each of them, several under way at once.

        Raises:
            ConfigError: the variable with the key is not set.
            SetupError: the server cannot be reached, or refuses, or says what is no answer.
        """
        headers = self._headers()
        with ThreadPoolExecutor(self.generation.batch_size) as pool:
            return list(pool.map(lambda one: self._answer(one, headers), requests))

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(
                    "the environment variable is not set",
                    where="eval.api_key_env",
                    found=self.api_key_env,
                    expected="a variable that holds the server's key",
                )
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _answer(self, request: Request, headers: dict[str, str]) -> Completion:
        began = time.perf_counter()
        said = self._post(self._body(request), headers)
        latency_ms = 1000 * (time.perf_counter() - began)
        try:
            choice, usage = said["choices"][0], said["usage"]
            said_text = (choice["message"]["content"] or "").encode("utf-8", "replace").decode()
            text, is_stopped = cut(said_text, request.stop)
            return Completion(
                text=text,
                tokens_in=int(usage["prompt_tokens"]),
                tokens_out=int(usage["completion_tokens"]),
                is_finished=is_stopped or choice.get("finish_reason") == "stop",
                latency_ms=latency_ms,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._failed(f"an answer without {error}: {json.dumps(said)[:300]}") from error

    def _body(self, request: Request) -> dict[str, Any]:
        generation = self.generation
        body: dict[str, Any] = {
            "model": self.model,
            **_conversation(request.messages),
            "max_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
        }
        if generation.temperature > 0:
            # 31 bits: what servers that hold it in a signed integer accept.
            body |= {"top_p": generation.top_p, "seed": request.seed % 2**31}
        return body | ({"stop": list(request.stop)} if request.stop else {})

    def _post(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        asked = urllib.request.Request(  # noqa: S310  # the scheme is checked with the settings
            url, data=json.dumps(body).encode(), headers=headers
        )
        try:
            with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as reply:  # noqa: S310
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise self._failed(
                f"{error.code}: {error.read()[:300].decode(errors='replace')}"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def _failed(self, found: str) -> SetupError:
        return SetupError(
            "the server gave no answer",
            where="eval.base_url",
            found=f"{self.base_url}: {found}",
            expected="an OpenAI-compatible server, such as task=serve starts",
            remedy="start it, or correct eval.base_url and eval.model",
        )


def _conversation(messages: Sequence[Message]) -> dict[str, Any]:
    """Return messages and tools as the protocol has them: arguments of calls are JSON texts."""
    turns = [{key: value for key, value in turn.items() if key != "tools"} for turn in messages]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = list(map(_call, turn["tool_calls"]))
    tools = messages[0].get("tools")
    return {"messages": turns, **({} if tools is None else {"tools": tools})}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
