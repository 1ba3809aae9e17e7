"""Mistakes on the command line: a message of one screen, with the command to write next."""

from __future__ import annotations

import math

import pytest

from mens_exp import cli
from mens_exp.config.suggestions import meant_by, of_flag
from mens_exp.errors import expected_name, listed

COLUMNS, LINES = 80, 24

# A mistaken command, and parts of its message.
MISTAKES = {
    "--epochs 3": ("unknown flag found --epochs 3", "write trainer.max_epochs=3"),
    "--epochs=3": ("unknown flag found --epochs=3", "write trainer.max_epochs=3"),
    "--lr 1e-4": ("unknown flag", "write optim.lr=1e-4"),
    "--model tiny_llama": ("unknown flag", "write model=tiny_llama"),
    "--load_in_4bit": ("unknown flag", "write backend=qlora"),
    "--frobnicate": ("unknown flag found --frobnicate", "key=value"),
    "train": ("not an override found train", "write task=train"),
    "evaluat": ("not an override found evaluat", "write task=evaluate"),
    "qlora": ("not an override found qlora", "write backend=qlora"),
    "help": ("not an override found help", "write --help"),
    "run": ("not an override found run", "python -m mens_exp trains"),
    "mine.yaml": ("not an override found mine.yaml", "write study=mine.yaml"),
    "whatever": ("not an override found whatever", "see --help"),
    "--wandb": ("unknown flag found --wandb", "write logger=wandb"),
    "logger=[wandb,csvv]": ("logger: unknown option found csvv", "write logger=[wandb,csv]"),
    "logger=[]": ("logger: does not name an option", "write logger=none"),
    "data=some/rows.jsonl": ("data: unknown option", "write data=jsonl data.path=some/rows.jsonl"),
    "data=me/rows": ("data: unknown option", "write data=hub data.id=me/rows"),
    "model=me/model": ("model: unknown option", "write model=hf model.id=me/model"),
    "model=./here": ("model: unknown option", "write model=hf model.id=./here"),
    "data.upto=9": ("data.upto: unknown key", "drop data.upto"),
    "suite._target_=a.B": (
        "suite._target_: a class is named in a file",
        "./conf/suite/<name>.yaml",
    ),
    "rows.jsonl": ("not an override found rows.jsonl", "write data=jsonl data.path=rows.jsonl"),
    "lora.r = 8": ("not an override found lora.r", "write lora.r=<value>, without spaces"),
    "use_liger_kernel=true": ("expected model.kernels", "write model.kernels=liger"),
    "deepspeed=true": ("it is not offered here", "drop deepspeed"),
    "frobnicate=1": ("frobnicate: unknown key", "--cfg job"),
    "foo.bar=1": ("foo.bar: unknown key", "--cfg job"),
    "lr=1e-3": ("lr: unknown key", "write optim.lr=1e-3"),
    "lora.rnak=8": ("lora.rnak: unknown key", "one of lora."),
    "~logger": ("logger: every run needs this group", "write logger=none"),
    "~model": ("model: every run needs this group", "choose an option, model=…"),
    "resume=nope": ("resume: no such run directory found nope", "train first: python -m mens_exp"),
    "task=doctor experiment=smoke": (
        "experiment: has no effect with task=doctor",
        "write python -m mens_exp task=doctor",
    ),
    "path=latest lora.r=8": ("path: has no effect with task=train", "mens_exp lora.r=8"),
    "task=tran": ("task: unknown option found tran", "the nearest is train", "write task=train"),
    "study=zz": ("study: unknown option", "or add your own as ./conf/study/<name>.yaml"),
    "trainer.logger=false": ("the Trainer gets it from the group logger", "write logger=none"),
    "trainer.callbacks=[]": ("the Trainer gets it from the group callbacks", "write callbacks="),
    "trainer.gpus=1": ("trainer.gpus: is a name used in Lightning 1", "write trainer.devices=1"),
    "trainer.devices=auto": ("trainer.devices: wrong type", "CUDA_VISIBLE_DEVICES"),
    "trainer.devices=[0]": ("trainer.devices: wrong type", "CUDA_VISIBLE_DEVICES"),
    "trainer.max_time={days:1,hours:2}": (
        "trainer.max_time: wrong type",
        "write trainer.max_time=DD:HH:MM:SS",
    ),
    "trainer.val_check_interval=0.25": (
        "trainer.val_check_interval: wrong type",
        "the number of micro-batches",
    ),
    "path=latest task=serve": ("path: no run found", "train one first: python -m mens_exp"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_takes_one_screen_and_names_the_next_command(
    tmp_path, monkeypatch, capsys, command
):
    """Exit code 2, and no file is written."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(command.split()) == 2
    said = capsys.readouterr()
    rows = sum(max(1, math.ceil(len(line) / COLUMNS)) for line in said.err.splitlines())
    assert rows <= LINES
    assert said.out == ""
    for part in MISTAKES[command]:
        assert part in " ".join(said.err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override",
    [
        *("logger=none", "suite=none", "sandbox=none"),
        *("policy=null", "experiment=null", "~policy", "~study"),
    ],
)
def test_to_switch_off_what_a_task_has_not_is_no_mistake(tmp_path, monkeypatch, override):
    """A script may switch it off for every task; choosing one is still an error."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--cfg", "job", "task=doctor", override]) == 0
    group = override.lstrip("~").partition("=")[0]
    other = {"logger": "csv", "suite": "jsonl", "sandbox": "unsafe"}.get(group)
    if other is not None:
        assert cli.main(["--cfg", "job", "task=doctor", f"{group}={other}"]) == 2


def test_many_names_are_cut_and_counted():
    """The message stays within a few terminal lines."""
    assert listed(["a", "b"]) == "one of a, b"
    assert listed([]) == "one of "
    said = listed([f"name_{number:03}" for number in range(500)])
    assert said.startswith("one of name_000, name_001")
    assert said.endswith(" more")
    assert len(said) < 400
    assert expected_name("zzzzzz", ["aa", "bb"]) == "one of aa, bb"


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-steps", "5", "write trainer.max_steps=5"),
        ("--lora-r", "8", "write lora.r=8"),
        ("-lr", None, "write optim.lr=…"),
        ("--deepspeed", "x", "drop it: it is not offered here"),
        ("--alpha", "16", "lora.alpha=16"),
        ("--zzzz", None, None),
    ],
)
def test_a_flag_of_another_tool_is_our_setting(flag, value, said):
    """The setting is found by its alias, the last part of its key, or its group."""
    found = of_flag(flag, value)
    assert found is None if said is None else said in found


def test_a_directory_of_a_run_is_a_path(tmp_path, monkeypatch):
    """If only a path is typed, the suggestions are to read or resume the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    assert "resume=run" in meant_by("run")
    assert meant_by("nothing_like_it") == "see --help"
