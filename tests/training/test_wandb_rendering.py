from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.logger import WandbLogger
from mens_exp.training.wandb_names import display_name, id_of, name_of, tags_of
from mens_exp.training.wandb_rendering import config_of, settings_of, summary_of

SHA = "ab" * 32
CONFIG = {"model": {"name": "SmolLM2-135M-Instruct"}}


def manifest_of(*overrides, experiment=None):
    return Manifest(
        run_id="r",
        task="train",
        experiment=experiment,
        started_utc="2026-11-20T05:58:01.123Z",
        overrides=list(overrides),
        choices={"model": "smollm2_135m", "backend": "qlora"},
        config_digest="ab" * 32,
        seed=42,
    )


def group_of(path, logger, manifest):
    return settings_of(logger, RunDir(path), manifest, CONFIG, "r")["run_group"]


def sweep_of(root, *cells, directory="{number}_runs"):
    """Write the record of a sweep with a job for each tuple of overrides."""
    root.mkdir(parents=True, exist_ok=True)
    jobs = [
        {
            "number": number,
            "directory": directory.format(number=number),
            "differs": list(differs),
            "state": "waiting",
            "reason": None,
            "config_digest": SHA,
            "contract": None,
            "estimate": {},
            "results": {},
            "notes": [],
            "attempts": [],
        }
        for number, differs in enumerate(cells)
    ]
    record = {
        "format": "mens_exp_sweep",
        "version": 1,
        "sweep_id": root.name,
        "created_utc": "2026-11-20T05:58:01.123Z",
        "command": [],
        "code_sha256": SHA,
        "n_jobs": 1,
        "threads": 1,
        "retries": 0,
        "changes": "refuse",
        "jobs": jobs,
    }
    (root / "sweep.json").write_text(json.dumps(record), encoding="utf-8")
    return [RunDir(root / job["directory"]) for job in jobs]


def names_of(root, *cells, fixed=(), **how):
    runs = sweep_of(root, *cells, **how)
    return [
        name_of(run, manifest_of(*fixed, *differs), CONFIG)
        for run, differs in zip(runs, cells, strict=True)
    ]


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["backend=qlora", "quant.double_quant=false"], "double_quant=false "),
        (["lora=attention", "+lora.r=8"], "lora=attention r=8 "),
        (["lora.r=8", "quant.r=4"], "lora.r=8 quant.r=4 "),
        (["~callbacks.memory"], "~callbacks.memory "),
        (["seed=42", "model=smollm2_135m", "logger.project=lab", "hydra.verbose=true"], ""),
    ],
)
def test_name_begins_with_what_was_changed(tmp_path, overrides, changed):
    """Then come seed, model and backend, once each; logger settings are left out."""
    name = name_of(RunDir(tmp_path), manifest_of(*overrides), CONFIG)
    assert name == f"{changed}seed42 SmolLM2-135M-Instruct qlora"


def test_name_without_a_configuration_uses_the_option(tmp_path):
    """The chosen option replaces the model's name."""
    assert name_of(RunDir(tmp_path), manifest_of(), {}) == "seed42 smollm2_135m qlora"


def test_long_name_keeps_its_seed_and_the_ends_of_a_long_value(tmp_path):
    """W&B allows 128 characters; the model is dropped first."""
    manifest = manifest_of(f"data.path=/data/{'x' * 200}/rows.jsonl", "optim.lr=0.1")
    name = name_of(RunDir(tmp_path), manifest, CONFIG)
    assert name == "path=/data/x…xxxxx/rows.jsonl lr=0.1 seed42 SmolLM2-135M-Instruct qlora"
    many = [f"group{number}.setting{number}={number * 1000}" for number in range(30)]
    name = name_of(RunDir(tmp_path), manifest_of(*many), CONFIG)
    assert len(name) == 128
    assert name.startswith("setting0=0 setting1=1000 ")
    assert name.endswith("… seed42")


def test_name_in_a_sweep_begins_with_its_factors(tmp_path):
    """Shared overrides follow the model, and a varied model is named only once."""
    fixed = ["data.seq_len=512", "trainer.max_steps=9"]
    cells = [("lora.r=8", "seed=1"), ("lora.r=16", "seed=1")]
    assert names_of(tmp_path / "a", *cells, fixed=fixed) == [
        "r=8 seed42 #0 SmolLM2-135M-Instruct qlora seq_len=512 max_steps=9",
        "r=16 seed42 #1 SmolLM2-135M-Instruct qlora seq_len=512 max_steps=9",
    ]
    cells = [("model=smollm2_135m",), ("model=qwen3_0_6b",)]
    assert names_of(tmp_path / "b", *cells, fixed=fixed[:1]) == [
        "model=smollm2_135m seed42 #0 qlora seq_len=512",
        "model=qwen3_0_6b seed42 #1 qlora seq_len=512",
    ]


PATHS = [f"data.path=/{'d' * 150}/{letter}/{'e' * 150}.jsonl" for letter in "ab"]


@pytest.mark.parametrize(
    "cells",
    [
        [(path,) for path in PATHS],
        [(*(f"group{n}.setting{n}={n}" for n in range(40)), f"lora.r={r}") for r in (8, 16)],
        [("lora.r=8",), ("quant.r=8",)],
        [(), ()],
    ],
)
@pytest.mark.parametrize("own", [None, "mine", "m" * 128])
def test_two_runs_of_one_sweep_never_share_a_name(tmp_path, cells, own):
    """Cases: values that differ in the middle, many factors, equal keys, a user's name."""
    fixed = [f"other.setting{number}={'x' * 40}" for number in range(9)]
    names = [
        display_name(WandbLogger(name=own), run, manifest_of(*fixed, *differs), CONFIG)
        for run, differs in zip(sweep_of(tmp_path, *cells), cells, strict=True)
    ]
    assert len(set(names)) == len(cells)
    assert all(len(name) <= 128 for name in names)
    assert own is None or all(name.startswith(own[:100]) for name in names)


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["lora.r", "quant.r", "model", "seed", "data.path", "+a.b"]),
                st.text("ab/.é=,", max_size=150),
            ).map("=".join),
            max_size=12,
        ),
        min_size=2,
        max_size=4,
    )
)
def test_any_sweep_has_names_of_its_own(tmp_path_factory, cells):
    """For random sweeps W&B accepts all names, and they are distinct."""
    names = names_of(tmp_path_factory.mktemp("sweep"), *map(tuple, cells))
    assert len(set(names)) == len(names)
    assert all(0 < len(name) <= 128 for name in names)


def test_a_job_below_its_sweep_by_two_directories_is_of_that_sweep(tmp_path):
    """hydra.sweep.subdir may have several levels; the last alone may be ambiguous."""
    cells = [("lora.r=8",), ("lora.r=16",)]
    assert names_of(tmp_path / "swept", *cells, directory="arm{number}/run") == [
        "r=8 seed42 #0 SmolLM2-135M-Instruct qlora",
        "r=16 seed42 #1 SmolLM2-135M-Instruct qlora",
    ]
    runs = [RunDir(tmp_path / "swept" / f"arm{number}" / "run") for number in (0, 1)]
    assert [id_of(run, manifest_of()) for run in runs] == ["swept_arm0-r", "swept_arm1-r"]
    assert id_of(RunDir(tmp_path / "swept" / "arm9" / "run"), manifest_of()) == "r"


def test_a_damaged_record_of_a_sweep_costs_no_run_its_mirror(tmp_path):
    """The job is then identified by its directory."""
    (tmp_path / "sweep.json").write_text("{", encoding="utf-8")
    name = name_of(RunDir(tmp_path / "0_abcd"), manifest_of("lora.r=8"), CONFIG)
    assert name == "r=8 seed42 #0_abcd SmolLM2-135M-Instruct qlora"


def test_what_an_agent_drew_stands_first_with_the_agents_id(tmp_path):
    """Two runs with equal values differ in the agent's run id."""
    manifest = manifest_of("data.seq_len=512", "optim.lr=0.1")
    manifest.inputs["wandb_agent"] = {
        "run_id": "abc123",
        "sweep_id": "swp",
        "entity": None,
        "project": None,
        "parameters": {"optim.lr": 0.1},
    }
    name = name_of(RunDir(tmp_path), manifest, CONFIG)
    assert name == "lr=0.1 seed42 #abc123 SmolLM2-135M-Instruct qlora seq_len=512"


def task_of(name, *overrides, **inputs):
    manifest = manifest_of(*overrides)
    manifest.task = name
    manifest.inputs.update(inputs)
    return manifest


@pytest.mark.parametrize(
    ("task", "inputs", "config", "name"),
    [
        ("evaluate", {"subject": "outputs/b"}, {"suite": {"name": "rust"}}, "evaluate: b on rust"),
        (
            "evaluate",
            {"subject": "base"},
            {"suite": {"name": "rust"}},
            "evaluate: base SmolLM2-135M-Instruct on rust",
        ),
        (
            "evaluate",
            {"specification": "/a/spec.json"},
            {"suite": {"name": "scorecard_spec"}},
            "evaluate: spec.json on scorecard_spec",
        ),
        ("merge", {"adapter": "outputs/b"}, {}, "merge: b"),
        ("export", {"subject": "outputs/b"}, {"format": "gguf"}, "export: b to gguf"),
        ("compare", {}, {"path": "x/a,x/b", "factors": ["lora.r"]}, "compare: lora.r a vs b"),
        ("attribute", {}, {}, "attribute: SmolLM2-135M-Instruct"),
        ("corpus", {}, {}, "corpus"),
        ("promote", {}, {"path": "x/compare.json"}, "promote: compare.json"),
        (
            "compare",
            {},
            {"path": "x/a,x/b", "compare": {"factors": ["seed"]}},
            "compare: seed a vs b",
        ),
    ],
)
def test_a_task_that_trains_nothing_is_named_after_what_it_does(
    tmp_path, task, inputs, config, name
):
    """The configured model is a default that the task may not read."""
    typed = [
        "model=smollm2_135m",
        f"task={task}",
        "export.format=gguf",
        "compare.factors=[lora.r]",
        "out=x",
    ]
    manifest = task_of(task, *typed, **inputs)
    assert name_of(RunDir(tmp_path / "run"), manifest, CONFIG | config) == name


def test_a_plan_is_named_as_the_run_it_plans(tmp_path):
    """The plan is named as the fine-tune it plans."""
    name = name_of(RunDir(tmp_path), task_of("plan", "task=plan", "lora.r=8"), CONFIG)
    assert name == "r=8 seed42 SmolLM2-135M-Instruct qlora"


def test_an_evaluation_of_a_sweeps_job_says_which_arm_it_scored(tmp_path):
    """The adapter's directory works too; other overrides of the command are added."""
    cells = [("lora.r=8", "seed=1"), ("lora.r=16", "seed=1")]
    runs = sweep_of(tmp_path / "swept", *cells)
    for run, differs in zip(runs, cells, strict=True):
        run.path.mkdir()
        manifest_of(*differs).write(run.manifest)
    config = {**CONFIG, "suite": {"name": "humaneval"}}
    for subject in (runs[1].path, runs[1].adapter):
        manifest = task_of("evaluate", "eval.temperature=0.5", "suite=x", subject=str(subject))
        name = name_of(RunDir(tmp_path / "out" / "run"), manifest, config)
        assert name == "evaluate: r=16 seed42 #1 on humaneval temperature=0.5"
    runs[1].manifest.write_text("{", encoding="utf-8")
    name = name_of(RunDir(tmp_path / "out" / "run"), manifest, config)
    assert name == "evaluate: 1_runs on humaneval temperature=0.5"


def test_tags_are_the_overrides_then_the_users_own():
    """An override is shortened in the middle to 64 characters; a user's tag is not."""
    paths = [f"data.path=/{'x' * 80}/{name}.jsonl" for name in ("train", "other")]
    tags = tags_of(["lora.r=8", *paths, "logger.tags=[mine]"], ["mine", "lora.r=8"])
    first, *cut, last = tags
    assert (first, last) == ("lora.r=8", "mine")
    assert [len(tag) for tag in cut] == [64, 64]
    assert all(tag.startswith("data.path=/xxx") for tag in cut)
    assert [tag.rpartition("/")[2] for tag in cut] == ["train.jsonl", "other.jsonl"]
    (long,) = tags_of([f"{'k' * 90}=1"], [])
    assert (len(long), long[-3:]) == (64, "k=1")


HYPOTHESIS = "Rank 8 is no worse than rank 16."
STUDY = {
    "name": "ranks",
    "sha256": SHA,
    "settings": {"hypothesis": HYPOTHESIS},
    "factors": ["lora.r"],
    "ledger": "ledger.jsonl",
    "entry": 1,
    "entry_sha256": SHA,
    "registered_utc": "2026-11-20T05:58:01.123Z",
    "later": [],
    "stopped": None,
    "comparison": None,
}


def test_runs_and_comparison_of_a_study_have_its_name_and_hypothesis(tmp_path):
    """The study is the first tag, and its hypothesis follows the user's own notes."""
    job, _ = sweep_of(tmp_path / "ranks", ("lora.r=8",), ("lora.r=16",))
    record = json.loads((tmp_path / "ranks" / "sweep.json").read_text("utf-8"))
    (tmp_path / "ranks" / "sweep.json").write_text(json.dumps(record | {"study": STUDY}), "utf-8")
    for run in (job, RunDir(tmp_path / "ranks" / "comparison_1")):
        for own, notes in ((None, HYPOTHESIS), ("Look here.", f"Look here.\n\n{HYPOTHESIS}")):
            logger = WandbLogger(notes=own, tags=["mine"])
            shown = settings_of(logger, run, manifest_of("lora.r=8", "study=a/b.yaml"), CONFIG, "r")
            assert shown["run_tags"] == ("study=ranks", "lora.r=8", "mine")
            assert shown["run_notes"] == notes


def test_a_run_of_no_study_has_the_users_notes_alone(tmp_path):
    """This applies to sweeps, single runs and studies with a damaged record."""
    job, _ = sweep_of(tmp_path / "plain", ("lora.r=8",), ("lora.r=16",))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "sweep.json").write_text("{", "utf-8")
    for run in (job, RunDir(tmp_path / "alone"), RunDir(tmp_path / "damaged" / "0_abcd")):
        shown = settings_of(WandbLogger(notes="mine"), run, manifest_of("lora.r=8"), CONFIG, "r")
        assert (shown["run_tags"], shown["run_notes"]) == (("lora.r=8",), "mine")
        assert settings_of(WandbLogger(), run, manifest_of(), CONFIG, "r")["run_notes"] is None


def test_group_is_the_loggers_before_the_experiments(tmp_path):
    """The user's setting takes precedence."""
    manifest = manifest_of(experiment="double_quant")
    assert group_of(tmp_path, WandbLogger(group="mine"), manifest) == "mine"
    assert group_of(tmp_path, WandbLogger(), manifest) == "double_quant"


def test_a_sweep_is_a_group_before_its_experiment_is(tmp_path):
    """Two sweeps of one experiment have two groups; an evaluation joins its run's group."""
    (tmp_path / "sweep.json").touch()
    manifest = manifest_of(experiment="double_quant")
    assert group_of(tmp_path / "0_abcd1234", WandbLogger(), manifest) == tmp_path.name
    read = manifest_of(experiment="double_quant")
    read.inputs["subject"] = str(tmp_path / "0_abcd1234")
    assert group_of(tmp_path / "elsewhere" / "run", WandbLogger(), read) == tmp_path.name


def test_the_same_sweep_launched_again_has_other_run_ids(tmp_path):
    """A job's id depends on place and composition; two launches share both."""
    alone = id_of(RunDir(tmp_path / "one" / "0_abcd1234"), manifest_of())
    assert alone == "r"
    for sweep in ("one", "two"):
        (tmp_path / sweep).mkdir()
        (tmp_path / sweep / "sweep.json").touch()
        assert id_of(RunDir(tmp_path / sweep / "0_abcd1234"), manifest_of()) == f"{sweep}_r"


def test_group_of_an_ad_hoc_sweep_is_its_directory(tmp_path):
    """Hydra's multirun.yaml or sweep.json marks a sweep; otherwise there is no group."""
    assert group_of(tmp_path / "0_abcd1234", WandbLogger(), manifest_of()) is None
    (tmp_path / "multirun.yaml").touch()
    assert group_of(tmp_path / "0_abcd1234", WandbLogger(), manifest_of()) == tmp_path.name


def test_record_that_is_still_empty_renders_as_nothing(tmp_path):
    """A run that failed at once has neither configuration nor scorecard."""
    assert config_of(RunDir(tmp_path), manifest_of(), []) == {}
    assert summary_of(RunDir(tmp_path), manifest_of()) == {"status": "started"}
