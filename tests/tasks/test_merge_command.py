"""The command task=merge as typed: bare shards, refusals, and what a killed merge leaves."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import fork_server
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors

from mens_exp import cli
from mens_exp.artifacts.adapter_v2 import AdapterMeta, write_adapter_v2
from mens_exp.artifacts.adapter_v3 import AdapterManifest, write_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir

MID, TABLE = "h.0.attn.c_proj.weight", "wte.weight"
KEYS = {"mid0": MID, "lm_head": TABLE}


@pytest.fixture
def ones(tmp_path):
    """Width 3, vocabulary 4, rank 2, alpha 4, all ones: v2 and v3 adapters and the base's shard."""
    tensors = {
        "mid0.lora_a": np.ones((2, 3), np.float32),
        "mid0.lora_b": np.ones((3, 2), np.float32),
        "lm_head.lora_a": np.ones((2, 3), np.float32),
        "lm_head.lora_b": np.ones((4, 2), np.float32),
    }
    sizes = {"vocab": 4, "d_model": 3, "rank": 2, "alpha": 4}
    order = ["mid0", "lm_head"]
    meta = AdapterMeta(embed_key=TABLE, layer_order=order, base_key_map=KEYS, **sizes)
    write_adapter_v2(tmp_path / "v2", meta, tensors)
    manifest = AdapterManifest(
        adapter_method="qlora",
        quant={"base_quant": "nf4", "double_quant": True},
        layer_order=order,
        base_key_map=KEYS,
        **sizes,
    )
    write_adapter(tmp_path / "v3", manifest, tensors)
    base = {MID: np.ones((3, 3), np.float32), TABLE: np.ones((4, 3), np.float32)}
    save_file({**base, "ln_f.weight": np.ones(3, np.float32)}, tmp_path / "base.safetensors")
    return tmp_path


FILES = {
    "v2": ("v2/candle_qlora_adapter.safetensors", "v2/candle_qlora_adapter_meta.json"),
    "v3": ("v3/adapter.safetensors", "v3/adapter_manifest.json"),
}


def typed(here, *overrides, code=0, schema="v2"):
    """Type the seeds' form of the command in a directory; later overrides replace earlier ones."""
    tensors, meta = FILES[schema]
    usual = [
        "task=merge",
        "parity.tokens=64",
        "logger=none",
        f"adapter={here / tensors}",
        f"merge.meta={here / meta}",
        f"merge.base_shard=[{here / 'base.safetensors'}]",
        f"out={here / 'out.safetensors'}",
        f"hydra.run.dir={here / 'record'}",
    ]
    by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
    assert cli.main([text for text in by_key.values() if not text.endswith("=-")]) == code
    record = RunDir(here / "record").manifest
    return Manifest.read(record) if record.is_file() else None


@pytest.mark.parametrize("schema", FILES)
def test_ones_merge_to_five(ones, schema):
    """By hand: 1 + (B A = 2) · 4 / 2 in both tensors with a delta; the norm is left out."""
    record = typed(ones, schema=schema)
    found = load_file(ones / "out.safetensors")
    assert found.keys() == {MID, "lm_head.weight"}
    for tensor in found.values():
        np.testing.assert_allclose(tensor, 5.0, atol=1e-6)
    assert record is not None
    assert record.results["merged_keys"] == {"mid0": MID, "lm_head": "lm_head.weight"}
    assert record.results["base"] == "original"
    digest = sha256_file(ones / "out.safetensors")
    assert record.results["out_sha256"] == {"out.safetensors": digest}


def test_the_header_s_quantizer_is_assumed_when_asked_and_said(ones, capsys):
    """Width 3 is no multiple of the block of 64, so the assumed quantizer is refused."""
    typed(ones, "merge.base=dequantized", code=2)
    said = capsys.readouterr()
    assert "records no more of it" in " ".join(said.out.split())
    assert "not a multiple of the quantizer's block" in said.err
    assert not (ones / "out.safetensors").exists()


def test_values_of_an_unknown_quantizer_are_not_taken_for_nf4(ones, capsys):
    """Onto the published weights it does merge, and writes the same file as for an nf4 header."""
    typed(ones, schema="v3")
    usual = (ones / "out.safetensors").read_bytes()
    (ones / "out.safetensors").unlink()
    place = ones / "v3" / "adapter_manifest.json"
    place.write_text(place.read_text("utf-8").replace('"nf4"', '"hqq"'), "utf-8")
    again = f"hydra.run.dir={ones / 'again'}"
    typed(ones, again, schema="v3", code=2)
    said = capsys.readouterr().err
    assert "hqq" in said
    assert "merge.base=original" in said
    assert not (ones / "out.safetensors").exists()
    typed(ones, "merge.base=original", f"hydra.run.dir={ones / 'third'}", schema="v3")
    assert (ones / "out.safetensors").read_bytes() == usual


def test_bytes_are_stable_and_numbers_are_rounded_to_nearest(ones):
    """The bytes are stable, and a half in bf16's last place rounds to the even neighbour."""
    close = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1.0]] * 3, np.float32)
    base = {MID: close, TABLE: np.ones((4, 3), np.float32)}
    save_file(base, ones / "base.safetensors")
    tensors = {name: value * 0 for name, value in load_file(ones / FILES["v2"][0]).items()}
    save_file(tensors, ones / FILES["v2"][0])
    for name in ("one", "two"):
        typed(ones, "merge.dtype=bf16", f"out={ones / name}", f"hydra.run.dir={ones / name}_record")
    assert (ones / "one").read_bytes() == (ones / "two").read_bytes()
    merged = load_tensors(ones / "one")[MID].float()
    assert torch.equal(merged[0], torch.tensor([1.0, 1 + 2**-6, 1.0]))


def test_a_number_beyond_f16_is_refused(ones, capsys):
    """A number beyond f16 would silently become infinite."""
    big = {MID: np.full((3, 3), 1e5, np.float32), TABLE: np.ones((4, 3), np.float32)}
    save_file(big, ones / "base.safetensors")
    typed(ones, "merge.dtype=f16", code=2)
    assert "beyond f16" in capsys.readouterr().err
    assert not (ones / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["adapter=burn/model.bin"], r"Burn checkpoint.*vox mens merge-weights"),
        (["merge.meta=-"], r"merge\.meta: is required with adapter="),
        (
            ["merge.base_shard=-"],
            r"merge\.base_shard: is required.*add merge\.base_shard=\[a\.safetensors",
        ),
        (["out=-"], r"out: is required.*add out=<file>"),
        (["base=x/y"], r"base: has no effect with adapter="),
        (["merge.mode=full"], r"shards alone are not a whole model"),
        (["adapter=nowhere.safetensors"], r"adapter\.file: no such file.*nowhere"),
        (["merge.base_shard=[nowhere.safetensors]"], r"merge\.base_shard: no such file"),
        (
            ["task=plan", "merge.meta=-", "merge.base_shard=-", "out=-"],
            r"adapter\.file: has no effect.*plan",
        ),
        (["adapter=-", "path=latest"], r"merge\.meta: has no effect with adapter.file=null"),
        (
            ["adapter=-", "merge.meta=-", "merge.base_shard=-"],
            r"path: no adapter to merge.*path=latest",
        ),
        (
            ["adapter=-", "merge.meta=-", "merge.base_shard=-", "path=base"],
            r"base model alone has nothing",
        ),
        (
            ["adapter=-", "merge.meta=-", "merge.base_shard=-", "path=no/such"],
            r"path: .*no/such.*next",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_without_its_parts_is_refused(ones, overrides, reason, capsys):
    """Exit code 2, and nothing is written."""
    typed(ones, *overrides, code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(reason, said), said
    assert not (ones / "out.safetensors").exists()


def test_an_output_that_is_there_stays(ones, capsys):
    """An existing output stays byte for byte as it is."""
    (ones / "out.safetensors").write_bytes(b"mine")
    typed(ones, code=2)
    assert "out: already exists" in capsys.readouterr().err
    assert (ones / "out.safetensors").read_bytes() == b"mine"


def test_a_disk_without_room_is_told_before(ones, monkeypatch, capsys):
    """Exit code 3, as the machine lacks something."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    typed(ones, code=3)
    assert "no room for the merged weights" in capsys.readouterr().err


@pytest.fixture
def adapter(tmp_path, tiny_base):
    """A v3 adapter for one layer of tiny_llama."""
    generator = np.random.default_rng(0)
    tensors = {
        "l0.q.lora_a": generator.normal(size=(2, 64)).astype(np.float32),
        "l0.q.lora_b": generator.normal(size=(64, 2)).astype(np.float32),
    }
    manifest = AdapterManifest(
        adapter_method="lora",
        quant={"base_quant": "none", "double_quant": False},
        layer_order=["l0.q"],
        base_key_map={"l0.q": "model.layers.0.self_attn.q_proj.weight"},
        vocab=320,
        d_model=64,
        rank=2,
        alpha=4,
        mens_exp={"base_weights_sha256": tiny_base.weights_sha256},
    )
    write_adapter(tmp_path / "adapter", manifest, tensors)
    return tmp_path / "adapter"


def by_path(adapter, base, *overrides, code=0):
    out = adapter.parent / "merged"
    named = [] if base is None else [f"base={base}"]
    usual = [
        "task=merge",
        "parity.tokens=64",
        "logger=none",
        f"path={adapter}",
        *named,
        f"out={out}",
    ]
    usual.append(f"hydra.run.dir={adapter.parent / 'record'}")
    by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
    assert cli.main([*by_key.values()]) == code
    return out


def split(base, target, *, files=3):
    """Split a model's single file into several, with an index."""
    shutil.copytree(base, target)
    tensors = load_file(base / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-{i % files}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        own = {name: tensors[name] for name in names if places[name] == file}
        save_file(own, target / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def test_another_base_is_refused_unless_that_is_meant(adapter, tiny_base, tmp_path, capsys):
    """One changed bit is another base, and so are other shards of the same weights."""
    other = split(tiny_base.directory, tmp_path / "other")
    by_path(adapter, other, code=2)
    said = capsys.readouterr().err
    assert "not the one that the adapter was trained on" in said
    assert "merge.any_base=true" in said
    out = by_path(adapter, other, "merge.any_base=true", f"hydra.run.dir={tmp_path / 'again'}")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    theirs = json.loads((other / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == theirs["weight_map"]
    merged = {key: load_file(out / file)[key] for key, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in merged.values())
    key = "model.layers.0.self_attn.q_proj.weight"
    tensors, plain = (
        load_file(adapter / "adapter.safetensors"),
        load_file(tiny_base.directory / "model.safetensors"),
    )
    delta = 2 * tensors["l0.q.lora_b"] @ tensors["l0.q.lora_a"]
    np.testing.assert_allclose(merged.pop(key), plain.pop(key) + delta, atol=1e-5)
    for name, tensor in plain.items():
        np.testing.assert_array_equal(merged[name], tensor)


def test_a_base_that_was_never_quantized_is_not_dequantized(adapter, tiny_base, capsys):
    """The adapter's header says that its base was not quantized."""
    by_path(adapter, tiny_base.directory, "merge.base=dequantized", code=2)
    assert "trained on an unquantized base" in capsys.readouterr().err


def test_a_quantized_checkpoint_and_an_unnamed_base_are_refused(
    adapter, tiny_base, tmp_path, capsys
):
    """A quantized checkpoint cannot be merged into; an unnamed base cannot be found."""
    other = split(tiny_base.directory, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (other / "config.json").write_text(json.dumps(config))
    by_path(adapter, other, code=2)
    assert (
        "config.json declares a quantization, but no layer is quantized" in capsys.readouterr().err
    )
    by_path(adapter, None, f"hydra.run.dir={tmp_path / 'again'}", code=2)
    assert "does not say where its base is" in capsys.readouterr().err
    by_path(adapter, tmp_path / "none", f"hydra.run.dir={tmp_path / 'third'}", code=2)
    assert "the base model was not found" in capsys.readouterr().err


KILLED = """
import os, signal
from mens_exp.layout import checkpoint_files
original = checkpoint_files.SafetensorsWriter.write
calls = 0
def write(self, name, piece):
    global calls
    original(self, name, piece)
    calls += 1
    if calls == 4:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint_files.SafetensorsWriter.write = write
"""


def test_a_kill_leaves_nothing_and_the_next_merge_tidies_up(adapter, tiny_base, tmp_path):
    """A merge killed while writing leaves a temporary directory, which the next one removes."""
    command = [
        sys.executable,
        "-m",
        "mens_exp",
        "task=merge",
        "parity.tokens=64",
        "logger=none",
        f"path={adapter}",
    ]
    command += [f"base={tiny_base.directory}", f"out={tmp_path / 'merged'}"]
    command += [f"hydra.run.dir={tmp_path / 'killed'}"]
    done = fork_server.run(command, before=KILLED, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "merged").exists()
    assert len(list(tmp_path.glob(".merged.*"))) == 1
    out = by_path(adapter, tiny_base.directory)
    assert (out / "model.safetensors").is_file()
    assert list(tmp_path.glob(".merged.*")) == []


def typed_run(here, path, *overrides, code=0):
    command = ["task=merge", "logger=none", f"path={path}", f"out={here / 'merged'}", *overrides]
    assert cli.main([*command, "parity.tokens=64", f"hydra.run.dir={here / 'record'}"]) == code
    return {} if code else load_tensors(here / "merged" / "model.safetensors")


@pytest.fixture(scope="module")
def merged_run(finished, tmp_path_factory):
    """Merge a run to the default directory; return the merge's own run and the command's output."""
    record = RunDir(tmp_path_factory.mktemp("merged") / "record")
    with redirect_stdout(io.StringIO()) as said:
        assert (
            cli.main(
                [
                    "task=merge",
                    "parity.tokens=64",
                    "logger=wandb",
                    f"path={finished.path}",
                    f"hydra.run.dir={record.path}",
                ]
            )
            == 0
        )
    return record, said.getvalue()


def test_a_merge_is_mirrored_with_its_certificate(merged_run, mirrored):
    """W&B gets the merge as a run with its decisions and certificate, but without weights."""
    record, _ = merged_run
    found = mirrored(record)
    (run,) = (one["run"] for one in found if one["type"] == "run")
    assert (run["job_type"], run["display_name"][:6]) == ("merge", "merge:")
    artifacts = [one["artifact"] for one in found if one["type"] == "artifact"]
    files = {a["type"]: [one["path"] for one in a["manifest"]["contents"]] for a in artifacts}
    assert files == {"merged": ["parity.json"], "manifest": ["manifest.json"]}
    told = {}
    for one in found:
        told |= one.get("summary", {}).get("update", {})
    assert (told["status"], told["mode"]) == ("succeeded", "full")


def test_a_run_its_peft_view_and_a_copy_of_that_merge_alike(
    finished, merged_run, tiny_base, tmp_path, capsys
):
    """A run records its base; elsewhere a PEFT directory needs the base and its quantizer."""
    for name in ("view", "copy"):
        (tmp_path / name).mkdir()
    record, said = merged_run
    ours = load_tensors(record.merged / "model.safetensors")
    assert "which the adapter was trained against" in said
    view = typed_run(tmp_path / "view", finished.peft)
    copy = shutil.copytree(finished.peft, tmp_path / "peft")
    told = [f"base={tiny_base.directory}", "merge.base=dequantized"]
    foreign = typed_run(tmp_path / "copy", copy, *told)
    assert "a PEFT directory does not say" in " ".join(capsys.readouterr().out.split())
    for name, weight in ours.items():
        assert torch.equal(weight, view[name])
        assert torch.equal(weight, foreign[name])
    plain = load_tensors(tiny_base.directory / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(ours[key], plain[key])


def test_a_merged_run_is_a_whole_directory(finished, merged_run):
    """The directory has tokenizer, chat template, model card and the files of the merge's run."""
    from transformers import AutoTokenizer

    run, _ = merged_run
    out = run.merged
    template = finished.chat_template.read_text("utf-8")
    assert AutoTokenizer.from_pretrained(out).chat_template == template
    assert "summed in f32" in (out / "README.md").read_text("utf-8")
    assert (out / "MODEL_CARD.md").read_bytes() == finished.model_card.read_bytes()
    record = Manifest.read(run.manifest)
    assert record.inputs["adapter_sha256"] == sha256_file(finished.adapter / "adapter.safetensors")
    assert record.results["out_sha256"] == {
        f"merged/{one.name}": sha256_file(one) for one in sorted(out.iterdir())
    }


def test_the_default_place_is_the_merge_s_own_run(merged_run):
    """The files are hashed among the outputs of the merge's run."""
    run, _ = merged_run
    outputs = Manifest.read(run.manifest).outputs
    assert outputs["merged/model.safetensors"] == sha256_file(run.path / "merged/model.safetensors")


def test_a_run_that_trained_every_weight_has_nothing_to_merge(finished, tmp_path, capsys):
    """A run of full fine-tuning has no adapter; the message names its model instead."""
    run = RunDir(shutil.copytree(finished.path, tmp_path / "full"))
    run.adapter.rename(run.weights)
    typed_run(tmp_path, run.path, code=2)
    assert "trained every weight and has no adapter" in capsys.readouterr().err


def test_a_directory_of_a_burn_checkpoint_names_the_right_command(tmp_path, capsys):
    """It has neither our files nor PEFT's, so the message names the command that merges it."""
    (tmp_path / "burn").mkdir()
    (tmp_path / "burn" / "model.bin").write_bytes(b"")
    typed_run(tmp_path, tmp_path / "burn", code=2)
    assert "vox mens merge-weights" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["data.seq_len=64", "tokenizer.allow_control_text=true"])
def test_what_the_run_answers_itself_is_refused(finished, tmp_path, key, capsys):
    """A certificate is measured on the run's own rows; other settings of them have no effect."""
    out = tmp_path / "merged"
    assert cli.main(["task=merge", "logger=none", f"path={finished.path}", f"out={out}", key]) == 2
    said = capsys.readouterr().err
    assert key.partition("=")[0] in said
    assert "has no effect on the adapter of a run" in said
    assert not out.exists()
