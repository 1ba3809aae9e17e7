"""PEFT types with their own configuration, compared with PEFT's models; refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from transformers_models import of_transformers

from mens_exp import cli
from mens_exp.config.overrides import check
from mens_exp.data.batch import packed_batch
from mens_exp.errors import RequestError
from mens_exp.export.adapter import config_of_adapter
from mens_exp.layout.targets import adapter_parameters
from mens_exp.lora.method import method_of
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.contract import contract_of
from mens_exp.planning.preflight import preflight
from mens_exp.quant.bnb import dequantized
from mens_exp.training.build import build_backend

# PEFT's BOFT looks for a CUDA compiler on every machine.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension"),
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1"),
]
F32 = ("quant.compute_dtype=f32",)
DENSE = ("backend=lora", "quant=none", *F32)
TARGETS = ["q_proj", "v_proj", "down_proj"]
FIELDS = {
    "OFT": {"oft_block_size": 16, "use_cayley_neumann": False},
    "BOFT": {"boft_block_size": 8},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 50, "scaling": 10.0},
    "MISS": {"r": 8},
    "WAVEFT": {"n_frequency": 50},
    "HRA": {"r": 4},
    "PEANUT": {"r": 8},
}
ON_FOUR_BITS = ("OFT", "BOFT", "FOURIERFT", "MISS", "WAVEFT")
LENGTHS = (11, 30)


def words(name, **others):
    fields = {"peft_type": name, **FIELDS[name], **others}
    written = json.dumps(fields).replace('"', "")
    return ("lora=peft", f"lora.config={written}", f"lora.targets=[{','.join(TARGETS)}]")


def of_peft(name, directory, *, quantized):
    """Return PEFT's model, built as in its documentation."""
    from peft import get_peft_config, get_peft_model

    model = of_transformers(directory, torch.float32, quant="nf4" if quantized else None)
    fields = {"peft_type": name, "task_type": "CAUSAL_LM", "target_modules": TARGETS}
    return get_peft_model(model, get_peft_config({**fields, **FIELDS[name]}))


def pairs(backend, model):
    """Yield our parameters and PEFT's, in the same order in each layer."""
    ours = dict(backend.causal_lm.named_parameters())
    for name, theirs in model.named_parameters():
        if theirs.requires_grad:
            yield ours[name.removeprefix("base_model.model.")], theirs


def alike(backend, model):
    """Move our adapter from its initial values, and copy it into PEFT's."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for ours, theirs in pairs(backend, model):
            ours.add_(torch.randn(ours.shape, generator=generator) * 0.05)
            theirs.copy_(ours)


def mean_loss(model, documents):
    """Return the mean loss per token from `forward(labels=…)` on single documents."""
    total, count = 0.0, 0
    for start, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.ids[None, start:end]).long()
        learned = torch.from_numpy(documents.supervised[None, start:end])
        many = int(learned[:, 1:].sum())
        labels = ids.masked_fill(~learned, -100)
        total = total + model(input_ids=ids, labels=labels).loss * many
        count += many
    return total / count


def our_loss(backend, documents):
    batch = packed_batch(documents, [list(range(len(LENGTHS)))], index=0)
    backend.begin(0)
    found = CrossEntropy("causal", 64)(backend(batch), batch.targets_M, backend.head)
    return found.total / found.count


def steps(loss, parameters):
    """Return the losses of three steps of torch's AdamW."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


@pytest.mark.parametrize(
    ("name", "quantized"), [*((one, True) for one in ON_FOUR_BITS), ("HRA", False)]
)
def test_three_steps_are_those_of_peft_s_own_model(
    name, quantized, tiny_backend, tiny_base, documents
):
    """The NF4 or float32 base and the start are the same; the plan counts PEFT's parameters."""
    backend = tiny_backend(*words(name), *(F32 if quantized else DENSE)).train()
    model = of_peft(name, tiny_base.directory, quantized=quantized).train()
    alike(backend, model)
    learned = [one for one in model.parameters() if one.requires_grad]
    expected = steps(lambda: mean_loss(model, documents), learned)
    found = steps(lambda: our_loss(backend, documents), [*backend.trainable().values()])
    assert found == pytest.approx(expected, rel=2e-6)
    assert expected[2] != pytest.approx(expected[0], rel=1e-4)
    assert adapter_parameters(backend.lora, backend.shape) == sum(one.numel() for one in learned)


def test_a_start_depends_on_the_seed_and_the_layer_alone(tiny_backend):
    """Other targets and the global generator do not matter."""
    state = torch.get_rng_state()
    one, again, other = (
        tiny_backend(*words("FOURIERFT"), *more).trainable()
        for more in ((), ("lora.targets=[v_proj]",), ("seed=1",))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert again.keys() < one.keys()
    assert all(torch.equal(again[name], one[name]) for name in again)
    assert not any(torch.equal(other[name], one[name]) for name in one)


@pytest.mark.parametrize("name", ["OFT", "MISS", "WAVEFT"])
def test_a_merge_adds_what_peft_merges_into_the_dequantized_weight(name, tiny_backend, tiny_config):
    """In float32 PEFT merges a dense layer; the certificate's definition agrees."""
    from peft import get_peft_config, get_peft_model

    settings = (*words(name), *F32)
    backend = tiny_backend(*settings)
    with torch.no_grad():
        for number, one in enumerate(backend.trainable().values()):
            one.add_(0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(number)))
    manifest, tensors = backend.adapter(tiny_config(*settings))
    assert manifest.peft_config == {"peft_type": name, **FIELDS[name]}
    method = method_of(backend.lora.spec).sharing(manifest.shared)
    for one in backend.modules_chosen[:3]:
        layer = backend.layers[one.logical]
        plain_OI = dequantized(layer.get_base_layer().weight)
        dense = torch.nn.ModuleDict({"one": torch.nn.Linear(one.width, one.out, bias=False)})
        dense["one"].weight.data = plain_OI.clone()
        fields = {"peft_type": name, **FIELDS[name], "target_modules": ["one"]}
        model = get_peft_model(dense, get_peft_config({"task_type": None, **fields}))
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(layer.get_parameter(part.removeprefix("base_model.model.one.")))
        merged_OI = model.merge_and_unload()["one"].weight
        parts = {
            part: torch.from_numpy(tensors[f"{one.logical}.{part}"])
            for part in manifest.form.tensors
        }
        change = method.change(parts, scale=1.0)
        assert torch.equal(change.onto(plain_OI.clone(), 0), merged_OI)
        assert (change.expected(plain_OI.double()) - merged_OI).abs().max() < 1e-5
        assert (merged_OI - plain_OI).abs().max() > 1e-3


def test_a_type_without_a_merge_is_refused_by_name():
    """PEFT cannot merge LILY, so a run with it is refused too."""
    from mens_exp.backends.passthrough import AnyPeft

    method = AnyPeft({"peft_type": "LILY"})
    with pytest.raises(RequestError, match="PEFT's LILY cannot be merged"):
        method.change({}, scale=1.0).onto(torch.zeros(8, 8), 0)


def test_an_adapter_without_its_run_is_the_same_model(tiny_backend, tiny_config, documents, cache):
    """It is rebuilt from the record, and by PEFT from its directory."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = (*words("BOFT"), *DENSE)
    config, backend = tiny_config(*settings), tiny_backend(*settings)
    with torch.no_grad():
        for one in backend.trainable().values():
            one.add_(0.1)
    manifest, tensors = backend.adapter(config)
    again = config_of_adapter(config, manifest, backend.base, backend.shape, None)
    again.model = config.model
    fresh = build_backend(again, resolve(config.model, cache))
    fresh.load_adapter(tensors)
    backend.write_peft(cache / "boft")
    dense = AutoModelForCausalLM.from_pretrained(backend.base.directory, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(dense, cache / "boft").eval()
    with torch.no_grad():
        ours = our_loss(backend.eval(), documents).item()
        assert our_loss(fresh.eval(), documents).item() == ours
        assert mean_loss(theirs, documents).item() == pytest.approx(ours, rel=1e-6)
        with backend.base_only():
            assert our_loss(backend, documents).item() != pytest.approx(ours, rel=1e-4)


def test_a_file_of_peft_s_is_its_fields(tmp_path):
    """The file is PEFT's; its modules are the targets, and fields that a run sets are ignored."""
    from peft import BOFTConfig

    saved = BOFTConfig(boft_block_size=8, target_modules=["v_proj"], task_type="CAUSAL_LM")
    saved.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    checked = check(["lora=peft", f"lora.config={file}", "model=tiny_llama"])
    (cell,) = checked.cells
    assert checked.problems == ()
    assert cell.config.lora.targets == ["v_proj"]
    assert cell.config.lora.config.items() >= {"peft_type": "BOFT", "boft_block_size": 8}.items()
    assert not cell.config.lora.config.keys() & {"base_model_name_or_path", "inference_mode"}
    file.write_text("[]", "utf-8")
    (problem,) = check(["lora=peft", f"lora.config={file}"]).problems
    assert "name an adapter_config.json that can be read" in str(problem)
    dotted = check(
        ["lora=peft", "lora.config.peft_type=OFT", "lora.config.target_modules=[q_proj]"]
    )
    assert dotted.cells[0].config.lora.config == {"peft_type": "OFT"}
    assert dotted.cells[0].config.lora.targets == ["q_proj"]


def test_two_configurations_are_two_contracts(tiny_config):
    """The digest includes PEFT's fields."""
    digests = [contract_of(tiny_config(*words("MISS", r=r))).digest for r in (8, 16)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("name", "more", "where", "said"),
    [
        ("OFT", {"oft_blok_size": 8}, "oft_blok_size", "the nearest is oft_block_size"),
        ("OFT", {"oft_block_size": "big"}, "oft_block_size", "expected an integer"),
        ("OFT", {"oft_block_size": 7}, None, "PEFT cannot put OFT"),
        ("BOFT", {"boft_n_butterfly_factor": 2}, None, "Setting boft_n_butterfly_factor to 1"),
        ("C3A", {"block_size": 24}, None, "should be a factor of the input size"),
        ("OFT", {"module_dropout": 0.1}, "module_dropout", "draws the masks"),
        ("OFT", {"inference_mode": True}, "inference_mode", "leave out lora.config"),
        ("OFT", {"modules_to_save": ["lm_head"]}, "modules_to_save", "linear layers alone"),
        ("C3A", {"block_size_pattern": {"q_proj": 8}}, "block_size_pattern", "the same settings"),
        ("OFT", {"layers_to_transform": [0]}, "layers_to_transform", "set lora.targets="),
        ("OFT", {"peft_type": "LORA"}, "peft_type", "choose lora=all_linear"),
        ("OFT", {"peft_type": "VERA"}, "peft_type", "choose lora=vera"),
        ("OFT", {"peft_type": "oft"}, "peft_type", "write lora.config.peft_type=OFT"),
        ("HRA", {}, None, "on a layer of Linear4bit"),
        ("PEANUT", {}, None, "on a layer of Linear4bit"),
    ],
)
def test_what_a_run_cannot_have_is_refused_before_a_model_is_loaded(
    tiny_config, name, more, where, said
):
    """There is one problem, with the field or PEFT's own message."""
    config = tiny_config(*words(name, **more))
    problems = [one for one in preflight(config) if str(one.where).startswith("lora.config")]
    assert [one.where for one in problems] == [f"lora.config.{where}" if where else "lora.config"]
    assert said in str(problems[0])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("peft_type:PREFIX_TUNING,num_virtual_tokens:4", "does not support prompt learning"),
        ("peft_type:PROMPT_TUNING,num_virtual_tokens:4", "choose lora=prompt_tuning"),
        ("peft_type:VBLORA,vector_length:16", "shared state"),
        ("peft_type:LILY", "something else than a product with a changed weight"),
        ("peft_type:BEFT", "something else than a product with a changed weight"),
        ("peft_type:C3A,block_size:16", "PEFT's C3A computes a wrong gradient of its input"),
        ("peft_type:PSOFT,r:8", "PEFT's PSOFT cannot be merged into weights: TypeError"),
        ("r:4", "unknown type of PEFT"),
    ],
)
def test_a_type_that_records_or_merges_cannot_hold_is_refused(tiny_config, fields, said):
    """PEFT or a trial on one layer detects it."""
    config = tiny_config("lora=peft", f"lora.config={{{fields}}}", *DENSE)
    (problem,) = [one for one in preflight(config) if str(one.where).startswith("lora.config")]
    assert said in str(problem)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["lora.variant=passthrough"], "has further settings"),
        (["lora=peft", "lora.config.peft_type=OFT", "lora.variant=dora"], "has no effect"),
    ],
)
def test_a_configuration_needs_its_option_and_the_option_a_configuration(texts, said, capsys):
    """This also holds beside another problem."""
    usual = ["task=plan", "model=tiny_llama", "trainer=cpu", "logger=none"]
    for more in ([], ["data.contract.max_nothing_frac=16"]):
        assert cli.main([*usual, *texts, *more]) == 2
        stated = capsys.readouterr().err
        assert said in stated
        assert stated.count("found") <= 2
        assert all(one.partition("=")[0] in stated for one in more)


def test_the_import_of_peft_says_nothing():
    """Importing PEFT first, as a plan does, shows no notice of bitsandbytes about kernels."""
    text = "from mens_exp.backends import passthrough as p; list(p._field_problems({}))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
