"""Engines that answer conversations in batches: the model in this process, a server, or vLLM.

``eval.engine=hf`` uses the model in this process, ``openai`` an OpenAI-compatible server, and
``vllm`` vLLM's offline engine with the adapter as a LoRA request, following its documented
interface (https://docs.vllm.ai, `LLM`, `SamplingParams`, `LoRARequest`). Our tokenizer encodes the
prompts for vLLM with the chat template of training, and decodes its ids. vLLM therefore differs
from ``hf`` only in its kernels and in the base weights, which are the published ones instead of
4-bit values.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError, MensError, MissingExtra, SetupError
from mens_exp.planning import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mens_exp.backends.protocol import Backend
    from mens_exp.tokenizer.load import Tokenizer
    from mens_exp.tokenizer.templates import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The generation settings of answers.

    Attributes:
        max_new_tokens: maximum length of an answer.
        batch_size: prompts completed together.
        temperature: sampling temperature; 0 means greedy decoding.
        top_p: probability mass of nucleus sampling.
    """

    max_new_tokens: int
    batch_size: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A conversation to answer, with the seed of sampling and the texts that stop the answer."""

    messages: tuple[Message, ...]
    seed: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An answer.

    Attributes:
        text: the answer without the stop text.
        tokens_in: prompt tokens; None if not counted.
        tokens_out: generated tokens including the end marker; None if not counted.
        is_finished: whether it ended with the end marker, or at a stop text.
        latency_ms: time from prompt to complete answer, of the whole batch with vLLM; None if the
            answer already existed.
        problem: the reason why there is no answer; None if there is one.
    """

    text: str
    tokens_in: int | None
    tokens_out: int | None
    is_finished: bool
    latency_ms: float | None
    problem: str | None = None


class Engine(Protocol):
    """Answers conversations."""

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer the requests, in order."""


def seed_of(seed: int, item_id: str, sample: int, attempt: int) -> int:
    """Return the seed of one answer: 60 bits, a pure function of the arguments."""
    return int(sha256_bytes(f"{seed}/{item_id}/{sample}/{attempt}".encode())[:15], 16)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to its first stop text, and whether there was one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def in_batches(
    requests: Sequence[Request],
    prompts: Sequence[list[int]],
    room: int,
    batch_size: int,
    answer: Callable[[list[Request], list[list[int]]], list[Completion]],
) -> list[Completion]:
    """Answer requests batch by batch, in order; prompts over ``room`` tokens get no answer.

    Args:
        requests: the requests.
        prompts: token ids of each prompt.
        room: maximum number of prompt tokens.
        batch_size: requests answered together.
        answer: answers one batch.
    """
    made = {i: _no_room(len(ids), room) for i, ids in enumerate(prompts) if len(ids) > room}
    fitting = [i for i in range(len(requests)) if i not in made]
    for start in range(0, len(fitting), batch_size):
        batch = fitting[start : start + batch_size]
        answers = answer([requests[i] for i in batch], [prompts[i] for i in batch])
        made.update(zip(batch, answers, strict=True))
    return [made[i] for i in range(len(requests))]


# Version of batching, for scorecards. 1: a batch waits for its longest answer; 2: a finished answer
# makes room for the next prompt.
BATCHING = 2


class GraphEngine:
    """``eval.engine=hf``: the model in this process, with its adapter or inside ``base_only``."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, generation: Generation) -> None:
        """Use a model, and a tokenizer with the chat template of training."""
        self.backend, self.tokenizer, self.generation = backend, tokenizer, generation

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer the requests; a finished answer makes room for the next prompt."""
        prompts = self.tokenizer.encode_prompts([list(one.messages) for one in requests])
        room = self.backend.max_positions - self.generation.max_new_tokens
        return in_batches(requests, prompts, room, max(1, len(requests)), self._answers)

    def _answers(self, requests: list[Request], prompts: list[list[int]]) -> list[Completion]:
        seconds: dict[int, float] = {}
        outputs = self.backend.generate(
            prompts,
            max_new_tokens=self.generation.max_new_tokens,
            end_ids=self.tokenizer.end_ids,
            batch_size=self.generation.batch_size,
            on_end=seconds.__setitem__,
            **self._options(requests),
        )
        completions = []
        for at, (request, prompt, ids) in enumerate(zip(requests, prompts, outputs, strict=True)):
            text, is_stopped = cut(self.tokenizer.decode(ids), request.stop)
            completions.append(
                Completion(
                    text=text,
                    tokens_in=len(prompt),
                    tokens_out=len(ids),
                    is_finished=is_stopped or bool(ids and ids[-1] in self.tokenizer.end_ids),
                    latency_ms=1000 * seconds[at],
                )
            )
        return completions

    def _options(self, requests: list[Request]) -> dict[str, Any]:
        from mens_exp.backends.generation import Sampling, Stops

        options: dict[str, Any] = {}
        if self.generation.temperature > 0:
            options["sampling"] = Sampling(
                temperature=self.generation.temperature,
                top_p=self.generation.top_p,
                seeds=[one.seed for one in requests],
            )
        if any(one.stop for one in requests):
            options["stops"] = Stops(
                texts=[one.stop for one in requests], decode=self.tokenizer.decode
            )
        return options


def _no_room(tokens: int, room: int) -> Completion:
    """Return the placeholder answer for a prompt that leaves no room for one."""
    return Completion(
        text="",
        tokens_in=tokens,
        tokens_out=0,
        is_finished=False,
        latency_ms=0.0,
        problem=f"the prompt has {tokens} tokens; {max(room, 0)} leave room for an answer",
    )


_TIMEOUT_S = 600.0  # per answer; an 8B model on a CPU generates 512 tokens in less


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEngine:
    """A model behind ``<base_url>/chat/completions``.

    Attributes:
        base_url: ``http://<host>:<port>/v1``.
        model: the server's name of the model.
        generation: generation settings; `batch_size` is the number of concurrent requests.
        api_key_env: the environment variable with the API key; None sends none.
    """

    base_url: str
    model: str
    generation: Generation
    api_key_env: str | None = None

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer the requests, several concurrently.

        Raises:
            ConfigError: the variable with the key is not set.
            SetupError: the server cannot be reached, refuses, or sends an invalid reply.
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
            # 31 bits, because some servers store the seed in a signed 32-bit integer.
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
            "the server did not answer",
            where="eval.base_url",
            found=f"{self.base_url}: {found}",
            expected="an OpenAI-compatible server, such as task=serve starts",
            remedy="start it, or correct eval.base_url and eval.model",
        )


def _conversation(messages: Sequence[Message]) -> dict[str, Any]:
    """Return messages and tools in the protocol's form, in which call arguments are JSON texts."""
    turns = [{key: value for key, value in turn.items() if key != "tools"} for turn in messages]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = list(map(_call, turn["tool_calls"]))
    tools = messages[0].get("tools")
    return {"messages": turns, **({} if tools is None else {"tools": tools})}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


_FORMATS = {ComputeDtype.bf16: "bfloat16", ComputeDtype.f32: "float32"}


def vllm_problems_here() -> Iterator[MensError]:
    """Yield problems that prevent vLLM from running on this machine."""
    if find_spec("vllm") is None:
        yield MissingExtra(
            "vLLM is not installed",
            where="eval.engine",
            found="vllm",
            expected="hf, or openai with a server that runs elsewhere",
            remedy="run: pip install 'mens-exp[vllm]', on a machine with a GPU",
        )
    if machine.look("auto").kind != "cuda":
        yield SetupError(
            "vLLM needs a GPU, and this machine has none",
            where="eval.engine",
            found="vllm",
            expected="hf, or openai with a server that runs elsewhere",
            remedy="choose eval.engine=hf",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model for vLLM to load.

    Attributes:
        base: directory of the base model.
        max_lora_rank: maximum rank of the adapter, one of vLLM's values; None without an adapter.
        dtype: dtype of the computation.
        max_positions: maximum tokens of prompt and answer together.
        trust_remote_code: whether the model's own code may run.
    """

    base: Path
    max_lora_rank: int | None
    dtype: ComputeDtype
    max_positions: int
    trust_remote_code: bool = False


def open_vllm(served: Served) -> Any:
    """Load a model into vLLM; both conditions use it.

    Raises:
        SetupError: vLLM cannot load it.
    """
    from vllm import LLM

    lora: dict[str, Any] = {}
    if served.max_lora_rank is not None:
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": served.max_lora_rank}
    try:
        return LLM(
            model=str(served.base),
            dtype=_FORMATS[served.dtype],
            max_model_len=served.max_positions,
            trust_remote_code=served.trust_remote_code,
            seed=0,
            **lora,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise SetupError(
            "vLLM cannot load the model",
            where="eval.engine",
            found=f"{type(error).__name__}: {error}",
            remedy="choose eval.engine=hf",
        ) from error


class VllmEngine:
    """One condition of an open vLLM: the base alone, or with its adapter."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Tokenizer,
        generation: Generation,
        max_positions: int,
        adapter: Path | None,
    ) -> None:
        """Use an engine opened by `open_vllm`.

        Args:
            engine: the engine.
            tokenizer: the tokenizer, with the chat template of training.
            generation: generation settings; `batch_size` requests are submitted at a time.
            max_positions: maximum tokens of prompt and answer together.
            adapter: a PEFT directory; None means the base alone.
        """
        self.engine, self.tokenizer, self.generation = engine, tokenizer, generation
        self.max_positions, self.adapter = max_positions, adapter

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer the requests, in order."""
        prompts = self.tokenizer.encode_prompts([list(one.messages) for one in requests])
        room = self.max_positions - self.generation.max_new_tokens
        return in_batches(requests, prompts, room, self.generation.batch_size, self._batch)

    def _batch(self, requests: list[Request], prompts: list[list[int]]) -> list[Completion]:
        from vllm.lora.request import LoRARequest

        lora = None
        if self.adapter is not None:
            lora = LoRARequest("tuned", 1, str(self.adapter))
        began = time.perf_counter()
        outputs = self.engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self._sampling(one) for one in requests],
            use_tqdm=False,
            lora_request=lora,
        )
        latency_ms = 1000 * (time.perf_counter() - began)
        completions = []
        for request, prompt, output in zip(requests, prompts, outputs, strict=True):
            said = output.outputs[0]
            ids = list(said.token_ids)
            text, is_stopped = cut(self.tokenizer.decode(ids), request.stop)
            completions.append(
                Completion(
                    text=text,
                    tokens_in=len(prompt),
                    tokens_out=len(ids),
                    is_finished=is_stopped or said.finish_reason == "stop",
                    latency_ms=latency_ms,
                )
            )
        return completions

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams

        drawn = {}
        if self.generation.temperature > 0:
            drawn = {"top_p": self.generation.top_p, "seed": request.seed}
        return SamplingParams(
            n=1,
            temperature=self.generation.temperature,
            max_tokens=self.generation.max_new_tokens,
            stop=list(request.stop),
            stop_token_ids=sorted(self.tokenizer.end_ids),
            **drawn,
        )
