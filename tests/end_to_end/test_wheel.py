"""The wheel works where there is no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_wheel_carries_every_config_file_and_template(wheel):
    """What is data in the checkout is in the package, and tests are not."""
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_installed_wheel_runs_a_job_in_an_empty_directory(wheel, tmp_path):
    """A fresh environment, the pinned versions, no checkout, and a cache of its own."""
    environment, here = tmp_path / "venv", tmp_path / "here"
    venv.create(environment, with_pip=True)
    here.mkdir()
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "MENS_EXP_CACHE"}}
    install = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    for command in (install, ["-m", "mens_exp", "experiment=smoke", "suite=none"]):
        done = subprocess.run(
            [str(python), *command],
            check=False,
            capture_output=True,
            text=True,
            cwd=here,
            env={**kept, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            timeout=1500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (record,) = here.glob("outputs/train/smoke/*/manifest.json")
    manifest = Manifest.read(record)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.provenance["commit"] is None
    assert [path.name for path in here.iterdir()] == ["outputs"]
    assert (tmp_path / "cache" / "mens_exp").is_dir()
    _own_callback(python.with_name("mens-exp"), tmp_path / "own", kept, tmp_path / "cache")


def _own_callback(script, here, kept, cache):
    """The callback that docs/extending.md shows, through the script, in an empty directory."""
    shown = (ROOT / "docs" / "extending.md").read_text("utf-8")
    for name in ("my_callbacks.py", "conf/callbacks/print_every.yaml"):
        block = re.search(rf"^`{name}`:\n\n```\w+\n(.*?)^```$", shown, re.MULTILINE | re.DOTALL)
        assert block is not None
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(block[1], encoding="utf-8")
    chosen = ["callbacks=[default,print_every]", "callbacks.print_every.every_n=2"]
    done = subprocess.run(
        [str(script), "experiment=smoke", "suite=none", *chosen],
        check=False,
        capture_output=True,
        text=True,
        cwd=here,
        env={**kept, "XDG_CACHE_HOME": str(cache)},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if ": loss " in line] == [
        "step 2",
        "step 4",
    ]
