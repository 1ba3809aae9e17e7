"""Toy packages of each kind, installed as pip does, and commands that find them.

A kind has a folder with three files: ``toy_….py`` with a `SPEC`, its option ``<name>.yaml`` and its
test.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import fork_server
import pytest

from mens_exp.artifacts.run_dir import RunDir

HERE = Path(__file__).parent
KINDS = {  # folder -> entry points, group of options
    "adapter": ("mens_exp.adapter_methods", "lora"),
    "objective": ("mens_exp.objectives", "objective"),
    "quantizer": ("mens_exp.quantizers", "quant"),
    "source": ("mens_exp.sources", "data"),
    "suite": ("mens_exp.suites", "suite"),
}


# A package with its own options: a torch schedule and a LightningModule.
LAB = {
    "__init__.py": "",
    "options/__init__.py": "",
    "options/schedule/halving.yaml": "# Half the rate after each two steps.\n"
    "_target_: torch.optim.lr_scheduler.StepLR\nstep_size: 2\ngamma: 0.5\n",
    "options/module/watched.yaml": "# Ours, and a metric.\n_target_: toy_lab.module.Watched\n",
    "module.py": """
from mens_exp.training.module import TrainingModule


class Watched(TrainingModule):
    def training_step(self, batch, index):
        self.log("lab/index", float(index))
        return super().training_step(batch, index)
""",
}


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Install every toy; return the directory for Python's path, and their options."""
    site, options = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("options")
    for module in sorted(HERE.glob("*/toy_*.py")):
        kind = module.parent.name
        group, option_group = KINDS[kind]
        (option,) = (HERE / kind).glob("*.yaml")
        shutil.copy(module, site)
        (options / "conf" / option_group).mkdir(parents=True, exist_ok=True)
        shutil.copy(option, options / "conf" / option_group)
        _install(site, module.stem, f"[{group}]\n{option.stem} = {module.stem}:SPEC\n")
    for option_group in ("data", "objective", "suite"):  # a setting chooses the others
        option = options / "conf" / option_group / "broken.yaml"
        option.parent.mkdir(parents=True, exist_ok=True)
        option.write_text(f"defaults: [/schema/{option_group}/broken@_here_, _self_]\n")
    lab = site / "toy_lab"
    for file, text in LAB.items():
        (lab / file).parent.mkdir(parents=True, exist_ok=True)
        (lab / file).write_text(text)
    _install(site, "toy_lab", "[mens_exp.conf]\nlab = toy_lab.options\n")
    lines = [f"[{group}]\nbroken = no_such_module:SPEC\n" for group, _ in KINDS.values()]
    _install(site, "broken", "".join(lines))
    return site, options


def _install(site, name, entry_points):
    """Write the metadata that pip writes about a package."""
    about = site / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="session")
def typed_in(installed):
    """Return a function that runs commands in a directory, with or without the toys installed.

    The schemas read entry points when they are imported, so the commands are forked from a process
    that was started beside the toys.
    """
    site, options = installed

    def place(directory):
        shutil.copytree(options / "conf", directory / "conf")

        def run(*words, code=0, with_toys=True):
            done = fork_server.run(
                [sys.executable, "-m", "mens_exp", *words],
                cwd=directory,
                env={**os.environ, **({fork_server.SITE: str(site)} if with_toys else {})},
                capture_output=True,
                text=True,
            )
            assert done.returncode == code, done.stdout + done.stderr
            return done

        return run

    return place


@pytest.fixture
def typed(typed_in, tmp_path):
    """Return a function that runs commands in the test's directory."""
    return typed_in(tmp_path)


@pytest.fixture
def trained(typed, tiny_run, tmp_path):
    """Return a function that trains for a few steps with the toys installed."""

    def run(*words, name="run", code=0):
        usual = [*tiny_run, f"hydra.run.dir={name}"]
        by_key = {word.partition("=")[0]: word for word in [*usual, *words]}
        done = typed(*by_key.values(), code=code)
        return done if code else RunDir(tmp_path / name)

    return run
