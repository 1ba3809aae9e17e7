from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import cast

import pytest

from mens_exp.artifacts.atomic import json_line
from mens_exp.artifacts.corpus_record import CorpusRecord, StepRecord
from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.corpus import STEPS as NAMES
from mens_exp.config.corpus import CorpusConfig, CurriculumConfig, DifficultyOrder
from mens_exp.config.evaluation import BubblewrapSandbox
from mens_exp.corpus.steps import pipeline
from mens_exp.corpus.steps.pipeline import STEPS, hashes, place_problems, run_steps
from mens_exp.errors import DataError
from mens_exp.rows.schema import TrainingPair, to_json

LATER = ["validate", "split", "curriculum"]


@pytest.fixture
def corpus(tmp_path):
    """Return the configuration of three steps over thirty rows in ten groups."""
    rows = [
        TrainingPair(
            prompt=f"p{number}",
            response=f"x = {number}",
            language="python",
            group=f"g{number % 10}",
        )
        for number in range(30)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(json_line(to_json(row), "rows") for row in rows))
    return CorpusConfig(steps=list(LATER), input=str(path), output=str(tmp_path / "out"))


def done(config):
    """Make the corpus; return why each step was run, None for a step that was reused."""
    from mens_exp.corpus.steps.pipeline import input_files

    files = input_files(config)
    why = {}
    run_steps(
        SimpleNamespace(corpus=config, sandbox=BubblewrapSandbox()),
        files,
        hashes(files, config),
        lambda step: why.update({step.record.step: step.why}),
    )
    return why


def content(config):
    root = pipeline.Path(cast("str", config.output))
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*.jsonl"))
    }


def test_every_step_is_recorded(corpus, tmp_path):
    """Recorded are settings, digests of input and output, counts and time, and the whole corpus."""
    done(corpus)
    record = StepRecord.read(tmp_path / "out/02-split/step.json")
    rows = tmp_path / "out/01-validate/rows.jsonl"
    assert record.inputs == {"rows.jsonl": sha256_file(rows)}
    assert record.settings == {"split": {"by": "file", "heldout_frac": 0.05, "val_frac": 0.05}}
    assert set(record.outputs) == {"train.jsonl", "val.jsonl", "heldout.jsonl"}
    assert sum(file["rows"] or 0 for file in record.outputs.values()) == 30
    assert (record.rows_in, record.rows_out) == (30, 30)
    assert record.seconds >= 0
    made = CorpusRecord.read(tmp_path / "out/corpus.json")
    assert [step["directory"] for step in made.steps] == [
        "01-validate",
        "02-split",
        "03-curriculum",
    ]
    for name, file in made.files.items():
        assert sha256_file(tmp_path / "out" / name) == file["sha256"]
    sides = ("train", "val", "heldout")
    assert set(made.files) == {f"03-curriculum/{side}.jsonl" for side in sides}


def test_a_second_run_does_nothing(corpus):
    """No file is rewritten, not even the index."""
    assert set(done(corpus).values()) == {"new"}
    before = content(corpus)
    assert done(corpus) == dict.fromkeys(LATER)
    assert content(corpus) == before


def test_the_same_input_gives_the_same_bytes(corpus, tmp_path):
    """The bytes are the same in another directory."""
    done(corpus)
    other = dataclasses.replace(corpus, output=str(tmp_path / "other"))
    done(other)
    assert content(other) == content(corpus)
    index = [(tmp_path / name / "corpus.json").read_bytes() for name in ("out", "other")]
    assert index[0] == index[1]


def test_a_changed_setting_is_done_again_from_there(corpus):
    """Earlier steps are reused."""
    done(corpus)
    corpus.split.val_frac = 0.3
    assert done(corpus) == {
        "validate": None,
        "split": "its input, its settings or the code changed",
        "curriculum": "its input, its settings or the code changed",
    }


def test_a_changed_last_setting_leaves_the_others(corpus):
    """Only the step that reads the setting runs again."""
    done(corpus)
    corpus.curriculum = CurriculumConfig(order=DifficultyOrder.hardest_first)
    assert [name for name, why in done(corpus).items() if why] == ["curriculum"]


def test_difficulty_reaches_the_next_step(corpus, tmp_path):
    """Without an input, generated rows are ordered by their own difficulty."""
    corpus.steps, corpus.input = ["generate", "curriculum"], None
    corpus.generate.rows = 8
    done(corpus)
    lines = (tmp_path / "out/02-curriculum/rows.jsonl").read_text("utf-8").splitlines()
    told = [json.loads(line)["difficulty"] for line in lines]
    assert told == sorted(told)
    assert len(told) == 8


def test_another_input_is_done_from_the_first_step(corpus, tmp_path):
    """Adding a row to the file reruns every step."""
    done(corpus)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "new", "response": "new"}\n')
    assert all(done(corpus).values())


def test_another_version_of_the_code_is_done_again(corpus, monkeypatch):
    """A step whose version changed runs again."""
    done(corpus)
    newer = dataclasses.replace(STEPS["split"], version=STEPS["split"].version + 1)
    monkeypatch.setitem(STEPS, "split", newer)
    assert [name for name, why in done(corpus).items() if why] == ["split", "curriculum"]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.write_text("{}\n"), "val.jsonl is not what the step wrote"),
        (lambda path: path.unlink(), "files of it are missing, or were added"),
        (lambda path: (path.parent / "x").touch(), "files of it are missing, or were added"),
        (
            lambda path: (path.parent / "step.json").write_text("{"),
            "its record cannot be read",
        ),
    ],
)
def test_a_corrupted_output_is_seen_and_made_again(corpus, tmp_path, harm, why):
    """That step and those after it run again and give the same bytes."""
    done(corpus)
    before = content(corpus)
    harm(tmp_path / "out/02-split/val.jsonl")
    assert done(corpus) == {
        "validate": None,
        "split": why,
        "curriculum": "a step before it was done again",
    }
    assert content(corpus) == before


def test_a_step_that_fails_leaves_the_ones_before_it(corpus, tmp_path):
    """A failed run leaves the directories of earlier steps, and the next run reuses them."""
    corpus.split.val_frac, corpus.split.heldout_frac = 0.3, 0.3
    done(corpus)
    corpus.steps = ["validate", "mix"]
    corpus.mix.weights = {"absent": 1.0}
    with pytest.raises(Exception, match="no weight"):
        done(corpus)
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {"01-validate", "02-split", "03-curriculum"}
    corpus.steps = list(LATER)
    assert done(corpus) == dict.fromkeys(LATER)


def test_an_empty_result_is_an_error(corpus, tmp_path):
    """The error names the step and its counts, and no directory is left."""
    from mens_exp.config.data import OnBadRow

    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    corpus.validate.on_bad_row = OnBadRow.quarantine
    with pytest.raises(DataError, match=r"no row is left after the step validate.*1 read"):
        done(corpus)
    assert not (tmp_path / "out/01-validate").exists()


KILLED = """
import os, sys
from types import SimpleNamespace
from mens_exp.config.corpus import CorpusConfig
from mens_exp.config.evaluation import BubblewrapSandbox
from mens_exp.corpus.steps import pipeline
from mens_exp.corpus.steps.pipeline import STEPS
from mens_exp.corpus.steps.pipeline import hashes, input_files
import dataclasses, time

def stuck(step):
    (step.directory / "train.jsonl").write_text("half")
    (step.scratch / "run").write_text("half")
    print("stuck", flush=True)
    time.sleep(60)

STEPS["split"] = dataclasses.replace(STEPS["split"], run=stuck)
config = CorpusConfig(
    steps=["validate", "split", "curriculum"], input=sys.argv[1], output=sys.argv[2]
)
files = input_files(config)
run = SimpleNamespace(corpus=config, sandbox=BubblewrapSandbox())
pipeline.run_steps(run, files, hashes(files, config), lambda done: None)
"""


def test_a_killed_step_leaves_nothing_half_done(corpus, tmp_path):
    """The next run removes partial output, reuses finished steps and gives the same result."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(corpus.input), str(corpus.output)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"stuck\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    out = tmp_path / "out"
    assert (out / "01-validate/step.json").exists()
    assert not (out / "02-split").exists()
    time.sleep(0.01)
    assert done(corpus) == {"validate": None, "split": "new", "curriculum": "new"}
    names = {path.name for path in out.iterdir()}
    assert names == {"01-validate", "02-split", "03-curriculum", "corpus.json"}


def test_the_steps_are_those_that_the_configuration_names():
    """Exactly the configured steps are run."""
    assert set(STEPS) == set(NAMES)


def told(config):
    return "\n".join(str(problem) for problem in place_problems(config))


def test_an_input_that_is_not_there_is_refused(corpus, tmp_path):
    """The error comes before anything is written."""
    corpus.input = str(tmp_path / "row.jsonl")
    assert "the nearest there is rows.jsonl" in told(corpus)
    assert not (tmp_path / "out").exists()


def test_an_output_within_the_input_is_refused(corpus, tmp_path):
    """A second run would extract from its own output."""
    corpus.steps, corpus.input = ["extract"], str(tmp_path)
    assert "the output is inside the input" in told(corpus)


def test_an_input_within_the_output_is_refused(corpus, tmp_path):
    """The input would be replaced while it is read."""
    done(corpus)
    corpus.input = str(tmp_path / "out/01-validate/rows.jsonl")
    assert "the input is inside the output" in told(corpus)


def test_a_directory_that_holds_something_else_is_refused(corpus, tmp_path):
    """A foreign directory is named and left alone; an earlier corpus is accepted."""
    done(corpus)
    (tmp_path / "out/corpus_report.html").touch()
    assert told(corpus) == ""
    (tmp_path / "out/thesis.md").write_text("mine")
    assert "thesis.md" in told(corpus)
    assert (tmp_path / "out/thesis.md").read_text() == "mine"
