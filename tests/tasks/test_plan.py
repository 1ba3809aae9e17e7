from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_plan_is_a_run_that_only_says_what_would_be_done(
    tiny_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table, plan.json and the event agree; nothing is trained."""
    run = RunDir(tmp_path / "run")
    assert cli.main([*tiny_run, "task=plan", f"hydra.run.dir={run.path}"]) == 0
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    assert (plan["steps"], plan["tokens_per_step"]) == (4, 768)
    events = {e["event"]: e["payload"] for e in read_events(run.telemetry)}
    assert events["plan"] == plan
    assert "4 of 768 tokens" in capsys.readouterr().out
    manifest = Manifest.read(run.manifest)
    assert (manifest.task, manifest.status) == ("plan", Status.SUCCEEDED)
    assert not run.adapter.exists()
    assert not run.checkpoints.exists()


def test_a_plan_never_imports_torch(tiny_run: list[str], tmp_path: Path) -> None:
    """It answers in about a second because nothing heavy is loaded for it."""
    arguments = [*tiny_run, "task=plan", f"hydra.run.dir={tmp_path / 'run'}"]
    code = (
        "import sys\nfrom mens_exp import cli\n"
        f"code = cli.main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'lightning', 'peft', 'wandb'} & sys.modules.keys()\n"
        "print(sorted(heavy), file=sys.stderr)\nsys.exit(code or bool(heavy))"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
