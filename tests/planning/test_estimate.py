from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import mens_exp
from mens_exp.config.compose import compose, typed
from mens_exp.corpus.generator import generate
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.layout.modules import linear_weights
from mens_exp.layout.shape import shape_of
from mens_exp.planning import machine, token_estimate
from mens_exp.planning.estimate import make_plan, steps_of
from mens_exp.rows.cache import encoded
from mens_exp.rows.encode import encode
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.training.optimizer import build_optimizer

# Each ChatML marker is one token, written as x; then 100 letters and the end marker.
ROW_TOKENS = len("xuser\npNx\nxassistant\n") + 101


@pytest.fixture
def on_rows(tiny_config, rows):
    """Configure a run on the ten rows."""

    def made(*overrides):
        shares = ["data.val_frac=0.2", "data.heldout_frac=0.2"]
        return tiny_config("data=jsonl", f"data.path={rows}", *shares, *overrides)

    return made


def warm(config, base, cache):
    """Encode both sides as a run does; return the number of documents of each."""
    tokenizer = HfTokenizer.from_directory(base.directory)
    rows = load_rows(config.data, cache)
    documents = {}
    for side in (Side.TRAIN, Side.VAL):
        key = cache_key(config, rows, side, tokenizer)
        pairs = getattr(rows, side.value)
        made, _ = encoded(
            cache,
            key,
            lambda pairs=pairs, key=key: encode(pairs, tokenizer, key.labelling),
        )
        documents[side] = len(made)
    return documents


def test_warm_plan_counts_exactly(on_rows, tiny_base, cache):
    """Documents and tokens are those that the run will read."""
    config = on_rows()
    documents = warm(config, tiny_base, cache)
    data = make_plan(config, cache)["data"]
    (file,) = data.pop("files").values()
    assert (file["role"], file["form"], file["rows"]) == ("rows", "pair", 10)
    assert data == {
        "source": "jsonl",
        "train_rows": documents[Side.TRAIN],
        "train_blocks": -(-documents[Side.TRAIN] // (512 // ROW_TOKENS)),
        "train_tokens": documents[Side.TRAIN] * ROW_TOKENS,
        "val_tokens": documents[Side.VAL] * ROW_TOKENS,
        "longest_tokens": ROW_TOKENS,
        "typical_tokens": ROW_TOKENS,
        "exact": True,
        "basis": "counted, from the cache",
    }


def test_a_split_by_few_prompts_is_told(tiny_config, cache, tmp_path):
    """A hundred rows with four prompts: at most two of these can be trained on."""
    lines = [{"prompt": f"Where is item {n % 4}?", "response": f"Shelf {n}."} for n in range(100)]
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    made = make_plan(tiny_config("data=jsonl", f"data.path={file}", "data.val_frac=0.1"), cache)
    trained = made["data"]["train_rows"]
    assert trained <= 50
    [said] = [one for one in made["warnings"] if "rows are trained on" in one]
    assert said.startswith(f"{trained} of 100 rows are trained on, and not 8")
    assert "data.val_path" in said


def test_cold_plan_of_a_file_encodes_some_rows(on_rows, tiny_base, cache):
    """The rows are alike, so a sample gives the exact number of tokens."""
    data = make_plan(on_rows("data.seq_len=500"), cache)["data"]
    assert not data["exact"]
    assert "encoded rows; the others not encoded yet" in data["basis"]
    assert data["train_tokens"] == data["train_rows"] * ROW_TOKENS


def test_cold_plan_without_a_tokenizer_estimates_and_says_so(on_rows, cache, monkeypatch):
    """Rows are counted; tokens are estimated from characters and limited to seq_len."""
    monkeypatch.setattr(token_estimate, "ready_directory", lambda *_: None)
    config = on_rows("data.seq_len=64", "objective=causal")
    data = make_plan(config, cache)["data"]
    assert not data["exact"]
    assert "estimated from the rows' characters" in data["basis"]
    # 102 characters at 3.4 a token and 40 for the template are 70, more than the limit of 64.
    assert data["train_tokens"] == data["train_rows"] * 64


def test_other_length_than_the_cached_one_is_cold(on_rows, tiny_base, cache):
    """Documents that were encoded for another length are not used."""
    warm(on_rows(), tiny_base, cache)
    assert not make_plan(on_rows("data.seq_len=500"), cache)["data"]["exact"]


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_the_plan_counts_a_shared_prompt_once(
    tiny_config, tiny_base, cache, tmp_path, monkeypatch, has_tokenizer
):
    """In tokens, with the template's; without a tokenizer, in characters of the rows."""
    rows = [{"prompt": f"{n:139d}", "chosen": "y" * 40, "rejected": "n" * 40} for n in range(10)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    if not has_tokenizer:
        monkeypatch.setattr(token_estimate, "ready_directory", lambda *_: None)
    template = len("xuser\nx\nxassistant\n"), 1  # each ChatML marker is one token
    prompt, answer = 139 + template[0] * has_tokenizer, 40 + template[1] * has_tokenizer
    words = ("data=jsonl", f"data.path={path}", "data.val_frac=0.2", "objective=orpo")
    words += ("trainer.max_steps=-1", "trainer.max_epochs=4", "data.seq_len=512")
    apart, once = (
        make_plan(tiny_config(*words, f"objective.share_prompt={one}"), cache)
        for one in ("false", "true")
    )
    expected = prompt / (2 * prompt + 2 * answer)
    assert once["data"].pop("shared_frac") == pytest.approx(expected, abs=1e-4)
    assert once["data"] == apart["data"]
    assert once["steps"] < apart["steps"]


def test_half_warm_cache_is_cold(on_rows, tiny_base, cache):
    """The run also reads the validation side."""
    config = on_rows("data.seq_len=300")
    warm(config, tiny_base, cache)
    rows, tokenizer = load_rows(config.data, cache), HfTokenizer.from_directory(tiny_base.directory)
    shutil.rmtree(cache_key(config, rows, Side.VAL, tokenizer).directory(cache))
    assert not make_plan(config, cache)["data"]["exact"]


def test_model_that_is_not_made_yet_is_cold(on_rows, tiny_base, cache):
    """Without the model's tokenizer nothing can be counted."""
    warm(on_rows(), tiny_base, cache)
    other = on_rows("model.init_seed=12345")
    assert not make_plan(other, cache)["data"]["exact"]


def test_cold_plan_of_the_library_reads_file_sizes(tiny_config, tmp_path):
    """Planning does not extract: rows are unknown, and tokens are marked as estimated."""
    data = make_plan(tiny_config(), tmp_path)["data"]
    assert data["train_rows"] is None
    assert (data["exact"], data["basis"]) == (
        False,
        "estimated from file sizes; nothing is cached yet",
    )
    assert data["train_tokens"] > 10 * data["val_tokens"] > 0
    assert data["longest_tokens"] == 512
    assert data["typical_tokens"] == pytest.approx(328, rel=0.02)  # the value with a warm cache
    assert list(tmp_path.iterdir()) == []


def test_cold_plan_of_generated_rows_generates_none(tiny_config, tmp_path, monkeypatch):
    """Rows are the configured number; tokens are within 15 % of the real ones."""
    config = tiny_config("data=synthetic", "data.rows=400", "data.repair_frac=0.5")
    with monkeypatch.context() as patch:
        patch.setattr(generate, "generate", None)
        cold = make_plan(config, tmp_path)["data"]
    assert (cold["train_rows"], cold["exact"]) == (360, False)
    assert cold["basis"] == "rows as asked for, tokens estimated; nothing is generated yet"
    assert list(tmp_path.iterdir()) == []
    rows = load_rows(config.data, tmp_path)
    warm = make_plan(config, tmp_path)["data"]
    assert len(rows.train) == warm["train_rows"] == 360
    for name in ("train_tokens", "val_tokens", "typical_tokens"):
        assert cold[name] == pytest.approx(warm[name], rel=0.15)
    assert cold["longest_tokens"] == 512


def test_plan_states_steps_and_tokens(on_rows, tiny_base, cache):
    """511 tokens * 2 sequences * 3 micro-batches, 7 steps; once encoded, without padding.

    Four rows fit into a block, so six rows are two blocks, each read 21 times.
    """
    config = on_rows(
        *("data.micro_batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.max_steps=7"),
        "data.seq_len=511",
    )
    plan = make_plan(config, cache)
    assert (plan["tokens_per_step"], plan["steps"], plan["tokens_total"]) == (3066, 7, 21462)
    rows = warm(config, tiny_base, cache)[Side.TRAIN]
    assert make_plan(config, cache)["tokens_total"] == 42 * rows * ROW_TOKENS / -(-rows // 4)
    assert plan["measured"] is None
    assert (plan["format"], plan["version"]) == ("mens_exp_plan", 1)


def test_epochs_are_counted_in_sequences(on_rows, tiny_base, cache):
    """Blocks with packing, rows without; a partial step counts as one."""
    overrides = ["trainer.max_steps=-1", "trainer.max_epochs=3", "data.seq_len=256"]
    config = on_rows(*overrides)
    rows = warm(config, tiny_base, cache)[Side.TRAIN]
    blocks = -(-rows * ROW_TOKENS // 256)
    assert make_plan(config, cache)["steps"] == -(-3 * blocks // 4)
    padded = on_rows(*overrides, "data.packing=false")
    assert make_plan(padded, cache)["steps"] == -(-3 * rows // 4)


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "blocks", "steps"),
    [(5, -1, None, 5), (5, 1, 100, 5), (50, 1, 10, 3), (-1, 2, 10, 5), (-1, 2, None, None)],
)
def test_the_nearer_limit_bounds_the_steps(
    on_rows,
    max_steps,
    max_epochs,
    blocks,
    steps,
):
    """Four blocks a step; if their number is unknown, max_epochs gives no limit."""
    config = on_rows(
        f"trainer.max_steps={max_steps}",
        f"trainer.max_epochs={max_epochs}",
        "data.micro_batch_size=2",
        "trainer.accumulate_grad_batches=2",
    )
    assert steps_of(config, blocks) == steps


def test_unknown_steps_make_time_unknown(tiny_config, tmp_path):
    """The estimate is null and has a reason."""
    config = tiny_config(
        "trainer.max_steps=-1", "trainer.max_epochs=1", "data.packing=false", "trainer=cpu"
    )
    plan = make_plan(config, tmp_path)
    assert (plan["steps"], plan["tokens_total"], plan["time_s"]["estimate"]) == (None, None, None)
    assert "not counted yet" in plan["time_s"]["basis"]


@pytest.mark.parametrize(
    ("accelerator", "gpu", "cuda", "known"),
    [
        ("cpu", True, "12.8", True),
        ("auto", False, "12.8", True),
        ("auto", True, None, True),
        ("auto", True, "12.8", False),
        ("gpu", False, "12.8", False),
    ],
)
def test_time_on_a_gpu_is_unknown_and_says_why(
    on_rows,
    cache,
    monkeypatch,
    accelerator,
    gpu,
    cuda,
    known,
):
    """No rate was measured there, and the CPU's is not used instead."""
    answer = ("a GPU", 80 << 30, 79 << 30, "9.0") if gpu else None
    monkeypatch.setattr(machine, "_gpu", lambda: answer)
    monkeypatch.setattr(machine, "_torch", lambda: ("2.13.0", cuda))
    time = make_plan(on_rows(f"trainer={accelerator}"), cache)["time_s"]
    assert (time["estimate"] is not None) == known
    assert ("CPU cores" in time["basis"]) == known
    assert ("no rate has been measured for a GPU" in time["basis"]) != known


def test_estimates_move_with_what_they_depend_on(tiny_config, cache):
    """More steps take longer, float32 takes more of both, and half the rank trains half as much."""

    def plan(*overrides):
        values = compose([["trainer=cpu", *overrides]])[0].values
        return make_plan(typed(values), cache)

    base, longer = plan(), plan("trainer.max_steps=600")
    f32, small = plan("quant.compute_dtype=f32"), plan("lora.r=8")
    assert longer["time_s"]["estimate"] > 5 * base["time_s"]["estimate"]
    assert f32["time_s"]["estimate"] > base["time_s"]["estimate"]
    assert f32["memory_bytes"]["estimate"] > base["memory_bytes"]["estimate"]
    assert 2 * small["trainable_parameters"] == base["trainable_parameters"] == 4_884_480


@pytest.mark.usefixtures("tiny_base")  # whose tokenizer the plan counts with
@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (("trainer.max_steps=2",), "trainer.max_steps"),
        (("trainer.max_epochs=2",), "trainer.max_epochs"),
        (("trainer.max_epochs=1000", "trainer.max_steps=2"), "trainer.max_steps"),
        (("trainer.max_epochs=1", "trainer.max_steps=100000"), "trainer.max_epochs"),
    ],
)
def test_the_plan_says_what_ends_the_run_and_how_many_epochs_that_is(
    on_rows, cache, overrides, bound
):
    """With max_epochs it is a whole number, with max_steps any fraction."""
    plan = make_plan(on_rows(*overrides), cache)
    assert plan["bound"] == bound
    if bound == "trainer.max_epochs":
        assert plan["epochs"] == int(overrides[0].partition("=")[2])
    else:
        blocks = math.ceil(plan["data"]["train_rows"] / (512 // ROW_TOKENS))
        assert plan["epochs"] == plan["steps"] * 4 / blocks


def test_memory_is_the_sum_of_its_components(on_rows, cache):
    """The estimate is inside its interval."""
    plan = make_plan(on_rows(), cache)
    memory = plan["memory_bytes"]
    assert memory["estimate"] == sum(memory["components"].values())
    assert 0 < memory["low"] < memory["estimate"] < memory["high"]
    assert memory["free"] > 0
    assert memory["runs"] == []


@pytest.mark.parametrize(
    ("option", "state"),
    [
        ("adamw", 8),
        ("adamw_8bit", 2),
        ("lion", 4),
        ("muon", 4),
        ("schedule_free schedule=constant", 12),
        ("prodigy", 16),
        ("prodigy optim.slice_p=4", 10),
        ("sgd", 4),
        ("sgd optim.momentum=0", 0),
    ],
)
def test_memory_counts_the_optimizer_s_own_state(on_rows, cache, option, state):
    """Gradients take 4 bytes more; scales of 8-bit blocks add 1/64."""
    plan = make_plan(on_rows(*f"optim={option}".split()), cache)
    components, parameters = plan["memory_bytes"]["components"], plan["trainable_parameters"]
    assert components["optimizer"] == pytest.approx(state * parameters, rel=0.016)
    assert components["gradients"] == 4 * parameters


OPTIMIZERS = {
    "adamw": (),
    "muon": (),
    "sgd": (),
    "adafactor": (),
    "schedule_free": ("schedule=constant",),
    "galore": ("backend=full", "quant=none", "optim.rank=8"),
    "galore reversed": ("backend=full", "optim.rank=8", "optim.proj_type=reverse_std"),
    "galore of rank 32": ("backend=full", "model=tiny_qwen2", "optim.rank=32"),
    "galore on gpt2": ("backend=full", "model=tiny_gpt2", "optim.rank=8"),
    "apollo": ("backend=full", "quant=none"),
    "apollo of rank 8": ("backend=full", "optim.rank=8", "optim.proj=svd"),
}


@pytest.mark.parametrize(("option", "more"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_the_planned_state_is_that_of_the_optimizer(
    on_rows, cache, tiny_backend, request, option, more
):
    """The oracle is a real optimizer's state after one step, without its step counters."""
    if option.startswith("apollo"):
        request.getfixturevalue("apollo")
    overrides = (f"optim={option.split()[0]}", *more)
    config, backend = on_rows(*overrides), tiny_backend(*overrides)
    parameters = backend.trainable()
    linear = linear_weights(shape_of(config.model)).keys() & parameters.keys()
    optimizer = build_optimizer(config.optim, parameters, linear=linear)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    planned = make_plan(config, cache)["memory_bytes"]["components"]["optimizer"]
    assert planned == held


@pytest.mark.parametrize(
    "option",
    ["lora", "ia3", "ln_tuning", "loha", "lokr", "adalora", "vera", "randlora", "prompt_tuning"],
)
def test_planned_parameters_are_those_of_the_graph(on_rows, cache, tiny_backend, option):
    """The oracle is the real model; methods that build whole updates have a component for them."""
    overrides = () if option == "lora" else (f"lora={option}", "lora.r=3")
    if option in {"ia3", "ln_tuning", "adalora", "prompt_tuning"}:
        overrides = (f"lora={option}",)
    plan = make_plan(on_rows(*overrides), cache)
    parameters = tiny_backend(*overrides).trainable().values()
    assert plan["trainable_parameters"] == sum(one.numel() for one in parameters)
    component = plan["memory_bytes"]["components"].get("updates of whole weights", 0)
    assert (component > 0) is (option in {"loha", "lokr", "randlora"})


def test_checkpointing_costs_time_and_saves_memory(on_rows, cache):
    """By hand, width 64: one whole layer, and the input of every layer; the plan mentions it."""
    settings = ("lora.dropout=0", "data.seq_len=64", "quant.compute_dtype=bf16")
    plans = [
        make_plan(on_rows(*settings, f"model.gradient_checkpointing={value}"), cache)
        for value in ("off", "on")
    ]
    plain, again = (plan["memory_bytes"]["components"]["activations"] for plan in plans)
    # Per token and layer: two f32 residuals; q, k and v; gate, up and their product; three inputs
    # of width 64 and one of 128; seven outputs of A.
    layer = 2 * 4 * 64 + 2 * (64 + 2 * 32 + 3 * 128 + 3 * 64 + 128 + 7 * 16)
    assert plain == 64 * 2 * layer
    assert again == 64 * (2 * 64 * 2 + layer)
    assert "computed again" in plans[1]["memory_bytes"]["basis"]
    assert "computed again" not in plans[0]["memory_bytes"]["basis"]


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ((4, 1, "off"), 3_619_786_752),
        ((1, 4, "off"), 2_077_323_264),
        ((4, 1, "on"), 1_750_880_256),
        ((1, 4, "on"), 1_607_565_312),
    ],
)
def test_memory_is_within_a_tenth_and_a_bit_of_what_was_measured(cache, settings, measured):
    """SmolLM2-135M on two cores with suite=none, as measured in experiments/LOG.md."""
    size, accumulate, value = settings
    overrides = [
        *("trainer=cpu", "suite=none"),
        f"data.micro_batch_size={size}",
        f"trainer.accumulate_grad_batches={accumulate}",
        f"model.gradient_checkpointing={value}",
    ]
    plan = make_plan(typed(compose([overrides])[0].values), cache)
    assert plan["memory_bytes"]["estimate"] == pytest.approx(measured, rel=0.12)


def test_machine_without_a_core_count_is_planned_for(on_rows, cache, monkeypatch):
    """In some containers it is unknown; one core is assumed, and the plan says so."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert "on 1 CPU cores" in make_plan(on_rows(), cache)["time_s"]["basis"]


def test_plan_is_plain_json(on_rows, cache):
    """The plan is written unchanged."""
    plan = make_plan(on_rows(), cache)
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan


def test_planning_imports_nothing_heavy(rows):
    """A new interpreter composes, checks and plans without the heavy libraries."""
    code = (
        "import sys\n"
        "from mens_exp.config.compose import compose, typed\n"
        "from mens_exp.planning.estimate import make_plan\n"
        "from mens_exp.planning.preflight import preflight, writable_cache\n"
        f"config = typed(compose([['data=jsonl', {f'data.path={rows}'!r}]])[0].values)\n"
        "preflight(config)\n"
        "make_plan(config, writable_cache())\n"
        "print([n for n in ('torch', 'transformers', 'lightning', 'wandb') if n in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(mens_exp.__file__ or "").parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]"


def test_what_the_targets_match_is_planned(on_rows, cache):
    """Modules, exact number of parameters and unusual settings, before torch is imported."""
    plan = make_plan(
        on_rows("lora.targets=[qv,lm_head]", "lora.variant=rslora", "lora.rank_pattern={qv:4}"),
        cache,
    )
    assert plan["lora_modules"] == "q, v in 2 of 2 layers; lm_head: 5 modules"
    # Inputs have width 64; q has 64 outputs, v 32, the head 320.
    assert plan["trainable_parameters"] == 2 * 4 * (128 + 96) + 16 * 384
    assert plan["lora"] == "qv+lm_head, rslora, r 16 and others, alpha 16, dropout 0.05"


def test_a_start_that_changes_the_base_keeps_the_plain_one_too(on_rows, cache):
    """PiSSA, and LoftQ from two iterations on: half a byte and a bit per adapted weight."""

    def parts(*overrides):
        return make_plan(on_rows(*overrides), cache)["memory_bytes"]["components"]

    name = "plain weights, for the base"
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    assert parts("lora.init=pissa")[name] == round(weights * 4.127 / 8)
    assert parts("lora.init=pissa", "lora=mlp")[name] == round(2 * 3 * 64 * 128 * 4.127 / 8)
    assert name in parts("lora.init=loftq", "lora.loftq_iters=2")
    from_gradients = parts("lora.init=lora_ga")
    assert from_gradients[name] == parts("lora.init=pissa")[name]
    assert from_gradients["gradients of weights, before step 1"] == 4 * weights
    assert not any("gradients of weights" in one for one in parts("lora.init=pissa"))
    assert name not in parts("lora.init=loftq")
    assert name not in parts()
