"""Model families through the command line, compared with transformers alone.

The oracle is the model's own ``forward(labels=...)`` or its ``generate``, on the directory that
the run was given.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
from pathlib import Path

import families
import pytest
import torch

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "families.md"
in_soak = functools.partial(pytest.param, marks=pytest.mark.soak)
# Families that once trained on a wrong loss, crashed, or were refused for a wrong reason.
ONCE_WRONG = (
    *("granite", "granitemoe", "cohere", "cohere2", "falcon_h1", "opt", "phimoe", "mixtral"),
    *("falcon", "gptj", "gpt_neo", "mpt", "llama4_text", "qwen2_moe", "bloom", "minicpm3", "xglm"),
    *("ctrl", "recurrent_gemma", "xlstm"),
    # Their layers differ, so they were refused until modules listed the layers that have them.
    *("afmoe", "axk1", "doge", "ernie4_5_moe", "exaone_moe", "gemma4_unified_text", "glm4_moe"),
    *("glm4_moe_lite", "hy_v3", "kimi_linear", "laguna", "minimax", "olmo_hybrid"),
)


def documented():
    """Return how each model type trains, or why not, from the record."""
    recorded = json.loads(families.RECORD.read_text("utf-8"))["families"]
    return {name: (one["trains"], one["reason"]) for name, one in recorded.items()}


def test_the_page_shows_the_record():
    """If families.json changed, run `make docs`."""
    assert PAGE.read_text("utf-8") == families.page()


def seed_of_commit():
    asked = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(asked, cwd=PAGE.parent, capture_output=True, text=True, check=False)
    return commit.stdout.strip()[:12] or "no commit"


def drawn():
    """Draw twelve of the families that could be made, with a seed from the commit."""
    seed = seed_of_commit()
    others = [name for name, (how, _) in documented().items() if how != "not made"]
    chosen = random.Random(seed).sample([one for one in others if one not in ONCE_WRONG], 12)
    return [pytest.param(name, id=f"{name}-seed-{seed}") for name in chosen]


@pytest.mark.parametrize("name", [*ONCE_WRONG, *drawn()])
def test_a_family_does_what_the_page_says(name, tmp_path):
    """It trains as documented, within the tolerances, or is refused."""
    found = families.outcome(name, tmp_path)
    assert found.how == documented()[name][0], found.reason
    if found.loss is not None:
        assert found.loss <= 1e-5
        assert found.gradient <= 1e-4


def test_the_page_names_every_causal_model_type():
    """Those of the installed transformers."""
    assert sorted(documented()) == families.model_types()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Make a family's tiny model directory."""

    def made(name, **settings):
        return families.make_tiny(name, tmp_path_factory.mktemp(name) / "model", **settings)

    return made


def train_on(train_in, directory, place, *overrides, code=0):
    return train_in(place, "model=hf", f"model.id={directory}", *overrides, code=code)


@pytest.fixture
def nothing_known(tmp_path, monkeypatch):
    """Use an empty cache, since earlier comparisons of the same graph are reused."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))


# Scaled logits, routed experts, dropout in function calls, state spaces, parallel blocks.
RESUMED = ("granite", "granitemoe", "cohere", "falcon_h1", "opt", "phimoe", "gptj")
RESUMED_IN_SOAK = ("cohere2", "biogpt", "mixtral", "qwen3_moe", "olmoe", "falcon", "gpt_neo")


def trains():
    """Return the overrides with which each family trains, by model type."""
    return {
        name: [f"data.packing={not words[0].startswith('un')}".lower(), *words[1:]]
        for name, (how, _) in documented().items()
        if (words := how.split(", "))[0] in ("packed", "unpacked")
    }


def drawn_to_resume():
    """Draw two more of the families that train."""
    others = sorted(trains().keys() - {*RESUMED, *RESUMED_IN_SOAK})
    return random.Random(seed_of_commit()).sample(others, 2)


@pytest.mark.parametrize(
    "name",
    [
        *(*RESUMED, *drawn_to_resume()),
        *(in_soak(name) for name in RESUMED_IN_SOAK),
    ],
)
def test_a_killed_run_ends_with_the_adapter_of_one_that_went_on(
    name, train_in, killed_at, tmp_path
):
    """The third step is repeated from the second checkpoint, and the bytes are the same."""
    settings = [
        "trainer.max_steps=3",
        "trainer.accumulate_grad_batches=2",
        "checkpoint.every_n_steps=1",
        "data.val_max_tokens=200",
        "lora.dropout=0.1",
    ]
    goes_on(name, train_in, killed_at, tmp_path, *trains()[name], *settings)


def goes_on(name, train_in, killed_at, tmp_path, *overrides):
    part = killed_at(5, tmp_path / "whole", tmp_path / "part")
    base = families.make_fitting(name, tmp_path / "model")
    whole = train_on(train_in, base, tmp_path / "whole", *overrides)
    assert not part.adapter.exists()
    assert cli.main([f"resume={part.path}"]) == 0
    assert Manifest.read(part.manifest).attempts[-1]["resumed_from_step"] == 2
    ours, theirs = (run.adapter / "adapter.safetensors" for run in (part, whole))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_a_killed_run_on_experts_ends_with_the_adapter_of_one_that_went_on(
    name, train_in, killed_at, tmp_path
):
    """The bytes are the same, whether experts are stored separately or together."""
    settings = [
        *("lora=experts", "lora.targets=[attention,experts]", "trainer.max_steps=3"),
        *("trainer.accumulate_grad_batches=2", "checkpoint.every_n_steps=1"),
        "data.val_max_tokens=200",
    ]
    goes_on(name, train_in, killed_at, tmp_path, *settings)


def reference_of(run):
    return Manifest.read(run.manifest).data_contract["probe"]["reference"]


WRONG_LOGITS = {
    "dropped scale": lambda logits: logits * 3.0,
    "two per cent": lambda logits: logits * 1.02,
    "a cap": lambda logits: 3 * torch.tanh(logits / 3),
    "another token's": lambda logits: logits.roll(1, -1),
}


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("wrong", WRONG_LOGITS)
def test_a_head_that_is_not_the_model_s_is_refused(
    wrong, tiny, train_in, tmp_path, monkeypatch, capsys
):
    """Also in a bf16 run: nothing is trained, and the manifest has the figures."""
    from mens_exp.backends import forward

    right, changed = forward.logits, WRONG_LOGITS[wrong]
    monkeypatch.setattr(forward, "logits", lambda *args: changed(right(*args)))
    run = train_on(train_in, tiny("granite"), tmp_path / "run", code=4)
    said = capsys.readouterr().err
    assert "the loss is not the one that transformers computes for this model" in said
    assert reference_of(run)["loss"] > 1e-4
    assert not run.checkpoints.exists()


@pytest.mark.usefixtures("nothing_known")
def test_an_adapter_of_another_scale_is_refused(tiny, train_in, tmp_path, monkeypatch, capsys):
    """One layer's factor is off by 2%."""
    from mens_exp.backends import qlora

    right = qlora.place_adapter

    def wrong(*args, **options):
        method, model, layers = right(*args, **options)
        next(iter(layers.values())).scaling["default"] *= 1.02
        return method, model, layers

    monkeypatch.setattr(qlora, "place_adapter", wrong)
    run = train_on(train_in, tiny("llama"), tmp_path / "run", code=4)
    assert "the gradient is not the one that transformers computes" in capsys.readouterr().err
    assert reference_of(run)["gradient"] > 1e-3


@pytest.mark.usefixtures("nothing_known")
def test_labels_that_are_not_shifted_are_refused(tiny, train_in, tmp_path, monkeypatch):
    """Each position would learn its own token."""
    from mens_exp.data import stream
    from mens_exp.training import contract_probe

    right = contract_probe.packed_batch

    def unshifted(*args, **options):
        batch = right(*args, **options)
        return contract_probe.dataclasses.replace(
            batch, targets_M=batch.input_ids_BT.flatten()[batch.predict_M]
        )

    for user in (contract_probe, stream):
        monkeypatch.setattr(user, "packed_batch", unshifted)
    run = train_on(train_in, tiny("llama"), tmp_path / "run", code=4)
    assert reference_of(run)["loss"] > 1e-3


@pytest.mark.usefixtures("nothing_known")
def test_a_comparison_is_kept_for_the_same_graph_alone(tiny, train_in, tmp_path):
    """Another rank or another base is compared again."""
    base = tiny("cohere")
    first, again, other = (
        reference_of(train_on(train_in, base, tmp_path / str(number), f"lora.r={rank}"))
        for number, rank in enumerate((4, 4, 8))
    )
    assert [one["from_cache"] for one in (first, again, other)] == [False, True, False]
    assert {**again, "from_cache": False} == first
    assert other["parameters"] == 2 * first["parameters"]


@pytest.mark.usefixtures("nothing_known")
def test_the_same_weights_under_another_configuration_are_compared_again(tiny, train_in, tmp_path):
    """Llama and Granite have the same tensors, but Granite scales its logits."""
    bases = [tiny("llama"), tiny("granite"), tiny("granite", logits_scaling=5.0)]
    runs = [train_on(train_in, base, tmp_path / str(n)) for n, base in enumerate(bases)]
    weights = {Manifest.read(run.manifest).inputs["base_weights_sha256"] for run in runs}
    assert len(weights) == 1
    assert [reference_of(run)["from_cache"] for run in runs] == [False, False, False]


def test_training_drops_nothing_that_the_published_model_drops(tiny, train_in, tmp_path):
    """OPT calls dropout as a function; a fully trained model keeps the original rates."""
    directory = tiny("opt")
    published = json.loads((directory / "config.json").read_text("utf-8"))
    assert (published["dropout"], published["layerdrop"]) == (0.2, 0.2)
    run = train_on(train_in, directory, tmp_path / "run", "backend=full")
    assert reference_of(run)["loss"] <= 1e-6
    written = json.loads((run.weights / "config.json").read_text("utf-8"))
    assert written["dropout"] == published["dropout"]


def test_routers_of_a_frozen_base_do_not_draw(tiny, train_in, tmp_path):
    """PhiMoE's routers draw experts in training mode; two runs of other seeds see one base."""
    overrides = ("lora=attention", "data.packing=false", "lora.dropout=0", "trainer.max_steps=1")
    directory = tiny("phimoe")
    runs = [
        train_on(train_in, directory, tmp_path / seed, *overrides, f"seed={seed}") for seed in "12"
    ]
    first, second = (Manifest.read(run.manifest).results["base_val_loss"] for run in runs)
    assert first == second
    assert reference_of(runs[0])["gradient"] <= 1e-4


def test_a_model_that_cannot_be_packed_is_evaluated(tmp_path):
    """An evaluation packs nothing, so it asks for no setting of it."""
    base = families.make_fitting("camembert", tmp_path / "model")
    rows = tmp_path / "suite.jsonl"
    rows.write_text('{"prompt": "A?", "expected": "a"}\n', "utf-8")
    command = ["task=evaluate", "path=base", "model=hf", f"model.id={base}", "trainer=cpu"]
    suite = ["suite=jsonl", f"suite.path={rows}", "suite.max_new_tokens=4", "logger=none"]
    run = f"hydra.run.dir={tmp_path / 'run'}"
    assert cli.main([*command, *suite, "backend=lora", "quant=none", run]) == 0
