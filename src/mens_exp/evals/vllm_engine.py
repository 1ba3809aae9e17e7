"""``eval.engine=vllm``: vLLM's offline engine, the adapter as one of its LoRA requests.

Written after vLLM's documented interface (https://docs.vllm.ai, `LLM`, `SamplingParams`,
`LoRARequest`). It is given ids, made by our tokenizer under the chat template of training, and its
ids are turned to text by ours too, so that it differs from ``eval.engine=hf`` in its kernels
alone, and in the base weights: these are the published ones, not 4-bit values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import MensError, MissingExtra, SetupError
from mens_exp.evals.generation import Completion, cut, in_batches
from mens_exp.plan import machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mens_exp.evals.generation import Generation, Request
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["Served", "VllmEngine", "open_vllm", "problems"]

_FORMATS = {ComputeDtype.bf16: "bfloat16", ComputeDtype.f32: "float32"}


def problems() -> Iterator[MensError]:
    """Yield what keeps vLLM from answering on this machine."""
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
            "vLLM answers on a GPU, and there is none here",
            where="eval.engine",
            found="vllm",
            expected="hf, or openai with a server that runs elsewhere",
            remedy="choose eval.engine=hf",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model that vLLM is to load.

    Attributes:
        base: directory of the base model.
        max_lora_rank: room for an adapter, one of vLLM's values; None where the base answers alone.
        dtype: of the computation.
        max_positions: tokens of prompt and answer.
        trust_remote_code: whether code that comes with the model may run.
    """

    base: Path
    max_lora_rank: int | None
    dtype: ComputeDtype
    max_positions: int
    trust_remote_code: bool = False


def open_vllm(served: Served) -> Any:
    """Load a model into vLLM; both conditions answer from it.

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
        """Take what `open_vllm` gave.

        Args:
            engine: the open vLLM.
            tokenizer: with the chat template of training.
            generation: how answers are made; `batch_size` requests are handed over at once.
            max_positions: tokens of prompt and answer.
            adapter: a PEFT directory; None asks the base alone.
        """
        self.engine, self.tokenizer, self.generation = engine, tokenizer, generation
        self.max_positions, self.adapter = max_positions, adapter

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer each of them, in their order."""
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
