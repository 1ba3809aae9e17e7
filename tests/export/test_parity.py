"""Comparing two graphs on the same text: equal graphs have distance zero, planted faults show."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mens_exp.artifacts.certificate import Certificate, Comparison, Evidence
from mens_exp.backends.generation import Trace
from mens_exp.config.task import BudgetConfig
from mens_exp.errors import DataError, MensError
from mens_exp.export import parity
from mens_exp.export.certificate import Probe, probe_of_rows, probe_of_text
from mens_exp.export.parity import compare, record_reference
from mens_exp.model.sources import resolve
from mens_exp.rows.documents import Labelling
from mens_exp.rows.schema import TrainingPair

F32 = "quant.compute_dtype=f32"
DOCUMENTS = ((5, 9, 200, 31, 7, 77, 3), (11, 12), (8, 100, 8, 100, 45, 2, 9, 60, 61))
PROBE = Probe(documents=DOCUMENTS, source="by hand")
STRICT = BudgetConfig(mean_kl=1e-6, top1_agreement=1.0, nll_difference=1e-4)


def trained(tiny_backend, tiny_config, *over):
    config = tiny_config(*over)
    backend = tiny_backend(*over, live=True)
    return backend, config, backend.base


def against(tmp_path, backend, forward, budget=STRICT):
    folder = tmp_path / "reference"
    folder.mkdir()
    return compare(record_reference(backend.trace, PROBE, folder), forward, "other", budget)


def test_a_graph_is_no_distance_from_itself(tmp_path, tiny_backend, tiny_config):
    """Every figure is zero, over all tokens but the first of each document."""
    backend, _, _ = trained(tiny_backend, tiny_config, F32)
    found = against(tmp_path, backend, backend.trace)
    assert found["tokens"] == sum(len(ids) - 1 for ids in DOCUMENTS) == 15
    assert found["max_kl"] == 0
    assert found["top1_agreement"] == 1
    assert found["worst_layer"]["relative_error"] == 0
    assert found["exceeded"] == []


def test_figures_are_those_worked_out_by_hand(tmp_path):
    """Logits (log 3, 0) against equal ones; hidden states 10% apart in one layer."""
    even, odd = torch.zeros(3, 2), torch.tensor([[np.log(3.0), 0.0]] * 3).float()
    state = torch.ones(3, 4)

    def one(_):
        return Trace(hidden={"embedding": state, "l0": state}, logits_TV=even)

    def other(_):
        return Trace(hidden={"embedding": state, "l0": 1.1 * state}, logits_TV=odd)

    probe = Probe(documents=((0, 1, 1),), source="by hand")
    reference = record_reference(one, probe, tmp_path)
    assert reference.nll == pytest.approx(np.log(2))
    found = compare(reference, other, "other", BudgetConfig(hidden_error=0.05))
    # KL(1/2, 1/2 ‖ 3/4, 1/4) = ln 2 - ln(3)/2 ... with p = (1/2, 1/2): -ln 2 - (ln 3/4 + ln 1/4)/2
    kl = -np.log(2) - 0.5 * (np.log(0.75) + np.log(0.25))
    assert found["mean_kl"] == pytest.approx(kl, rel=1e-6)
    assert found["nll_difference"] == pytest.approx(-np.log(0.25) - np.log(2), rel=1e-6)
    assert found["worst_layer"]["layer"] == "l0"
    assert found["worst_layer"]["relative_error"] == pytest.approx(0.1, rel=1e-5)
    assert [text.split()[0] for text in found["exceeded"]] == [
        "mean_kl",
        "nll_difference",
        "hidden_error",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["quant.double_quant=false", "quant.block_size=128"],
        ["quant=fp4"],
        ["model=tiny_gpt2"],
        ["model=tiny_qwen2"],
        ["lora.variant=rslora"],
        ["lora.variant=dora"],
        ["lora.init=pissa"],
        ["lora.init=loftq", "lora.loftq_iters=3"],
        ["lora=lm_head"],
        ["backend=lora"],
        ["quant.skip=[mlp]"],
    ],
    ids=lambda it: " ".join(it) or "nf4",
)
def test_the_dequantized_base_and_the_deltas_are_the_trained_model(
    tmp_path,
    tiny_backend,
    tiny_config,
    overrides,
):
    """In float32, the trained model and its merged form differ only by rounding."""
    backend, config, base = trained(tiny_backend, tiny_config, F32, *overrides)
    with parity.merged(backend, config, base, into="dequantized") as forward:
        found = against(tmp_path, backend, forward)
    assert found["exceeded"] == []
    assert found["max_kl"] < 1e-8
    assert found["worst_layer"]["relative_error"] < 1e-5


def test_the_published_base_under_the_same_deltas_is_another_model(
    tmp_path, tiny_backend, tiny_config
):
    """Merging into the original weights omits the quantization error that training compensated."""
    backend, config, base = trained(tiny_backend, tiny_config, F32)
    with parity.merged(backend, config, base, into="original") as forward:
        found = against(tmp_path, backend, forward)
    assert found["mean_kl"] > 20 * (STRICT.mean_kl or 0)
    assert any(text.startswith("mean_kl") for text in found["exceeded"])


def test_the_proxy_stack_is_traced_layer_by_layer(
    tiny_backend,
):
    """The trace contains the embedding, the middle layers and the head's input."""
    backend = tiny_backend("backend=proxy", F32, live=True)
    found = backend.trace([5, 9, 200])
    backend.eval()
    with torch.no_grad():
        expected = backend.head(backend.hidden(torch.tensor([5, 9, 200])))
    assert torch.equal(found.logits_TV, expected)
    assert list(found.hidden) == ["embedding", "mid0", "mid1", "head's input"]
    assert torch.equal(found.hidden["embedding"], backend.embedding_VD[[5, 9, 200]].float())


def test_a_directory_is_opened_as_it_is_stored(tmp_path, tiny_backend, tiny_base):
    """The base's own directory equals the backend with its adapter off and nothing quantized."""
    backend = tiny_backend("backend=lora", F32)
    with parity.from_directory(tiny_base.directory) as forward:
        found = against(tmp_path, backend, forward)
    assert found["max_kl"] < 1e-8


def test_a_model_that_does_not_fit_is_read_layer_by_layer(tmp_path, tiny_base):
    """The figures are the same with memory for a third of the weights."""
    with parity.from_directory(tiny_base.directory) as forward:
        (tmp_path / "reference").mkdir()
        reference = record_reference(forward, PROBE, tmp_path / "reference")
    size = sum(path.stat().st_size for path in tiny_base.directory.glob("*.safetensors"))
    with parity.from_directory(tiny_base.directory, memory_bytes=size // 3) as forward:
        found = compare(reference, forward, "off disk", STRICT)
    assert found["max_kl"] < 1e-10


def test_a_merge_quantized_again_is_compared_under_the_same_quantizer(
    tmp_path, tiny_backend, tiny_config
):
    """The unchanged base, quantized with the run's settings, is the run's base."""
    backend, config, base = trained(tiny_backend, tiny_config, F32, "quant.block_size=128")
    with backend.base_only(), parity.quantized_from(base.directory, config, base) as forward:
        found = against(tmp_path, backend, forward)
    assert found["max_kl"] == 0


def test_a_number_that_is_not_finite_is_an_error(tmp_path):
    """NaN raises an error instead of entering an average."""

    def broken(ids):
        state = torch.full((len(ids), 2), float("nan"))
        return Trace(hidden={"embedding": state}, logits_TV=torch.zeros(len(ids), 4))

    def whole(ids):
        state = torch.ones(len(ids), 2)
        return Trace(hidden={"embedding": state}, logits_TV=torch.zeros(len(ids), 4))

    probe = Probe(documents=((1, 2, 3),), source="by hand")
    with pytest.raises(MensError, match="not finite"):
        compare(record_reference(whole, probe, tmp_path), broken, "broken", STRICT)


class Letters:
    """A tokenizer with one id per character."""

    def encode_all(self, texts):
        return [[ord(letter) for letter in text] for text in texts]


def test_a_file_of_text_is_cut_into_documents(tmp_path):
    """Ten characters in pieces of four; a last piece of one character would be dropped."""
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij")
    letters = Letters()
    probe = probe_of_text(path, letters, seq_len=4, tokens=9)
    assert [len(ids) for ids in probe.documents] == [4, 4, 2]
    assert probe.record()["source"] == "text: text.txt"


@pytest.mark.parametrize("content", [b"abc", b"\xff\xfe\x00"], ids=["too short", "not UTF-8"])
def test_a_text_that_cannot_serve_is_refused(tmp_path, content):
    """The message names the setting and the file."""
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    letters = Letters()
    with pytest.raises(DataError, match=r"parity\.text.*text\.txt"):
        probe_of_text(path, letters, seq_len=4, tokens=9)
    with pytest.raises(DataError, match="No such file"):
        probe_of_text(tmp_path / "none.txt", letters, seq_len=4, tokens=9)


def test_rows_that_are_held_out_come_first_and_others_fill_up(cache, tiny_base, tiny_config):
    """Whole rows are taken until there are enough tokens, and the source is recorded."""
    from mens_exp.tokenizer.load import load_tokenizer

    config = tiny_config()
    base = resolve(config.model, cache)
    tokenizer = load_tokenizer(config.tokenizer, base.directory)
    rows = [TrainingPair(prompt=f"What is {n}?", response=f"It is {n}.") for n in range(12)]
    labelling = Labelling(objective="assistant", seq_len=64)
    sides = {"held out": rows[:2], "validation": rows[2:]}
    probe = probe_of_rows(sides, tokenizer, labelling, 200)
    assert probe.tokens >= 200
    assert probe.source.startswith("rows: 2 of held out, ")
    alone = probe_of_rows(sides, tokenizer, labelling, 2)
    assert alone.source == "rows: 1 of held out"
    assert probe.documents[0] == alone.documents[0]
    with pytest.raises(DataError, match="no row"):
        probe_of_rows({"held out": []}, tokenizer, labelling, 200)


def certificate(**changes):
    found = Comparison(
        what="the written model",
        tokens=15,
        mean_kl=0.0,
        p99_kl=0.0,
        max_kl=0.0,
        top1_agreement=1.0,
        nll_difference=0.0,
        worst_layer={"layer": "l0", "relative_error": 0.0},
        exceeded=[],
    )
    usual = {
        "evidence": Evidence.GRAPH,
        "reference": "as trained",
        "reference_nll": 2.0,
        "probe": PROBE.record(),
        "judged": "written",
        "comparisons": {"written": found},
        "tensors": {},
        "budget": {"mean_kl": 0.002},
        "passed": True,
        "accepted": False,
        "sources": {"adapter_sha256": "0" * 64},
        "files": {"config.json": "1" * 64},
    }
    return Certificate(**{**usual, **changes})


def test_a_certificate_reads_back_as_it_was_written(tmp_path):
    """Every field keeps its value and type."""
    certificate().write(tmp_path / "parity.json")
    assert Certificate.read(tmp_path / "parity.json") == certificate()


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("passed", False, "verdict contradicts the recorded figures"),
        ("judged", "other", "was not compared"),
        ("accepted", True, "nothing had to be accepted"),
        ("version", 2, "newer version"),
        ("budgte", {}, "unknown key"),
        ("reference_nll", "2", "wrong value"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_refused(tmp_path, field, value, match):
    """An edited verdict is detected."""
    path = tmp_path / "parity.json"
    certificate().write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(DataError, match=match):
        Certificate.read(path)
