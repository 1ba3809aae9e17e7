from __future__ import annotations

import math
import re
import shutil
import sys
from pathlib import Path

import fork_server
import page
import pytest
from record import Results

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", page.scripts())
def test_a_script_leaves_a_record_of_the_form(name, tmp_path):
    """At the smallest size figures and ratios are finite, with this commit and machine."""
    if name == "sandbox" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    script = str(BENCHMARKS / f"{name}.py")
    results = tmp_path / "results"
    done = fork_server.run(
        [sys.executable, script, "--smallest", "--results", str(results)],
        cwd=tmp_path,
        capture_output=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    found = Results.read(results / f"{name}.json")
    assert found.name == name
    assert found.question.endswith("?")
    (run,) = found.runs
    assert run["command"] == f"python benchmarks/{name}.py --smallest"
    assert run["size"] == "smallest"
    assert run["machine"]["cores"] >= 1
    assert run["machine"]["memory_gib"] > 0
    assert re.fullmatch("[0-9a-f]{40}", run["commit"])
    assert run["versions"]["torch"]
    assert run["figures"]
    for figure in run["figures"]:
        assert math.isfinite(figure["value"])
        assert figure["name"] in done.stdout.decode()
        if figure["reference"] is not None and figure["reference_value"] != 0:
            assert math.isfinite(figure["ratio"])
    assert any(figure["ratio"] is not None for figure in run["figures"])
