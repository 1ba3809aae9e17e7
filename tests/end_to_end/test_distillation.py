"""Runs that learn a teacher's distributions: complete, resumed, in two processes, refused."""

from __future__ import annotations

import json
import shutil
import weakref

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file
from teachers import model_directory

from mens_exp import cli
from mens_exp.artifacts import host
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.backends.frozen_base import Teacher
from mens_exp.backends.qlora import QloraBackend
from mens_exp.rows.cache import cache_root
from mens_exp.training import build, precompute

DISTIL = "objective=distillation"


def events(run, name):
    return [event["payload"] for event in read_events(run.telemetry) if event["event"] == name]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A wider model with the same vocabulary."""
    return model_directory(tmp_path_factory.mktemp("teacher"), hidden_size=128, init_seed=7)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_adapter_recovers_what_quantization_lost(beta, train_in, tmp_path):
    """NF4 with packing, without a teacher: the divergence from the unquantized base falls."""
    settings = (DISTIL, f"objective.beta={beta}", "trainer.max_steps=8")
    run = train_in(tmp_path / "run", *settings, "quant.compute_dtype=f32")
    base, tuned = events(run, "validation")
    assert 0 < tuned["val/divergence"] < 0.8 * base["val/divergence"]
    assert tuned["val/teacher_nll"] == pytest.approx(base["val/teacher_nll"])
    first, *_, last = events(run, "step")
    assert last["train/loss"] < first["train/loss"] == pytest.approx(first["train/divergence"])
    manifest = Manifest.read(run.manifest)
    inputs = manifest.inputs
    assert inputs["teacher"]["weights_sha256"] == inputs["base_weights_sha256"]
    assert manifest.results["tuned_val_bits_per_byte"] is not None
    assert "Metrics of the objective" in run.report.read_text("utf-8")


def test_a_run_in_parts_and_one_of_two_processes_take_the_course_of_one(
    teacher, train_in, whole_and_parts, tmp_path
):
    """Resumed: the same bits. In two processes: equal within rounding."""
    settings = (DISTIL, f"objective.teacher={teacher}", "objective.beta=0.5")
    settings += ("objective.ce_weight=0.3", "objective.temperature=2", "quant.compute_dtype=f32")
    whole, parts = whole_and_parts(*settings)
    mine, its = (load_file(one.adapter / "adapter.safetensors") for one in (parts, whole))
    assert all((mine[name] == its[name]).all() for name in its)
    two = train_in(tmp_path / "two", *settings, "trainer=ddp", "trainer.accelerator=cpu")
    for kind, names in (
        ("step", ("train/loss", "train/divergence", "train/teacher_nll")),
        ("validation", ("val/loss", "val/divergence", "val/teacher_nll")),
    ):
        for one, other in zip(events(two, kind), events(whole, kind), strict=True):
            for name in names:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_hidden_states_are_compared_in_parts_and_in_two_processes_as_in_one(
    train_in, whole_and_parts, tmp_path
):
    """The same bits if resumed; equal within rounding for two processes or blocks of two."""
    place = model_directory(tmp_path / "deep", num_hidden_layers=4, init_seed=7)
    settings = (DISTIL, f"objective.teacher={place}", "objective.hidden_weight=0.5")
    settings += ("quant.compute_dtype=f32", "lora.dropout=0")
    whole, parts = whole_and_parts(*settings)
    mine, its = (load_file(one.adapter / "adapter.safetensors") for one in (parts, whole))
    assert all((mine[name] == its[name]).all() for name in its)
    for one in events(whole, "step"):
        expected = one["train/divergence"] + 0.5 * one["train/hidden_mse"]
        assert one["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert "hidden_mse" in whole.report.read_text("utf-8")
    two = train_in(tmp_path / "two", *settings, "trainer=ddp", "trainer.accelerator=cpu")
    joined = ("data.micro_batch_size=2", "trainer.accumulate_grad_batches=1")
    other_steps = train_in(tmp_path / "joined", *settings, *joined)
    for run in (two, other_steps):
        for kind, names in (
            ("step", ("train/loss", "train/hidden_mse")),
            ("validation", ("val/loss", "val/hidden_mse")),
        ):
            for one, other in zip(events(run, kind), events(whole, kind), strict=True):
                for name in names:
                    assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_hidden_states_of_the_base_before_quantization_are_recovered(train_in, tmp_path):
    """On NF4 in bf16 with packing, the error of the named layer falls."""
    settings = (DISTIL, "objective.hidden_weight=10", "objective.hidden_layers=[1]")
    run = train_in(tmp_path / "run", *settings, "trainer.max_steps=8")
    base, tuned = events(run, "validation")
    assert 0 < tuned["val/hidden_mse"] < base["val/hidden_mse"]


def test_the_contract_and_the_plan_know_compared_hidden_states(train_in, tmp_path):
    """Weight and layers enter the digest; hidden states of both models take memory."""
    free, all_layers, one = (
        train_in(tmp_path / f"plan_{number}", "task=plan", DISTIL, *words)
        for number, words in enumerate(
            (
                (),
                ("objective.hidden_weight=1",),
                ("objective.hidden_weight=1", "objective.hidden_layers=[2]"),
            )
        )
    )
    digests = {Manifest.read(run.manifest).contract["digest"] for run in (free, all_layers, one)}
    assert len(digests) == 3
    before, after, less = (
        json.loads(run.plan.read_text("utf-8"))["memory_bytes"]["components"]
        for run in (free, all_layers, one)
    )
    config = OmegaConf.load(all_layers.config)
    values = config.data.seq_len * config.data.micro_batch_size * config.model.hidden_size
    assert after["teacher"] - before["teacher"] == 2 * values * 2  # three states instead of one
    assert after["compared hidden states"] == values * (3 * 2 + 2 * 4)
    assert less["compared hidden states"] == values * (3 * 2 + 4)
    assert "compared hidden states" not in before


def test_the_contract_has_the_content_of_the_teacher_and_the_plan_its_memory(
    teacher, train_in, tmp_path
):
    """The digest depends on the teacher's content, not on its path."""
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(teacher, moved)
    shutil.copytree(teacher, other)
    weights = load_file(other / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name] + 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    plans, digests = [], []
    for place in (teacher, moved, other):
        words = ("task=plan", DISTIL, f"objective.teacher={place}")
        run = train_in(tmp_path / f"plan_{place.name}", *words)
        plans.append(json.loads(run.plan.read_text("utf-8")))
        digests.append(Manifest.read(run.manifest).contract["digest"])
    assert digests[0] == digests[1] != digests[2]
    plain = train_in(tmp_path / "plain", "task=plan")
    usual = json.loads(plain.plan.read_text("utf-8"))
    every = sum(one.size for one in weights.values() if one.ndim > 1)
    found = plans[0]["memory_bytes"]["components"]["teacher"]
    assert every * 2 < found < every * 2 + 192 * 1024
    assert "teacher" not in usual["memory_bytes"]["components"]
    assert plans[0]["time_s"]["flop_per_step"] > usual["time_s"]["flop_per_step"]


@pytest.mark.parametrize("packing", ["true", "false"])
def test_stored_top_tokens_are_those_of_every_learned_turn(packing, teacher, train_in, tmp_path):
    """Learned turns are apart in a document, and a turn of weight 0 is not learned."""
    file = tmp_path / "rows.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for n in range(40):
            turns = [
                {"role": role, "content": f"{role} {turn} says {n * turn}", **extra}
                for turn, extra in enumerate([{}, {"weight": n % 2}, {}], 1)
                for role in ("user", "assistant")
            ]
            for turn in turns[::2]:
                turn.pop("weight", None)
            out.write(json.dumps({"messages": turns}) + "\n")
    settings = [DISTIL, f"objective.teacher={teacher}", f"data.path={file}"]
    settings += ["quant.compute_dtype=f32", f"data.packing={packing}", "trainer.max_steps=2"]
    whole = train_in(tmp_path / "whole", *settings)
    kept = train_in(tmp_path / "kept", *settings, "objective.top_k=319")
    for kind, name in (("step", "train/loss"), ("validation", "val/teacher_nll")):
        expected = [event[name] for event in events(whole, kind)]
        assert [event[name] for event in events(kept, kind)] == pytest.approx(expected, rel=1e-5)


def test_top_tokens_of_the_cache_take_the_course_of_the_teacher(
    teacher, train_in, tmp_path, monkeypatch
):
    """top_k of all tokens but one equals the full teacher; later runs and replays never load it."""
    settings = (DISTIL, f"objective.teacher={teacher}", "objective.beta=0.3")
    settings += ("objective.temperature=2", "quant.compute_dtype=f32")
    whole = train_in(tmp_path / "whole", *settings)
    kept = train_in(tmp_path / "kept", *settings, "objective.top_k=319")
    names = {
        "step": ("train/loss", "train/divergence", "train/teacher_nll"),
        "validation": ("val/loss", "val/divergence", "val/teacher_nll"),
    }
    for kind, of_kind in names.items():
        for one, other in zip(events(kept, kind), events(whole, kind), strict=True):
            for name in of_kind:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)
    facts = Manifest.read(kept.manifest).facts["teacher_top_tokens"]
    assert facts["from_cache"] == 0 < facts["val_tokens"] < facts["train_tokens"]

    def refused(*_):
        raise AssertionError("the teacher is loaded")

    monkeypatch.setattr(precompute, "Teacher", refused)
    again = train_in(tmp_path / "again", *settings, "objective.top_k=319")
    found = Manifest.read(again.manifest).facts["teacher_top_tokens"]
    assert found["from_cache"] == facts["val_tokens"] + facts["train_tokens"]
    assert found["sha256"] == facts["sha256"]
    mine, its = (load_file(one.adapter / "adapter.safetensors") for one in (again, kept))
    assert all((mine[name] == its[name]).all() for name in its)
    words = ("task=inspect", f"path={kept.path}", "inspect.replay=true", "logger=none")
    assert cli.main([*words, f"hydra.run.dir={tmp_path / 'replay'}"]) == 0


def test_top_tokens_are_resumed_and_shared_by_processes(teacher, train_in, tmp_path):
    """Resumed without the cache: the same bits. In two processes: equal within rounding."""
    settings = (DISTIL, f"objective.teacher={teacher}", "objective.top_k=8")
    settings += ("quant.compute_dtype=f32",)
    parts = train_in(tmp_path / "parts", *settings, "trainer.max_steps=2")
    shutil.rmtree(cache_root() / "teacher_top_tokens")
    assert cli.main([f"resume={parts.path}", "trainer.max_steps=4"]) == 0
    whole = train_in(tmp_path / "whole", *settings)
    mine, its = (load_file(one.adapter / "adapter.safetensors") for one in (parts, whole))
    assert all((mine[name] == its[name]).all() for name in its)
    shutil.rmtree(cache_root() / "teacher_top_tokens")
    two = train_in(tmp_path / "two", *settings, "trainer=ddp", "trainer.accelerator=cpu")
    for one, other in zip(events(two, "step"), events(whole, "step"), strict=True):
        assert one["train/divergence"] == pytest.approx(other["train/divergence"], rel=1e-4)


def test_the_teacher_is_gone_when_the_student_is_loaded(teacher, train_in, tmp_path, monkeypatch):
    """Although garbage is collected rarely at startup, and what is left then is frozen."""
    made, there = [], []

    class Watched(Teacher):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.extend(weakref.ref(one) for one in self.causal_lm.parameters())

    def loaded(*arguments, **options):
        there.append(sum(one() is not None for one in made))
        return QloraBackend(*arguments, **options)

    monkeypatch.setattr(precompute, "Teacher", Watched)
    monkeypatch.setattr(
        build, "get_class", lambda name: loaded if "Qlora" in name else get_class(name)
    )
    host.collect_rarely()
    settings = (DISTIL, f"objective.teacher={teacher}", "objective.top_k=7")
    train_in(tmp_path / "run", *settings, "trainer.max_steps=1")
    assert len(made) > 10
    assert there == [0]


def test_the_plan_has_the_teacher_before_training(teacher, train_in, tmp_path):
    """No FLOPs and no memory beside the student, but a pass before training."""
    named = (DISTIL, f"objective.teacher={teacher}", "task=plan")
    plain, kept = (
        json.loads(train_in(tmp_path / name, *words).plan.read_text("utf-8"))
        for name, words in (("plain", ("task=plan",)), ("kept", (*named, "objective.top_k=8")))
    )
    assert "teacher" not in kept["memory_bytes"]["components"]
    assert kept["time_s"]["flop_per_step"] == plain["time_s"]["flop_per_step"]
    assert "reference" in kept["time_s"]
    assert "reference" not in plain["time_s"]
    large = model_directory(tmp_path / "large", hidden_size=1024, intermediate_size=4096)
    words = (DISTIL, f"objective.teacher={large}", "task=plan", "objective.top_k=8")
    plan = json.loads(train_in(tmp_path / "of_large", *words).plan.read_text("utf-8"))
    found = plan["memory_bytes"]["components"]
    weights = load_file(large / "model.safetensors")
    in_bf16 = 2 * sum(one.size for one in weights.values() if one.ndim > 1)
    before = sum(found.values()) - found["framework"] - found.get("as earlier runs here", 0)
    assert found["teacher before step 1"] > 0
    assert in_bf16 < before < in_bf16 + 2**20  # its states and a chunk of its logits


def test_another_teacher_does_not_go_on(teacher, train_in, tmp_path, capsys):
    """Resuming with changed teacher weights is refused by name."""
    place = tmp_path / "teacher"
    shutil.copytree(teacher, place)
    settings = (DISTIL, f"objective.teacher={place}", "trainer.max_steps=2")
    run = train_in(tmp_path / "run", *settings)
    model_directory(place, hidden_size=128, init_seed=8)
    assert cli.main([f"resume={run.path}", "trainer.max_steps=4"]) == 2
    assert "inputs.teacher.weights_sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("backend=lora", "quant=none"), "which is the student itself here"),
        (("backend=full", "quant=none", "optim.lr=1e-4"), "which is the student itself here"),
        (("backend=proxy",), "needs the graph of a causal model"),
        (("objective.teacher=/nowhere",), "is not a directory"),
        (("objective.teacher_revision=main",), "objective.teacher_revision"),
        (("objective.beta=1.5",), "objective.beta"),
        (("objective.temperature=0",), "objective.temperature"),
        (("objective.ce_weight=1",), "objective.ce_weight"),
        (("objective.hidden_weight=-1",), "objective.hidden_weight"),
        (("objective.hidden_layers=[1]",), "has no effect with objective.hidden_weight=0.0"),
        (
            ("objective.hidden_weight=1", "objective.top_k=8"),
            "needs the teacher at every step, but objective.top_k stores its top tokens only",
        ),
        *(
            (("objective.hidden_weight=1", f"objective.hidden_layers={layers}"), "from 1 to 2")
            for layers in ("[]", "[0]", "[3]", "[2,1]", "[1,1]")
        ),
        (("objective.top_k=0",), "objective.top_k"),
        (("objective.top_k=320",), "objective.top_k: covers the whole vocabulary"),
        (("objective.top_k=8", "data.streaming=true"), "objective.top_k: needs all rows"),
        (("trainer=fsdp", "trainer.accelerator=cpu"), "every process holds the whole teacher"),
    ],
)
def test_what_cannot_be_learned_is_refused(words, said, train_in, tmp_path, capsys):
    """Exit code 2 before training."""
    run = train_in(tmp_path / "run", DISTIL, *words, code=2)
    assert said in capsys.readouterr().err
    assert not run.adapter.exists()


def test_teachers_without_counterparts_of_the_layers_are_refused(
    teacher, train_in, tmp_path, capsys
):
    """Another width, fewer layers, or a number of layers that is not a multiple."""
    settings = (DISTIL, "objective.hidden_weight=1")
    train_in(tmp_path / "wide", *settings, f"objective.teacher={teacher}", code=2)
    assert "the teacher's of 128, the student's of 64" in capsys.readouterr().err
    for many in (1, 3):
        other = model_directory(tmp_path / f"layers_{many}", num_hidden_layers=many)
        train_in(tmp_path / f"of_{many}", *settings, f"objective.teacher={other}", code=2)
        assert f"{many} layers of the teacher, 2 of the student" in capsys.readouterr().err


def test_other_vocabularies_and_tokenizers_are_refused(teacher, train_in, tmp_path, capsys):
    """The message says what differs."""
    larger = model_directory(tmp_path / "larger", vocab_size=384)
    train_in(tmp_path / "one", DISTIL, f"objective.teacher={larger}", code=2)
    assert "384 logits" in capsys.readouterr().err
    named = f"objective.teacher={teacher}"
    train_in(tmp_path / "none", DISTIL, named, "objective.teacher_revision=main", code=2)
    assert "because objective.teacher is the directory" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    train_in(tmp_path / "two", DISTIL, f"objective.teacher={other}", code=2)
    said = capsys.readouterr().err
    assert "the teacher has another tokenizer" in said
    assert "another model" in said
