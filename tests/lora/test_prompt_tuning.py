"""Prompt tuning, compared with PEFT's; packing, generation, records and refusals."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers_models import of_transformers

from mens_exp.config.overrides import check
from mens_exp.data.batch import packed_batch, padded_batch, with_virtual_tokens
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.preflight import preflight

F32 = ("quant.compute_dtype=f32",)
DENSE = ("backend=lora", "quant=none", *F32)
MANY = 6
PROMPT = ("lora=prompt_tuning", f"lora.num_virtual_tokens={MANY}")
LENGTHS = (11, 30, 47)


def of_peft(directory, backend, *, quant=None):
    """Return PEFT's model with the vectors of a backend."""
    from peft import PromptTuningConfig, get_peft_model

    model = of_transformers(directory, torch.float32, quant=quant)
    model.requires_grad_(requires_grad=False)
    asked = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=MANY)
    with quiet():
        peft = get_peft_model(model, asked)
    with torch.no_grad():
        theirs(peft).copy_(vectors(backend))
    return peft


def vectors(backend):
    return backend.trainable()["embedding.prompt_embeddings"]


def theirs(peft):
    return peft.prompt_encoder["default"].embedding.weight


def mean_loss(model, documents):
    """Return the mean loss per token from `forward(labels=…)` on single documents."""
    total, count = 0.0, 0
    for start, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.ids[None, start:end]).long()
        learned = torch.from_numpy(documents.supervised[None, start:end])
        labels = ids.masked_fill(~learned, -100)
        many = int(learned[:, 1:].sum())
        total = total + model(input_ids=ids, labels=labels).loss * many
        count += many
    return total / count


def our_loss(backend, batch):
    backend.begin(0)
    found = CrossEntropy("causal", 64)(backend(batch), batch.targets_M, backend.head)
    return found.total / found.count


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


@pytest.fixture
def packed(documents):
    return packed_batch(documents, [list(range(len(LENGTHS)))], index=0, multiple=32)


@pytest.fixture
def padded(documents):
    return padded_batch(documents, [[one] for one in range(len(LENGTHS))], index=0, pad_id=2)


@pytest.mark.parametrize("start", ["sample_vocab", "random"])
def test_losses_gradients_and_steps_are_those_of_peft(
    start, tiny_backend, tiny_base, documents, packed
):
    """Three AdamW steps in float32 over packed documents, and over PEFT's single ones."""
    backend = tiny_backend(*PROMPT, f"lora.prompt_tuning_init={start}", *DENSE).train()
    model = of_peft(tiny_base.directory, backend).train()
    ours = torch.optim.AdamW([*backend.trainable().values()], lr=1e-1)
    other = torch.optim.AdamW([theirs(model)], lr=1e-1)
    values = []
    for _ in range(3):
        losses = our_loss(backend, packed), mean_loss(model, documents)
        values.append(losses[0].item())
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for optimizer, loss in zip((ours, other), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert vectors(backend).grad.abs().max() > 1e-4
        assert (vectors(backend).grad - theirs(model).grad).abs().max() < 1e-5
        for optimizer in (ours, other):
            optimizer.step()
        assert (vectors(backend) - theirs(model)).abs().max() < 1e-4
    assert values[-1] < values[0]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for p in backend.trainable().values())


def test_on_four_bits_the_loss_is_that_of_peft(tiny_backend, tiny_base, documents, packed):
    """The base is quantized with NF4 by transformers, too."""
    backend = tiny_backend(*PROMPT, *F32).train()
    model = of_peft(tiny_base.directory, backend, quant="nf4")
    found = our_loss(backend, packed).item()
    assert found == pytest.approx(mean_loss(model, documents).item(), rel=1e-6)


def test_packed_and_padded_documents_have_the_same_states(tiny_backend, documents, packed, padded):
    """Each begins with its own virtual tokens, with positions from 0; the last is alone, too."""
    backend = tiny_backend(*PROMPT, *DENSE).eval()
    with torch.no_grad():
        together, apart = backend(packed), backend(padded)
        alone = backend(packed_batch(documents, [[2]], index=0))
    assert torch.equal(packed.targets_M, padded.targets_M)
    assert (together - apart).abs().max() < 1e-5
    assert (together[-len(alone) :] - alone).abs().max() < 1e-5


def test_without_the_adapter_there_are_no_virtual_tokens(tiny_backend, packed, padded):
    """Inside `base_only`, states and answers are those of a graph with an untrained LoRA."""
    backend, plain = tiny_backend(*PROMPT, *DENSE).eval(), tiny_backend(*DENSE).eval()
    prompts, asked = [[5, 6, 7], [8, 9]], {"max_new_tokens": 4, "end_ids": {2}}
    with torch.no_grad():
        tuned = backend(packed)
        with backend.base_only():
            assert torch.equal(backend(packed), plain(packed))
            assert torch.equal(backend(padded), plain(padded))
            assert backend.generate(prompts, **asked) == plain.generate(prompts, **asked)
            assert torch.equal(backend.next_logits([5, 6])[0], plain.next_logits([5, 6])[0])
        assert torch.equal(backend(packed), tuned)
        assert (plain(packed) - tuned).abs().max() > 1e-2


def test_a_micro_batch_keeps_its_targets(packed, documents):
    """Ids, positions and bounds by hand, for documents of 2 and 3 tokens."""
    small = packed_batch(documents, [[0, 1]], index=0)
    found = with_virtual_tokens(small, [320, 321])
    ids = small.input_ids_BT[0].tolist()
    first, second = ids[:11], ids[11:41]
    assert found.input_ids_BT[0, :45].tolist() == [320, 321, *first, 320, 321, *second]
    assert found.position_ids_BT[0, :45].tolist() == [*range(13), *range(32)]
    assert found.documents == ((0, 13), (13, 45))
    assert found.input_ids_BT.shape[1] % 32 == 0
    flat = found.input_ids_BT.flatten()
    assert torch.equal(flat[found.predict_M + 1], small.targets_M)
    assert with_virtual_tokens(packed, []) is packed


def test_documents_that_share_a_prompt_share_its_virtual_tokens(tiny_backend, documents_of):
    """A pair packed with one prompt has the states of its documents alone."""
    from dataclasses import replace

    from mens_exp.rows.documents import share_prompts

    prompt = [5, 6, 7, 8, 9]
    pair = documents_of(
        [[*prompt, 20, 21, 22], [*prompt, 30, 31], [40, 41, 42, 43], [40, 41, 50, 51]],
        [[0] * 5 + [1] * 3, [0] * 5 + [1] * 2, [0, 0, 1, 1], [0, 0, 1, 1]],
    )
    pair = replace(pair, together=2, virtual_tokens=MANY)
    shared = share_prompts(pair)
    backend = tiny_backend(*PROMPT, *DENSE).eval()
    joined = packed_batch(shared, [[0, 1, 2, 3]], index=0)
    placed = with_virtual_tokens(joined, backend.virtual_ids)
    assert joined.prefixes == (None, (0, 5), None, (10, 12))
    assert placed.prefixes == (None, (0, 11), None, (16, 24))
    assert placed.documents == ((0, 14), (14, 16), (16, 26), (26, 28))
    assert joined.tokens == placed.documents[-1][1] == int(shared.room.sum())
    assert torch.equal(placed.input_ids_BT.flatten()[placed.target_places], joined.targets_M)
    with torch.no_grad():
        found = backend(joined)
        alone = torch.cat([backend(packed_batch(pair, [[one]], index=0)) for one in range(4)])
    assert (found - alone).abs().max() < 1e-5


def test_answers_are_those_that_peft_generates(tiny_backend, tiny_base):
    """Greedy decoding of prompts of several lengths, in one batch; and token by token."""
    backend = tiny_backend(*PROMPT, "lora.prompt_tuning_init=random", *DENSE).eval()
    model = of_peft(tiny_base.directory, backend).eval()
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, 259, length).tolist() for length in (3, 19, 8)]
    found = backend.generate(prompts, max_new_tokens=8, end_ids={2})
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        for token in answer:
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
            assert int(logits.argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    first, cache = backend.next_logits(prompts[0])
    assert int(first.argmax()) == found[0][0]
    second, _ = backend.next_logits(found[0][:1], cache)
    assert int(second.argmax()) == found[0][1]
    with torch.no_grad():
        every = model(input_ids=torch.tensor(prompts[:1])).logits[0, MANY:]
    traced = backend.trace(prompts[0])
    assert (traced.logits_TV - every).abs().max() < 1e-4
    assert {len(states) for states in traced.hidden.values()} == {len(prompts[0])}


@pytest.mark.parametrize("settings", [DENSE, F32], ids=["dense", "nf4"])
def test_peft_loads_the_directory(settings, tiny_backend, tiny_base, tmp_path):
    """`PeftModel.from_pretrained` gives the logits of the trained graph."""
    from peft import PeftModel

    backend = tiny_backend(*PROMPT, *settings).eval()
    backend.write_peft(tmp_path / "peft")
    quant = None if settings is DENSE else "nf4"
    model = of_transformers(tiny_base.directory, torch.float32, quant=quant)
    with quiet():
        model = PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    ids = list(range(5, 25))
    with torch.no_grad():
        every = model(input_ids=torch.tensor([ids])).logits[0, MANY:]
    assert (backend.trace(ids).logits_TV - every).abs().max() < 1e-4
    written = json.loads((tmp_path / "peft/adapter_config.json").read_text("utf-8"))
    assert (written["peft_type"], written["num_virtual_tokens"]) == ("PROMPT_TUNING", MANY)
    assert backend.peft_view_is_exact


def test_the_record_describes_the_vectors(tiny_backend, tiny_config, tmp_path):
    """Read back, they are the same; a tensor with another number of rows is refused."""
    from mens_exp.artifacts.adapter_v3 import read_adapter, write_adapter
    from mens_exp.errors import MensError

    backend = tiny_backend(*PROMPT, *DENSE)
    manifest, tensors = backend.adapter(tiny_config(*PROMPT, *DENSE))
    write_adapter(tmp_path, manifest, tensors)
    again, values = read_adapter(tmp_path)
    assert (again.variant, again.rank, again.layer_order) == ("prompt_tuning", MANY, ["embedding"])
    assert again.base_key_map == {"embedding": "model.embed_tokens.weight"}
    ours = vectors(backend).detach().numpy()
    assert np.array_equal(values["embedding.prompt_embeddings"], ours)
    fresh = tiny_backend(*PROMPT, *DENSE, "seed=5")
    assert not torch.equal(vectors(fresh), vectors(backend))
    fresh.load_adapter(values)
    assert torch.equal(vectors(fresh), vectors(backend))
    with pytest.raises(MensError, match="wrong shape"):
        write_adapter(tmp_path, manifest, {"embedding.prompt_embeddings": ours[:-1]})


def test_initial_values_are_embeddings_of_tokens_or_normal(tiny_backend, tiny_base):
    """As in PEFT; a text is repeated or cut to the number of vectors."""
    from mens_exp.lora.prompt_tuning import start_from_text
    from mens_exp.tokenizer.load import load_tokenizer

    backend = tiny_backend(*PROMPT, *DENSE)
    table_VD = backend.causal_lm.get_input_embeddings().get_base_layer().weight
    rows = [(table_VD == one).all(dim=1).nonzero()[0].item() for one in vectors(backend)]
    assert len(set(rows)) > MANY // 2
    random = vectors(tiny_backend(*PROMPT, "lora.prompt_tuning_init=random", *DENSE))
    assert 0.8 < random.std().item() < 1.2
    tokenizer = load_tokenizer(tiny_config_tokenizer(), tiny_base.directory)
    for text in ("abcd", "abcdefghij"):
        facts = start_from_text(backend, tokenizer, text)
        (ids,) = tokenizer.encode_all([text])
        cycled = (ids * MANY)[:MANY]
        assert facts == {"init_text_tokens": len(ids)}
        assert torch.equal(vectors(backend), table_VD[cycled])


def tiny_config_tokenizer():
    from mens_exp.config.model import TokenizerConfig

    return TokenizerConfig(name="hf")


def problems(*overrides):
    checked = check(["model=tiny_llama", "logger=none", "trainer=cpu", "suite=none", *overrides])
    of_files = [one for cell in checked.cells for one in preflight(cell.config)]
    return {error.where: str(error) for error in (*checked.problems, *of_files)}


@pytest.mark.parametrize(
    ("overrides", "where", "words"),
    [
        (["lora.num_virtual_tokens=0"], "lora.num_virtual_tokens", "0"),
        (["lora.num_virtual_tokens=511"], "lora.num_virtual_tokens", "at most 510"),
        (["lora.targets=[attention]"], "lora.targets", "adapts no module"),
        (["lora.r=8"], "lora.r", "does not read it"),
        (["lora.dropout=0.1"], "lora.dropout", "does not read it"),
        (["lora.init=pissa"], "lora.init", "default"),
        (["lora.prompt_tuning_init=text"], "lora.prompt_tuning_init_text", "is required"),
        (["lora.prompt_tuning_init_text=Hi"], "lora.prompt_tuning_init_text", "sample_vocab"),
        (["objective.neftune_alpha=5"], "objective.neftune_alpha", "virtual tokens"),
        (["optim=muon"], "optim", "embeddings"),
        (["backend=full", "quant=none"], "lora", "full"),
        (["backend=burn", "quant=none"], "lora.variant", "qlora or lora"),
        (["backend=proxy"], "lora.variant", "plain LoRA"),
    ],
)
def test_what_cannot_be_is_refused(overrides, where, words):
    """Before anything runs, by the setting to change."""
    found = problems("lora=prompt_tuning", *overrides)
    assert where in found, found
    assert words in found[where]
