"""The command task=export on adapters, typed as a user would."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

from mens_exp import cli
from mens_exp.artifacts.adapter_v2 import read_adapter_directory
from mens_exp.artifacts.adapter_v3 import deltas, read_adapter, write_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.backends.lora import tied_head_is_meant
from mens_exp.model.quiet import quiet


@pytest.fixture
def export(tmp_path, monkeypatch, capsys):
    """Type the command in an empty directory, and return what it said."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def typed(*overrides, code=0):
        assert cli.main(["task=export", *overrides]) == code
        said = capsys.readouterr()
        return said.out + said.err

    return typed


def logits(base, directory):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with quiet(), tied_head_is_meant(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")  # PEFT, of norms
        model = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
        tuned = PeftModel.from_pretrained(model, directory).eval()
    with torch.inference_mode():
        return tuned(input_ids=torch.arange(3, 27)[None]).logits.numpy()


def test_a_runs_adapter_leaves_as_peft(finished, tiny_base, export, tmp_path):
    """Its logits equal those of the view PEFT itself wrote, and the chat template is included."""
    said = export(f"path={finished.path}", "export.format=peft", "out=there", "hydra.run.dir=own")
    there = tmp_path / "here" / "there"
    expected = logits(tiny_base, finished.peft)
    np.testing.assert_allclose(logits(tiny_base, there), expected, atol=1e-5, rtol=0)
    assert (there / "chat_template.jinja").is_file()
    assert "The adapter in schema v3 is now in PEFT's form: 14 layers" in said
    record = Manifest.read(tmp_path / "here" / "own" / "manifest.json")
    assert record.inputs["subject"] == str(finished.adapter)
    assert record.results["form"] == "peft"
    assert record.results["tensors_sha256"] == sha256_file(there / "adapter_model.safetensors")
    assert record.results["parameters"] == sum(
        values.size for values in read_adapter(finished.adapter)[1].values()
    )


def test_tuned_norms_leave_in_pefts_form_alone(finished_with, tiny_base, export, tmp_path):
    """PEFT computes the same from the export as from the run; other forms are refused at once."""
    run = finished_with("lora=ln_tuning", "optim.lr=1e-2")
    for form, said in (
        ("v2", "tuned norms are not a delta"),
        ("v3", "export it with export.format=peft"),
        ("vllm", "vLLM loads LoRA adapters alone"),
        ("ollama", "choose ollama.form=merged"),
    ):
        more = ["ollama.form=adapter"] if form == "ollama" else []
        assert said in " ".join(
            export(f"path={run.path}", f"export.format={form}", *more, code=2).split()
        )
        assert list((tmp_path / "here").iterdir()) == []
    export(f"path={run.path}", "export.format=peft", "out=there", "hydra.run.dir=own")
    found, own = (logits(tiny_base, one) for one in (tmp_path / "here" / "there", run.peft))
    np.testing.assert_array_equal(found, own)
    _, tensors = read_adapter(run.adapter)
    assert Manifest.read(tmp_path / "here" / "own" / "manifest.json").results["parameters"] == sum(
        values.size for values in tensors.values()
    )


@pytest.mark.parametrize("form", ["v2", "v3", "peft"])
def test_without_out_it_lies_in_the_exports_own_run(finished, export, tmp_path, form):
    """The outputs of the export's own run list its hashes; an export can be exported again."""
    export(f"path={finished.path}", f"export.format={form}", "hydra.run.dir=own")
    own = tmp_path / "here" / "own"
    outputs = Manifest.read(own / "manifest.json").outputs
    assert {one for one in outputs if one.startswith("adapter/")} == {
        f"adapter/{file.name}" for file in (own / "adapter").iterdir()
    }
    given = ["model=tiny_llama"] if form == "peft" else []
    export("path=own/adapter", "export.format=v3", "out=again", *given)
    source, ours = read_adapter(finished.adapter)
    after, again = read_adapter_directory(tmp_path / "here" / "again")
    for layer, (A_RI, B_OR, scale) in deltas(source, ours).items():
        np.testing.assert_array_equal(again[f"{layer}.lora_a"], A_RI)
        np.testing.assert_array_equal(again[f"{layer}.lora_b"], B_OR)
        assert after.scale_of(layer) == scale


def test_latest_is_the_training_run_that_started_last(finished, export, tmp_path):
    """Among the runs in ./outputs; the record has its name instead of the word `latest`."""
    run = shutil.copytree(finished.path, tmp_path / "here" / "outputs" / "train" / "x" / "run")
    export("path=latest", "export.format=v3", "hydra.run.dir=own")
    record = Manifest.read(tmp_path / "here" / "own" / "manifest.json")
    assert record.inputs["subject"] == str(run.relative_to(tmp_path / "here") / "adapter")


def test_a_plain_run_leaves_as_v3_byte_for_byte(finished, export, tmp_path):
    """A plain adapter needs no folding, so its tensors are written unchanged."""
    export(f"path={finished.path}", "export.format=v3", "out=there")
    for name in ("adapter.safetensors", "adapter_manifest.json"):
        written = (tmp_path / "here" / "there" / name).read_bytes()
        assert written == (finished.adapter / name).read_bytes()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["path=nowhere", "export.format=peft"], "there is no adapter"),
        (["path=nowhere", "export.format=peft"], "nowhere, which does not exist"),
        (["path=nowhere", "export.format=peft"], "next write path=latest"),
        (["path={run}", "export.format=peft", "model=tiny_llama"], "which names its own"),
        (
            ["path={run}", "export.format=v3", "export.base_quant=nf4"],
            "records how its base was quantized",
        ),
        (
            ["path={run}", "export.format=v3", "export.checkpoints=true"],
            "no effect with export.format=v3",
        ),
        (
            ["path={run}", "export.format=bundle", "model=tiny_gpt2"],
            "no effect with export.format=bundle",
        ),
        (["path={run}", "export.double_quant=true"], "no effect with export.format=bundle"),
        (["path={run}", "export.format=gguf7"], "gguf7"),
        (["path={run}", "export.format=v3", "out={run}"], "already exists"),
        (["path={run}", "export.format=v3", "out=."], "already exists"),
        (["path={run}", "export.format=hf", "out=."], "already exists"),
        (["path=base", "export.format=hf", "model=tiny_llama", "out=."], "already exists"),
        (
            [
                "path={run}",
                "export.format=v3",
                "export.base_quant=none",
                "export.double_quant=true",
            ],
            "contradicts export.base_quant=none",
        ),
        (
            [
                "path={run}",
                "export.format=v3",
                "export.base_quant=mxfp4",
                "export.double_quant=true",
            ],
            "contradicts export.base_quant=mxfp4, which has no scales",
        ),
    ],
)
def test_an_export_is_refused_before_a_run_directory_is_made(
    finished,
    export,
    tmp_path,
    overrides,
    said,
):
    """The command ends with exit code 2, says what is wrong and leaves nothing behind."""
    text = export(*(one.format(run=finished.path) for one in overrides), code=2)
    assert said in " ".join(text.split())
    assert list((tmp_path / "here").iterdir()) == []


def test_several_reasons_are_given_together(finished, export, tmp_path):
    """A DoRA adapter without a delta and a destination that is not empty are reported together."""
    manifest, tensors = read_adapter(finished.adapter)
    assert manifest.mens_exp is not None
    manifest.mens_exp["variant"] = "dora"
    tensors |= {
        f"{layer}.lora_magnitude": np.ones(tensors[f"{layer}.lora_b"].shape[0], np.float32)
        for layer in manifest.layer_order
    }
    write_adapter(tmp_path / "dora", manifest, tensors)
    text = export(
        f"path={tmp_path / 'dora'}", "export.format=v3", f"out={tmp_path / 'dora'}", code=2
    )
    assert "DoRA is not a delta" in text
    assert "already exists" in text


@pytest.fixture
def theirs(finished, tmp_path):
    """A PEFT directory from elsewhere: outside any run, with another name for its base."""
    place = shutil.copytree(finished.peft, tmp_path / "theirs")
    file = place / "adapter_config.json"
    config = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": "org/model"}
    file.write_text(json.dumps(config), encoding="utf-8")
    return place


@pytest.mark.parametrize(
    ("given", "quant", "method"),
    [
        ([], {"base_quant": "none", "double_quant": False}, "lora"),
        (["export.base_quant=nf4"], {"base_quant": "nf4", "double_quant": True}, "qlora"),
        (["export.double_quant=false"], {"base_quant": "nf4", "double_quant": False}, "qlora"),
    ],
)
def test_somebody_elses_peft_directory_becomes_v3(
    theirs,
    finished,
    export,
    tmp_path,
    given,
    quant,
    method,
):
    """The command's model names its layers; what the directory does not state may be given."""
    export(
        f"path={theirs}",
        "export.format=v3",
        "model=tiny_llama",
        "out=v3",
        "hydra.run.dir=own",
        *given,
    )
    manifest, tensors = read_adapter(tmp_path / "here" / "v3")
    source, ours = read_adapter(finished.adapter)
    assert manifest.base_key_map == source.base_key_map
    assert (manifest.quant, manifest.adapter_method) == (quant, method)
    assert manifest.base_model == "org/model"
    assert all(np.array_equal(tensors[name], values) for name, values in ours.items())
    notes = Manifest.read(tmp_path / "here" / "own" / "manifest.json").notes
    assert any("names its base org/model; names and shapes are those of tiny" in n for n in notes)
    assert any("recorded as none" in one for one in notes) is not bool(given)


def test_a_runs_own_peft_view_is_recorded_as_the_run_was(finished, export, tmp_path):
    """Quantization and model are those of the run, so neither has to be given."""
    export(f"path={finished.peft}", "export.format=v3", "out=v3")
    manifest, _ = read_adapter(tmp_path / "here" / "v3")
    source, _ = read_adapter(finished.adapter)
    assert (manifest.quant, manifest.adapter_method) == (source.quant, source.adapter_method)


def test_a_peft_directory_of_another_model_is_refused(theirs, export):
    """The command's model is SmolLM2 by default, which the directory does not match."""
    text = export(f"path={theirs}", "export.format=v3", code=2)
    assert "the adapter is for another base model" in text
    assert "model.id" in text


def test_a_v2_is_lifted_with_what_it_does_not_tell(finished, export, tmp_path):
    """Double quantization is assumed unless set; a model is not needed, and refused."""
    export(f"path={finished.path}", "export.format=v2", "out=v2")
    export("path=v2", "export.format=v3", "out=lifted", "export.double_quant=false")
    manifest, _ = read_adapter(tmp_path / "here" / "lifted")
    assert manifest.quant == {"base_quant": "nf4", "double_quant": False}
    assert "takes all it needs" in export("path=v2", "export.format=v3", "model=tiny_llama", code=2)


def test_a_bundle_goes_where_out_says(finished, export, tmp_path):
    """The bundle is written to `out`, and the record has its name."""
    export(
        f"path={finished.path}",
        "out=there.tar.gz",
        "export.allow_absolute_paths=true",
        "hydra.run.dir=own",
    )
    record = Manifest.read(tmp_path / "here" / "own" / "manifest.json")
    assert record.results["bundle"] == "there.tar.gz"
    assert record.results["bundle_sha256"] == sha256_file(tmp_path / "here" / "there.tar.gz")


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.variant=dora"],
        ["lora.variant=rslora", "lora.rank_pattern={q_proj:4}", "lora.alpha_pattern={v_proj:3}"],
        ["lora.init=pissa"],
        ["lora.init=pissa", "lora.variant=rslora"],
    ],
    ids=["dora", "rslora", "pissa", "pissa rslora"],
)
def test_what_a_run_trained_is_what_leaves(
    train_in,
    tiny_base,
    export,
    tmp_path,
    overrides,
):
    """To PEFT directly and by way of v3, the logits equal those of PEFT's own view to 1e-5."""
    run = train_in(tmp_path / "run", "optim.lr=5e-3", *overrides)
    expected = logits(tiny_base, run.peft)
    export(f"path={run.path}", "export.format=peft", "out=peft")
    ours = logits(tiny_base, tmp_path / "here" / "peft")
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)
    if overrides == ["lora.variant=dora"]:
        assert "DoRA is not a delta" in export(f"path={run.path}", "export.format=v3", code=2)
        return
    export(f"path={run.path}", "export.format=v3", "out=v3")
    export("path=v3", "export.format=peft", "out=back", "model=tiny_llama")
    back = logits(tiny_base, tmp_path / "here" / "back")
    np.testing.assert_allclose(back, expected, atol=1e-5, rtol=0)
    manifest, _ = read_adapter(tmp_path / "here" / "v3")
    assert manifest.rank == (32 if "lora.init=pissa" in overrides else 16)
