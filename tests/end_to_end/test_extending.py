from __future__ import annotations

import importlib.util
import json
import math
import os
import sqlite3
import sys
from pathlib import Path

import fork_server
import pytest
import torch

import mens_exp
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.telemetry import read_events

SCRIPT = "import sys; from mens_exp.cli import main; sys.exit(main(sys.argv[1:]))"


def _page():
    spec = importlib.util.spec_from_file_location(
        "extending_page", Path(__file__).with_name("extending_page.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = _page()
COMMANDS = PAGE.commands()


@pytest.fixture
def job(tmp_path, rows_file):
    """Run a command as the installed script does, in a directory with the page's files."""
    PAGE.write_into(tmp_path)
    rows = [json.loads(line) for line in rows_file.read_text("utf-8").splitlines()]
    with sqlite3.connect(tmp_path / "tickets.sqlite") as database:
        database.execute("CREATE TABLE tickets (id, question, answer, customer, rating)")
        database.executemany(
            "INSERT INTO tickets VALUES (?, ?, ?, ?, ?)",
            [
                (number, row["prompt"], row["response"], f"customer {number % 40}", number % 6)
                for number, row in enumerate(rows)
            ],
        )

    def run(*arguments, code=0):
        # -P keeps the working directory off sys.path, as for a console script.
        tiny = PAGE.TINY if "schedule=restarts" not in arguments else PAGE.WITHOUT_EXPERIMENT
        usual = [*tiny, f"data.path={rows_file}"]
        if "data=tickets" in arguments:
            usual = [word for word in usual if not word.startswith(("data=", "data.path="))]
        done = fork_server.run(
            [sys.executable, "-P", "-c", SCRIPT, *usual, *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(mens_exp.__file__ or "").parents[1])},
            timeout=300,
        )
        assert done.returncode == code, done.stdout + done.stderr
        records = sorted(tmp_path.glob("outputs/*/*/*/manifest.json"))
        return done, json.loads(records[-1].read_text("utf-8")) if records else {}

    return run


def test_the_page_shows_a_class_of_each_kind_at_the_promised_length():
    """A callback takes at most ten lines, an objective thirty."""
    shown = PAGE.files()
    assert {name for name in shown if name.endswith(".py")} == {
        "my_averaging.py",
        "my_callbacks.py",
        "my_modules.py",
        "my_rows.py",
        "my_objectives.py",
        "my_optimizers.py",
        "my_backends.py",
    }
    assert len(shown["my_callbacks.py"].strip().splitlines()) <= 10
    assert len(shown["my_objectives.py"].strip().splitlines()) <= 30
    assert len(COMMANDS) == 10


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_shown_command_trains_and_records_what_it_named(job, tmp_path, command):
    """The record names the classes and the digests of their modules."""
    done, manifest = job(*command)
    assert manifest["status"] == "succeeded"
    (target,) = manifest["provenance"]["own_classes"]["targets"]
    file = f"{target.partition('.')[0]}.py"
    own = {file: sha256_file(tmp_path / file)} if target.startswith("my_") else {}
    assert manifest["provenance"]["own_classes"]["files"] == own
    if target == "my_callbacks.PrintEvery":
        shown = [line for line in done.stdout.splitlines() if line.startswith("step ")]
        every = 2 if len(command) > 1 else 5
        ends = [int(line.split()[1].strip(":")) for line in shown if ": loss " in line]
        assert [end for end in ends if end and end % every] == []


def test_the_shown_objective_is_cross_entropy_at_gamma_0():
    """In value and gradient; with gamma=2 each token is weighted by (1 - p)^2."""
    import torch
    from torch.nn import functional

    from mens_exp.objective.causal import CrossEntropy

    shown = {}
    exec(PAGE.files()["my_objectives.py"], shown)  # our own page
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = torch.randn(11, 8, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([3, 1, 10, 0, 7])

    def head(hidden_CD):
        return hidden_CD @ weights.T

    ours = CrossEntropy("assistant", 2)(hidden, targets, head)
    (expected,) = torch.autograd.grad(ours.total, hidden)
    same = shown["Focal"](gamma=0.0, chunk_tokens=2)(hidden, targets, head)
    assert same.count == ours.count
    torch.testing.assert_close(same.total, ours.total)
    torch.testing.assert_close(torch.autograd.grad(same.total, hidden)[0], expected)
    focal = shown["Focal"](gamma=2.0, chunk_tokens=2)(hidden, targets, head).total
    p = head(hidden).softmax(-1)[range(5), targets]
    each = functional.cross_entropy(head(hidden), targets, reduction="none")
    torch.testing.assert_close(focal, ((1 - p) ** 2 * each).sum())


def test_the_shown_backend_leaves_a_of_the_first_layer_as_drawn(job, tmp_path, tiny_backend):
    """Every other matrix has changed."""
    job("backend=frozen_a", "hydra.run.dir=run")
    _, tuned = read_adapter(tmp_path / "run" / "adapter")
    drawn = {name: p.detach().numpy() for name, p in tiny_backend().trainable().items()}
    still = {name for name, values in tuned.items() if (values == drawn[name]).all()}
    assert still == {n for n in drawn if n.startswith("l0.") and n.endswith("lora_a")}


def test_a_run_with_classes_goes_on_where_they_are_and_nowhere_else(job, tmp_path):
    """Without ./conf the class is not trusted, so resuming is refused."""
    job("callbacks=mine", "hydra.run.dir=run")
    arguments = ["resume=run", "trainer.max_steps=6"]
    command = [sys.executable, "-P", "-c", SCRIPT, *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(mens_exp.__file__ or "").parents[1])}
    (tmp_path / "conf").rename(tmp_path / "elsewhere")
    refused = fork_server.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert refused.returncode == 2, refused.stderr
    assert "my_callbacks.PrintEvery" in refused.stderr
    assert "./conf" in refused.stderr
    (tmp_path / "elsewhere").rename(tmp_path / "conf")
    went_on = fork_server.run(
        command, check=False, capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert went_on.returncode == 0, went_on.stderr
    assert "step 6: loss" not in went_on.stdout  # every 5th, and 6 is not one
    assert "step 5: loss" in went_on.stdout


def test_the_shown_schedule_is_torchs_own(job, tmp_path):
    """The rate of each step follows the paper's formula; T_0=2 restarts after two steps."""
    _, manifest = job("schedule=restarts", "optim.lr=1e-3", "hydra.run.dir=outputs/a/b/run")
    assert manifest["facts"]["warmup_steps"] is None  # unknown for a user's class
    (file,) = tmp_path.glob("outputs/a/b/run/telemetry.jsonl")
    told = read_events(file)
    rates = [e["payload"]["optim/lr"] for e in told if e["event"] == "step"]
    shares = [(1 + math.cos(math.pi * (step % 2) / 2)) / 2 for step in range(4)]
    assert rates == pytest.approx([1e-3 * share for share in shares])


def test_a_module_that_leaves_labels_unsmoothed_trains_what_ours_does(job, tmp_path):
    """Its own training_step gives the same losses; the record lists what is unproven."""
    job("hydra.run.dir=outputs/a/b/0_ours")
    _, manifest = job(
        "module=smoothed", "module.label_smoothing=0.0", "hydra.run.dir=outputs/a/b/1"
    )
    losses = [
        [e["payload"]["train/loss"] for e in read_events(file) if e["event"] == "step"]
        for file in sorted(tmp_path.glob("outputs/a/b/*/telemetry.jsonl"))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    about = manifest["facts"]["module"]
    assert about["holds"] == ["A comparison is a comparison", "The artifact is the model"]
    assert set(about["unproven"]) == {
        *("What ran is what you asked for", "Nothing is lost", "It plans before it spends"),
    }
    assert manifest["contract"]["settings"]["module._target_"] == "my_modules.Smoothed"
    assert manifest["facts"]["hyperparameters"] == {"label_smoothing": 0.0}
    assert manifest["results"]["metrics"]["smoothed_loss"] > 0


def test_the_shown_average_is_the_adapter_that_is_kept(job, tmp_path):
    """Decay 0 keeps the last adapter; decay 0.5 averages those of the four steps by halves."""
    keep = "checkpoint.every_n_steps=1", "checkpoint.keep=9"
    for name, more in (
        ("plain", ()),
        ("zero", ("callbacks=[default,average]", "callbacks.average.decay=0.0")),
        ("half", ("callbacks=[default,average]", "callbacks.average.decay=0.5")),
    ):
        job(*more, *keep, f"hydra.run.dir={name}")
    kept = {n: read_adapter(tmp_path / n / "adapter")[1] for n in ("plain", "zero", "half")}
    states = [
        torch.load(tmp_path / "plain" / "checkpoints" / f"step_{n:08}.ckpt", weights_only=True)
        for n in (1, 2, 3, 4)
    ]
    for name, values in kept["plain"].items():
        assert (kept["zero"][name] == values).all()
        mean = states[0]["adapter"][name].clone()
        for state in states[1:]:
            mean = (mean + state["adapter"][name]) / 2
        torch.testing.assert_close(torch.from_numpy(kept["half"][name]), mean)


def test_the_shown_source_trains_on_what_its_query_finds(job, rows_file):
    """Only tickets rated 4 or 5 are used."""
    _, manifest = job("data=tickets", "data.min_rating=4")
    given = len(rows_file.read_text("utf-8").splitlines())
    found = manifest["inputs"]["data"]["files"]["my_rows.Tickets.rows"]
    assert found["rows"] == sum(number % 6 >= 4 for number in range(given))
    assert manifest["contract"]["data"]["generated_from"] == f"rows {found['sha256']}"
