from __future__ import annotations

import json

import pytest

from mens_exp.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *arguments):
    """Run a refused command; return the lines of each problem by the place that it names first."""
    assert main(arguments) == 2
    blocks = {}
    for line in capsys.readouterr().err.splitlines():
        if not line.startswith(" "):
            place = line.partition(": ")[0]
        blocks[place] = f"{blocks.get(place, '')}{line}\n"
    return blocks


def test_every_fault_of_a_command_is_told_at_once(here, capsys):
    """Keys, options, values and files: the place, what was found, valid values, nearest name."""
    (here / "misnamed.jsonl").write_text('{"prompt": "p", "response": "r"}\n', "utf-8")
    said = refusal(
        capsys,
        "quant.duble_quant=true",
        "+lora.foo=1",
        "backend=qlra",
        "lora.r=0",
        "data=jsonl",
        "data.path=misnamd.jsonl",
        "model=tiny_llama",
        "data.seq_len=4096",
    )
    expectations = {
        "quant.duble_quant": ["quant.duble_quant=true", "the nearest is quant.double_quant"],
        "lora.foo": ["+lora.foo=1", "one of lora.name, "],
        "backend": ["qlra", "the nearest is qlora"],
        "lora.r": ["0", "a value >= 1"],
        "data.path": ["misnamd.jsonl", "the nearest there is misnamed.jsonl"],
        "data.seq_len": ["4096", "at most 2048 for tiny_llama"],
    }
    assert said.keys() == expectations.keys()
    for place, parts in expectations.items():
        assert all(part in said[place] for part in parts)
    assert list(here.iterdir()) == [here / "misnamed.jsonl"]


def test_faulty_rows_are_told_with_the_faulty_override(here, capsys):
    """Invalid JSON and a row without a response are each named by file and line."""
    rows = here / "rows.jsonl"
    rows.write_text('{"prompt": "p", "response": "r"}\nnot JSON\n{"prompt": "p"}\n', "utf-8")
    said = refusal(capsys, "model=tiny_llama", "data=jsonl", f"data.path={rows}", "lora.r=0")
    assert said.keys() == {f"{rows}:2", f"{rows}:3", "lora.r"}
    assert "not JSON" in said[f"{rows}:2"]
    assert "'response' (alias 'output')" in said[f"{rows}:3"]
    assert list(here.iterdir()) == [rows]


def test_truncated_base_model_is_told_before_anything_runs(here, capsys):
    """The message names the safetensors file, and no run directory is created."""
    base = here / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama"}), "utf-8")
    (base / "tokenizer.json").write_text("{}", "utf-8")
    (base / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    said = refusal(capsys, "model=hf", f"model.id={base}")
    assert list(said) == [str(base / "model.safetensors")]
    assert "truncated" in said[str(base / "model.safetensors")]
    assert list(here.iterdir()) == [base]


def test_sweep_with_one_faulty_cell_starts_none(here, capsys):
    """A fault that can be found beforehand must not appear in the second run."""
    said = refusal(capsys, "-m", "model=tiny_llama", "lora.r=4,0", "seed=1,2")
    assert list(said) == ["lora.r", "sweep.invalid"]
    assert "2 of 4 cells cannot run" in said["sweep.invalid"]
    assert "2 (lora.r=0, seed=1); 3 (lora.r=0, seed=2)" in said["sweep.invalid"]
    assert list(here.iterdir()) == []


def test_unknown_flag_is_refused(here, capsys):
    """The message repeats the flag and says where to look."""
    said = refusal(capsys, "--bogus")
    assert "--bogus" in "".join(said.values())
    assert "--hydra-help" in "".join(said.values())
