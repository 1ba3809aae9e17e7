"""The wheel works without a checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mens_exp.artifacts.manifest import Manifest, Status

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place)]
    done = subprocess.run(
        [*command, str(ROOT)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = place.glob("*.whl")
    return built


def test_the_wheel_carries_every_config_file_and_template(wheel):
    """The package has the checkout's data files, and no tests."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    conf = {
        f"mens_exp/conf/{path.relative_to(ROOT / 'conf').as_posix()}"
        for path in (ROOT / "conf").rglob("*.yaml")
    }
    source = ROOT / "src" / "mens_exp"
    templates = {
        f"mens_exp/{path.relative_to(source).as_posix()}"
        for path in source.rglob("templates/*")
        if path.is_file()
    }
    schemas = {f"mens_exp/artifacts/schemas/adapter_{v}.schema.json" for v in ("v2", "v3")}
    assert conf | templates | schemas <= names
    assert len(templates) >= 3
    assert not [name for name in names if name.startswith(("tests", "conf/"))]


def test_the_wheel_describes_itself_to_an_index(wheel):
    """No relative links or comments in the README, a py.typed file, and one version everywhere."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (described,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(described).decode()
    assert "mens_exp/py.typed" in names
    head, _, shown = text.partition("\n\n")
    assert "Summary: QLoRA and LoRA fine-tuning" in head
    assert shown.startswith("# mens_exp\n")
    assert re.findall(r"\]\((?!https?://)[^)]*\)|<!--", shown) == []
    (version,) = re.findall(r"^Version: (.*)$", head, re.MULTILINE)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def required(text):
    """Return the installed distributions that the requirements need, directly or indirectly."""
    found, waiting = {}, [(Requirement(one), frozenset()) for one in text]
    while waiting:
        one, of = waiting.pop()
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in {"", *of}):
            continue
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if extras <= found.get(name, frozenset()) and name in found:
            continue
        found[name] = found.get(name, frozenset()) | extras
        needs = metadata.distribution(name).requires or []
        waiting += [(Requirement(need), found[name]) for need in needs]
    return [metadata.distribution(name) for name in found]


def install_by_link(environment, wheel):
    """Unpack the wheel in an environment, and link its dependencies from this one.

    Returns:
    The environment's directory of programs.
    """
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (described,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(described).decode().splitlines()
    declared = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    for one in required(declared):
        tops = {file.parts[0] for file in one.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            source = Path(one.locate_file(top))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    script = programs / "mens-exp"
    python = programs / "python"
    script.write_text(f"#!{python}\nfrom mens_exp.cli import entry_point\nentry_point()\n", "utf-8")
    script.chmod(0o755)
    return programs


def install_by_pip(environment, wheel):
    """Install the wheel in an environment with pip and the pinned versions of its dependencies.

    Returns:
    The environment's directory of programs.
    """
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(programs / "python"), "-m", "ensurepip"]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    install = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    done = subprocess.run(
        [str(programs / "python"), *install],
        check=False,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return programs


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "installed", [install_by_link, pytest.param(install_by_pip, marks=pytest.mark.soak)]
)
def test_the_installed_wheel_runs_a_job_in_an_empty_directory(
    wheel, installed, rows_file, tmp_path
):
    """Only the declared dependencies are there, with a new cache and a user's callback.

    The callback is the one in docs/how-to/extending.md.
    """
    environment, here = tmp_path / "venv", tmp_path / "here"
    venv.create(environment)
    programs = installed(environment, wheel)
    shown = (ROOT / "docs" / "how-to" / "extending.md").read_text("utf-8")
    for name in ("my_callbacks.py", "conf/callbacks/print_every.yaml"):
        block = re.search(rf"^`{name}`:\n\n```\w+\n(.*?)^```$", shown, re.MULTILINE | re.DOTALL)
        assert block is not None
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(block[1], encoding="utf-8")
    before = {path.name for path in here.iterdir()}
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "MENS_EXP_CACHE"}}
    chosen = ["callbacks=[default,print_every]", "callbacks.print_every.every_n=2"]
    data = ["data=jsonl", f"data.path={rows_file}", "data.val_frac=0.1"]
    done = subprocess.run(
        [str(programs / "mens-exp"), "experiment=smoke", "suite=none", *data, *chosen],
        check=False,
        capture_output=True,
        text=True,
        cwd=here,
        env={**kept, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.split(":")[0] for line in done.stdout.splitlines() if ": loss " in line]
    assert said == ["step 2", "step 4"]
    (record,) = here.glob("outputs/train/smoke/*/manifest.json")
    manifest = Manifest.read(record)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.provenance["commit"] is None
    compiled = {"__pycache__"}  # of the user's module, by Python
    assert {path.name for path in here.iterdir()} - before - compiled == {"outputs"}
    assert (tmp_path / "cache" / "mens_exp").is_dir()
