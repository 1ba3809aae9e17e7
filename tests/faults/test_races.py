"""Commands that several people or jobs start at the same moment in one directory."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import ExitStack

import after_faults
import fork_server
import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX fork; run it on Linux")

WAIT = """
import os, time
while not os.path.exists({go!r}):
    time.sleep(0.001)
"""
OPEN = ["task=promote", "ledger=decisions.jsonl", f"promote.suite_digest={'ab' * 32}"]
OPEN += ["promote.arms=[qlora,burn]", "promote.factor=backend"]


@pytest.fixture
def together(tmp_path):
    """Start commands in processes that begin together; return how each ended."""

    def run(*commands):
        go = tmp_path / "go"
        environment = {**os.environ, "MENS_EXP_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}
        with ExitStack() as files:
            places = [tmp_path / f"said_{number}" for number in range(len(commands))]
            logs = [files.enter_context(place.open("w")) for place in places]
            processes = [
                fork_server.Popen(
                    [sys.executable, "-m", "mens_exp", *command],
                    stdout=log,
                    stderr=log,
                    cwd=tmp_path,
                    env=environment,
                    before=WAIT.format(go=str(go)),
                )
                for command, log in zip(commands, logs, strict=True)
            ]
        time.sleep(0.1)
        go.touch()
        codes = [process.wait(timeout=300) for process in processes]
        go.unlink()
        return codes, [place.read_text("utf-8") for place in places]

    return run


def left_over(root):
    return [name for name in after_faults.read(root) if after_faults.LEFT_OVER.search(name)]


def test_two_builders_of_one_cache_make_it_once(together, tiny_run, finished, tmp_path):
    """Base, encoded rows and certificate: both runs use the same, and no partial file remains."""
    commands = [[*tiny_run, f"hydra.run.dir=run_{number}"] for number in (0, 1)]
    codes, said = together(*commands)
    assert codes == [0, 0], said
    adapters = {(tmp_path / f"run_{n}/adapter/adapter.safetensors").read_bytes() for n in (0, 1)}
    assert adapters == {(finished.adapter / "adapter.safetensors").read_bytes()}
    assert left_over(tmp_path) == []
    assert len(list((tmp_path / "cache/models").iterdir())) == 1


def chained(path):
    """Read a ledger and verify its chain, from the definition."""
    entries, before = [json.loads(line) for line in path.read_text("utf-8").splitlines()], None
    for number, entry in enumerate(entries, start=1):
        body = {key: value for key, value in entry.items() if key != "sha256"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert entry["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert (entry["number"], entry["previous"]) == (number, before)
        before = entry["sha256"]
    return entries


def test_eight_promoters_of_one_ledger_all_stand_in_it(together, tmp_path):
    """Each opens a cycle; no entry is lost, and the chain is valid."""
    commands = [
        [
            *OPEN,
            f"promote.open_cycle=c{n}",
            f"promote.seeds=[{2 * n},{2 * n + 1}]",
            f"hydra.run.dir=own{n}",
        ]
        for n in range(8)
    ]
    codes, said = together(*commands)
    assert codes == [0] * 8, said
    entries = chained(tmp_path / "decisions.jsonl")
    assert {entry["cycle"]["cycle"] for entry in entries} == {f"c{n}" for n in range(8)}
    assert left_over(tmp_path) == []


def test_of_eight_promoters_of_one_cycle_one_wins(together, tmp_path):
    """The others learn that it is registered already, and what to do next."""
    commands = [
        [*OPEN, "promote.open_cycle=c", "promote.seeds=[1,2]", f"hydra.run.dir=own{n}"]
        for n in range(8)
    ]
    codes, said = together(*commands)
    assert sorted(codes) == [0] + [2] * 7, said
    refused = [text for code, text in zip(codes, said, strict=True) if code]
    assert all("is already registered" in text and "\n  next " in text for text in refused)
    assert len(chained(tmp_path / "decisions.jsonl")) == 1


def test_of_two_sweeps_in_one_directory_one_runs(together, tiny_run, tmp_path):
    """The other one is refused with a next step, and changes nothing."""
    usual = [text for text in tiny_run if not text.startswith("trainer.max_steps=")]
    command = ["-m", *usual, "trainer.max_steps=1", "seed=1,2", "hydra.sweep.dir=all"]
    codes, said = together(command, command)
    assert sorted(codes) == [0, 2], said
    refused = said[codes.index(2)]
    assert "\n  next " in refused
    assert "Traceback" not in refused
    record = json.loads((tmp_path / "all/sweep.json").read_text("utf-8"))
    assert [job["state"] for job in record["jobs"]] == ["succeeded"] * 2
    assert len(list((tmp_path / "all").glob("*/manifest.json"))) == 2
    assert list(after_faults.believed(tmp_path)) == []
    assert left_over(tmp_path) == []


def test_evaluating_a_run_that_trains_disturbs_neither(together, tiny_run, finished, tmp_path):
    """Evaluation says that there is no adapter yet, and training finishes."""
    ask = ["task=evaluate", "path=run", "logger=none", "suite=heldout_syntax", "suite.items=1"]
    (tmp_path / "run").mkdir()
    codes, said = together(
        [*tiny_run, "hydra.run.dir=run"],
        *([*ask, f"hydra.run.dir=evaluation_{number}"] for number in range(2)),
    )
    assert codes[0] == 0, said[0]
    for code, text in zip(codes[1:], said[1:], strict=True):
        assert code == 0 or (code == 2 and "\n  next " in text and "Traceback" not in text), text
    trained = (tmp_path / "run/adapter/adapter.safetensors").read_bytes()
    assert trained == (finished.adapter / "adapter.safetensors").read_bytes()
    assert list(after_faults.believed(tmp_path)) == []
