from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections import Counter

import fork_server
import pytest

from mens_exp import cli
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.config.compose import from_yaml, typed
from mens_exp.errors import RequestError
from mens_exp.export.subject import subject_of
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import quantized_modules

SUITE = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with one training run and a later evaluation of it."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def trained(train_in, place):
    return train_in(place / "outputs" / "train" / "default" / "a", *SUITE, "optim.lr=0.1")


@pytest.fixture(scope="module")
def evaluated(trained, place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("HOME", str(place))  # there is no account here
        mirrored = ["logger=wandb", "logger.project=lab", "hydra.run.dir=outputs/evaluate/b"]
        assert cli.main(["task=evaluate", "path=latest", *SUITE, *mirrored]) == 0
    return RunDir(place / "outputs" / "evaluate" / "b")


def test_evaluation_repeats_the_scorecard_of_training(trained, evaluated, untimed):
    """The saved adapter on a newly built graph answers as the graph did at the end of training."""
    assert untimed(evaluated) == untimed(trained)
    base, tuned = (e["completion"] for e in read_item_events(trained.events)[::2])
    assert base != tuned


def test_evaluation_is_a_run_of_its_own(trained, evaluated):
    """The run names its subject and the inputs it used, and has a report."""
    manifest = Manifest.read(evaluated.manifest)
    assert (manifest.task, manifest.status) == ("evaluate", Status.SUCCEEDED)
    theirs = Manifest.read(trained.manifest).inputs
    assert manifest.inputs["base_weights_sha256"] == theirs["base_weights_sha256"]
    assert manifest.inputs["data"]["rows_sha256"] == theirs["data"]["rows_sha256"]
    adapter = trained.adapter / "adapter.safetensors"
    assert manifest.inputs["adapter_sha256"] == sha256_file(adapter)
    assert evaluated.report.is_file()


def inspected(run, *options):
    """Return what W&B's own reader finds in the mirror."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(run.wandb)]
    return fork_server.run(command, check=True, capture_output=True, text=True).stdout


def test_an_evaluation_leaves_a_mirror_with_its_kpis_and_the_run_it_scored(trained, evaluated):
    """It has the names of a training run and needs no account; task=sync sends the same."""
    shown = json.loads(inspected(evaluated, "--summary"))
    assert (shown["project"], shown["state"]) == ("lab", "finished")
    assert shown["name"] == "evaluate: a on heldout_syntax items=2 max_new_tokens=40"
    assert shown["config"]["evaluated_run"] == {"run_id": "a", "wandb_run_id": "a"}
    card = json.loads(evaluated.scorecard.read_text("utf-8"))["conditions"]
    for condition in ("base", "tuned"):
        assert shown["summary"][f"{condition}/parse_rate"] == card[condition]["parse_rate"]
        assert shown["summary"][f"{condition}/attempts"] == card[condition]["attempts_mean"]
    assert "tuned_parse_rate" not in shown["summary"]
    assert Manifest.read(evaluated.manifest).notes == []


def test_the_mirror_of_an_evaluation_has_its_predictions(trained, evaluated):
    """One row per item has both answers side by side, and the style that the grader read."""
    lines = [json.loads(line) for line in inspected(evaluated).splitlines()]
    (row,) = [one["history"]["item"] for one in lines if one["type"] == "history"]
    (files,) = evaluated.wandb.glob("offline-run-*/files")
    table = json.loads((files / row["predictions.path"]).read_text("utf-8"))
    events = [json.loads(line) for line in evaluated.events.read_text("utf-8").splitlines()]
    told = {(one["item_id"], one["condition"]): one for one in events}
    assert len(table["data"]) == 2
    for line in table["data"]:
        shown = dict(zip(table["columns"], line, strict=True))
        for side in ("base", "tuned"):
            own = told[shown["item_id"], side]
            assert shown[side] == own["completion"]
            assert shown[f"{side}/error"] == own["error"]
            assert shown[f"{side}/style"] == own["style"]
            assert own["style"] in {"last block", "open block", "completion"}
    started = next(one["run"] for one in lines if one["type"] == "run")
    assert started["job_type"] == "evaluate"
    assert "run_group" not in started  # neither a sweep nor an experiment


@pytest.mark.parametrize("sink", ["csv", "tensorboard"])
def test_a_logger_of_training_steps_is_refused(sink, tmp_path, capsys):
    """An evaluation has no training steps to log."""
    out = f"hydra.run.dir={tmp_path}/out"
    assert cli.main(["task=evaluate", "path=latest", *SUITE, f"logger={sink}", out]) == 2
    assert "task=evaluate has none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_latest_is_still_the_training_run_after_an_evaluation(
    trained, evaluated, place, monkeypatch
):
    """The evaluation started later, but path=latest still names the training run."""
    monkeypatch.chdir(place)
    assert evaluated.manifest.is_file()
    assert subject_of("latest").path.resolve() == trained.path.resolve()
    recorded = Manifest.read(evaluated.manifest).inputs["subject"]
    assert (place / recorded).resolve() == trained.path.resolve()


def test_an_evaluation_is_no_subject(evaluated):
    """An evaluation has no adapter, so it cannot be evaluated."""
    with pytest.raises(RequestError, match=r"the run trained nothing.*\(evaluate\)"):
        subject_of(str(evaluated.path))


def test_a_run_without_an_adapter_is_refused_before_a_directory_is_made(
    broken,
    tmp_path,
    capsys,
):
    """The message gives the run's status and how to finish it."""
    run = broken(tmp_path / "run", 3)
    out = tmp_path / "evaluation"
    command = ["task=evaluate", "logger=none", f"path={run.path}", *SUITE, f"hydra.run.dir={out}"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert "the run has no adapter" in said
    assert "(cancelled)" in said
    assert f"resume={run.path}" in said
    assert not out.exists()


def test_an_unknown_path_is_refused(tmp_path, capsys):
    """No run directory is created for an unknown path."""
    out = tmp_path / "evaluation"
    assert cli.main(["task=evaluate", "logger=none", "path=nowhere", f"hydra.run.dir={out}"]) == 2
    assert "no such run directory" in capsys.readouterr().err
    assert not out.exists()


def test_another_base_than_in_training_is_refused(trained, tmp_path, capsys):
    """An adapter is meaningless on weights other than those it was trained on."""
    moved = tmp_path / "moved"
    copied = RunDir(moved)
    shutil.copytree(trained.path, moved)
    text = copied.config.read_text(encoding="utf-8")
    copied.config.write_text(text.replace("init_seed: 0", "init_seed: 1"), encoding="utf-8")
    manifest = Manifest.read(copied.manifest)  # or else its own hash would refuse it
    manifest.outputs["config.yaml"] = sha256_file(copied.config)
    manifest.write(copied.manifest)
    out = tmp_path / "evaluation"
    command = ["task=evaluate", "logger=none", f"path={moved}", *SUITE, f"hydra.run.dir={out}"]
    assert cli.main(command) == 2
    assert (
        "base_weights_sha256: has changed since the run was trained on it"
        in capsys.readouterr().err
    )
    assert Manifest.read(RunDir(out).manifest).status is Status.FAILED


BASE = ["task=evaluate", "logger=none", "path=base", "model=tiny_llama", "trainer=cpu"]


def test_the_base_is_scored_alone(
    trained,
    untimed,
    tmp_path,
    tiny_run,
    monkeypatch,
):
    """On the same rows it answers as the base of the run did, with no other condition."""
    monkeypatch.chdir(tmp_path)
    data = [text for text in tiny_run if text.startswith("data")]
    out = RunDir(tmp_path / "evaluation")
    assert cli.main([*BASE, *data, *SUITE, f"hydra.run.dir={out.path}"]) == 0
    theirs = [event for event in untimed(trained)["events"] if event["condition"] == "base"]
    assert untimed(out)["events"] == theirs
    assert list(Scorecard.read(out.scorecard).conditions) == ["base"]
    assert Manifest.read(out.manifest).inputs["subject"] == "base"


def test_a_suite_that_has_nothing_to_ask_is_refused(trained, tmp_path, monkeypatch, capsys):
    """The scorecard was requested, so it is refused; a training run would go on without one."""
    monkeypatch.chdir(tmp_path)
    out = RunDir(tmp_path / "evaluation")
    given = [f"path={trained.path}", "task=evaluate", *SUITE, "suite.max_new_tokens=1"]
    assert cli.main([*given, f"hydra.run.dir={out.path}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "nothing can be scored" in said
    assert "no held-out answer is under suite.max_new_tokens=1" in said
    assert not out.scorecard.exists()


@pytest.mark.parametrize("inside", ["adapter", "adapter/peft", "adapter/adapter.safetensors"])
def test_an_adapter_by_itself_is_scored_on_the_models_base(
    trained,
    untimed,
    tmp_path,
    tiny_run,
    inside,
):
    """Either form works, as a directory or file; ranks and layers are the adapter's own."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(trained.adapter, moved / "adapter")
    data = [text for text in tiny_run if text.startswith("data")]
    out = RunDir(tmp_path / "evaluation")
    command = [
        "task=evaluate",
        "logger=none",
        f"path={moved / inside}",
        "model=tiny_llama",
        "trainer=cpu",
    ]
    assert cli.main([*command, *data, *SUITE, f"hydra.run.dir={out.path}"]) == 0
    assert untimed(out)["events"] == untimed(trained)["events"]
    assert "adapter_sha256" in Manifest.read(out.manifest).inputs


def test_an_adapter_of_another_base_is_refused(trained, tmp_path, capsys):
    """The adapter's manifest has the hash of the weights that it was trained on."""
    shutil.copytree(trained.adapter, tmp_path / "adapter")
    command = [
        "task=evaluate",
        "logger=none",
        f"path={tmp_path / 'adapter'}",
        "model=tiny_llama",
        "trainer=cpu",
    ]
    other = ["model.init_seed=1", "suite=mini_python", "sandbox=none"]
    assert cli.main([*command, *other, f"hydra.run.dir={tmp_path / 'out'}"]) == 2
    assert "the adapter was trained on another base model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["suite=mini_python", "data=synthetic"], "data: has no effect with suite=mini_python"),
        (["suite=mini_python", "eval.samples=2"], "greedy samples"),
        (["suite=mini_python", "eval.base_url=http://x/v1"], "has no effect with eval.engine=hf"),
        (["suite=lm_eval"], "suite=lm_eval is a directory of your own"),
        (["suite=lm_eval", "suite.path=t", "eval.engine=openai"], "also for likelihoods"),
        (["suite=lm_eval", "suite.path=t", "eval.temperature=1"], "whose task files say it"),
        (["eval.engine=openai", *SUITE], "the held-out rows belong to a run's own model"),
        (["eval.engine=openai", "suite=mini_python"], "eval.model: is required"),
        (["suite=jsonl"], "suite.path: suite=jsonl is a file of your own"),
        (["suite=jsonl", "suite.path=x", "suite.function=x.py:f"], "with suite.check=exact"),
        (["suite=scorecard_spec", "suite.path=x"], "path: has no effect"),
    ],
)
def test_what_has_no_effect_or_lacks_something_is_refused(overrides, said, capsys):
    """The message names the setting or what is missing, before anything is loaded."""
    assert cli.main([*BASE, *overrides]) == 2
    assert said in capsys.readouterr().err


def test_an_adapter_is_scored_on_the_base_that_it_records(train_in, tmp_path, capsys):
    """The base is the recorded one unless another is chosen; the message gives its settings."""
    told = ["quant=int2", "quant.block_size=64", "quant.skip=[down_proj]", "lora.targets=[q_proj]"]
    run = train_in(tmp_path / "run", *told, *SUITE, "trainer.max_steps=1")
    capsys.readouterr()
    command = ["task=evaluate", "logger=none", "model=tiny_llama", "suite=mini_python"]
    command += ["suite.items=1", "sandbox=none"]
    for place in (run.adapter, run.peft):
        assert cli.main([*command, f"path={place}", f"hydra.run.dir={tmp_path / 'no'}"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        left = ",".join(f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1))
        needed = f"quant=int2 quant.skip=[{left}]"
        assert f"add {needed} to score the model that was trained" in said
    for name, chosen in (("same", needed.split()), ("other", ["quant=nf4"])):
        out = tmp_path / name
        assert cli.main([*command, *chosen, f"path={run.adapter}", f"hydra.run.dir={out}"]) == 0


def test_the_blocks_of_single_modules_are_part_of_the_base_that_is_named(
    train_in, tmp_path, capsys
):
    """The message also has per-module blocks and quantizers; typed, they make the same base."""
    told = ["quant.type_pattern={v_proj:nf2}", "quant.block_size_pattern={down_proj:128}"]
    told += ["quant.double_quant_pattern={*.0.*.v_proj:true,*.1.mlp.down_proj:false}"]
    run = train_in(tmp_path / "run", *told, *SUITE, "trainer.max_steps=1", "lora.targets=[q_proj]")
    capsys.readouterr()
    command = ["task=evaluate", "logger=none", "model=tiny_llama", "suite=mini_python"]
    command += ["suite.items=1", "sandbox=none", f"path={run.adapter}"]
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'no'}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    layers = [f"model.layers.{layer}" for layer in (0, 1)]
    types = ",".join(f"{one}.self_attn.v_proj:nf2" for one in layers)
    blocks = ",".join(f"{one}.mlp.down_proj:128" for one in layers)
    doubles = f"{layers[0]}.self_attn.v_proj:true,{layers[1]}.mlp.down_proj:false"
    doubles = ",".join(sorted(doubles.split(",")))
    needed = f"'quant.type_pattern={{{types}}}' 'quant.block_size_pattern={{{blocks}}}'"
    needed += f" 'quant.double_quant_pattern={{{doubles}}}'"
    assert f"add {needed} to score the model that was trained" in said
    out = f"hydra.run.dir={tmp_path / 'same'}"
    assert cli.main([*command, *shlex.split(needed), out]) == 0
    again = typed(from_yaml(RunDir(tmp_path / "same").config))
    stored = quantized_modules(again.quant, shape_of(again.model))
    assert Counter((one.quant_type.value, one.block) for one in stored.values()) == {
        ("nf4", 64): 10,
        ("nf4", 128): 2,
        ("nf2", 64): 2,
    }


def test_vllm_is_refused_where_it_cannot_answer(
    trained,
    tmp_path,
    capsys,
    monkeypatch,
):
    """A missing package and an adapter that vLLM would serve otherwise are reported together."""
    monkeypatch.setattr("mens_exp.evals.engines.find_spec", lambda name: None)
    shutil.copytree(trained.path, tmp_path / "run")
    peft = RunDir(tmp_path / "run").peft / "adapter_config.json"
    peft.write_text(json.dumps(json.loads(peft.read_text()) | {"use_dora": True}))
    command = [
        "task=evaluate",
        "logger=none",
        f"path={peft.parent}",
        "eval.engine=vllm",
        "suite=mini_python",
    ]
    tiny = ["model=tiny_llama", "sandbox=none", f"hydra.run.dir={tmp_path / 'out'}"]
    assert cli.main([*command, *tiny, "lora.r=2"]) == 3
    said = capsys.readouterr().err
    assert "lora.r: has no effect" in said
    assert "vLLM does not serve DoRA" in said
    assert "pip install 'mens-exp[vllm]'" in said


def test_a_function_is_no_part_of_a_training_run(capsys):
    """A stored configuration that names a function would run it on someone else's machine."""
    command = ["suite=jsonl", "suite.path=x", "suite.check=function", "suite.function=x.py:f"]
    assert cli.main(["model=tiny_llama", "logger=none", *command]) == 2
    assert "only task=evaluate calls a function of yours" in capsys.readouterr().err


def test_a_specification_brings_its_own_models(tmp_path, capsys):
    """No `path` is needed; each condition is in the scorecard under its id."""
    condition = {"label": "x", "mode": "fixture_file", "backend": "base", "model_id": "m"}
    spec = {
        "schema_version": 1,
        "prompt_pack_version": "1",
        "max_retries": 0,
        "conditions": [
            {"id": name, "fixture": f"{name}.json", **condition} for name in ("old", "new")
        ],
        "tasks": [{"id": "a", "prompt": "Write f.", "expected_contains": ["def f"]}],
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    (tmp_path / "old.json").write_text(json.dumps({"a": ["def g(): pass"]}))
    (tmp_path / "new.json").write_text(json.dumps({"a": ["def f(): return 1"]}))
    out = RunDir(tmp_path / "out")
    named = ["suite=scorecard_spec", f"suite.path={tmp_path / 'spec.json'}"]
    assert cli.main(["task=evaluate", "logger=none", *named, f"hydra.run.dir={out.path}"]) == 0
    card = Scorecard.read(out.scorecard)
    success = {name: kpis["task_success"] for name, kpis in card.conditions.items()}
    assert success == {"old": 0.0, "new": 1.0}
    assert [one["id"] for one in card.generation["conditions"]] == ["old", "new"]
    assert capsys.readouterr().err == ""


def test_answers_end_where_transformers_ends_them(tiny_base, tmp_path, monkeypatch):
    """At the model's own end tokens, of which generation_config.json may name several."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = shutil.copytree(tiny_base.directory, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    questions = ["What is two and two?", "Name a colour.", "Sort these numbers."]

    def answers():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        for question in questions:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            ids = tokenizer(text, return_tensors="pt")
            made = model.generate(**ids, max_new_tokens=12, do_sample=False)
            yield made[0, ids["input_ids"].shape[1] :].tolist()

    third = next(answers())[2]
    settings = json.dumps({"eos_token_id": [2, third]})
    (base / "generation_config.json").write_text(settings, "utf-8")
    expected = list(answers())
    assert expected[0][-1] == third
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": one, "expected": "four"}) for one in questions]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), "utf-8")
    command = ["task=evaluate", "path=base", "model=hf", f"model.id={base}", "trainer=cpu"]
    command += ["quant=none", "backend=lora", "quant.compute_dtype=f32", "logger=none"]
    command += ["suite=jsonl", "suite.path=rows.jsonl", "suite.max_new_tokens=12"]
    assert cli.main([*command, "hydra.run.dir=scored"]) == 0
    found = read_item_events(tmp_path / "scored" / "events.jsonl")
    assert [event["tokens_out"] for event in found] == [len(ids) for ids in expected]
    assert [event["finished"] for event in found] == [ids[-1] in {2, third} for ids in expected]


def test_a_base_with_a_short_context_is_scored_on_items_of_a_file(tiny_base, tmp_path, monkeypatch):
    """`data.seq_len` has no effect there, so its default of 512 tokens is no problem."""
    base = shutil.copytree(tiny_base.directory, tmp_path / "base")
    settings = json.loads((base / "config.json").read_text("utf-8"))
    (base / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 64}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi.", "expected": "Hi."}\n', "utf-8")
    command = ["model=hf", f"model.id={base}", "trainer=cpu", "logger=none"]
    of_file = ["suite=jsonl", "suite.path=rows.jsonl", "suite.max_new_tokens=4"]
    assert cli.main(["task=evaluate", "path=base", *command, *of_file, "hydra.run.dir=a"]) == 0
    assert Scorecard.read(tmp_path / "a" / "scorecard.json").items == 1
    assert cli.main(["task=train", *command, *of_file, "hydra.run.dir=b"]) == 2
