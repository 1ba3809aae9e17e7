from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.config.option_files import our_options

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = (
    "model=tiny_llama trainer=cpu logger=none data.seq_len=256 schedule.warmup_steps=0 "
    "trainer.max_steps=4 data.val_max_tokens=512"
)


def _blocks():
    """Return each block of commands between the markers of the README."""
    marked = re.search(r"<!-- commands: start.*?-->(.*?)<!-- commands: end -->", README, re.DOTALL)
    assert marked is not None
    return re.findall(r"^```bash\n(.*?)^```$", marked[1], re.MULTILINE | re.DOTALL)


@pytest.fixture
def typed(tmp_path, rows_file, shell_path):
    """Run commands in a directory with rows."""
    shutil.copy(rows_file, tmp_path / "rows.jsonl")

    def type_(commands):
        done = subprocess.run(
            ["bash", "-e", "-c", commands],  # the reader's own shell
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": shell_path},
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return type_


def test_readme_fits_a_first_reading():
    """At most 120 lines and three blocks of commands."""
    assert len(README.splitlines()) <= 120
    assert len(_blocks()) == 3


def test_readme_has_the_names_that_people_look_for():
    """Each is spelled as in the field."""
    names = "QLoRA NF4 LoRA fine-tuning evaluation reproducibility Hydra Lightning PEFT"
    assert [name for name in names.split() if name not in README] == []


def test_the_main_job_trains_and_reports(typed, tmp_path):
    """The command is unchanged, except for a model of two random layers."""
    main_job, _, _ = _blocks()
    assert main_job == "python -m mens_exp\n"
    typed(f"{main_job.strip()} {SMALL} suite.items=2 suite.max_new_tokens=16")
    (manifest,) = tmp_path.glob("outputs/train/*/*/manifest.json")
    assert Manifest.read(manifest).status is Status.SUCCEEDED
    assert (manifest.parent / "report.html").is_file()


def test_an_8b_model_on_a_gpu_is_planned(typed, tmp_path):
    """The plan for 24 GiB has the memory range that the README states."""
    _, on_a_gpu, _ = _blocks()
    planned = on_a_gpu.replace("mens_exp", "mens_exp task=plan trainer.device_gib=24", 1)
    said = " ".join(typed(planned).split())
    assert "meta-llama/Llama-3.1-8B-Instruct" in said
    (record,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    memory = json.loads(record.read_text("utf-8"))["memory_bytes"]
    low, high = (round(memory[end] / 2**30) for end in ("low", "high"))
    assert f"the plan says {low} to {high} GiB" in " ".join(README.split())


def test_two_arms_get_a_verdict(typed, tmp_path):
    """Two seeds instead of five, on two random layers."""
    _, _, two_arms = _blocks()
    assert "seed=1,2,3,4,5 " in two_arms
    typed(two_arms.replace("-m lora=", f"-m {SMALL} lora=").replace("seed=1,2,3,4,5", "seed=1,2"))
    (found,) = tmp_path.glob("outputs/compare/*/*/compare.json")
    record = json.loads(found.read_text("utf-8"))
    assert record["factors"] == ["lora"]
    assert [arm["seeds"] for arm in record["arms"]] == [[1, 2], [1, 2]]


def test_the_table_names_tasks_and_suites_that_exist():
    """Every task=, suite=, lora= and model= in the README is an option."""
    options = our_options()
    for group, option in re.findall(r"\b(task|suite|lora|model)=(\w+)", README):
        assert option in options[group], f"{group}={option}"


def test_readme_picture_is_there():
    """The picture of a real report is in the repository."""
    picture = re.search(r"!\[.*?\]\((.*?)\)", README)
    assert picture is not None
    assert (ROOT / picture[1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_a_page_names_exist(name):
    """The Makefile has each quoted target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    quoted = re.findall(r"^    make (\w+)", (ROOT / name).read_text("utf-8"), re.MULTILINE)
    assert {"run", "test"} <= set(quoted) or "quick" in quoted
    assert [target for target in quoted if f"\n{target}:" not in makefile] == []


def test_ci_runs_the_test_command_of_readme():
    """CI runs `make test`, and the README names it."""
    assert "    make test " in README
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text("utf-8")
