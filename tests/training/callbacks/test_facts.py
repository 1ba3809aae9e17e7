from __future__ import annotations

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.training.callbacks.facts import ManifestFacts


def test_facts_are_those_of_the_first_batch_and_the_graph(fit):
    """Facts are compared with counts made here from the stream and the parameters."""
    first = fit.data.train_dataloader().batch(0)
    fit.run(fit.trainer(ManifestFacts(fit.record)))
    facts = Manifest.read(fit.record.dir.manifest).facts
    bounds = first.documents
    expected = {
        "packing": True,
        "documents_in_first_batch": len(bounds),
        "longest_document_in_first_batch": max(end - start for start, end in bounds),
        "tokens_in_first_batch": bounds[-1][1],
        "supervised_tokens_in_first_batch": len(first.targets_M),
        "accumulate_grad_batches": 2,
        "device": "cpu",
        "deterministic": True,
        "quant": "nf4",
        "trainable_matrices": 2 * 7 * 2,
    }
    assert {name: facts[name] for name in expected} == expected
    assert [e["event"] for e in read_events(fit.record.dir.telemetry)] == ["facts"]


def test_facts_of_the_first_batch_survive_a_resume(fit):
    """A resumed process starts with a later batch, which is not the run's first."""
    fit.record.manifest.facts["tokens_in_first_batch"] = 7
    fit.data.train_dataloader().position = 2
    fit.run(fit.trainer(ManifestFacts(fit.record), max_steps=1))
    facts = fit.record.manifest.facts
    assert facts["tokens_in_first_batch"] == 7
    assert facts["device"] == "cpu"


def test_a_resume_in_other_forms_is_noted(fit, tmp_path):
    """The note gives the step up to which the other forms were used; if equal, there is none."""
    started = fit.trainer(ManifestFacts(fit.record), max_steps=1)
    fit.run(started)
    started.save_checkpoint(tmp_path / "one.ckpt")
    fit.run(fit.trainer(ManifestFacts(fit.record)), ckpt_path=tmp_path / "one.ckpt")
    assert fit.record.manifest.notes == []
    del fit.record.manifest.facts["numerics"]
    fit.run(fit.trainer(ManifestFacts(fit.record)), ckpt_path=tmp_path / "one.ckpt")
    (note,) = fit.record.manifest.notes
    assert note.startswith("up to step 1, ")
    assert note.endswith(": as earlier releases do")
