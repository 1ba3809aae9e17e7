"""Toys of each kind, installed the way pip does, and a command line that finds them.

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
KINDS = {"quantizer": ("mens_exp.quantizers", "quant")}  # folder -> entry points, group of options


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Install every toy; returns the directory that Python finds them in, and their options."""
    site, options = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("options")
    for kind, (group, option_group) in KINDS.items():
        (module,) = (HERE / kind).glob("toy_*.py")
        (option,) = (HERE / kind).glob("*.yaml")
        shutil.copy(module, site)
        (options / "conf" / option_group).mkdir(parents=True)
        shutil.copy(option, options / "conf" / option_group)
        about = site / f"{module.stem}-1.0.dist-info"
        about.mkdir()
        name = module.stem.replace("_", "-")
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        line = f"[{group}]\n{option.stem} = {module.stem}:SPEC\n"
        (about / "entry_points.txt").write_text(line)
    return site, options


@pytest.fixture
def typed(installed, tiny_run, tmp_path):
    """Return a function that types a command where the toys are installed.

    The schemas read entry points when they are imported, so the commands are forked from a process
    that was started beside the toys.
    """
    site, options = installed
    shutil.copytree(options / "conf", tmp_path / "conf")

    def run(*words, code=0):
        by_key = {word.partition("=")[0]: word for word in [*tiny_run, *words]}
        done = fork_server.run(
            [sys.executable, "-m", "mens_exp", *by_key.values()],
            cwd=tmp_path,
            env={**os.environ, fork_server.SITE: str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def trained(typed, tmp_path):
    """Return a function that trains for a few steps with the toys at hand."""

    def run(*words):
        typed(*words, "hydra.run.dir=run")
        return RunDir(tmp_path / "run")

    return run
