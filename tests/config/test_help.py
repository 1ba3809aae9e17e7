from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from hydra.core.global_hydra import GlobalHydra

import mens_exp
from mens_exp import cli
from mens_exp.config.compose import VERSION_BASE, compose, prepare_hydra
from mens_exp.config.option_files import config_directory, group_options
from mens_exp.config.overrides import check

HELP = yaml.safe_load((config_directory() / "hydra/help/mens_exp.yaml").read_text("utf-8"))
TEXT = HELP["template"]
HEAVY = ["torch", "transformers", "lightning", "wandb", "peft", "bitsandbytes"]
SCREEN = (80, 45)  # width and height of a terminal


def section(title):
    """Return the lines under a heading, up to the next heading, with continuations joined."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith(" ")), len(lines))
    text = re.sub(r"\n {8,}", " ", "\n".join(lines[start:end]))
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


def listed_groups():
    """Return the options of each group in the help text."""
    return {line.split()[0]: line.split()[1:] for line in section("Groups")}


def test_help_fits_a_screen():
    """The text needs no wrapping and no scrolling."""
    lines = TEXT.splitlines()
    assert max(map(len, lines)) <= SCREEN[0]
    assert len(lines) <= SCREEN[1]


def test_help_lists_every_group_with_every_option():
    """The default comes first; callbacks are listed by their collections, as there are too many."""
    defaults = compose([[]])[0].choices
    expected = {group: set(options) for group, options in group_options().items()}
    expected["callbacks"] = {"default", "minimal"}
    del expected["task"]
    found = listed_groups()
    assert {group: set(options) for group, options in found.items()} == expected
    unset = {"preset", "experiment", "policy", "study"}
    assert all(o[0] == defaults[g] for g, o in found.items() if g not in unset)


def test_help_lists_every_task_once():
    """Tasks are grouped by what they are used for."""
    words = re.sub(r"\([^)]*\)", "", " ".join(section("Tasks"))).replace(",", " ").split()
    uses = {"prepare", "judge", "hand", "on"}
    tasks = [word for word in words if word not in uses]
    assert sorted(tasks) == sorted([*group_options()["task"], "train"])  # train is a use and a task


def test_help_points_to_the_documentation():
    """The files exist."""
    named = re.findall(r"\b[\w/]+\.md\b", TEXT)
    root = Path(__file__).parents[2]
    assert named
    assert [name for name in named if not (root / name).is_file()] == []


COMMANDS = [line.strip() for line in TEXT.splitlines() if line.strip().startswith("python -m")]


@pytest.mark.parametrize("line", [line for line in COMMANDS if "resume" not in line])
def test_example_of_help_composes(line):
    """Each example has valid overrides."""
    command = shlex.split(re.split(r"\s{2,}", line)[0])
    assert command[:3] == ["python", "-m", "mens_exp"]
    arguments = command[3:]
    multirun = arguments[:1] == ["-m"]
    checked = check(arguments[multirun:], multirun=multirun)
    assert checked.problems == ()
    assert len(checked.cells) == (6 if multirun else 1)


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["--cfg", "job"],
        ["lora.r=0", "quant.duble_quant=true"],
        ["task=plan", "experiment=smoke", "hydra.run.dir=out"],
        ["-m", "task=plan", "experiment=smoke", "hydra.sweep.dir=out"],
    ],
    ids=" ".join,
)
def test_quick_answer_imports_nothing_heavy(command, tmp_path):
    """--help, --cfg, errors, a plan and the parent process of a sweep."""
    code = (
        "import json, sys\n"
        "from mens_exp.cli import main\n"
        f"code = main({command!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(json.dumps([code, loaded]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(mens_exp.__file__ or "").parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    expected = 2 if "lora.r=0" in command else 0
    assert json.loads(done.stderr.splitlines()[-1]) == [expected, []]


@pytest.fixture
def copies(monkeypatch):
    """Record the deep copies of Hydra's config repository, which knows every file of conf/."""
    made = []

    def copied(repository, memo):
        made.append(repository)
        return repository

    monkeypatch.setattr(ConfigRepository, "__deepcopy__", copied, raising=False)
    return made


@pytest.mark.parametrize(
    "command", [["--help"], ["--hydra-help"], ["--help", "lora=qv"]], ids=" ".join
)
def test_help_copies_no_repository(command, copies, capsys):
    """Counts copies instead of seconds: a copy per option made help twice as slow as a plan."""
    assert cli.main(command) == 0
    assert "hydra" in capsys.readouterr().out
    assert len(copies) == 0


def test_hydra_copies_its_repository_for_each_group_that_it_lists(copies):
    """Proves that the counter of the previous test works."""
    prepare_hydra()
    with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        for group in ("lora", "quant", "trainer"):
            assert loader.get_group_options(group)
    assert len(copies) == 3
