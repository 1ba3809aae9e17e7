from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import MissingExtra, SetupError
from mens_exp.evals import engines
from mens_exp.evals.engines import (
    Generation,
    Request,
    Served,
    VllmEngine,
    open_vllm,
    vllm_problems_here,
)
from mens_exp.tokenizer.implementations import HfTokenizer

QUESTION = {"role": "user", "content": "What is it?"}


@dataclass
class FakeParams:
    """SamplingParams with only the fields of vLLM 0.11 that are used."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16


@dataclass
class FakeLora:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class FakeLLM:
    """LLM with the documented keyword arguments; it returns scripted tokens."""

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False
    seed: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    says: list[int] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def generate(
        self,
        prompts,
        sampling_params,
        *,
        use_tqdm=True,
        lora_request=None,
    ):
        assert not use_tqdm
        assert len(prompts) == len(sampling_params)
        assert lora_request is None or self.enable_lora
        self.asked.append((prompts, sampling_params, lora_request))
        said = SimpleNamespace(token_ids=tuple(self.says), finish_reason="length")
        return [SimpleNamespace(outputs=[said]) for _ in prompts]


@pytest.fixture
def vllm(monkeypatch):
    """Install a module with the signatures that vLLM documents."""
    module, lora, request = (ModuleType(n) for n in ("vllm", "vllm.lora", "vllm.lora.request"))
    module.LLM, module.SamplingParams = FakeLLM, FakeParams
    request.LoRARequest = FakeLora
    for one in (module, lora, request):
        monkeypatch.setitem(sys.modules, one.__name__, one)


@pytest.fixture
def tokenizer(tiny_base):
    return HfTokenizer.from_directory(tiny_base.directory)


def opened(room=None):
    engine = open_vllm(
        Served(base=Path("base"), max_lora_rank=room, dtype=ComputeDtype.bf16, max_positions=64)
    )
    assert isinstance(engine, FakeLLM)
    return engine


@pytest.mark.usefixtures("vllm")
def test_the_adapter_is_a_lora_request_of_the_tuned_condition_alone(
    tokenizer,
):
    """One engine has room for the rank; only tuned requests carry the LoRA request."""
    adapter = Path("adapter")
    engine = opened(32)
    assert (engine.model, engine.dtype, engine.max_model_len) == ("base", "bfloat16", 64)
    assert (engine.enable_lora, engine.max_loras, engine.max_lora_rank) == (True, 1, 32)
    generation = Generation(max_new_tokens=8, batch_size=4)
    for path in (None, adapter):
        request = Request(messages=(QUESTION,), seed=1)
        VllmEngine(engine, tokenizer, generation, 64, path).complete([request])
    (_, _, of_base), (_, _, of_tuned) = engine.asked
    assert of_base is None
    assert of_tuned == FakeLora("tuned", 1, "adapter")
    assert not opened().enable_lora


@pytest.mark.usefixtures("vllm")
def test_it_is_given_the_ids_of_training_and_its_ids_become_text_here(
    tokenizer,
):
    """Token ids come from our chat template; text, stop strings and counts are made here."""
    engine = opened()
    engine.says = tokenizer.encode_all(["def f(): pass\nEND more"])[0]
    requests = [Request(messages=(QUESTION,), seed=2**59 + n, stop=("END",)) for n in range(3)]
    generation = Generation(max_new_tokens=8, batch_size=2, temperature=0.5, top_p=0.9)
    answers = VllmEngine(engine, tokenizer, generation, 64, None).complete(requests)
    prompt = tokenizer.encode_prompts([[QUESTION]])[0]
    assert [len(prompts) for prompts, _, _ in engine.asked] == [2, 1]
    prompts, params, _ = engine.asked[0]
    assert prompts == [{"prompt_token_ids": prompt}] * 2
    assert params[1] == FakeParams(
        n=1,
        temperature=0.5,
        top_p=0.9,
        seed=2**59 + 1,
        stop=["END"],
        stop_token_ids=sorted(tokenizer.end_ids),
        max_tokens=8,
    )
    assert [one.text for one in answers] == ["def f(): pass\n"] * 3
    assert answers[0].is_finished
    assert (answers[0].tokens_in, answers[0].tokens_out) == (len(prompt), len(engine.says))


@pytest.mark.usefixtures("vllm")
def test_greedy_answers_have_no_seed_and_may_be_cut_off(tokenizer):
    """Greedy decoding in vLLM is temperature 0; the answer may be truncated."""
    engine = opened()
    engine.says = tokenizer.encode_all(["and so on"])[0]
    generation = Generation(max_new_tokens=8, batch_size=2)
    (answer,) = VllmEngine(engine, tokenizer, generation, 64, None).complete(
        [Request(messages=(QUESTION,), seed=3)]
    )
    params = engine.asked[0][1][0]
    assert (params.temperature, params.seed, params.stop) == (0.0, None, [])
    assert not answer.is_finished


@pytest.mark.usefixtures("vllm")
def test_a_prompt_without_room_for_an_answer_is_not_asked(tokenizer):
    """The event has the same problem as with the in-process model."""
    engine = opened()
    generation = Generation(max_new_tokens=60, batch_size=2)
    (answer,) = VllmEngine(engine, tokenizer, generation, 64, None).complete(
        [Request(messages=(QUESTION,), seed=3)]
    )
    assert answer.problem is not None
    assert not engine.asked


@pytest.mark.usefixtures("vllm")
def test_what_vllm_cannot_load_is_told(monkeypatch):
    """The error includes vLLM's own message."""

    def refused(self, *_, **__):
        raise ValueError("architecture not supported")

    monkeypatch.setattr(FakeLLM, "__init__", refused)
    with pytest.raises(SetupError, match=r"cannot load the model.*architecture not supported"):
        opened()


def test_without_vllm_and_without_a_gpu_both_are_told(monkeypatch):
    """Both errors come before anything is loaded."""
    cpu, cuda = SimpleNamespace(kind="cpu"), SimpleNamespace(kind="cuda")
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    monkeypatch.setattr(engines.machine, "look", lambda accelerator: cpu)
    missing, no_gpu = vllm_problems_here()
    assert isinstance(missing, MissingExtra)
    assert "pip install 'mens-exp[vllm]'" in str(missing)
    assert "this machine has none" in str(no_gpu)
    monkeypatch.setattr(engines, "find_spec", lambda name: object())
    monkeypatch.setattr(engines.machine, "look", lambda accelerator: cuda)
    assert list(vllm_problems_here()) == []
