"""Losses of a PEFT directory, as computed by the trained graph and by PEFT."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers_models import of_transformers

from mens_exp.data.batch import packed_batch
from mens_exp.model import attention
from mens_exp.model.quiet import quiet
from mens_exp.training.peft_view import losses

pytestmark = pytest.mark.probes

LENGTHS = (11, 30, 47)


@pytest.fixture
def documents(random_documents):
    """Return three documents, about half of each supervised."""
    return random_documents(LENGTHS)


@pytest.fixture
def batch(documents):
    """Return the documents in one row."""
    return packed_batch(documents, [list(range(len(LENGTHS)))], index=0)


def loaded(base, directory, dtype, kernel):
    """Load the 4-bit base and a PEFT directory as PEFT's documentation does."""
    from peft import PeftModel

    model = of_transformers(base, dtype, quant="nf4", attn_implementation=kernel)
    with quiet():
        return PeftModel.from_pretrained(model, directory).eval()


def sum_of_losses(model, documents):
    """Return the sum of `forward(labels=...)` over the single documents."""
    total = 0.0
    for start, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.ids[None, start:end]).long()
        learned = torch.from_numpy(documents.supervised[None, start:end])
        labels = ids.masked_fill(~learned, -100)
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * int(learned[:, 1:].sum())
    return total


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_both_kernels_give_the_losses_of_peft(
    name, tiny_backend, tiny_base, documents, batch, tmp_path
):
    """The directory is loaded by PEFT; agreement is closer in float32 than in bf16."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[name]
    backend = tiny_backend(f"quant.compute_dtype={name}", live=True).eval()
    backend.write_peft(tmp_path / "peft")
    found = losses(backend, batch, documents)
    for kernel in ("sdpa", "eager"):
        model = loaded(tiny_base.directory, tmp_path / "peft", dtype, kernel)
        assert getattr(found, kernel) == pytest.approx(sum_of_losses(model, documents), rel=1e-6)
    assert found.difference <= (1e-6 if name == "f32" else 1e-2)
    assert backend.causal_lm.config._attn_implementation == attention.IMPLEMENTATION


def test_attention_that_is_not_transformers_is_seen(tiny_backend, documents, batch, monkeypatch):
    """Control: attention scores that are three times too large are found."""
    backend = tiny_backend("quant.compute_dtype=f32", live=True).eval()
    right = attention._sdpa_document
    monkeypatch.setattr(attention, "_sdpa_document", lambda *a: right(*a[:4], a[4] * 3))
    found = losses(backend, batch, documents)
    assert found.difference > 1e-5
    assert found.kernels < 1e-6
