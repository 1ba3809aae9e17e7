"""An adapter on real weights: a correct merge passes its certificate, every wrong one fails.

The weights are four of SmolLM2's layers; make soak takes all thirty, and more forms. Transformers
alone computes the run's validation loss from merged models and GGUF files.
"""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mens_exp import cli
from mens_exp.artifacts.certificate import Certificate, Inspection, Outcome
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.export.certificate import hashes_of, rejected_place
from mens_exp.export.handoff import read_handoff
from mens_exp.planning.machine import look

SQUARE = "base_model.model.model.layers.2.self_attn.q_proj"  # 576 by 576
PROJECTIONS = 7  # of a layer
in_soak = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=[4, in_soak(30)])
def layers(request):
    """The number of SmolLM2's layers in the base model."""
    return int(request.param)


@pytest.fixture(scope="module")
def run(
    layers,
    smollm2_cut,
    code_rows,
    tmp_path_factory,
):
    """A run of four steps, enough for an adapter with an effect."""
    directory = tmp_path_factory.mktemp("smollm2") / "run"
    if layers < 30:  # so few layers in bf16 have noise over the budget
        model = ["model=hf", f"model.id={smollm2_cut}", "quant.compute_dtype=f32"]
    else:
        model = [f"quant.compute_dtype={'bf16' if look('cpu').has_bf16 else 'f32'}"]
    command = [
        *model,
        "data=jsonl",
        f"data.path={code_rows}",
        "trainer=cpu",
        "trainer.max_steps=4",
        "trainer.accumulate_grad_batches=2",
        "data.seq_len=256",
        "data.val_max_tokens=4096",
        "optim.lr=2e-3",
        "suite=none",
        "suite.items=0",
        "logger=none",
    ]
    assert cli.main([*command, f"hydra.run.dir={directory}"]) == 0
    return RunDir(directory)


@pytest.fixture
def merged(run, tmp_path):
    """Merge the run's adapter or another path; return the exit code and the output."""

    def merge(*overrides, path=None):
        out = tmp_path / "merged"
        command = [
            "task=merge",
            "logger=none",
            f"path={path or run.path}",
            f"out={out}",
            "parity.tokens=256",
            "merge.dtype=f32",
        ]
        code = cli.main([*command, f"hydra.run.dir={tmp_path / 'record'}", *overrides])
        return code, out

    return merge


@pytest.fixture
def tampered(run, tmp_path):
    """Copy the run, apply a change to its PEFT directory, and return that directory."""

    def changed(change):
        copy = tmp_path / "run"
        shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("checkpoints"))
        peft = RunDir(copy).peft
        tensors = load_file(peft / "adapter_model.safetensors")
        config = json.loads((peft / "adapter_config.json").read_text())
        change(tensors, config)
        save_file(tensors, peft / "adapter_model.safetensors")
        (peft / "adapter_config.json").write_text(json.dumps(config))
        manifest = Manifest.read(RunDir(copy).manifest)  # or its digests alone would be refused
        for file in peft.glob("adapter_*"):
            manifest.outputs[file.relative_to(copy).as_posix()] = sha256_file(file)
        manifest.write(RunDir(copy).manifest)
        return peft

    return changed


def certificate_of(tmp_path, directory):
    """Read the certificate, which the task's own run directory repeats."""
    found = Certificate.read(directory / "parity.json")
    own = Certificate.read(RunDir(tmp_path / "record").parity)
    assert found.comparisons == own.comparisons
    return found


def validated(run, *, rel):
    """Return the run's validation loss to `rel`; in bf16, rounding alone changes it by 1e-3."""
    manifest = Manifest.read(run.manifest)
    in_f32 = manifest.facts["compute_dtype"] == "float32"
    return pytest.approx(manifest.results["tuned_val_loss"], rel=rel if in_f32 else max(rel, 3e-3))


def test_a_right_merge_of_a_real_adapter_passes(run, tmp_path, merged, written_loss):
    """Every graph is compared, and transformers alone computes the run's validation loss."""
    code, out = merged()
    assert code == 0
    found = certificate_of(tmp_path, out)
    assert found.passed
    assert not found.accepted
    assert set(found.comparisons) == {
        "written",
        "dequantized_merged",
        "original_merged",
        "requantized",
    }
    written, dense = found.comparisons["written"], found.comparisons["dequantized_merged"]
    assert written["mean_kl"] == pytest.approx(dense["mean_kl"], rel=0.02)
    assert found.comparisons["original_merged"]["mean_kl"] > 10 * written["mean_kl"]
    assert found.probe is not None
    assert found.probe["tokens"] >= 256
    card = (out / "README.md").read_text()
    assert "Parity with the trained model" in card
    assert "within the budget" in card
    assert Manifest.read(RunDir(tmp_path / "record").manifest).results["parity"] == (
        "within the budget"
    )
    assert written_loss(run, out) == validated(run, rel=1e-6)


def test_the_published_base_under_an_nf4_adapter_is_set_aside(run, tmp_path, merged, written_loss):
    """Exit code 4; the rejected output has another validation loss."""
    code, out = merged("merge.base=original")
    assert code == 4
    assert not out.exists()
    found = certificate_of(tmp_path, rejected_place(out))
    assert not found.passed
    assert written_loss(run, rejected_place(out)) != validated(run, rel=1e-2)
    assert any(text.startswith("mean_kl") for text in found.exceeded())


def test_what_is_accepted_is_kept_and_says_so(tmp_path, merged):
    """parity.accept=true: certificate and card state both the failure and the acceptance."""
    code, out = merged("merge.base=original", "parity.accept=true")
    assert code == 0
    found = certificate_of(tmp_path, out)
    assert (found.passed, found.accepted) == (False, True)
    assert "and accepted" in (out / "README.md").read_text()


def _alpha_doubled(_, config):
    config["lora_alpha"] *= 2


def _a_module_dropped(tensors, config):
    for name in [name for name in tensors if ".mlp.down_proj." in name]:
        del tensors[name]
    config["target_modules"] = [one for one in config["target_modules"] if "down_proj" not in one]


def _a_and_b_swapped(tensors, _):
    a, b = f"{SQUARE}.lora_A.weight", f"{SQUARE}.lora_B.weight"
    tensors[a], tensors[b] = tensors[b].T.contiguous(), tensors[a].T.contiguous()


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        (_alpha_doubled, lambda layers: PROJECTIONS * layers),
        (_a_module_dropped, lambda layers: layers),
        (_a_and_b_swapped, lambda _: 1),
    ],
    ids=["alpha doubled", "a module dropped", "A and B swapped in one square layer"],
)
def test_an_adapter_that_is_not_the_trained_one_is_found(
    merged,
    tampered,
    change,
    tensors,
    layers,
):
    """The reference is the run's own adapter, whatever was merged.

    A wrong tensor can be lost in the noise of bf16 logits, but not in the comparison of tensors.
    """
    code, out = merged(path=tampered(change))
    assert code == 4
    found = Certificate.read(rejected_place(out) / "parity.json")
    assert not found.passed
    wrong = [name for name, one in found.tensors.items() if one["relative"] > 0.5]
    assert len(wrong) == tensors(layers)


def test_the_same_form_untampered_passes(layers, merged, tampered):
    """The run's PEFT directory passes as the run's adapter."""
    code, out = merged(path=tampered(lambda *_: None))
    assert code == 0
    tensors = Certificate.read(out / "parity.json").tensors
    assert len(tensors) == PROJECTIONS * layers
    assert max(one["relative"] for one in tensors.values()) < 1e-3


def test_a_base_of_another_revision_is_found(run, tmp_path, merged, base):
    """Merging into slightly changed weights needs merge.any_base, and fails its certificate."""
    other = tmp_path / "revision"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, values in weights.items():
        if values.dim() == 2:
            noise = torch.randn(values.shape, generator=generator) * values.float().std()
            weights[name] = (values.float() + 0.03 * noise).to(values.dtype)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    code, out = merged(f"base={other}")
    assert code == 2  # its digest is not the recorded one
    assert not out.exists()
    code, out = merged(f"base={other}", "merge.any_base=true", f"hydra.run.dir={tmp_path / 'two'}")
    assert code == 4
    assert not Certificate.read(rejected_place(out) / "parity.json").passed
    assert run.manifest.is_file()


@pytest.fixture
def base(run, cache):
    """The directory of the base model."""
    from mens_exp.config.compose import from_yaml, typed
    from mens_exp.model.sources import resolve

    return resolve(typed(from_yaml(run.config)).model, cache).directory


@pytest.fixture
def exported(run, tmp_path):
    """Export the run in some format, and return the directory."""

    def export(*overrides):
        out = tmp_path / "out"
        command = ["task=export", f"path={run.path}", f"out={out}", "parity.tokens=256"]
        assert cli.main([*command, f"hydra.run.dir={tmp_path / 'record'}", *overrides]) == 0
        found = certificate_of(tmp_path, out)
        assert found.passed
        hashes = hashes_of(out)
        assert found.files == hashes
        results = Manifest.read(RunDir(tmp_path / "record").manifest).results
        assert results["files_sha256"] == hashes
        return out

    return export


# Measured: 2e-8 and 4e-5; a weight keeps 24 bits or 11.
@pytest.mark.parametrize(("dtype", "rel"), [("f32", 1e-6), in_soak("f16", 2e-4)])
def test_a_run_leaves_as_gguf_with_its_certificate(dtype, rel, run, exported, of_gguf):
    """Merged in f32 and rounded once; transformers reads weights and tokenizer from the file."""
    out = exported("export.format=gguf", f"gguf.dtype={dtype}")
    assert Certificate.read(out / "parity.json").comparisons["written"]["mean_kl"] < 0.005
    assert read_handoff(out).tokenizer_source == "model.gguf"
    assert of_gguf(out) == validated(run, rel=rel)


def test_a_gguf_file_is_certified_again(tmp_path, exported, monkeypatch):
    """By its directory or by the run that wrote it; one flipped bit of a weight is found."""
    out = exported("export.format=gguf", "gguf.dtype=q8_0")
    monkeypatch.chdir(tmp_path)

    def inspected(name, path):
        directory = f"hydra.run.dir={tmp_path / name}"
        code = cli.main(["task=inspect", f"path={path}", "inspect.verify=true", directory])
        record = Inspection.read(RunDir(tmp_path / name).inspection)
        return code, {one["name"]: one["outcome"] for one in record.verification["checks"]}

    ways = {"of_directory": out, "of_run": tmp_path / "record"}
    for name, path in ways.items():
        code, outcomes = inspected(name, path)
        assert code == 0
        assert outcomes["files.model.gguf"] == Outcome.EQUAL
        assert outcomes["certificate: written.mean_kl"] == Outcome.EQUAL, outcomes
    file = out / "model.gguf"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for name, path in ways.items():
        code, outcomes = inspected(f"{name}_flipped", path)
        assert (code, outcomes["files.model.gguf"]) == (4, Outcome.DIFFERS)


@pytest.fixture
def of_gguf(run, written_loss):
    """Return the loss of a GGUF file as transformers reads it, optionally with changed weights."""
    from transformers import GgufConfig

    options = {"gguf_file": "model.gguf", "quantization_config": GgufConfig(dequantize=True)}
    return lambda out, change=None: written_loss(run, out, change, **options)


def in_q8_0(weight):
    """Round a matrix by ggml's definition of Q8_0: 32 integers, and an f16 scale of max / 127."""
    if weight.dim() != 2 or weight.shape[1] % 32:
        return weight
    blocks = weight.double().reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    steps = torch.where(scale > 0, blocks / scale, 0).round()
    return (steps * scale.half().double()).reshape(weight.shape).float()


def test_eight_bits_of_gguf_are_the_merged_weights_rounded_once(
    run, tmp_path, merged, written_loss, exported, of_gguf
):
    """The loss equals that of the merged f32 model whose weights are rounded here.

    Eight bits change the loss by up to 1%, depending on the CPU that trained the adapter.
    """
    code, plain = merged()
    assert code == 0
    expected = written_loss(run, plain, in_q8_0)
    shutil.rmtree(tmp_path / "record")
    out = exported("export.format=gguf", "gguf.dtype=q8_0")
    assert Certificate.read(out / "parity.json").comparisons["written"]["mean_kl"] < 0.005
    assert read_handoff(out).tokenizer_source == "model.gguf"
    assert of_gguf(out) == pytest.approx(expected, rel=1e-5)
    assert expected != validated(run, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "family", "files"),
    [
        in_soak(["export.format=hf"], "hf-transformers", {"config.json", "model.safetensors"}),
        in_soak(
            ["export.format=ollama"], "ollama", {"Modelfile", "config.json", "model.safetensors"}
        ),
        (
            ["export.format=ollama", "ollama.form=adapter"],
            "ollama",
            {"Modelfile", "adapter.gguf", "adapter_config.json", "adapter_model.safetensors"},
        ),
        in_soak(
            ["export.format=vllm"], "vllm", {"adapter_config.json", "adapter_model.safetensors"}
        ),
    ],
    ids=["hf", "ollama", "ollama adapter", "vllm"],
)
def test_a_run_leaves_for_other_programs_with_its_certificate(
    layers,
    exported,
    overrides,
    family,
    files,
):
    """The program's files, the hand-off record and the card or Modelfile are written."""
    out = exported(*overrides)
    assert files < {path.name for path in out.iterdir()}
    assert read_handoff(out).backend_family == family
    tensors = Certificate.read(out / "parity.json").tensors
    assert len(tensors) == PROJECTIONS * layers
    assert max(one["relative"] for one in tensors.values()) < 0.01
    if "Modelfile" in files:
        base = "smollm2_cut" if layers < 30 else "SmolLM2-135M-Instruct"
        begins = "FROM .\n" if "config.json" in files else f"FROM {base}\nADAPTER ./adapter.gguf\n"
        assert (out / "Modelfile").read_text().startswith(begins)
