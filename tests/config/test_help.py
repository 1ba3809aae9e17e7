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
from mens_exp.config.overrides import check
from mens_exp.config.user_config import config_directory, group_options

HELP = yaml.safe_load((config_directory() / "hydra/help/mens_exp.yaml").read_text("utf-8"))
TEXT = HELP["template"]
HEAVY = ["torch", "transformers", "lightning", "wandb", "peft", "bitsandbytes"]
MAIN_TASKS = 6  # what help shows first


def section(title):
    """Return the indented lines under a heading."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("  ")), len(lines))
    return [line.strip() for line in lines[start:end]]


def listed_groups():
    """Read the options of each group off their column."""
    columns = (
        re.match(r"(\w+)\s+(\S+(?: \S+)*)\s{2,}\S|(\w+) (\S+(?: \S+)*)  ", line)
        for line in section("Config groups")
    )
    found = {}
    for column in columns:
        assert column is not None, "a line of help is group, options, what it decides"
        found[column[1] or column[3]] = (column[2] or column[4]).split()
    return found


def test_help_lists_every_group_with_every_option():
    """The default first, as composed; callbacks by their collections, the blocks being many."""
    defaults = compose([[]])[0].choices
    expected = {group: set(options) for group, options in group_options().items()}
    expected["callbacks"] = {"default", "minimal"}
    del expected["task"]
    found = listed_groups()
    assert {group: set(options) for group, options in found.items()} == expected
    unset = {"preset", "experiment", "policy", "study"}
    assert all(o[0] == defaults[g] for g, o in found.items() if g not in unset)


def test_help_lists_the_tasks():
    """Each one that exists, up to the six main ones, in the words of its YAML."""
    tasks = {line.split()[0] for line in section("Tasks")}
    existing = set(group_options()["task"])
    assert tasks <= existing
    assert len(tasks) == min(len(existing), MAIN_TASKS)


def test_settings_that_help_names_exist(nodes):
    """What stands behind the options of a group are keys of its options."""
    for line in section("Config groups"):
        group, rest = line.split(maxsplit=1)
        names = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b|\b(?:r|lr|eps|path)\b", rest)
        keys = {key for name in group_options()[group] for key in nodes[group, name]}
        options = set(group_options()[group])
        assert set(names) <= keys | options, group


@pytest.mark.parametrize("line", section("Examples"))
def test_example_of_help_composes(line):
    """Each example is a command whose overrides are right."""
    command = shlex.split(re.split(r"\s{3,}", line)[0])
    assert command[:3] == ["python", "-m", "mens_exp"]
    arguments = command[3:]
    multirun = arguments[:1] == ["-m"]
    checked = check(arguments[multirun:], multirun=multirun)
    assert checked.problems == ()
    assert len(checked.cells) == (4 if multirun else 1)


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
    """Help, the composed configuration, errors, a whole plan and a sweep's own process."""
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
    """Collect the deep copies of Hydra's config repository, which knows every file of conf/."""
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
    """A count, not a time: a copy for each option made help take twice as long as a plan."""
    assert cli.main(command) == 0
    assert "hydra" in capsys.readouterr().out
    assert len(copies) == 0


def test_hydra_copies_its_repository_for_each_group_that_it_lists(copies):
    """What the test above counts is there to be counted."""
    prepare_hydra()
    with initialize_config_dir(str(config_directory()), version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        for group in ("lora", "quant", "trainer"):
            assert loader.get_group_options(group)
    assert len(copies) == 3
