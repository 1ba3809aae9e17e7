"""Runs compared with TRL's SFTTrainer on the same batches, and adapters that TRL trained.

TRL renders, masks, collates, trains and saves with its own code. It gets the same model directory,
first adapter and rows, in the order that the run's seed draws.
"""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from families import make_tiny
from safetensors.torch import load_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events

STEPS, ACCUMULATED, SEED, RATE = 10, 2, 7, 4e-3
HELD_OUT = "put aside 22"  # SHA-256 in the lowest hundredth, as for no other group
# The end marker is trained on, the newline after it is not.
MARKED = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '<call>' + call['function']['name'] + ' ' }}
            {{- call['function']['arguments'] | tojson }}
        {%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def conversation(number):
    """Every third row has a system prompt, every second one a second exchange.

    In every fifth row the assistant calls a tool.
    """
    turns = [
        {"role": "user", "content": f"Add {number}."},
        {"role": "assistant", "content": f"def add(x):\n    return x + {number}\n"},
    ]
    if number % 2:
        turns += [
            {"role": "user", "content": "Äh, wie oft?"},
            {"role": "assistant", "content": "Twice. " * (number % 5 + 1)},
        ]
    if number % 5 == 0:
        called = {"name": "add", "arguments": {"terms": [number, 1], "unit": "Öre"}}
        turns += [
            {"role": "user", "content": "Try it."},
            {
                "role": "assistant",
                "content": "So:",
                "tool_calls": [{"type": "function", "function": called}],
            },
            {"role": "tool", "content": str(number + 1)},
            {"role": "assistant", "content": f"It gives {number + 1}."},
        ]
    if number % 3 == 0:
        turns.insert(0, {"role": "system", "content": "Answer in Python."})
    return turns


def row(number):
    """Return a row with its tools, if any."""
    unit = {"type": "string", "description": "of the terms"}
    parameters = {"type": "object", "properties": {"unit": unit}}
    function = {"name": "add", "description": "Adds.", "parameters": parameters}
    tools = None if number % 5 else [{"type": "function", "function": function}]
    return {"messages": conversation(number), "tools": tools}


ROWS = [row(number) for number in range(26)]
VALIDATED = [row(number) for number in range(100, 106)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama with a chat template that marks the assistant's text, as TRL requires."""
    directory = make_tiny("llama", tmp_path_factory.mktemp("trl") / "model", attention_dropout=None)
    (directory / "chat_template.jinja").write_text(MARKED, "utf-8")
    return directory


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Files of training rows and validation rows."""
    place = tmp_path_factory.mktemp("rows")
    sides = {
        "train": [
            {"messages": conversation(999), "group": HELD_OUT},
            *({**one, "group": f"row {i}"} for i, one in enumerate(ROWS)),
        ],
        "val": [{**one, "group": f"val {i}"} for i, one in enumerate(VALIDATED)],
    }
    for name, lines in sides.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (place / f"{name}.jsonl").write_text(text, "utf-8")
    return place


def peft_on(base, adapter=None, **options):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter, **options)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=projections)
    )


@pytest.fixture(scope="module")
def first(base, tmp_path_factory):
    """The initial adapter of both, made by PEFT with a random B."""
    place = tmp_path_factory.mktemp("first") / "adapter"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft_on(base)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def settings(base, rows, first):
    """Settings shared with TRL's trainer: f32, mean over the whole batch, clipping, schedule."""
    return [
        "model=hf",
        f"model.id={base}",
        "backend=lora",
        "quant=none",
        "quant.compute_dtype=f32",
        f"lora.init_from={first}",
        *("lora.r=4", "lora.alpha=8", "lora.dropout=0"),
        "objective=assistant",
        f"data.path={rows / 'train.jsonl'}",
        f"data.val_path={rows / 'val.jsonl'}",
        "data.heldout_frac=0.01",
        "data.seq_len=512",
        "data.val_max_tokens=100000",
        f"trainer.max_steps={STEPS}",
        "trainer.gradient_clip_val=1",
        "schedule=cosine",
        f"optim.lr={RATE}",
        "optim.weight_decay=0.1",
        f"seed={SEED}",
    ]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches of both. TRL cannot pack on a CPU, so a step of the packed run holds all rows.

    ``loss`` is TRL's name of the loss.
    """

    ours: tuple[str, ...]
    size: int
    rows: list[dict[str, object]]
    loss: str = "nll"


def in_order(count):
    """Repeat the rows in a run's order: a permutation by Philox from seed and epoch."""
    order = []
    while len(order) < count:
        entropy = np.random.SeedSequence([SEED, len(order) // len(ROWS)])
        drawn = np.random.Generator(np.random.Philox(entropy)).permutation(len(ROWS))
        order += drawn.tolist()
    return [ROWS[place] for place in order[:count]]


BATCHES = {
    "padded": Batches(
        ours=("data.packing=false", "data.micro_batch_size=2", "trainer.accumulate_grad_batches=2"),
        size=2,
        rows=in_order(STEPS * 2 * ACCUMULATED),
    ),
    "packed": Batches(
        ours=("data.packing=true", "data.micro_batch_size=1", "trainer.accumulate_grad_batches=9"),
        size=len(ROWS) // ACCUMULATED,
        rows=ROWS * STEPS,
    ),
    "dynamic": Batches(
        ours=(
            *("data.packing=false", "data.micro_batch_size=2", "trainer.accumulate_grad_batches=2"),
            "objective.dft=true",
        ),
        size=2,
        rows=in_order(STEPS * 2 * ACCUMULATED),
        loss="dft",
    ),
}


def trained_by_trl(base, first, batches, place):
    """Train with TRL; return each step's loss, and the directory of the saved adapter."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL and transformers themselves
        trainer = SFTTrainer(
            model=peft_on(base, first, is_trainable=True),
            args=SFTConfig(
                output_dir=str(place),
                assistant_only_loss=True,
                loss_type=batches.loss,
                max_length=512,
                per_device_train_batch_size=batches.size,
                gradient_accumulation_steps=ACCUMULATED,
                max_steps=STEPS,
                learning_rate=RATE,
                lr_scheduler_type="cosine",
                warmup_steps=0,
                weight_decay=0.1,
                max_grad_norm=1.0,
                optim="adamw_torch",
                train_sampling_strategy="sequential",
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(batches.rows),
            processing_class=AutoTokenizer.from_pretrained(base),
        )
        trainer.train()
    trainer.save_model(str(place / "adapter"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, place / "adapter"


@pytest.fixture(scope="module")
def theirs(base, first, tmp_path_factory):
    """TRL's losses and adapter, trained once for each kind of batches."""

    @functools.cache
    def trained(name):
        return trained_by_trl(base, first, BATCHES[name], tmp_path_factory.mktemp("trl") / name)

    return trained


@pytest.fixture
def ours(settings, train_in, tmp_path):
    """Train a run with TRL's settings and the given overrides."""

    def trained(*overrides):
        return train_in(tmp_path / "run", *settings, *overrides, without="data.val_frac")

    return trained


def losses_of(run):
    events = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    return [payload["train/loss"] for payload in events]


def adapter_in(directory):
    tensors = load_file(directory / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]), tensors.keys()


@pytest.mark.parametrize("name", BATCHES)
def test_losses_and_adapter_are_those_of_trl(name, ours, theirs, first):
    """Ten steps in f32: each loss to 1e-6, and each element of the adapter to 1e-5."""
    run = ours(*BATCHES[name].ours)
    manifest = Manifest.read(run.manifest)
    assert manifest.inputs["data"]["train_rows"] == len(ROWS)
    if name == "packed":
        assert manifest.facts["epochs"] == STEPS
    losses, directory = theirs(name)
    if name != "dynamic":  # its loss rises with a probability below 1/e
        assert losses[-1] < 0.9 * losses[0]
    assert losses_of(run) == pytest.approx(losses, rel=1e-6)
    (tuned, names), (other, same) = adapter_in(run.peft), adapter_in(directory)
    assert names == same
    assert (other - adapter_in(first)[0]).abs().max() > 1e-2
    assert (tuned - other).abs().max() <= 1e-5
    assert (tuned - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("override", ["objective=causal", "seed=8"])
def test_another_mask_or_order_is_not_trl_s(override, ours, theirs):
    """The comparison can fail."""
    run = ours(*BATCHES["padded"].ours, override)
    assert losses_of(run) != pytest.approx(theirs("padded")[0], rel=1e-3)


def validation_loss(model, base):
    """Return the mean loss on assistant tokens, with transformers' own mask and forward pass."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    total, count = 0.0, 0
    for one in VALIDATED:
        rendered = tokenizer.apply_chat_template(
            one["messages"],
            tools=one["tools"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        ids_BT = rendered["input_ids"]
        labels_BT = ids_BT.masked_fill(torch.as_tensor(rendered["assistant_masks"]) == 0, -100)
        learned = int((labels_BT != -100).sum())
        with torch.inference_mode():
            total += float(model.eval()(input_ids=ids_BT, labels=labels_BT).loss) * learned
        count += learned
    return total / count


def test_an_adapter_that_trl_trained_goes_in(ours, theirs, base):
    """The loss before the first step is the one that PEFT alone computes."""
    _, directory = theirs("padded")
    run = ours(*BATCHES["padded"].ours, f"lora.init_from={directory}", "trainer.max_steps=1")
    results = Manifest.read(run.manifest).results
    expected = validation_loss(peft_on(base, directory), base)
    assert results["initial_val_loss"] == pytest.approx(expected, rel=1e-6)
    assert expected < 0.9 * results["base_val_loss"]


def test_an_adapter_that_trl_trained_is_merged(theirs, base, tmp_path):
    """Each weight equals PEFT's own merge, and the model has the same validation loss."""
    from transformers import AutoModelForCausalLM

    _, directory = theirs("padded")
    out = tmp_path / "merged"
    merge = ["task=merge", "logger=none", f"path={directory}", f"base={base}", "merge.dtype=f32"]
    places = [f"out={out}", f"hydra.run.dir={tmp_path / 'record'}"]
    assert cli.main([*merge, *places, "parity.tokens=64"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model = peft_on(base, directory)
    expected = validation_loss(model, base)
    theirs = model.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        assert torch.allclose(weight, theirs[name], rtol=0, atol=1e-6), name
    assert validation_loss(merged, base) == pytest.approx(expected, rel=1e-6)
