"""The loss of a run's PEFT directory, measured with transformers and PEFT alone."""

from __future__ import annotations

import pytest
import torch

from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import from_yaml, typed
from mens_exp.corpus.source import load_rows
from mens_exp.model.quiet import quiet
from mens_exp.model.resolve import resolve
from mens_exp.rows.encode import messages_of

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def peft_model(run, base):
    """Load the quantized base and the adapter with transformers and PEFT alone.

    bitsandbytes' own inference kernel for AVX512-BF16 is left out: SmolLM2's loss is 2.2206 with
    it, and 2.2223 without it, in f32, and by ours (12 documents, experiments/LOG.md).
    """
    from bitsandbytes.nn import Linear4bit
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quant = typed(from_yaml(run.config)).quant
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[quant.compute_dtype.value]
    int8 = BitsAndBytesConfig(load_in_8bit=True)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    with quiet():
        stored = {"nf4": nf4, "int8": int8}[quant.quant_type.value]
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=stored, dtype=dtype)
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.support_avx512bf16_for_cpu = False
        return PeftModel.from_pretrained(model, run.peft).eval()


def loss_of(model, run, base, cache):
    """Score the validation documents one by one, answers alone, with a plain forward pass.

    Rendering, ids and labels are made here with transformers' own tokenizer.
    """
    from transformers import AutoTokenizer

    config = typed(from_yaml(run.config))
    tokenizer = AutoTokenizer.from_pretrained(base)
    options = {} if tokenizer.chat_template else {"chat_template": CHATML}
    total, count = 0.0, 0
    for pair in load_rows(config.data, cache).val:
        prompt = tokenizer.apply_chat_template(
            messages_of(pair), tokenize=False, add_generation_prompt=True, **options
        )
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = f"{pair.response}<|im_end|>"
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*prompt_ids, *answer_ids]])
        ids = ids[:, : config.data.seq_len]
        learned = ids[0, len(prompt_ids) :]
        if not len(learned):
            continue
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits.float(), learned, reduction="sum")
        total, count = total + float(losses), count + len(learned)
    validated = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "validation"]
    assert count == validated[-1]["val/supervised_tokens"]
    return total / count


def base_of(run, cache):
    return resolve(typed(from_yaml(run.config)).model, cache).directory


@pytest.fixture
def peft_loss(cache):
    """Score a run's validation documents with an adapter, its own unless told otherwise."""

    def scored(run, *, adapter_of=None):
        base = base_of(run, cache)
        return loss_of(peft_model(adapter_of or run, base), run, base, cache)

    return scored
