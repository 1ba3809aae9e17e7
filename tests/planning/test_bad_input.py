"""Damaged model directories and contradictory commands are refused by a plan and a run alike."""

from __future__ import annotations

import io
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from mens_exp import cli
from mens_exp.config.overrides import check
from mens_exp.planning.preflight import preflight

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def base(tiny_base, tmp_path):
    """A copy of tiny_llama's directory, to be damaged."""
    return Path(shutil.copytree(tiny_base.directory, tmp_path / "base"))


def configure(base, **changes):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def embed(base, *shape):
    tensors = load_file(base / WEIGHTS) | {EMBEDDING: np.zeros(shape, np.float32)}
    save_file(tensors, base / WEIGHTS)


def without_configuration(base):
    (base / "config.json").unlink()


def unreadable_configuration(base):
    (base / "config.json").write_text("{", "utf-8")


def without_a_shard(base):
    (base / WEIGHTS).rename(base / "shard-0.safetensors")
    places = {EMBEDDING: "shard-0.safetensors", "model.norm.weight": "shard-1.safetensors"}
    (base / INDEX).write_text(json.dumps({"weight_map": places}), "utf-8")


def with_header(base, header, length, data=0):
    """Write a header, followed by a hole in the file, which takes no disk space."""
    with (base / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", length) + header)
        file.truncate(8 + len(header) + data)


def header_longer_than_its_file(base):
    with_header(base, b"{}", 10_000)


def header_of_a_gigabyte(base):
    with_header(base, b"", 1 << 30, data=(1 << 30) + 100)


def header_that_lies(base):
    raw = (base / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    start, end = header[EMBEDDING]["data_offsets"]
    header[EMBEDDING]["data_offsets"] = [start, end - 4]
    told = json.dumps(header).encode()
    with_header(base, told, len(told), data=len(raw) - 8 - length)


def embedding_of_rank_1(base):
    embed(base, 320 * 64)


def another_vocabulary(base):
    embed(base, 319, 64)


def another_width(base):
    embed(base, 320, 128)


def heads_that_do_not_divide(base):
    configure(base, num_key_value_heads=3)


def too_many_ids(base):
    file = str(base / "tokenizer.json")
    core = Tokenizer.from_file(file)
    core.add_tokens([f"<extra{n}>" for n in range(320 - 259 + 1)])
    core.save(file)


DAMAGES = {
    without_configuration: "config.json: is missing or unreadable",
    unreadable_configuration: "config.json: is not JSON",
    without_a_shard: "shards listed in the index are absent",
    header_longer_than_its_file: "the file is truncated inside its header",
    header_of_a_gigabyte: "header length is not credible",
    header_that_lies: "offsets disagree with shape and dtype",
    embedding_of_rank_1: "the embedding is of rank 1",
    another_vocabulary: "the embedding has another vocabulary than config.json",
    another_width: "the embedding has another width than config.json",
    too_many_ids: "the tokenizer has ids that the model has no embedding for",
    heads_that_do_not_divide: "query heads do not divide evenly over key and value heads",
}
# Damage that is reported before any shard is opened.
UNOPENED = {without_configuration, unreadable_configuration, without_a_shard}
damages = pytest.mark.parametrize(
    ("damage", "said"), DAMAGES.items(), ids=lambda it: getattr(it, "__name__", "") or str(it)[:40]
)

PROXY = ["model=tiny_llama", "backend=proxy"]
COMMANDS = {
    "more last tokens than a sequence": (
        ["model=tiny_llama", "objective=last_k", "objective.k=9", "data.seq_len=8"],
        "objective.k: more tokens than a sequence has",
    ),
    "full stack and head alone": (
        [*PROXY, "backend.lm_head_only=true", "backend.require_full_stack=true"],
        "backend.require_full_stack: the head alone is not a full stack",
    ),
    "head alone and some layers": (
        [*PROXY, "backend.lm_head_only=true", "backend.max_layers=2"],
        "backend.max_layers: has no effect with backend.lm_head_only=true",
    ),
}


@pytest.fixture
def refused(tiny_run, tmp_path, capsys):
    """Give a command as a plan and as a run, and return both error messages."""

    def both(*overrides):
        said = []
        for task in ("plan", "train"):
            run = tmp_path / task
            usual = [*tiny_run, f"task={task}", f"hydra.run.dir={run}"]
            by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
            assert cli.main(list(by_key.values())) == 2
            assert not run.exists()
            said.append(capsys.readouterr().err)
        return said

    return both


@damages
def test_damaged_model_is_refused_by_plan_and_run_alike(refused, base, damage, said):
    """Exit code 2 and the same specific message twice, with a next step and no run directory."""
    damage(base)
    of_plan, of_run = refused("model=hf", f"model.id={base}")
    assert said in " ".join(of_plan.split())
    assert str(base) in of_plan
    assert of_run == of_plan


@pytest.mark.parametrize(("overrides", "said"), COMMANDS.values(), ids=COMMANDS)
def test_contradictory_command_is_refused_by_plan_and_run_alike(refused, overrides, said):
    """The message names the setting that was typed."""
    of_plan, of_run = refused(*overrides)
    assert said in " ".join(of_plan.split())
    assert of_run == of_plan


def test_messages_are_one_for_each_fault():
    """No two faults share a message."""
    said = [*DAMAGES.values(), *(one for _, one in COMMANDS.values())]
    assert len(set(said)) == len(said) == 14


@damages
def test_refusal_reads_no_weights(
    base,
    monkeypatch,
    damage,
    said,
):
    """From a shard, only its first eight bytes and the header of that length are read."""
    damage(base)
    usual = ["logger=none", "trainer=cpu", "suite=none"]
    (cell,) = check(["model=hf", f"model.id={base}", *usual]).cells
    last = [0]
    most = 8 + _header_bytes(base)
    monkeypatch.setattr("io.open", watched(io.open, last))
    problems = preflight(cell.config)
    assert any(said.rpartition(": ")[2] in str(problem) for problem in problems)
    assert last[0] <= most
    assert (last[0] >= 8) is (damage not in UNOPENED)


def _header_bytes(base):
    """Return the length of a plausible header, or 0."""
    (file,) = base.glob("*.safetensors")
    with file.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
    return length if length < min(file.stat().st_size, 1 << 30) else 0


def watched(opened, last):
    """Open files as usual, and record the furthest position read in a shard."""

    class Watched(io.FileIO):
        def read(self, size=-1, /):
            found = super().read(-1 if size is None else size)
            last[0] = max(last[0], self.tell())
            return found

    def opening(file, mode="r", *more, **how):
        if str(file).endswith(".safetensors") and mode == "rb":
            return Watched(file, "rb")
        return opened(file, mode, *more, **how)

    return opening
