"""The Python functions of `mens_exp`, compared with the command line."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import api_page
import numpy as np
import peft
import pytest
import torch
import transformers
from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra

import mens_exp
from mens_exp import MensError, compare, compose, evaluate, load_run, plan, train
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory; runs are written to its outputs/."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_importing_the_package_loads_and_changes_nothing():
    """`dir` lists the names, each is loaded at its first use, and the process is unchanged."""
    code = (
        "import os, sys, signal, logging\n"
        "before = dict(os.environ), signal.getsignal(signal.SIGINT), set(sys.modules)\n"
        "import mens_exp\n"
        "names = dir(mens_exp)\n"
        "assert {'train', 'compare', 'load_run'} <= set(names)\n"
        "loaded = sorted(n for n in set(sys.modules) - before[2] if n.startswith('mens_exp'))\n"
        "assert loaded == ['mens_exp'], loaded\n"
        "assert before[:2] == (dict(os.environ), signal.getsignal(signal.SIGINT))\n"
        "assert logging.getLogger().handlers == []\n"
        "from mens_exp import train, MensError\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error():
    """`hasattr` and `from … import` behave as for any module."""
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        _ = mens_exp.fit


def test_a_composition_is_what_the_command_line_shows(tiny_run, capsys):
    """The values equal those of `--cfg job`; options and overrides can be read."""
    from mens_exp import cli

    found = compose(*tiny_run, "lora.r=4")
    assert cli.main(["--cfg", "job", *tiny_run, "lora.r=4"]) == 0
    shown = capsys.readouterr().out
    assert "r: 4" in shown
    assert [line for line in found.to_yaml().splitlines() if line not in shown] == []
    assert (found.config.lora.r, found.choices["model"]) == (4, "tiny_llama")
    assert compose(found, "lora.r=8").config.lora.r == 8


def test_all_mistakes_are_raised_together():
    """The exception has each dotted path, as on the command line."""
    with pytest.raises(MensError) as raised:
        compose("lora.r=0", "quant.duble_quant=true")
    assert [one.where for one in raised.value.problems] == ["quant.duble_quant", "lora.r"]


@pytest.mark.parametrize("call", [train, plan, compose])
def test_an_override_is_a_text(call):
    """A mapping, as other libraries take, is refused with a message."""
    with pytest.raises(MensError, match="an override must be a string"):
        call({"lora.r": 8})


@pytest.mark.parametrize("call", [train, plan, compose])
def test_several_values_are_told_as_a_program_can_give_them(call):
    """A function has no -m, so a list of values is refused."""
    with pytest.raises(MensError, match="one call takes one value for each setting") as raised:
        call("seed=1,2", "lora.r=4")
    assert raised.value.where == "seed"
    assert compose("model=tiny_llama", "data=jsonl", "data.path='a,b.jsonl'").config.data.path


def test_a_task_is_chosen_by_the_function(tiny_run):
    """An override of `task` is refused."""
    with pytest.raises(MensError, match="the function already determines the task"):
        plan(*tiny_run, "task=train")
    assert not Path("outputs").exists()


class Tables(HTMLParser):
    """The text of a page, with a check of its tags."""

    def __init__(self, page):
        super().__init__()
        self.text, self.open = "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f"{data} "


def drawn(shown):
    """Return an object's text in a notebook, after a check of its markup."""
    page = Tables(shown._repr_html_())
    assert page.open == []
    return " ".join(page.text.split())


def test_a_plan_forecasts_without_training(tiny_run, capsys):
    """The result has figures, a table for a notebook, and a record like that of task=plan."""
    found = plan(*tiny_run)
    assert found.memory_bytes > 2**20
    assert RunDir(found.path).plan.is_file()
    assert "r 16, alpha 16" in drawn(found)
    assert capsys.readouterr().out == ""
    assert "model tiny_llama" in drawn(compose(*tiny_run))


@pytest.fixture(scope="module")
def arms(tmp_path_factory, tiny_run):
    """Two runs, trained one after the other in this process; do not change them."""
    place = tmp_path_factory.mktemp("arms")
    return [train(*tiny_run, *more, f"hydra.run.dir={place}/{n}") for n, more in enumerate(MORE)]


MORE = ((), ("lora.r=4",))


def test_a_run_is_the_one_that_the_command_line_makes(arms, finished):
    """Adapter and loss are equal to the bit; a second run in the same process works too."""
    theirs = Manifest.read(finished.manifest)
    adapter = "adapter/adapter.safetensors"
    assert arms[0].manifest.outputs[adapter] == theirs.outputs[adapter]
    assert arms[0].results["tuned_val_loss"] == theirs.results["tuned_val_loss"]
    assert arms[1].manifest.outputs[adapter] != theirs.outputs[adapter]
    assert [run.status for run in arms] == [Status.SUCCEEDED] * 2
    assert arms[1].config.lora.r == 4


def test_a_run_shows_base_beside_tuned(arms):
    """A notebook shows the losses and the path of the record."""
    shown = drawn(arms[0])
    assert "Validation loss" in shown
    assert str(arms[0].path) in shown.replace(" ", "")
    assert len(arms[0].steps()) == 4
    assert arms[0].validations()[-1]["val/loss"] == arms[0].results["tuned_val_loss"]
    assert arms[0].report.is_file()


def documents(run, tokenizer):
    """Yield ids and labels of the validation documents, from transformers' own template."""
    ended = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    for pair in run.rows():
        asked = [{"role": "user", "content": pair.prompt}]
        answered = [*asked, {"role": "assistant", "content": pair.response}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(answered, return_dict=False)
        last = max(place for place, one in enumerate(ids) if one == ended)
        labels = [-100] * len(prompt) + ids[len(prompt) : last + 1]
        yield torch.tensor([ids]), torch.tensor([labels + [-100] * (len(ids) - len(labels))])


@pytest.mark.parametrize("overrides", [[], ["lora.init=pissa"], ["backend=full", "optim.lr=1e-3"]])
def test_the_loss_of_the_model_is_the_recorded_one(finished_with, overrides):
    """The oracle is transformers, on the validation rows, with its own tokenizer and labels."""
    run = load_run(finished_with(*overrides).path)
    model, tokenizer = run.model("cpu"), run.tokenizer()
    assert isinstance(model, transformers.PreTrainedModel | peft.PeftModel)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    total = count = 0
    with torch.no_grad():
        for ids, labels in documents(run, tokenizer):
            learned = int((labels[:, 1:] != -100).sum())
            total += float(model(input_ids=ids, labels=labels).loss) * learned
            count += learned
    assert total / count == pytest.approx(run.results["tuned_val_loss"], rel=2e-5)
    assert abs(run.results["base_val_loss"] - run.results["tuned_val_loss"]) > 1e-3


def test_a_changed_adapter_is_no_model_of_the_run(arms, tmp_path):
    """The adapter no longer has the recorded digest."""
    shutil.copytree(arms[0].path, tmp_path / "copy")
    other = load_run(tmp_path / "copy")
    tensors = RunDir(other.path).adapter / "adapter.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(MensError):
        other.model("cpu")


def test_a_run_without_a_model_says_so(tiny_run):
    """A plan has trained nothing."""
    found = load_run(plan(*tiny_run).path)
    assert found.manifest.task == "plan"
    for part in (found.model, found.tokenizer):
        with pytest.raises(MensError, match="trained nothing"):
            part()
    with pytest.raises(MensError, match="unknown side"):
        found.rows("test")


def test_a_comparison_gives_verdicts(arms, capsys):
    """By arm, on the primary KPI; the page is written and nothing is printed."""
    found = compare(arms, "compare.factors=[lora.r]")
    [arm] = found.verdicts
    assert arm == "lora.r=4"
    first, second = (run.results["tuned_val_loss"] for run in arms)
    assert found.differences[arm] == pytest.approx(second - first)
    assert found.primary == "val_loss"
    assert found.page.is_file()
    assert "lora.r=4" in drawn(found)
    assert capsys.readouterr().out == ""


def test_an_evaluation_scores_a_run(arms):
    """The run is not trained again."""
    found = evaluate(arms[0], "suite=heldout_syntax", "suite.items=1", "logger=none")
    assert set(found.scorecard.conditions) == {"base", "tuned"}
    assert found.manifest.inputs["subject"] == str(arms[0].path)
    assert drawn(found)


def test_a_failed_run_is_raised_and_recorded(tiny_run, monkeypatch):
    """The caller gets the recipe's own error, or a bug's exception."""
    from mens_exp.training.module import TrainingModule

    with pytest.raises(MensError, match="no row has a supervised token left"):
        train(*tiny_run, "data.seq_len=16", "hydra.run.dir=short")
    assert load_run("short").status is Status.FAILED

    def broken(*_):
        raise ZeroDivisionError("by our own fault")

    monkeypatch.setattr(TrainingModule, "training_step", broken)
    with pytest.raises(ZeroDivisionError):
        train(*tiny_run, "hydra.run.dir=bug")
    assert load_run("bug").manifest.error["type"] == "ZeroDivisionError"


def test_a_library_that_exits_ends_no_process(tiny_run, monkeypatch):
    """SystemExit would end a notebook's kernel."""
    from mens_exp.training.module import TrainingModule

    monkeypatch.setattr(TrainingModule, "training_step", lambda *_: sys.exit(7))
    with pytest.raises(MensError, match="asked to end the process"):
        train(*tiny_run)


def test_ctrl_c_closes_the_record_and_the_run_goes_on(tiny_run, monkeypatch, finished):
    """It raises KeyboardInterrupt; the resumed run has the loss of an undisturbed one."""
    from mens_exp.training.module import TrainingModule

    step, calls = TrainingModule.training_step, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 11:  # after the checkpoint of step 2
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(TrainingModule, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt, match="cancelled"):
        train(*tiny_run, "hydra.run.dir=run")
    assert signal.getsignal(signal.SIGINT) is handler
    stopped = load_run("run")
    assert stopped.status is Status.CANCELLED
    done = train(resume=stopped)
    assert done.status is Status.SUCCEEDED
    theirs = Manifest.read(finished.manifest).results
    assert done.results["tuned_val_loss"] == theirs["tuned_val_loss"]
    with pytest.raises(MensError, match=r"trainer\.max_steps"):
        train("lora.r=2", resume=done)


def test_a_second_ctrl_c_interrupts_and_does_not_kill(tiny_run, monkeypatch):
    """The second signal comes while the record is being closed."""
    from mens_exp.tasks.run import Run as OpenRun
    from mens_exp.training.module import TrainingModule

    def pressed(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingModule, "training_step", pressed)
    monkeypatch.setattr(OpenRun, "_render", pressed)
    with pytest.raises(KeyboardInterrupt):
        train(*tiny_run, "hydra.run.dir=run")
    assert load_run("run").status is Status.CANCELLED


def test_a_run_leaves_the_state_of_the_process_as_it_was(tiny_run):
    """Random numbers and deterministic algorithms are the notebook's own again."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)

    def drawn():
        return random.random(), np.random.random(), torch.rand(1).item()

    try:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        expected = drawn()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        train(*tiny_run, "trainer.max_steps=1", "hydra.run.dir=run")
        assert drawn() == expected
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_another_thread_trains_too(tiny_run, finished):
    """`train` works outside of the main thread, to which signals belong, with the same result."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(train, *tiny_run).result()
    assert found.status is Status.SUCCEEDED
    adapter = "adapter/adapter.safetensors"
    assert found.manifest.outputs[adapter] == Manifest.read(finished.manifest).outputs[adapter]


def test_an_application_of_hydra_goes_on_with_its_own_configuration(tiny_run, tmp_path):
    """Hydra's state, logging and the working directory stay the caller's."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.yaml").write_text("db: mysql\n", "utf-8")
    handlers = list(logging.getLogger().handlers)
    where = os.path.relpath(tmp_path / "theirs", Path(__file__).parent)
    GlobalHydra.instance().clear()
    with initialize(where, version_base=None):
        plan(*tiny_run)
        assert hydra_compose("config").db == "mysql"
    assert logging.getLogger().handlers == handlers
    assert Path.cwd() == tmp_path


def test_processes_of_torchrun_are_refused(tiny_run, monkeypatch):
    """Each process would train a run of its own."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MensError, match="the command line under torchrun"):
        train(*tiny_run)


def test_latest_is_the_run_trained_last(arms, tiny_run, tmp_path):
    """Neither an earlier run nor a later plan or comparison; an unknown path is refused."""
    earlier, last = tmp_path / "outputs" / "2", tmp_path / "outputs" / "1"
    shutil.copytree(arms[1].path, last)
    shutil.copytree(arms[0].path, earlier)
    planned = plan(*tiny_run).path
    compared = compare([earlier, last], "compare.factors=[lora.r]").path
    paths = (earlier, last, planned, compared)
    started = [load_run(path).manifest.started_utc for path in paths]
    assert started == sorted(started)
    assert load_run("latest").path == last
    with pytest.raises(MensError, match="no such run directory"):
        load_run("nope")


def test_the_page_is_that_of_the_code():
    """`make docs` writes it, with every function, every object and the notebook's code."""
    shown = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text("utf-8")
    assert shown == api_page.page()
    for name in mens_exp.api.__all__:
        assert f"### `{name}`" in shown
    assert "- `resume`: a run that was stopped, to continue in its directory." in shown
    assert Path(mens_exp.__file__).with_name("py.typed").is_file()
