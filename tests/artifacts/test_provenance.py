from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from mens_exp import __version__
from mens_exp.artifacts.provenance import PACKAGES, collect

IDENTITY = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")


def git(directory, *arguments):
    done = subprocess.run(
        ["git", "-C", str(directory), *IDENTITY, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    path = tmp_path / "checkout"
    (path / "package").mkdir(parents=True)
    (path / "package" / "code.py").write_text("x = 1\n")
    git(path, "init", "-q")
    git(path, "add", ".")
    git(path, "commit", "-q", "-m", "first")
    return path


def test_a_clean_checkout_is_its_commit(checkout):
    """The full hash, not dirty, no diff digest; the workspace is the same checkout."""
    facts = collect(checkout, package=checkout / "package")
    assert facts["commit"] == git(checkout, "rev-parse", "HEAD")
    assert len(facts["commit"]) == 40
    assert (facts["dirty"], facts["diff_sha256"], facts["workspace"]) == (False, None, None)


def test_a_changed_file_and_a_new_one_make_different_dirty_digests(checkout):
    """The digest distinguishes two dirty states of one commit."""
    package = checkout / "package"
    (package / "code.py").write_text("x = 2\n")
    changed = collect(checkout, package=package)
    (package / "new.py").write_text("")
    added = collect(checkout, package=package)
    assert changed["dirty"] is added["dirty"] is True
    assert re.fullmatch("[0-9a-f]{64}", changed["diff_sha256"])
    assert changed["diff_sha256"] != added["diff_sha256"]


def test_rows_beside_the_code_are_no_change_of_it(checkout):
    """Untracked files outside the package do not make the checkout dirty."""
    (checkout / "rows.jsonl").write_text("{}")
    (checkout / "tutorial").mkdir()
    (checkout / "tutorial" / "make.py").write_text("")
    facts = collect(checkout, package=checkout / "package")
    assert (facts["dirty"], facts["diff_sha256"]) == (False, None)


def test_a_package_that_no_checkout_tracks_has_no_commit(checkout, tmp_path):
    """A virtual environment in a repository is not that repository's code, only its workspace."""
    site = checkout / "venv"
    site.mkdir()
    (site / "code.py").write_text("")
    facts = collect(checkout, package=site)
    assert (facts["commit"], facts["dirty"], facts["diff_sha256"]) == (None, None, None)
    assert facts["workspace"]["commit"] == git(checkout, "rev-parse", "HEAD")
    assert collect(tmp_path, package=site)["workspace"] is None


def test_a_machine_without_git_has_no_commit(checkout, tmp_path, monkeypatch):
    """The commit is null."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect(checkout, package=checkout / "package")["commit"] is None


def test_a_hooks_variables_do_not_name_another_repository(checkout, tmp_path, monkeypatch):
    """Git sets GIT_DIR inside every hook."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert collect(checkout, package=checkout / "package")["commit"] is not None


def test_only_the_declared_variables_are_kept_and_never_a_secret(tmp_path, monkeypatch):
    """A mens_exp variable with a name like a secret's is left out too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MENS_EXP_CACHE", "c")
    monkeypatch.setenv("MENS_EXP_HUB_TOKEN", "hunter2")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    facts = collect(tmp_path)
    assert facts["environment"]["OMP_NUM_THREADS"] == "2"
    assert "MENS_EXP_CACHE" not in facts["environment"]  # a path, and no influence on results
    assert "hunter2" not in json.dumps(facts)


def test_the_packages_are_our_dependencies():
    """The list has the dependencies in pyproject.toml, and the extras that may change a result."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for none_of_it in ("dev", "docs", "notebooks", "release", "schema", "serve"):
        del extras[none_of_it]
    texts = [*project["dependencies"], *(text for extra in extras.values() for text in extra)]
    assert {re.split(r"[^\w-]", text)[0] for text in texts} <= set(PACKAGES)


def test_the_facts_are_json_and_name_versions_and_hardware(tmp_path):
    """The versions are the installed ones."""
    facts = json.loads(json.dumps(collect(tmp_path), allow_nan=False))
    assert facts["packages"]["mens-exp"] == __version__
    assert re.match(r"\d+\.\d+", facts["packages"]["numpy"])
    assert facts["cpu"]["logical_cores"] >= 1
    assert facts["memory_bytes"] > 2**20
    assert facts["accelerators"] == []
    assert "hostname" not in facts
