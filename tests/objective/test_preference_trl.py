"""Losses, rewards and gradients of preference objectives, compared with TRL's trainers.

TRL renders, tokenizes and collates the rows with code of its own, and computes its loss with its
own trainer class on the same model and adapter, in f32.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from live_adapters import fill_b

from mens_exp.config.objective_spec import shares_prompts
from mens_exp.corpus.source import labelling_of
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.data.stream import MicroBatches
from mens_exp.planning.machine import ALONE
from mens_exp.rows.documents import share_prompts
from mens_exp.rows.encode import encode
from mens_exp.rows.packing import single
from mens_exp.rows.parse import parse_row
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import build_backend, objective_of
from mens_exp.training.module import TrainingModule
from mens_exp.training.precompute import known_answers

CLOSE = 1e-5
# Without a newline after the last answer, which TRL would supervise too.
TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


ROWS = [
    {
        "prompt": [user(f"Add {n}.")],
        "chosen": [said(f"def add_{n}(x):\n    return x + {n}")],
        "rejected": [said("no idea, " * (1 + n % 3))],
    }
    for n in range(4)
]
ROWS += [
    {
        "prompt": [
            {"role": "system", "content": "Be terse."},
            user("Hi."),
            said("Yes?"),
            user("4"),
        ],
        "chosen": [said("four")],
        "rejected": [said("It is the number that follows three.")],
    }
]


LENGTH = {"max_length": 1024}


@dataclass(frozen=True)
class Case:
    """Our settings, TRL's settings for the same loss, and the pairs per micro-batch of TRL."""

    ours: tuple[str, ...]
    theirs: dict[str, object] = field(default_factory=dict)
    at_once: int = len(ROWS)
    packing: bool = True
    scale: float = 1.0  # for the adapter's B
    moved: float | None = None  # factor of B after sampling, if any
    split: int = 1  # micro-batches per step, ours and TRL's, if its loss depends on them


DPO = {
    "sigmoid": Case(("objective.beta=0.3",), {"beta": 0.3}),
    "sigmoid, padded": Case((), {}, packing=False),
    "sigmoid, shared prompts": Case(("objective.share_prompt=true",)),
    "ipo": Case(("objective.loss=ipo",), {"loss_type": ["ipo"]}),
    "hinge": Case(("objective.loss=hinge",), {"loss_type": ["hinge"]}),
    "robust": Case(
        ("objective.loss=robust", "objective.label_smoothing=0.2"),
        {"loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    # With one pair, AOT's sorting has no effect, so it is the conservative DPO loss.
    "label smoothing": Case(
        ("objective.label_smoothing=0.2",), {"loss_type": ["aot"], "label_smoothing": 0.2}, 1
    ),
    "length normalised": Case(
        ("objective.length_normalised=true",), {"loss_type": ["sigmoid_norm"]}
    ),
    # TRL averages over the tokens of a micro-batch, we over those of each pair.
    "NLL term": Case(
        ("objective.nll_weight=0.7",),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.7]},
        1,
    ),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    place = tmp_path_factory.mktemp("template")
    (place / "chat.jinja").write_text(TEMPLATE, "utf-8")
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    return [
        "backend=lora",
        "quant=none",
        "quant.compute_dtype=f32",
        *("lora.r=4", "lora.alpha=8", "lora.dropout=0"),
        f"tokenizer.chat_template={place / 'chat.jinja'}",
        "data=jsonl",
        f"data.path={place / 'rows.jsonl'}",
        "data.seq_len=1024",
    ]


@dataclass(frozen=True)
class Computed:
    """Token ids of the answers, loss, metrics and gradient."""

    ids: list[list[int]]
    loss: float
    metrics: dict[str, float]
    gradient: dict[str, torch.Tensor]


@pytest.fixture
def ours(tiny_config, tiny_base, settings):
    """Compute a case with our module."""

    def computed(objective, case, rows=ROWS):
        config = tiny_config(*settings, f"objective={objective}", *case.ours)
        backend = fill_b(build_backend(config, tiny_base))
        times(backend, case.scale)
        module = TrainingModule(config, backend, objective_of(config), total_steps=1).train()
        tokenizer = load_tokenizer(config.tokenizer, tiny_base.directory)
        pairs = [parse_row(row, "rows.jsonl:1") for row in rows]
        documents = encode(pairs, tokenizer, labelling_of(config))
        if shares_prompts(config.objective):
            documents = share_prompts(documents)
        everything = range(len(documents))
        if case.moved is not None:
            stream = MicroBatches(
                documents,
                single(len(documents)),
                micro_batch_size=1,
                total=len(documents),
                seed=None,
                packing=case.packing,
                pad_id=tokenizer.pad_id,
            )
            data = SimpleNamespace(
                train_documents=documents,
                val_documents=documents,
                in_blocks=lambda: stream,
                trained_blocks=lambda: np.arange(len(documents)),
                val_dataloader=lambda: stream,
            )
            run = SimpleNamespace(manifest=SimpleNamespace(facts={}), save=lambda: None)
            module.known_answers = known_answers(run, module, data, ALONE)
            times(backend, case.moved)
        losses = []
        for some in parts(everything, len(documents) // case.split):
            batch = (
                packed_batch(documents, [some], 0, multiple=32)
                if case.packing
                else padded_batch(documents, [[one] for one in some], 0, pad_id=tokenizer.pad_id)
            )
            losses.append(module.passed(batch)[1])
            losses[-1].total.backward()
        count = sum(one.count for one in losses)
        bounds = zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
        return backend, Computed(
            ids=[documents.ids[a:b].tolist() for a, b in bounds],
            loss=sum(float(one.total.detach()) for one in losses) / count,
            metrics={
                name: sum(float(one.metrics[name]) for one in losses)
                / sum(float(one.counts.get(name, one.count)) for one in losses)
                for name in losses[0].metrics
            },
            gradient={name: p.grad / count for name, p in backend.trainable().items()},
        )

    return computed


def times(backend, factor):
    """Multiply the B of every adapter."""
    for name, parameter in backend.trainable().items():
        if name.endswith("lora_b"):
            parameter.data.mul_(factor)


PROJECTIONS = {
    **{one: f"self_attn.{one}_proj" for one in "qkvo"},
    **{one: f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}


def peft_name(name):
    """Return PEFT's name of one of our parameters, such as `l0.q.lora_a`."""
    layer, projection, side = name.split(".")
    number, letter = layer.removeprefix("l"), side[-1].upper()
    module = f"base_model.model.model.layers.{number}.{PROJECTIONS[projection]}"
    return f"{module}.lora_{letter}.default.weight"


@pytest.fixture
def trainer_of(tiny_base, tmp_path):
    """Build a TRL trainer on the base with the weights of our adapter."""

    def built(trainer, config, backend, rows, reward_funcs=None, **settings):
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tiny_base.directory)
        tokenizer.chat_template = TEMPLATE
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # between TRL and transformers
            made = trainer(
                model=AutoModelForCausalLM.from_pretrained(
                    tiny_base.directory, dtype=torch.float32
                ),
                args=config(
                    output_dir=str(tmp_path),
                    gradient_checkpointing=False,
                    bf16=False,
                    use_cpu=True,
                    report_to="none",
                    **settings,
                ),
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
                peft_config=LoraConfig(
                    r=4,
                    lora_alpha=8,
                    lora_dropout=0.0,
                    target_modules=[name.rpartition(".")[2] for name in PROJECTIONS.values()],
                    task_type="CAUSAL_LM",
                ),
                **({} if reward_funcs is None else {"reward_funcs": reward_funcs}),
            )
        copy_adapter(backend, made)
        made.model.train()
        return made

    return built


def copy_adapter(backend, trainer):
    theirs = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, value in backend.trainable().items():
            theirs[peft_name(name)].copy_(value)


def gradient_of(trainer, backend):
    theirs = dict(trainer.model.named_parameters())
    return {name: theirs[peft_name(name)].grad for name in backend.trainable()}


def parts(rows, at_once):
    return [rows[i : i + at_once] for i in range(0, len(rows), at_once)]


def same(found, expected):
    """Assert that two results are equal."""
    assert found.ids == expected.ids
    assert found.loss == pytest.approx(expected.loss, rel=CLOSE, abs=CLOSE)
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=CLOSE, abs=CLOSE), name
    lengths = [torch.cat([g.flatten() for g in one.gradient.values()]) for one in (found, expected)]
    assert lengths[1].norm() > 1e-3
    assert (lengths[0] - lengths[1]).norm() <= CLOSE * lengths[1].norm()


def rewards_in(logged):
    """Return our names of the metrics that a TRL trainer logs."""
    return {
        "chosen_reward": logged["rewards/chosen"],
        "rejected_reward": logged["rewards/rejected"],
        "reward_margin": logged["rewards/margins"],
        "reward_accuracy": logged["rewards/accuracies"],
    }


def by_dpo(trainer_of, backend, case):
    """Compute a case with TRL's DPOTrainer."""
    from trl import DPOConfig, DPOTrainer

    trainer = trainer_of(DPOTrainer, DPOConfig, backend, ROWS, **LENGTH, **case.theirs)
    batches = [
        trainer.data_collator(some) for some in parts(list(trainer.train_dataset), case.at_once)
    ]
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch) / len(batches)
        loss.backward()
        total += float(loss.detach())
    logged = {name: sum(v) / len(v) for name, v in trainer._metrics["train"].items()}
    ids = [
        [sample["prompt_ids"] + sample[f"{one}_ids"] for one in ("chosen", "rejected")]
        for sample in trainer.train_dataset
    ]
    return Computed(
        ids=[one for both in ids for one in both],
        loss=total,
        metrics=rewards_in(logged),
        gradient=gradient_of(trainer, backend),
    )


@pytest.mark.parametrize("name", DPO)
def test_dpo_is_that_of_trl(name, ours, trainer_of):
    """Loss, rewards, margins, accuracies and every adapter's gradient agree to 1e-5."""
    backend, found = ours("dpo", DPO[name])
    same(found, by_dpo(trainer_of, backend, DPO[name]))


def test_another_beta_is_not_trl_s(ours, trainer_of):
    """Control: the comparison can fail."""
    backend, found = ours("dpo", Case(("objective.beta=0.11",)))
    with pytest.raises(AssertionError):
        same(found, by_dpo(trainer_of, backend, Case(())))


CPO = {
    "cpo": Case((), {"loss_type": "sigmoid"}, 1),
    "cpo without NLL, smoothed": Case(
        ("objective.nll_weight=0", "objective.label_smoothing=0.1"),
        {"loss_type": "sigmoid", "cpo_alpha": 0.0, "label_smoothing": 0.1},
    ),
    "cpo hinge": Case(
        ("objective.nll_weight=0", "objective.loss=hinge"),
        {"loss_type": "hinge", "cpo_alpha": 0.0},
    ),
    "cpo ipo": Case(
        ("objective.nll_weight=0", "objective.loss=ipo"), {"loss_type": "ipo", "cpo_alpha": 0.0}
    ),
    "simpo": Case(
        ("objective.beta=2.5", "objective.target=0.5"),
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 0.5},
    ),
    "simpo with NLL, smoothed": Case(
        ("objective.nll_weight=0.3", "objective.label_smoothing=0.1"),
        {
            "loss_type": "simpo",
            "cpo_alpha": 0.3,
            "beta": 2.0,
            "simpo_gamma": 1.0,
            "label_smoothing": 0.1,
        },
        1,
    ),
    "orpo": Case(("objective.beta=0.4",), {"beta": 0.4}, 1),
    "orpo with shared prompts": Case(
        ("objective.beta=0.4", "objective.share_prompt=true"), {"beta": 0.4}, 1
    ),
}


def tokenized(rows, tokenizer):
    """Return the rows as TRL's pair trainers collate them, tokenized by transformers."""
    found = []
    for row in rows:
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        sides = {}
        for side in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=True)
            ids = ids["input_ids"]
            sides[f"{side}_input_ids"] = ids
            sides[f"{side}_labels"] = [-100] * len(asked) + ids[len(asked) :]
        found.append(sides)
    return found


def padded(samples):
    """Pad samples on the right, each side to its longest."""
    batch = {}
    for name in samples[0]:
        fill = -100 if name.endswith("labels") else 0
        width = max(len(one[name]) for one in samples)
        batch[name] = torch.tensor(
            [one[name] + [fill] * (width - len(one[name])) for one in samples]
        )
        if name.endswith("input_ids"):
            lengths = torch.tensor([[len(one[name])] for one in samples])
            mask = (torch.arange(width)[None] < lengths).long()
            batch[name.replace("input_ids", "attention_mask")] = mask
    return batch


def by_reference_free(objective, trainer_of, backend, case):
    """Compute a case with TRL's CPOTrainer or ORPOTrainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these are experimental
        from trl.experimental.cpo import CPOConfig, CPOTrainer
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    classes = (ORPOTrainer, ORPOConfig) if objective == "orpo" else (CPOTrainer, CPOConfig)
    texts = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    trainer = trainer_of(*classes, backend, texts, **LENGTH, **case.theirs)
    samples = tokenized(ROWS, trainer.processing_class)
    batches = [padded(some) for some in parts(samples, case.at_once)]
    total, logged = 0.0, {}
    for batch in batches:
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
        (loss / len(batches)).backward()
        total += float(loss.detach()) / len(batches)
        for name, value in metrics.items():
            logged[name] = logged.get(name, 0.0) + value / len(batches)
    return Computed(
        ids=[one[f"{side}_input_ids"] for one in samples for side in ("chosen", "rejected")],
        loss=total,
        metrics=rewards_in(logged)
        | ({"chosen_nll": logged["nll_loss"]} if case.theirs.get("cpo_alpha") else {}),
        gradient=gradient_of(trainer, backend),
    )


@pytest.mark.parametrize("name", CPO)
def test_objectives_without_reference_are_those_of_trl(name, ours, trainer_of):
    """For CPO, SimPO and ORPO loss, rewards, margins, accuracies and gradient agree to 1e-5."""
    objective = name.partition(" ")[0]
    backend, found = ours(objective, CPO[name])
    same(found, by_reference_free(objective, trainer_of, backend, CPO[name]))


LABELLED = [
    {
        "prompt": row["prompt"],
        "completion": row["chosen" if n % 2 else "rejected"],
        "label": n % 2 == 1,
    }
    for n, row in enumerate(ROWS)
]
WEIGHTS = ("objective.wanted_weight=1.5", "objective.unwanted_weight=0.8")
KTO = {
    "weights": Case(WEIGHTS, {"desirable_weight": 1.5, "undesirable_weight": 0.8}, scale=-0.3),
    "padded, KL below 0": Case((), packing=False),
}


def by_kto(trainer_of, backend, case, rows):
    """Compute a case with TRL's KTOTrainer."""
    from trl import KTOConfig, KTOTrainer

    size = {"per_device_train_batch_size": len(rows)}
    trainer = trainer_of(KTOTrainer, KTOConfig, backend, rows, **LENGTH, **size, **case.theirs)
    samples = list(trainer.train_dataset)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(samples))
    loss.backward()
    logged = {name: value for name, (value,) in trainer._metrics["train"].items()}
    ids = [
        [one["prompt_ids"] + one[name] for name in ("completion_ids", "KL_completion_ids")]
        for one in samples
    ]
    return Computed(
        ids=[one for both in ids for one in both],
        loss=float(loss.detach()),
        metrics={
            "chosen_reward": logged["rewards/chosen"],
            "rejected_reward": logged["rewards/rejected"],
            "kl": logged["kl"],
        },
        gradient=gradient_of(trainer, backend),
    )


@pytest.mark.parametrize("name", KTO)
def test_kto_is_that_of_trl(name, ours, trainer_of):
    """Loss, rewards, the KL of mismatched answers and the gradient agree to 1e-5."""
    backend, found = ours("kto", KTO[name], LABELLED)
    expected = by_kto(trainer_of, backend, KTO[name], LABELLED)
    assert (expected.metrics["kl"] > 1e-3) is (KTO[name].scale < 0)
    same(found, expected)


SAMPLED = [
    {
        "prompt": [user(f"Add {n}.")],
        "completion": [said(f"def add_{n}(x):\n    return x + {n}\n" * (k * (n + 1)) or "no idea")],
        "reward": reward,
    }
    for n, rewards in enumerate([(0.0, 1.0, 1.0), (1.0, 0.25, -2.0), (0.5, 0.5, 0.5)])
    for k, reward in enumerate(rewards)
]
GRPO = {
    "not moved": Case((), {"beta": 0.04}, moved=1.0),
    "clipped": Case(("objective.beta=0.3",), {"beta": 0.3}, moved=-2.0),
    "padded, clipped": Case((), {"beta": 0.04}, moved=1.5, packing=False),
    "without KL and scale, clipped higher": Case(
        (
            *("objective.beta=0", "objective.scale_rewards=none"),
            *("objective.epsilon_low=0.01", "objective.epsilon_high=0.02"),
        ),
        {"beta": 0.0, "scale_rewards": "none", "epsilon": 0.01, "epsilon_high": 0.02},
        moved=-1.0,
    ),
    "scaled by all, clipped": Case(
        ("objective.scale_rewards=batch",), {"beta": 0.04, "scale_rewards": "batch"}, moved=-2.0
    ),
    "dr_grpo, clipped, in parts": Case(
        ("objective.loss_type=dr_grpo", "objective.max_completion_tokens=40"),
        {"beta": 0.04, "loss_type": "dr_grpo", "max_completion_length": 40},
        moved=-2.0,
        split=3,
    ),
    "dapo, clipped higher, in parts": Case(
        ("objective.loss_type=dapo", "objective.epsilon_high=0.28", "objective.beta=0.3"),
        {"beta": 0.3, "loss_type": "dapo", "epsilon_high": 0.28},
        moved=-2.0,
        split=3,
    ),
    "dapo, padded, clipped": Case(
        ("objective.loss_type=dapo",), {"beta": 0.04, "loss_type": "dapo"}, moved=1.5, packing=False
    ),
    "bnpo, clipped": Case(
        ("objective.loss_type=bnpo",), {"beta": 0.04, "loss_type": "bnpo"}, moved=-2.0
    ),
    "bnpo, clipped, in parts": Case(
        ("objective.loss_type=bnpo",), {"beta": 0.04, "loss_type": "bnpo"}, moved=-2.0, split=3
    ),
    "grpo, clipped, in parts": Case((), {"beta": 0.04}, moved=-2.0, split=9),
}


def by_grpo(trainer_of, backend, case):
    """Compute a case with TRL's GRPOTrainer, given only rewards and answers."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import split_tensor_dict

    times(backend, 1 / case.moved)
    at_once = case.split if case.theirs.get("loss_type") in {"bnpo", "dapo"} else 1
    trainer = trainer_of(
        GRPOTrainer,
        GRPOConfig,
        backend,
        SAMPLED,
        reward_funcs=lambda reward, **_: reward,
        per_device_train_batch_size=len(SAMPLED) // at_once,
        gradient_accumulation_steps=at_once,
        num_generations=3,
        num_iterations=2,  # with one, no old log-probability is stored
        **{"loss_type": "grpo", **case.theirs},
    )
    tokenizer, ids = trainer.processing_class, []
    for row in SAMPLED:
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)
        ids.append((asked, whole["input_ids"][len(asked) :]))
    asked, answers = ([one[side] for one in ids] for side in (0, 1))
    trainer._generate = lambda _: (asked, answers, None, answers, None, {}, None, None)
    samples = trainer._generate_and_score_completions(SAMPLED)
    times(backend, case.moved)
    copy_adapter(backend, trainer)
    trainer.current_gradient_accumulation_steps = at_once
    total = 0.0
    for some in split_tensor_dict(samples, at_once):
        loss = trainer.compute_loss(trainer.model, some)
        loss.backward()
        total += float(loss.detach())
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    metrics = {"reward": logged["reward"]}
    if case.theirs.get("scale_rewards") != "batch":  # TRL checks whether all are equal
        metrics["equal_frac"] = logged["frac_reward_zero_std"]
    if at_once == 1:  # TRL logs means per micro-batch
        metrics["clip_frac"] = logged["clip_ratio/region_mean"]
        metrics |= {"base_kl": logged["kl"]} if "kl" in logged else {}
    return Computed(
        ids=[before + answer for before, answer in ids],
        loss=total,
        metrics=metrics,
        gradient=gradient_of(trainer, backend),
    )


@pytest.mark.parametrize("name", GRPO)
def test_grpo_is_that_of_trl(name, ours, trainer_of):
    """Advantages, log-probabilities, loss, metrics and gradient agree after the adapter moved."""
    backend, found = ours("grpo", GRPO[name], rows_of_rewards())
    expected = by_grpo(trainer_of, backend, GRPO[name])
    assert (found.metrics["clip_frac"] > 0) is ("clipped" in name)
    same(found, expected)


def test_the_mean_of_bnpo_alone_is_that_of_micro_batches(ours):
    """For other loss types, a step in parts has the gradient of the whole; all four differ."""
    means = {}
    for loss_type in ("grpo", "dr_grpo", "bnpo", "dapo"):
        words = (f"objective.loss_type={loss_type}",)
        whole, in_parts = (
            ours("grpo", Case(words, moved=-2.0, split=split), rows_of_rewards())[1]
            for split in (1, 3)
        )
        if loss_type == "bnpo":
            assert abs(whole.loss - in_parts.loss) > 1e-3
            with pytest.raises(AssertionError):
                same(in_parts, whole)
        else:
            same(in_parts, whole)
        means[loss_type] = whole.loss, in_parts.loss
    assert means["bnpo"][0] == pytest.approx(means["dapo"][0], rel=1e-6)
    assert len({round(one, 4) for _, one in means.values()}) == 4


def rows_of_rewards():
    return [
        {
            "prompt": row["prompt"][0]["content"],
            "response": row["completion"][0]["content"],
            "fields": {"reward": row["reward"]},
        }
        for row in SAMPLED
    ]
