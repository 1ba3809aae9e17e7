"""Runs compared with a trainer that shares no code with mens_exp.

The reference is `reference_trainer.py`. It asks a run only which documents each micro-batch held.
Each probe trains one small random model in f32 from one adapter, both ways. Losses, gradient norms,
learning rates, validation losses and the saved adapter must agree within `TOLERANCES`; otherwise
the script exits with 1.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import record
import torch
from lightning import Callback
from peft import LoraConfig, get_peft_model
from reference_trainer import (
    CLIP,
    END,
    MICRO_BATCHES,
    RATE,
    START,
    Lion,
    Outcome,
    Probe,
    Row,
    adamw,
    adapter_in,
    cosine,
    cross_entropy,
    distilled,
    dpo,
    grpo,
    ipo,
    loaded,
    mean_of_pairs,
    mean_of_tokens,
    one_cycle,
    orpo,
    smoothed_with_z,
    stable,
    trained_by_reference,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import mens_exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

QUESTION = "How far do runs differ from a trainer that shares no code with mens_exp?"
# Relative to the largest value of a sequence, and for adapters to the reference's total change.
TOLERANCES = {
    "loss": 1e-5,
    "gradient norm": 1e-5,
    "learning rate": 1e-6,
    "validation loss": 1e-5,
    "adapter": 1e-4,
}
RANK, ALPHA, VOCABULARY = 8, 16, 320
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' }}{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SETTINGS = [
    *("trainer=cpu", "logger=none", "suite=none", "model=hf", "backend=lora", "data=jsonl"),
    *("quant.compute_dtype=f32", "lora.dropout=0", f"lora.r={RANK}", f"lora.alpha={ALPHA}"),
    *("data.heldout_frac=0.01", "data.seq_len=96", "data.packing=false", "data.micro_batch_size=2"),
    *("trainer.max_steps=3", "trainer.accumulate_grad_batches=2"),
    *(f"trainer.gradient_clip_val={CLIP}", f"optim.lr={RATE}", "schedule=constant"),
    *("schedule.warmup_steps=0", "callbacks=[default,micro_batches]"),
]
# AdamW divides by the root of tiny squared gradients; an eps above 1e-8 suppresses their noise.
ADAMW = ("optim.eps=1e-4",)
PACKED = ("data.packing=true",)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": START,
    "eos_token_id": END,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 32}
# By model type: the family's peculiarities, and the adapted modules.
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({"rope_parameters": LLAMA3}, LINEAR),
    "gemma2": (GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0}, LINEAR),
    "gemma3_text": (GEMMA | {"sliding_window_pattern": 2}, LINEAR),
    "granite": (
        {
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        LINEAR,
    ),
    "cohere": ({"logit_scale": 0.25}, LINEAR),
    "phi3": ({"sliding_window": 16}, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "qwen3": ({"head_dim": 32}, LINEAR),
    "olmo2": ({}, LINEAR),
    "mistral": ({"sliding_window": 12, "head_dim": 32}, LINEAR),
    "mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
        LINEAR[:4],
    ),
    "gpt_neox": ({}, ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
    "gpt2": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "num_key_value_heads": 4},
        ["c_attn", "c_proj", "c_fc"],
    ),
}


class Recorder(Callback):
    """A callback that records the token ids of each micro-batch in the working directory."""

    def on_fit_start(self, _trainer: Any, _module: Any) -> None:
        """Clear the record of earlier runs."""
        self._seen: list[tuple[int, list[list[int]]]] = []

    def on_train_batch_start(self, trainer: Any, _module: Any, batch: Any, _index: int) -> None:
        """Split the micro-batch into documents and record them."""
        rows = batch.input_ids_BT
        if batch.documents is not None:
            found = [rows[0, first:end].tolist() for first, end in batch.documents]
        else:
            masks = batch.attention_mask_BT.bool()
            found = [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]
        self._seen.append((int(trainer.global_step), found))

    def on_fit_end(self, _trainer: Any, _module: Any) -> None:
        """Write the record."""
        MICRO_BATCHES.write_text(json.dumps(self._seen), "utf-8")


def main() -> None:
    """Run the probes, print every difference, and record the largest of each probe."""
    given = record.begin(record.command_line(__file__, __doc__))
    given.results = given.results.resolve()
    figures, failed = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for probe in smallest() if given.smallest else probes():
            found = differences(*both(probe))
            quantity = max(found, key=lambda one: found[one] / TOLERANCES[one])
            beside = (f"tolerance of the {quantity}", TOLERANCES[quantity])
            lower = record.Better.LOWER
            figures.append(record.figure(probe.name, found[quantity], "relative", lower, beside))
            each = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
            print(f"{probe.name}: {each}", flush=True)
            if found[quantity] > TOLERANCES[quantity]:
                failed.append(probe.name)
    record.finish(QUESTION, figures, given)
    if failed:
        sys.exit(f"beyond the tolerance: {', '.join(failed)}")


def differences(ours: Outcome, theirs: Outcome, first: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest relative difference of each quantity; inf if a value is not finite."""
    found = {}
    for name, values in theirs.figures.items():
        assert len(ours.figures[name]) == len(values), f"{name}: both took as many steps"
        expected = torch.tensor(values, dtype=torch.float64)
        gap = torch.tensor(ours.figures[name], dtype=torch.float64) - expected
        found[name] = float(gap.abs().max() / expected.abs().max())
    assert ours.adapter.keys() == theirs.adapter.keys(), "both adapted the same layers"
    mine, other, start = (
        torch.cat([one[name].double().flatten() for name in sorted(one)])
        for one in (ours.adapter, theirs.adapter, first)
    )
    found["adapter"] = float((mine - other).norm() / (other - start).norm())
    return {name: value if math.isfinite(value) else math.inf for name, value in found.items()}


def both(probe: Probe) -> tuple[Outcome, Outcome, dict[str, Tensor]]:
    """Train with both trainers; return both outcomes and the initial adapter."""
    prepare(probe)
    ours = trained_by_mens_exp(probe)
    return ours, trained_by_reference(probe), adapter_in(Path("first"))


def prepare(probe: Probe) -> None:
    """Write model, teacher, initial adapter, rows and recorder into the working directory."""
    special, targets = FAMILIES[probe.family]
    for name, seed in (("model", 0), ("teacher", 1)):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(probe.family, **SIZES | special)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():  # not near uniform, and no norm of ones
                weight.mul_(3.0) if weight.ndim > 1 else weight.add_(0.1 * torch.randn_like(weight))
        model.save_pretrained(name)
        tokenizer().save_pretrained(name)
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": targets} | dict(probe.lora)
    adapted = get_peft_model(loaded("model"), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.05 * torch.randn_like(weight))
    adapted.save_pretrained("first", save_embedding_layers=False)
    for name, rows in (("rows", probe.rows), ("validated", probe.validated)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    option = Path("conf/callbacks/micro_batches.yaml")
    option.parent.mkdir(parents=True, exist_ok=True)
    option.write_text("# Records micro-batches.\n_target_: independent.Recorder\n", "utf-8")


def trained_by_mens_exp(probe: Probe) -> Outcome:
    """Train with mens_exp, and read its record."""
    targets = ",".join(FAMILIES[probe.family][1])
    here = [f"model.id={Path('model').resolve()}", f"lora.init_from={Path('first').resolve()}"]
    data = ["data.path=rows.jsonl", "data.val_path=validated.jsonl", f"lora.targets=[{targets}]"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = mens_exp.train(*SETTINGS, *here, *data, *probe.overrides)
    lines = (run.path / "telemetry.jsonl").read_text("utf-8").strip().split("\n")
    events = [json.loads(line) for line in lines]
    steps = [one["payload"] for one in events if one["event"] == "step"]
    checks = [one["payload"]["val/loss"] for one in events if one["event"] == "validation"]
    figures = {
        "loss": [one["train/loss"] for one in steps],
        "gradient norm": [one["train/grad_norm"] for one in steps],
        "learning rate": [one["optim/lr"] for one in steps],
        "validation loss": [checks[0], checks[-1]],  # of the base, and at the end
    }
    return Outcome(figures, adapter_in(run.path / "adapter/peft"))


def tokenizer() -> Any:
    """Make a byte-level tokenizer with some frequent pairs."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=CONTROL, initial_alphabet=alphabet
    )
    made.train_from_iterator([json.dumps(row) for row in (*ROWS, *PAIRS)], trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), CONTROL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **names)


def plain_rows() -> list[Row]:
    """Return rows of different lengths, with rewards that only GRPO reads."""
    answers = ["Pear.", "Oak, beech, lime and many other kinds.", "A wren sings.", "Carp."]
    answers += ["A dime is worth ten cents.", "Ruby", "Dory", "The town of York, with its walls."]
    things = ["fruit", "tree", "bird", "fish", "coin, please", "gem", "boat", "town"]
    return [
        {"prompt": f"Name a {thing}.", "response": answer}
        for thing, answer in zip(things, answers, strict=True)
    ]


ROWS = plain_rows()
VALIDATED = [
    {"prompt": "Name a herb.", "response": "Sage and thyme."},
    {"prompt": "Name a colour.", "response": "A light blue, as of the sky in the morning."},
]
WEIGHTS = [1, 0.5, 2, 0, 0.25, 3, 1, 4, 0, 5]  # the last two are for validation
WEIGHTED = [
    {**row, "fields": {"weight": weight}}
    for row, weight in zip([*ROWS, *VALIDATED], WEIGHTS, strict=True)
]
PAIRS = [
    {"prompt": one["prompt"], "chosen": one["response"], "rejected": other["response"]}
    for one, other in pairwise([*ROWS, *VALIDATED])
]
REWARDED = [
    {
        "prompt": row["prompt"],
        "response": f"{row['response']} {number}" * (1 + number % 2),
        "fields": {"reward": (place + number) % 4 / 3},
    }
    for place, row in enumerate([*ROWS, *VALIDATED])
    for number in range(3 + place % 2)
]
TURNS = [
    {
        "messages": [
            {"role": "system", "content": f"Be {row['prompt']}"},
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"], "weight": int(place != 1)},
            {"role": "user", "content": "Again"},
            {"role": "assistant", "content": f"{row['response']} Yes."},
        ]
    }
    for place, row in enumerate([*ROWS, *VALIDATED])
]


def probe_of(name: str, *overrides: str, **changed: Any) -> Probe:
    """Make a probe; the default trains on plain rows with cross-entropy and AdamW."""
    plain = Probe(
        name=name,
        overrides=(*ADAMW, *overrides),
        rows=tuple(ROWS),
        validated=tuple(VALIDATED),
        loss=mean_of_tokens(cross_entropy),
        validation=mean_of_tokens(cross_entropy),
        optimizer=adamw,
    )
    return replace(plain, **changed)


def of_family(family: str, *, packed: bool) -> Probe:
    """Make the probe of a model family."""
    way = ("packed", PACKED) if packed else ("padded", ())
    return probe_of(f"{family}, {way[0]}", *way[1], family=family)


def of_pairs(name: str, value: Callable[..., Tensor], *overrides: str) -> Probe:
    """Make a probe of a pairwise loss, which is also its validation loss."""
    loss = mean_of_pairs(value)
    sides = {"rows": tuple(PAIRS[:-2]), "validated": tuple(PAIRS[-2:])}
    return probe_of(name, "data.seq_len=192", *overrides, loss=loss, validation=loss, **sides)


def smallest() -> list[Probe]:
    """Return a few probes that together cover most features."""
    smooth = mean_of_tokens(smoothed_with_z(0.1, 0.01))
    both_settings = ("objective.label_smoothing=0.1", "objective.z_loss=0.01")
    return [
        of_family("gemma2", packed=True),
        probe_of("label smoothing and z-loss", *both_settings, loss=smooth),
        of_pairs("DPO", dpo, "objective=dpo", "objective.beta=0.3"),
    ]


def probes() -> list[Probe]:
    """Return all probes."""
    weights = {
        "rows": tuple(WEIGHTED[:-2]),
        "validated": tuple(WEIGHTED[-2:]),
        "loss": mean_of_tokens(cross_entropy, lambda row: float(row["fields"]["weight"])),
        # validation omits rows of weight 0 and weights the others equally
        "validation": mean_of_tokens(cross_entropy, lambda row: row["fields"]["weight"] > 0),
    }
    turns = {"rows": tuple(TURNS[:-2]), "validated": tuple(TURNS[-2:])}
    rewards = {"rows": tuple(REWARDED[:-7]), "validated": tuple(REWARDED[-7:])}
    relative = grpo(REWARDED)
    long_rows = "data.seq_len=192"
    by_field = "objective.weight_field=weight"
    teacher = ("objective=distillation", "objective.teacher=teacher")
    heat = ("objective.beta=0.5", "objective.temperature=2", "objective.ce_weight=0.3")
    near = mean_of_tokens(distilled(0.5, 2, 0.3))
    ranks = {"down_proj": 4, "q_proj": 2}
    pattern = "lora.rank_pattern={down_proj:4,q_proj:2}"
    long = ("trainer.max_steps=10", "trainer.accumulate_grad_batches=1")
    wsd = ("schedule=wsd", "schedule.warmup_steps=2", "schedule.decay_frac=0.35")
    epochs = ("trainer.max_epochs=2", "trainer.max_steps=-1", "trainer.accumulate_grad_batches=3")
    return [
        *(of_family(name, packed=packed) for name in FAMILIES for packed in (False, True)),
        *smallest()[1:],
        probe_of("weights of rows", by_field, **weights),
        probe_of("weights of rows, packed", by_field, *PACKED, **weights),
        probe_of("last 3 tokens", "objective=last_k", "objective.k=3", last_tokens=3),
        probe_of("several turns", long_rows, **turns),
        probe_of("several turns, packed", long_rows, *PACKED, **turns),
        probe_of("last of several turns", long_rows, "objective.turns=last", turns="last", **turns),
        of_pairs("DPO, packed", dpo, "objective=dpo", "objective.beta=0.3", *PACKED),
        of_pairs("IPO", ipo, "objective=dpo", "objective.beta=0.3", "objective.loss=ipo"),
        of_pairs("ORPO", orpo, "objective=orpo", "objective.beta=0.25"),
        probe_of("GRPO", "objective=grpo", loss=relative, validation=relative, **rewards),
        probe_of("distillation", *teacher, *heat, loss=near),
        probe_of("distillation, packed", *teacher, *heat, *PACKED, loss=near),
        probe_of("rsLoRA", "lora.variant=rslora", lora=(("use_rslora", True),)),
        probe_of("DoRA", "lora.variant=dora", lora=(("use_dora", True),)),
        probe_of("rank pattern", pattern, lora=(("rank_pattern", ranks),)),
        probe_of(
            "rsLoRA with rank and alpha patterns",
            *("lora.variant=rslora", pattern, "lora.alpha_pattern={up_proj:3}"),
            lora=(("use_rslora", True), ("rank_pattern", ranks), ("alpha_pattern", {"up_proj": 3})),
        ),
        probe_of(
            "AdamW with decay and betas",
            *("optim.weight_decay=0.5", "optim.betas=[0.8,0.9]"),
            optimizer=lambda parameters: torch.optim.AdamW(
                parameters, lr=RATE, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-4
            ),
        ),
        probe_of(
            "SGD with Nesterov momentum and decay",
            overrides=(
                *("optim=sgd", "optim.lr=0.5", "optim.momentum=0.9", "optim.nesterov=true"),
                "optim.weight_decay=0.01",
            ),
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01
            ),
        ),
        probe_of(
            "Lion with decay",
            overrides=("optim=lion", "optim.lr=1e-3", "optim.weight_decay=0.2"),
            optimizer=lambda parameters: Lion(parameters, 1e-3, 0.2),
        ),
        probe_of("cosine", *long, "schedule=cosine", "schedule.warmup_steps=3", rate=cosine),
        probe_of("warm-up, hold and decay", *long, *wsd, rate=stable),
        probe_of(
            "one cycle", *long, "schedule=one_cycle", "schedule.warmup_steps=null", rate=one_cycle
        ),
        probe_of(
            "last step of fewer micro-batches",
            *(*epochs, "schedule=linear", "data.micro_batch_size=1"),
            rate=lambda step, steps: 1 - step / steps,
        ),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
