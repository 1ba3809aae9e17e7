"""Runs that adapt the experts of a mixture, through the command line.

The oracle for a run's output is what transformers and PEFT compute alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.layout.families import _EXPERTS
from mens_exp.model.quiet import quiet

# Experts stored one by one under two sets of names, and all in one tensor.
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "granitemoe")
UNQUANTIZED = ("backend=lora", "quant=none", "quant.compute_dtype=f32")


@pytest.fixture(scope="session")
def mixture(shelf):
    """A tiny mixture of experts; do not change it."""
    return lambda name: shelf(f"tiny_{name}", lambda at: families.make_fitting(name, at / "model"))


@pytest.fixture(scope="session")
def trained_on(mixture, finished_with):
    """Return a finished run on a mixture; do not change it."""

    def trained(name, *overrides):
        base = mixture(name) / "model"
        return finished_with("model=hf", f"model.id={base}", "lora=experts", *overrides)

    return trained


def by_transformers(directory):
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def by_peft(run, base):
    from peft import PeftModel

    with quiet():
        return PeftModel.from_pretrained(by_transformers(base), run.peft).eval()


@pytest.mark.parametrize("name", MIXTURES)
def test_a_merge_is_peft_s_own(name, trained_on, mixture, tmp_path):
    """Every tensor of the merged checkpoint equals PEFT's, under its original name."""
    run = trained_on(name, *UNQUANTIZED, "lora.targets=[attention,experts]")
    out = tmp_path / "merged"
    command = [
        "task=merge",
        "parity.tokens=64",
        "logger=none",
        f"path={run.path}",
        f"out={out}",
        "merge.dtype=f32",
    ]
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'merge'}"]) == 0
    theirs = by_peft(run, mixture(name) / "model").merge_and_unload(safe_merge=True)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    found = {key: one for file in out.glob("*.safetensors") for key, one in load_file(file).items()}
    published = load_file(mixture(name) / "model" / "model.safetensors")
    assert found.keys() == expected.keys() == published.keys()
    changed = {key for key in found if not torch.equal(found[key], published[key])}
    assert any("expert" in key or "_linear" in key for key in changed)
    for key, values in expected.items():
        assert torch.allclose(found[key], values, rtol=0, atol=1e-6), key
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        ours, peft = by_transformers(out)(ids).logits, by_peft(run, mixture(name) / "model")(ids)
    assert torch.allclose(ours, peft.logits, atol=1e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_run_on_four_bits_learns_and_says_that_experts_are_not(name, trained_on):
    """Loss and gradient were compared with transformers before step 1; notes name the experts."""
    manifest = Manifest.read(trained_on(name).manifest)
    reference = manifest.data_contract["probe"]["reference"]
    assert reference["loss"] <= 1e-5
    assert reference["gradient"] <= 1e-4
    assert reference["parameters"] == manifest.facts["trainable_parameters"]
    assert manifest.results["tuned_val_loss"] < manifest.results["base_val_loss"]
    assert manifest.facts["expert_dtype"] == "bfloat16"
    held = manifest.facts["expert_parameters"]
    assert any(f"the experts are not quantized: {held:,} of" in note for note in manifest.notes)
    assert any("PEFT adds the adapter to the weights of experts" in one for one in manifest.notes)


@pytest.mark.parametrize("name", _EXPERTS)
def test_every_family_of_the_table_trains_its_experts(name, tmp_path):
    """The page of families lists it; loss and gradient are those of transformers."""
    found = families.outcome(name, tmp_path, "lora=experts")
    assert found.how.split(", ")[0] in {"packed", "unpacked"}, found.reason
    assert found.loss <= 1e-5
    assert found.gradient <= 1e-4
    page = Path(__file__).parents[2] / "docs" / "measured" / "families.md"
    listed = page.read_text("utf-8").split("`lora=experts`")[1].split("\n\n")[0]
    assert f"`{name}`" in listed


def test_a_dense_model_has_no_such_notes(finished):
    """Only mixtures have notes about experts."""
    assert not any("experts" in note for note in Manifest.read(finished.manifest).notes)


def test_the_plan_counts_experts_as_they_are(mixture):
    """Unquantized beside 4-bit attention, and counted again for PEFT's sums if adapted."""
    from mens_exp.config.compose import compose, typed
    from mens_exp.config.model import HfModel
    from mens_exp.layout.shape import shape_of
    from mens_exp.planning.activations import Documents
    from mens_exp.planning.memory import memory

    def components(*overrides):
        usual = ["trainer=cpu", "suite=none", "suite.items=0", "model.gradient_checkpointing=false"]
        config = typed(compose([[*usual, *overrides]])[0].values)
        config.model = HfModel(
            id=str(base), gradient_checkpointing=config.model.gradient_checkpointing
        )
        documents = Documents(longest=64, typical=64.0)
        return memory(config, shape_of(config.model), documents, kind="cpu").components

    base = mixture("granitemoe") / "model"
    held = {n: p.numel() for n, p in by_transformers(base).named_parameters() if p.dim() == 3}
    dense, every = (components(f"lora={name}") for name in ("attention", "experts"))
    assert dense["experts, not quantized"] == 2 * sum(held.values())
    attention = 2 * (64 * 64 + 32 * 64 + 32 * 64 + 64 * 64 + 4 * 64)  # including the router
    assert 0.5 < dense["base weights"] / attention < 0.54
    assert "experts with their adapters" not in dense
    largest = sum(held.values()) // 2  # both layers are equal
    assert every["experts with their adapters"] == 2 * (sum(held.values()) + largest)
    whole = components("lora=experts", "backend=lora", "quant=none")
    assert whole["base weights"] == 2 * (attention + sum(held.values()))
    assert "experts, not quantized" not in whole


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("lora=experts", "lora.dropout=0.05"), "set lora.dropout=0 to adapt experts"),
        (("lora=experts", "lora.variant=dora"), "PEFT has no DoRA for experts"),
        (("lora=experts", "optim=muon"), "which Muon would orthogonalize together"),
        (("lora=experts", "lora.variant=loha"), "for linear layers of decoder layers alone"),
        (("lora=experts", "lora.init=pissa"), "experts are not quantized"),
        (("lora.targets=[w1]", "lora.dropout=0"), "all experts of a layer are one tensor"),
        (("lora.targets=['*.experts.2.*']", "lora.dropout=0"), "all experts of a layer are one"),
        (("lora=all_linear",), "set lora.dropout=0 to adapt experts"),
        (("lora=all_linear", "lora.dropout=0"), "lora=experts lora.targets=[attention,experts]"),
        (("lora=experts", "lora.rank_pattern={w1:3}"), "values that differ"),
    ],
)
def test_what_peft_cannot_do_is_one_refusal(overrides, said, mixture, train_in, tmp_path, capsys):
    """There is one problem, before training, and it names an alternative."""
    base = mixture("mixtral") / "model"
    run = train_in(tmp_path / "run", "model=hf", f"model.id={base}", *overrides, code=2)
    text = " ".join(re.sub(r"[│╭╰╮╯─]", " ", capsys.readouterr().err).split())
    assert said in text
    assert "lora=attention" in text or "lora=experts" in text or "one value" in text
    assert text.count("found ") == 1
    assert not run.checkpoints.exists()


def test_a_model_without_experts_is_refused(train_in, tmp_path, capsys):
    """The message says that the model family has none."""
    train_in(tmp_path / "run", "lora=experts", code=2)
    assert "llama has no experts" in capsys.readouterr().err


def test_experts_in_parts_are_refused(mixture, tiny_config):
    """Each process of trainer=fsdp would hold a part of them."""
    from mens_exp.config.model import HfModel
    from mens_exp.planning.checks.adapter import check_lora

    config = tiny_config("trainer=fsdp", "lora=experts", "trainer.devices=2")
    config.model = HfModel(id=str(mixture("mixtral") / "model"))
    (problem,) = check_lora(config)
    assert "each process holds a part" in problem.what
    assert "set lora=attention" in problem.remedy
    config.lora.targets = ["attention"]
    assert list(check_lora(config)) == []


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
@pytest.mark.parametrize("form", ["adapter", "peft"])
def test_a_run_starts_from_an_adapter_on_experts(name, form, trained_on, train_in, tmp_path):
    """With a learning rate of almost zero, the loss is that at the end of the first run."""
    first = trained_on(name, *UNQUANTIZED)
    start = first.adapter if form == "adapter" else first.peft
    config = Manifest.read(first.manifest)
    model = next(one for one in config.overrides if one.startswith("model.id="))
    again = train_in(
        *(tmp_path / "run", "model=hf", model, "lora=experts", *UNQUANTIZED),
        *(f"lora.init_from={start}", "optim.lr=1e-30", "trainer.max_steps=1"),
    )
    ours = Manifest.read(again.manifest).results["tuned_val_loss"]
    assert ours == pytest.approx(config.results["tuned_val_loss"], rel=1e-6)


def test_an_adapter_on_attention_is_no_start_for_experts(
    trained_on, mixture, train_in, tmp_path, capsys
):
    """It lacks the experts' layers."""
    other = trained_on("mixtral", "lora.targets=[attention]")
    base = mixture("mixtral") / "model"
    train_in(
        *(tmp_path / "run", "model=hf", f"model.id={base}", "lora=experts"),
        f"lora.init_from={other.adapter}",
        code=2,
    )
    assert "lacks layers that this run trains" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_what_follows_a_run_reads_its_experts(name, trained_on, mixture, tmp_path, capsys):
    """Exporting to PEFT, and inspecting both the adapter and a checkpoint."""
    run = trained_on(name, *UNQUANTIZED)
    theirs = load_file(run.peft / "adapter_model.safetensors")
    out = tmp_path / "peft"
    command = ["task=export", f"path={run.path}", "export.format=peft", f"out={out}"]
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'export'}"]) == 0
    written = load_file(out / "adapter_model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[key], values) for key, values in theirs.items())
    norms = []
    state = run.last_checkpoint()
    for number, path in enumerate((run.path, state)):
        place = tmp_path / f"inspect{number}"
        assert cli.main(["task=inspect", f"path={path}", f"hydra.run.dir={place}"]) == 0
        record = json.loads((place / "inspection.json").read_text("utf-8"))
        norms.append({layer: one["frobenius"] for layer, one in record["layers"].items()})
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    peft = {}
    for key in {key.rpartition(".lora_")[0] for key in theirs}:
        A, B = (theirs[f"{key}.lora_{which}.weight"].double() for which in "AB")
        r, many = 16, 4
        peft[key] = sum(
            float((B[:, one::many] @ A[one * r : (one + 1) * r]).square().sum())
            for one in range(many)
        )
    total = sum(value**2 for value in norms[0].values())
    assert total == pytest.approx(sum(peft.values()), rel=1e-4)  # alpha / r is 1
    capsys.readouterr()


def test_vllm_is_not_given_experts(trained_on, tmp_path, capsys):
    """The message suggests task=merge."""
    run = trained_on("mixtral", *UNQUANTIZED)
    command = ["task=export", f"path={run.path}", "export.format=vllm", f"out={tmp_path / 'out'}"]
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert "adapters on experts" in said
    assert "task=merge" in said


@pytest.mark.parametrize("which", ["scale", "another expert"])
def test_wrong_adapters_on_experts_are_refused_before_they_train(
    which, mixture, train_in, tmp_path, monkeypatch, capsys
):
    """A factor off by 2%, and the experts' matrices in another order."""
    from peft.tuners.lora.layer import ParamWrapper

    right = ParamWrapper.get_delta_factors

    def wrong(self, name):
        lhs, rhs, scale = right(self, name)
        return (lhs, rhs, 1.02 * scale) if which == "scale" else (lhs.roll(1, 0), rhs, scale)

    monkeypatch.setattr(ParamWrapper, "get_delta_factors", wrong)
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    base = mixture("mixtral") / "model"
    run = train_in(tmp_path / "run", "model=hf", f"model.id={base}", "lora=experts", code=4)
    said = capsys.readouterr().err
    assert "is not the one that transformers computes" in said
    assert not run.checkpoints.exists()


def test_experts_that_are_not_what_their_names_say_are_refused(
    mixture, train_in, tmp_path, monkeypatch, capsys
):
    """The test swaps the names of gate and up, as if a loader put up first."""
    from mens_exp.layout import families as found_family

    names = found_family._MIXTRAL
    swapped = found_family.replace(names, gate_up=names.gate_up[::-1])
    monkeypatch.setitem(found_family._EXPERTS, "mixtral", swapped)
    base = mixture("mixtral") / "model"
    run = train_in(tmp_path / "run", "model=hf", f"model.id={base}", "lora=experts", code=2)
    said = capsys.readouterr().err
    assert "does not store its experts as" in said
    assert "lora=attention" in said
    assert not RunDir(run.path).checkpoints.exists()


def test_a_merge_on_four_bits_is_certified_and_scored_as_its_run(trained_on, tmp_path):
    """The certificate passes, and both the run and the merge can be evaluated."""
    run = trained_on("qwen3_moe")
    place = tmp_path / "merge"
    assert (
        cli.main(
            [
                "task=merge",
                "parity.tokens=64",
                "logger=none",
                f"path={run.path}",
                f"hydra.run.dir={place}",
            ]
        )
        == 0
    )
    assert json.loads((place / "manifest.json").read_text("utf-8"))["status"] == "succeeded"
    assert json.loads(RunDir(place).parity.read_text("utf-8"))["passed"]
    for number, path in enumerate((run.path, place)):
        at = tmp_path / f"evaluate{number}"
        command = ["task=evaluate", f"path={path}", "suite=mini_python", "suite.items=2"]
        assert cli.main([*command, "suite.max_new_tokens=8", f"hydra.run.dir={at}"]) == 0
