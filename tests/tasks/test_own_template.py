"""A chat template from a file, from the first batch to an evaluation of the finished run."""

from __future__ import annotations

import json

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} on {{ strftime_now('%Y-%m-%d') }}: {{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}"
    "assistant on {{ strftime_now('%Y-%m-%d') }}: {% endif %}"
)


@pytest.fixture(scope="module")
def templated(train_in, tmp_path_factory):
    """A finished run with a template of its own, whose file was then deleted."""
    directory = tmp_path_factory.mktemp("templated")
    file = directory / "mine.jinja"
    file.write_text(TEMPLATE, "utf-8")
    overrides = [f"tokenizer.chat_template={file}", "tokenizer.date=2026-01-05"]
    overrides += ["data.truncation=left", "objective.turns=last"]
    run = train_in(directory / "run", *overrides, "trainer.max_steps=2")
    file.unlink()
    return run, file


def test_template_lands_in_the_run_and_beside_the_adapter(
    templated,
):
    """A copy is stored where transformers looks for it, byte for byte."""
    run, _ = templated
    assert run.chat_template.read_text("utf-8") == TEMPLATE
    assert (run.peft / "chat_template.jinja").read_text("utf-8") == TEMPLATE


def test_record_says_what_shaped_the_ids(templated):
    """The record has the template's source and date, and how rows were cut and learned."""
    inputs = Manifest.read(templated[0].manifest).inputs
    assert (inputs["chat_template"], inputs["chat_template_date"]) == ("a file", "2026-01-05")
    data = inputs["data"]
    assert (data["truncation"], data["turns"], data["train_unrolled"]) == ("left", "last", 0)
    (file,) = data["files"].values()
    assert (file["form"], file["rows"], len(file["sha256"])) == ("pair", 60, 64)


def test_run_is_evaluated_though_the_file_is_gone(templated, tmp_path):
    """The run's own copy is read, so the prompts are those of training."""
    run, _ = templated
    arguments = [
        "task=evaluate",
        "logger=none",
        f"path={run.path}",
        "suite.items=1",
        "suite.max_new_tokens=64",
    ]
    target = RunDir(tmp_path / "evaluated")
    assert cli.main([*arguments, "trainer=cpu", f"hydra.run.dir={target.path}"]) == 0
    events = [json.loads(line) for line in target.events.read_text("utf-8").splitlines()]
    before, between = "user on 2024-07-26: <|im_end|>", "assistant on 2024-07-26: "
    overhead = len(before) - len("<|im_end|>") + 1 + len(between)
    assert {e["tokens_in"] - len(e["prompt"]) for e in events} == {overhead}


def test_run_goes_on_though_the_file_is_gone(templated):
    """The run resumes for more steps under the same template."""
    run, _ = templated
    assert cli.main([f"resume={run.path}", "trainer.max_steps=3"]) == 0
    assert Manifest.read(run.manifest).results["steps"] == 3


def test_absent_template_is_refused_before_a_run_opens(tiny_run, tmp_path, capsys):
    """An absent template is reported with every other problem."""
    overrides = [f"tokenizer.chat_template={tmp_path / 'no.jinja'}", "lora.targets=[x]"]
    assert cli.main([*tiny_run, *overrides, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "tokenizer.chat_template: the file cannot be read" in said
    assert "lora.targets" in said
    assert not (tmp_path / "run").exists()


def test_a_plan_shows_the_date_that_prompts_will_have(tiny_run, tmp_path, capsys):
    """The plan shows the date if the template asks for one."""
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE, "utf-8")
    dated = [*tiny_run, "task=plan", f"tokenizer.chat_template={file}", "tokenizer.date=2026-01-05"]
    assert cli.main([*dated, f"hydra.run.dir={tmp_path / 'plan'}"]) == 0
    assert "2026-01-05 in every prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("date", "said"),
    [("2026-01-05", "the chat template asks for no date"), ("yesterday", "is not a date")],
)
def test_a_date_without_effect_is_refused(date, said, tiny_run, tmp_path, capsys):
    """ChatML asks for no date, and an invalid date is refused."""
    run = RunDir(tmp_path / "run")
    assert cli.main([*tiny_run, f"tokenizer.date={date}", f"hydra.run.dir={run.path}"]) == 2
    assert f"tokenizer.date: {said}" in capsys.readouterr().err
    assert not run.path.exists()
