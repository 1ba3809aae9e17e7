from __future__ import annotations

import pytest
import torch
from lightning import Callback

from mens_exp.artifacts.scorecard import read_item_events
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.suite import MiniPythonSuite
from mens_exp.errors import TrainingError
from mens_exp.evals.attempts import FirstItems, Measured, Plan, measure
from mens_exp.evals.engines import Generation, GraphEngine
from mens_exp.evals.program_suite import mini_python
from mens_exp.training.build import build_module
from mens_exp.training.callbacks.best_adapter import BestAdapter
from mens_exp.training.callbacks.checkpoint import Checkpoint
from mens_exp.training.callbacks.scorecard import Scorecard


class Rates:
    """Takes the score of each scorecard from a list, and records the items asked for."""

    def __init__(self, values, metric="eval/parse_rate"):
        self.values, self.metric = iter(values), metric
        self.asked = []

    def __call__(self, items):
        self.asked.append(items)
        value = {self.metric: next(self.values)}
        return Measured(items=items, values=value, unknown={"eval/task_success": "x"}, events=[])


class Kept(Callback):
    """Keeps the adapter after each optimizer step."""

    def __init__(self):
        self.adapters = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.at_step_boundary:
            self.adapters[trainer.global_step] = adapter_of(pl_module)


def adapter_of(module):
    return {name: p.detach().clone() for name, p in module.backend.trainable().items()}


def same(first, second):
    return all(torch.equal(first[name], value) for name, value in second.items())


def scored(record):
    events = read_events(record.dir.telemetry)
    return [event["payload"] for event in events if event["event"] == "scorecard_step"]


def real_score(fit):
    """Score with the graph in training, as a run does, without executing anything."""
    tokenizer = fit.data.tokenizer
    engine = GraphEngine(
        fit.module.backend,
        tokenizer,
        Generation(max_new_tokens=6, batch_size=2, temperature=0.8),
    )
    suite = mini_python(MiniPythonSuite(items=3))
    manifest = fit.record.manifest
    return lambda items: measure(FirstItems(suite, items), engine, None, Plan(), manifest)


def test_every_nth_step_and_the_last_are_scored(fit):
    """With five steps and a scorecard every two, steps 2, 4 and 5 are scored."""
    rates = Rates([0.25, 0.5, 0.75])
    fit.run(fit.trainer(Scorecard(fit.record, rates, 2, 3), max_steps=5))
    payloads = scored(fit.record)
    assert [(p["step"], p["eval/parse_rate"], p["items"]) for p in payloads] == [
        (2, 0.25, 3),
        (4, 0.5, 3),
        (5, 0.75, 3),
    ]
    assert payloads[0]["unknown"] == {"eval/task_success": "x"}
    assert payloads[0]["seconds"] >= 0
    assert rates.asked == [3, 3, 3]


def test_a_graph_that_answers_in_training_trains_the_same(fit, tiny_backend):
    """With real, sampled generation the adapter stays bitwise equal."""
    without = fit.trainer(max_steps=3)
    fit.run(without)
    expected = adapter_of(fit.module)
    fit.module = build_module(fit.config, tiny_backend(), fit.data)
    fit.data.train_dataloader().position = 0
    modes = [module.training for module in fit.module.modules()]
    fit.run(fit.trainer(Scorecard(fit.record, real_score(fit), 1, 2), max_steps=3))
    assert same(adapter_of(fit.module), expected)
    assert [module.training for module in fit.module.modules()] == modes
    assert any(modes)
    answered = [read_item_events(fit.record.dir.events_at(step)) for step in (1, 2, 3)]
    assert [len(events) for events in answered] == [2, 2, 2]
    assert {event["condition"] for events in answered for event in events} == {"tuned"}
    assert all(event["tokens_out"] for events in answered for event in events)
    assert not fit.record.dir.events.exists()
    for payload, events in zip(scored(fit.record), answered, strict=True):
        assert payload["eval/parse_rate"] == sum(bool(e["parses"]) for e in events) / 2
        assert "eval/task_success" not in payload
        assert payload["unknown"]["eval/task_success"]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("eval/parse_rate", [0.2, 0.8, 0.5], 2),
        ("eval/parse_rate", [0.5, 0.5, 0.1], 1),
        ("eval/latency_ms", [3.0, 2.0, 1.0], 3),
    ],
)
def test_the_best_adapter_by_a_kpi_is_put_back(fit, metric, values, best):
    """The KPI's direction decides, ties go to the earliest, and the loss is that step's."""
    kept, chooser = Kept(), BestAdapter(fit.record, metric)
    card = Scorecard(fit.record, Rates(values, metric), 1)
    fit.run(fit.trainer(chooser, kept, card, max_steps=3, val_check_interval=2))
    assert same(adapter_of(fit.module), kept.adapters[best])
    assert not same(kept.adapters[1], kept.adapters[2])
    assert fit.module.selected == (best, chooser.loss)
    results = fit.record.manifest.results
    assert (results["adapter_metric"], results["adapter_metric_value"]) == (
        metric,
        values[best - 1],
    )


def test_a_validation_between_scorecards_chooses_nothing(fit):
    """Validations without a scorecard are not candidates, so the second step is chosen."""
    chooser = BestAdapter(fit.record, "eval/parse_rate")
    card = Scorecard(fit.record, Rates([0.0, 0.0]), 2)
    fit.run(fit.trainer(chooser, card, max_steps=3, val_check_interval=2))
    assert chooser.step == 2


def test_a_kpi_that_the_suite_leaves_unknown_ends_the_run(fit):
    """Selecting the first adapter instead would be an accident."""
    chooser = BestAdapter(fit.record, "eval/task_success")
    card = Scorecard(fit.record, Rates([0.0]), 1)
    with pytest.raises(TrainingError, match=r"adapter\.metric.*found task_success.*parse_rate"):
        fit.run(fit.trainer(chooser, card, val_check_interval=2))


def test_the_best_so_far_survives_a_checkpoint(fit, tiny_backend):
    """The best step is known only from the checkpoint and is still chosen."""
    kept, card = Kept(), Scorecard(fit.record, Rates([0.9, 0.1]), 1)
    chooser, saver = BestAdapter(fit.record, "eval/parse_rate"), Checkpoint(fit.record)
    fit.run(fit.trainer(chooser, kept, card, saver, max_steps=2, val_check_interval=2))
    fit.module = build_module(fit.config, tiny_backend(), fit.data)
    again = BestAdapter(fit.record, "eval/parse_rate")
    fit.record.dir.events_at(3).write_text("of a stopped attempt", encoding="utf-8")
    fit.record.dir.events_at(9).write_text("of a stopped attempt", encoding="utf-8")
    later = Scorecard(fit.record, Rates([0.5]), 1)
    trainer = fit.trainer(again, later, Checkpoint(fit.record), max_steps=3, val_check_interval=2)
    fit.run(trainer, ckpt_path=fit.record.dir.checkpoint(2), weights_only=True)
    assert (again.step, again.value) == (1, 0.9)
    assert same(adapter_of(fit.module), kept.adapters[1])
    names = sorted(path.name for path in fit.record.dir.scorecards.iterdir())
    assert names == [f"step_0000000{step}.jsonl" for step in (1, 2, 3)]
    assert read_item_events(fit.record.dir.events_at(3)) == []
