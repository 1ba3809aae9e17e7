"""Losses of a run's output, measured with transformers and PEFT alone."""

from __future__ import annotations

import pytest
import torch
from transformers_models import of_transformers

from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import from_yaml, typed
from mens_exp.corpus.source import load_rows
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import resolve
from mens_exp.rows.answers import messages_of

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def peft_model(run, base):
    """Load the quantized base and the adapter with transformers and PEFT alone."""
    from peft import PeftModel

    quant = typed(from_yaml(run.config)).quant
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[quant.compute_dtype.value]
    model = of_transformers(base, dtype, quant=quant.quant_type.value)
    with quiet():
        return PeftModel.from_pretrained(model, run.peft).eval()


def loss_of(model, run, directory, cache):
    """Score validation documents one by one with `forward(labels=...)`, on the answers alone.

    The documents' text, ids and labels come from the tokenizer that transformers loads.
    """
    from transformers import AutoTokenizer

    config = typed(from_yaml(run.config))
    tokenizer = AutoTokenizer.from_pretrained(directory)
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
        learned = ids.shape[1] - len(prompt_ids)
        if learned <= 0:
            continue
        labels = ids.clone()
        labels[:, : len(prompt_ids)] = -100
        with torch.inference_mode():
            mean = float(model(input_ids=ids, labels=labels).loss)
        total, count = total + mean * learned, count + learned
    validated = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "validation"]
    assert count == validated[-1]["val/supervised_tokens"]
    return total / count


def base_of(run, cache):
    return resolve(typed(from_yaml(run.config)).model, cache).directory


@pytest.fixture
def peft_loss(cache):
    """Score a run's validation documents with PEFT, on the run's own adapter by default."""

    def scored(run, *, adapter_of=None):
        base = base_of(run, cache)
        return loss_of(peft_model(adapter_of or run, base), run, base, cache)

    return scored


@pytest.fixture
def written_loss(cache):
    """Score a run's validation documents with a directory that transformers loads by itself."""
    from transformers import AutoModelForCausalLM

    def scored(run, directory, change=None, **options):
        # transformers ignores how a GGUF splits texts; tests/export/test_gguf.py reads its ids.
        tokenizer = base_of(run, cache) if "gguf_file" in options else directory
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
        for parameter in model.parameters() if change is not None else ():
            parameter.data = change(parameter.data)
        return loss_of(model.eval(), run, tokenizer, cache)

    return scored
