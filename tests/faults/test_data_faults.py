"""Data faults of the two source systems, injected again to check that they are caught.

They are listed in REFERENCE, sections 11 and 12. Each is injected at its original place. The run
has to end before its first step, and the check that finds the fault shares no code with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil

import numpy as np
import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.model import RandomModel
from mens_exp.corpus import mix, split
from mens_exp.corpus.split import Side, side_of
from mens_exp.data import stream
from mens_exp.model import attention
from mens_exp.model.sources import resolve
from mens_exp.rows import encode
from mens_exp.rows.schema import TrainingPair, to_json
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.training.module import TrainingModule

pytestmark = pytest.mark.probes

REFUSED = 4
LOOP = (
    "def {name}(values):\n    total = {n}\n    for value in values:\n        total += value * {n}\n"
)


@pytest.fixture
def refused(
    train_in,
    tmp_path,
    monkeypatch,
):
    """Train under a fault, with a cache for this run, and return the certificate's complaint."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))

    def trained(*overrides, without=None):
        run = train_in(tmp_path / "run", *overrides, code=REFUSED, without=without)
        assert not run.checkpoints.exists()  # nothing was trained
        manifest = Manifest.read(run.manifest)
        assert manifest.data_contract is not None
        return "\n".join(manifest.data_contract["violations"])

    return trained


@pytest.fixture
def encoding(monkeypatch):
    """Inject a fault into `encode`: it gets the real function and the arguments."""
    real = encode.encode

    def faulty(fault):
        monkeypatch.setattr(encode, "encode", lambda *given: fault(real, *given))

    return faulty


def written(path, pairs):
    path.write_text("".join(json.dumps(to_json(pair)) + "\n" for pair in pairs), "utf-8")
    return f"data.path={path}"


def test_keys_that_no_schema_has_are_all_refused(tiny_run, tmp_path, capsys):
    """Their schema silently dropped six keys; here they are six errors."""
    keys = ("max_seq_length", "pack", "eos", "min_len", "shuffle_seed", "num_proc")
    command = [*tiny_run, f"hydra.run.dir={tmp_path / 'run'}"]
    assert cli.main([*command, *(f"+data.{key}=1" for key in keys)]) == 2
    said = capsys.readouterr().err
    assert all(f"data.{key}" in said for key in keys)


def test_a_sequence_length_that_is_not_forwarded_is_caught(encoding, refused):
    """The documents become longer than the requested length."""
    encoding(
        lambda real, pairs, encoder, labelling: real(
            pairs, encoder, dataclasses.replace(labelling, seq_len=5_000)
        )
    )
    found = refused("data.seq_len=48", "data.packing=false")
    assert "data.seq_len: a document is longer than was asked for" in found


def test_packing_that_is_not_forwarded_is_caught(monkeypatch, refused):
    """The check reads the first batch back."""
    real = stream.MicroBatches.__init__

    def packed(self, *given, **named):
        real(self, *given, **{**named, "packing": True})

    monkeypatch.setattr(stream.MicroBatches, "__init__", packed)
    assert "packed: True, data.packing=False" in refused("data.packing=false")


def test_an_end_marker_that_is_not_trained_is_caught(encoding, refused):
    """No document would learn to end."""

    def without_ends(real, pairs, encoder, labelling):
        made = real(pairs, encoder, labelling)
        return dataclasses.replace(
            made, supervised=made.supervised & ~np.isin(made.ids, list(encoder.end_ids))
        )

    encoding(without_ends)
    found = refused()
    assert "data.contract.allow_untrained_end: the end of an answer is not learned" in found
    assert "found 0 of " in found


def test_another_prompt_at_evaluation_is_caught(monkeypatch, refused):
    """Evaluation prompts without the chat template differ from those of training."""

    def bare(self, conversations):
        return self.encode_all([turns[-1]["content"] for turns in conversations])

    monkeypatch.setattr(HfTokenizer, "encode_prompts", bare)
    found = refused()
    assert "tokenizer.chat_template: evaluation would use another prompt" in found
    assert "found 16 of 16 prompts differ" in found


def test_targets_without_the_shift_are_caught(monkeypatch, refused):
    """Each token would be predicted from itself."""
    real = stream.packed_batch

    def unshifted(*given, **named):
        batch = real(*given, **named)
        return dataclasses.replace(batch, predict_M=batch.predict_M + 1)

    monkeypatch.setattr(stream, "packed_batch", unshifted)
    assert "labels are not the tokens that follow" in refused()


def test_a_model_that_sees_what_it_predicts_is_caught(monkeypatch, refused):
    """The same fault after batching: the hidden state is that of the target token itself."""
    from mens_exp.backends import forward

    real = forward.hidden_states

    def unshifted(causal_lm, batch):
        return real(causal_lm, dataclasses.replace(batch, predict_M=batch.predict_M + 1))

    monkeypatch.setattr(forward, "hidden_states", unshifted)
    assert "objective: the loss depends on the token that it predicts" in refused("lora.dropout=0")


def test_attention_that_damages_the_next_document_is_caught(monkeypatch, refused, tmp_path):
    """The fault needs a document that, rounded up, fills its pack; short ones never do."""

    def gathered(x_TGRK, block):
        x_GRTK = x_TGRK[block.queries].permute(1, 2, 0, 3).contiguous()  # no copy in this layout
        x_GRTK[:, :, block.count :] = 0
        return x_GRTK.flatten(1, 2)

    monkeypatch.setattr(attention, "_gathered", gathered)
    # Packs of 192 tokens with documents of 163 and 24.
    rows = [TrainingPair(prompt=f"{n:03}", response="x" * (n % 2 or 140)) for n in range(80)]
    found = refused(written(tmp_path / "rows.jsonl", rows), "model.family=phi3")
    assert "model: the gradient is not the one that transformers computes for this model" in found


def test_a_mask_that_a_left_cut_leaves_behind_is_caught(encoding, refused):
    """The prompt's length still counts from tokens that truncation removed."""

    def unmoved(real, pairs, encoder, labelling):
        made = real(pairs, encoder, labelling)
        whole = real(pairs, encoder, dataclasses.replace(labelling, seq_len=5_000))
        assert len(whole) == len(made)
        masks = [
            whole.supervised[start : start + length]
            for start, length in zip(whole.offsets, made.lengths, strict=False)
        ]
        return dataclasses.replace(made, supervised=np.concatenate(masks))

    encoding(unmoved)
    found = refused("data.truncation=left", "data.seq_len=40", "data.contract.probe=false")
    assert "objective.labels: parts of answers are not learned" in found


def test_gradients_of_the_last_micro_batch_alone_are_caught(monkeypatch, refused):
    """Gradients are reset before every micro-batch, so accumulation has no effect."""
    real = TrainingModule.training_step

    def forgetful(self, batch, number):
        for parameter in self.backend.trainable().values():
            parameter.grad = None
        return real(self, batch, number)

    monkeypatch.setattr(TrainingModule, "training_step", forgetful)
    found = refused()
    assert (
        "trainer.accumulate_grad_batches: accumulated micro-batches do not equal one batch" in found
    )


def test_mix_weights_that_are_rounded_up_are_caught(monkeypatch, refused, tmp_path):
    """0.7 and 0.3 rounded up are equal weights."""
    sources = []
    for name, weight in (("a", 0.7), ("b", 0.3)):
        rows = [TrainingPair(prompt=f"Say {name}{n}.", response=f"{name}{n}") for n in range(40)]
        written(tmp_path / f"{name}.jsonl", rows)
        sources.append(f"{{path:{tmp_path / name}.jsonl,weight:{weight}}}")
    real = mix._shares

    def rounded(weights, names):
        return real({name: math.ceil(weights[name]) for name in names}, names)

    monkeypatch.setattr(mix, "_shares", rounded)
    found = refused("data=mix", f"data.sources=[{','.join(sources)}]", without="data.path")
    assert "data.sources: a source of the mix does not have its share" in found


def test_a_hash_of_the_text_lets_copies_through_and_they_are_caught(
    monkeypatch,
    refused,
    train_in,
    tmp_path,
):
    """Reformatted code: a hash of its syntax drops it as a duplicate; one of its text does not."""
    groups = [f"file {n}" for n in range(60)]
    sides = {group: side_of(group, 0.1, 0.1) for group in groups}
    own = [group for group in groups if sides[group] is not Side.HELDOUT]
    apart = [group for group in groups if sides[group] is Side.HELDOUT]
    rows = [
        TrainingPair(prompt=f"Sum {n}.", response=LOOP.format(name=f"f{n}", n=n), group=group)
        for n, group in enumerate([*own, *apart])
    ]
    copies = [
        dataclasses.replace(
            row, response=row.response.replace("    ", "  ") + "# copy\n", group=own[0]
        )
        for row in rows[len(own) :]
    ]
    kept, gone = split.without_duplicates([*rows, *copies])
    assert (len(kept), gone) == (len(rows), len(copies))
    train_in(tmp_path / "clean", written(tmp_path / "kept.jsonl", kept))
    monkeypatch.setattr(
        split, "response_key", lambda text: hashlib.sha256(text.encode()).hexdigest()
    )
    kept, gone = split.without_duplicates([*rows, *copies])
    assert gone == 0
    everything = written(tmp_path / "all.jsonl", kept)
    found = refused(everything, "suite=heldout_syntax")
    assert "data.contract.max_overlap_frac: training rows contain items of the" in found
    trained = train_in(tmp_path / "unscored", everything)  # a note, since nothing is scored on them
    [note] = [one for one in Manifest.read(trained.manifest).notes if "measure memory" in one]
    assert "of the held-out rows have half of their text or more in a training row" in note


def test_items_of_the_suite_that_are_trained_on_are_caught(refused, tmp_path):
    """Items of a suite are compared with the training rows, like held-out rows."""
    rows = [
        TrainingPair(prompt=f"Sum {n}.", response=LOOP.format(name=f"f{n}", n=n)) for n in range(60)
    ]
    own = [row for row in rows if side_of(split.group_of(row), 0.1, 0.1) is Side.TRAIN][:4]
    suite = tmp_path / "suite.jsonl"
    items = [{"prompt": row.prompt, "expected": row.response} for row in own]
    suite.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    found = refused(written(tmp_path / "rows.jsonl", rows), "suite=jsonl", f"suite.path={suite}")
    assert "4 of 4 items of suite=jsonl" in found


def test_conversations_whose_answer_never_changes_are_caught(refused, tmp_path):
    """Two questions get the same answer in every row."""
    rows = [
        TrainingPair(prompt=f"And {n}?", response="Yes.", history=((f"Is it {n}?", "Yes."),))
        for n in range(60)
    ]
    found = refused(written(tmp_path / "turns.jsonl", rows))
    assert "max_repeated_answer_frac: conversations repeat the same answer" in found


def test_rows_of_one_file_on_two_sides_are_caught(monkeypatch, refused, tmp_path):
    """A split by row instead of by source file."""
    rows = [
        TrainingPair(prompt=f"Add {n}.", response=f"x + {n}", group=f"file {n % 6}")
        for n in range(60)
    ]
    monkeypatch.setattr(split, "group_of", lambda pair: pair.id)
    found = refused(written(tmp_path / "rows.jsonl", rows))
    assert "data: rows of one group are in both training and evaluation" in found
    assert "file 0" in found


def test_a_run_without_a_fault_has_a_certificate_without_a_violation(finished):
    """Every figure that the faults change has its correct value here."""
    node = Manifest.read(finished.manifest).data_contract
    assert node is not None
    assert (node["violations"], node["unknown"]) == ([], {})
    assert node["tokens"]["end_marker_trained"] is True
    assert node["tokens"]["trained_by_role"]["user"] == 0
    assert node["tokens"]["nothing_to_learn"] == node["tokens"]["trained_tokens_lost"] == 0
    assert node["rows"]["prompts_checked"] == 16
    assert node["probe"]["targets_follow"] is True
    assert node["probe"]["peek"] == 0
    assert max(node["probe"][f"accumulation_{one}"] for one in ("loss", "gradient")) < 0.01
    assert [part["contained"] for part in node["overlap"]] == [0]


def flip_eight_signs(weights):
    """Flip the signs of eight weights across the file, like a failing disk."""
    content = bytearray(weights.read_bytes())
    step = (len(content) - 20_000) // 8  # after the header
    for number in range(8):
        content[20_001 + 2 * (number * step // 2)] ^= 0x80
    assert content != weights.read_bytes()
    weights.write_bytes(bytes(content))


def test_a_base_that_rotted_in_the_cache_is_never_trained_on(train_in, tmp_path, monkeypatch):
    """The base is built again, the record notes it, and the adapter is that of the intact base.

    The plan, which reads the tokenizer first, does not refuse a base that will be rebuilt.
    """
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    good = train_in(tmp_path / "good")
    (weights,) = (tmp_path / "cache" / "models").glob("*/model.safetensors")
    flip_eight_signs(weights)
    tokenizer = weights.with_name("tokenizer.json")
    content = tokenizer.read_bytes()
    tokenizer.write_bytes(content[:-1] + b"\0")  # the size is unchanged
    after = train_in(tmp_path / "after")
    assert tokenizer.read_bytes() == content
    inputs = [Manifest.read(run.manifest).inputs for run in (good, after)]
    assert [one.get("base_made_again") for one in inputs] == [
        None,
        ["model.safetensors", "tokenizer.json"],
    ]
    assert inputs[0]["base_weights_sha256"] == inputs[1]["base_weights_sha256"]
    adapters = [(run.adapter / "adapter.safetensors").read_bytes() for run in (good, after)]
    assert adapters[0] == adapters[1]


def test_a_base_that_was_edited_in_its_directory_is_recorded_as_it_is(train_in, tmp_path):
    """mens_exp did not make this base and cannot rebuild it; the record has its actual digest."""
    made = resolve(RandomModel(name="tiny"), tmp_path / "cache")
    own = shutil.copytree(made.directory, tmp_path / "own")
    flip_eight_signs(own / "model.safetensors")
    run = train_in(tmp_path / "run", "model=hf", f"model.id={own}", without="model=")
    found = Manifest.read(run.manifest).inputs["base_weights_sha256"]
    content = hashlib.sha256((own / "model.safetensors").read_bytes()).hexdigest()
    listed = json.dumps({"model.safetensors": content}, separators=(",", ":"))
    assert found == hashlib.sha256(listed.encode()).hexdigest() != made.weights_sha256
