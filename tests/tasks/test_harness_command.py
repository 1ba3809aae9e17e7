from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is missing: pip install 'mens-exp[lm-eval]'")

from mens_exp import cli
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard, read_item_events

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{a}}}} + {{{{a}}}} ="
doc_to_choice: ["1", "2"]
doc_to_target: "{{{{a - 1}}}}"
"""


def test_training_ends_with_the_harness_tasks_of_base_and_tuned(tmp_path, train_in):
    """One scorecard has the harness's figures of base and tuned; an evaluation repeats them."""
    data, tasks = tmp_path / "sums.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps({"a": a}) + "\n" for a in (1, 2, 1)))
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.format(data=data))
    suite = ["suite=lm_eval", f"suite.path={tasks}"]
    trained = train_in(tmp_path / "run", *suite, "optim.lr=0.1")
    card = Scorecard.read(trained.scorecard)
    assert (card.suite, card.items, list(card.conditions)) == ("lm_eval", 3, ["base", "tuned"])
    assert card.self_test is not None
    for name, kpis in card.conditions.items():
        events = [e for e in read_item_events(trained.events) if e["condition"] == name]
        assert kpis["sums/acc"] == kpis["task_success"] == kpis["sums_task_success"]
        assert kpis["task_success"] == sum(bool(e["task_success"]) for e in events) / 3
    out = tmp_path / "again"
    again = ["task=evaluate", "logger=none", f"path={trained.path}", *suite, f"hydra.run.dir={out}"]
    assert cli.main(again) == 0
    repeated = Scorecard.read(RunDir(out).scorecard)
    assert repeated.suite_digest == card.suite_digest
    assert repeated.conditions["tuned"]["sums/acc"] == card.conditions["tuned"]["sums/acc"]
    assert RunDir(out).report.is_file()
