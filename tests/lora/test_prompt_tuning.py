"""Prompt tuning, compared with PEFT's; packing, generation, records and refusals."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers_models import of_transformers

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.overrides import check
from mens_exp.config.rules.lora import lora_problems
from mens_exp.data.batch import packed_batch, padded_batch, with_virtual_tokens
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.checks.adapter import check_lora
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


@pytest.mark.parametrize(
    "settings",
    [
        ("lora.prompt_tuning_init=sample_vocab",),
        ("lora.prompt_tuning_init=random", "model.gradient_checkpointing=on"),
        ("model=tiny_gpt2",),
    ],
)
def test_losses_gradients_and_steps_are_those_of_peft(settings, tiny_backend, documents, packed):
    """Three AdamW steps in float32 over packed documents, and over PEFT's single ones."""
    backend = tiny_backend(*PROMPT, *settings, *DENSE).train()
    model = of_peft(backend.base.directory, backend).eval()  # GPT-2 has dropout
    ours = torch.optim.AdamW([*backend.trainable().values()], lr=1e-2)
    other = torch.optim.AdamW([theirs(model)], lr=1e-2)
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


def test_initial_values_are_embeddings_of_tokens_or_normal(tiny_backend, tiny_config, tiny_base):
    """As in PEFT; a text is repeated or cut to the number of vectors."""
    from mens_exp.lora.prompt_tuning import start_from_text
    from mens_exp.tokenizer.load import load_tokenizer

    backend = tiny_backend(*PROMPT, *DENSE)
    table_VD = backend.causal_lm.get_input_embeddings().get_base_layer().weight
    rows = [(table_VD == one).all(dim=1).nonzero()[0].item() for one in vectors(backend)]
    assert len(set(rows)) > MANY // 2
    random = vectors(tiny_backend(*PROMPT, "lora.prompt_tuning_init=random", *DENSE))
    assert 0.8 < random.std().item() < 1.2
    tokenizer = load_tokenizer(tiny_config().tokenizer, tiny_base.directory)
    for text in ("abcd", "abcdefghij"):
        facts = start_from_text(backend, tokenizer, text)
        (ids,) = tokenizer.encode_all([text])
        cycled = (ids * MANY)[:MANY]
        assert facts == {"init_text_tokens": len(ids)}
        assert torch.equal(vectors(backend), table_VD[cycled])


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
        (["objective=fim", "data.seq_len=40"], "data.seq_len", "objective=fim"),
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


def test_answers_of_another_model_are_refused(tiny_config):
    """New virtual tokens change the model, so its sampled answers are those of another."""
    config = tiny_config("lora=prompt_tuning", "objective=grpo")
    (problem,) = lora_problems(config)
    assert (problem.where, "lora.init_from" in problem.expected) == ("objective=grpo", True)
    config.lora.init_from = "latest"
    assert not list(lora_problems(config))


def test_lora_options_refuse_the_variant_without_its_settings():
    """The group of other options has no number of virtual tokens."""
    found = problems("lora.variant=prompt_tuning", "lora.targets=[attention]")
    assert "choose it by its option, lora=prompt_tuning" in found["lora.variant"]


@pytest.fixture(scope="module")
def run(finished_with):
    return finished_with("lora=prompt_tuning", "lora.num_virtual_tokens=6", "data.seq_len=96")


def test_a_run_records_what_was_trained(run):
    """Documents and virtual tokens fill blocks together; the probe compares with transformers."""
    manifest = Manifest.read(run.manifest)
    assert manifest.facts["trainable_parameters"] == MANY * 64
    assert manifest.facts["virtual_tokens"] == MANY
    assert manifest.facts["lora_modules"] == "embedding: 1 module"
    assert manifest.contract["adapter"]["rank"] == MANY
    reference = manifest.data_contract["probe"]["reference"]
    assert max(reference["loss"], reference["gradient"]) < 1e-6
    assert manifest.results["peft_view_difference_f32"] < 1e-6
    assert manifest.results["tuned_val_loss"] < manifest.results["base_val_loss"]


def test_validation_of_the_base_has_no_virtual_tokens(run, finished_with):
    """It is that of a run with LoRA on the same rows, none of which is cut."""
    other = finished_with("data.seq_len=90")
    losses = [Manifest.read(one.manifest).results["base_val_loss"] for one in (run, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("task=merge out={out}", "cannot be merged into its weights"),
        ("task=export export.format=hf out={out}", "cannot be merged into its weights"),
        ("task=export export.format=vllm out={out}", "vLLM loads LoRA adapters alone"),
        (
            "task=export export.format=ollama ollama.form=adapter out={out}",
            "Ollama loads LoRA adapters alone",
        ),
        ("task=export export.format=peft out={out}", "use adapter/peft, which its run has written"),
        ("task=export export.format=v3 out={out}", "prompt tuning changes no weight"),
        ("task=export export.format=v2 out={out}", "prompt tuning changes no weight"),
        ("task=serve", "is an adapter, not a complete model"),
    ],
)
def test_a_form_that_cannot_hold_virtual_tokens_is_refused(run, command, words, tmp_path, capsys):
    """By name, and nothing is written."""
    out = tmp_path / "out"
    texts = command.format(out=out).split()
    code = cli.main([*texts, f"path={run.path}", f"hydra.run.dir={tmp_path / 'record'}"])
    assert code == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_peft_directory_of_virtual_tokens_is_not_read_as_lora(run, tmp_path, capsys):
    """The refusal names its type; the record next to it can be read."""
    place = run.peft
    code = cli.main(["model=tiny_llama", f"lora.init_from={place}", "trainer=cpu", "logger=none"])
    assert code == 2
    assert "PROMPT_TUNING" in capsys.readouterr().err


def test_base_and_tuned_model_are_scored(run, rows_file, tmp_path, capsys):
    """A scorecard of a run and one of its adapter directory have the same answers."""
    answers = []
    rows = f"data.path={rows_file}"
    named = ["model=tiny_llama", "trainer=cpu", "data=jsonl", rows, "data.heldout_frac=0.1"]
    for path, more in ((run.path, []), (run.adapter, [*named, "data.val_frac=0.1"])):
        place = tmp_path / path.name
        asked = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=48", "logger=none"]
        code = cli.main(["task=evaluate", f"path={path}", *asked, *more, f"hydra.run.dir={place}"])
        assert code == 0, capsys.readouterr().err
        events = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
        answers.append({(one["condition"], one["item_id"]): one["completion"] for one in events})
    assert answers[0] == answers[1]
    assert {condition for condition, _ in answers[0]} == {"base", "tuned"}


def test_training_continues_from_the_adapter_of_a_run(run, train_in, tmp_path, capsys):
    """The initial loss is the earlier run's last one; another number of tokens is refused."""
    start = ("lora=prompt_tuning", f"lora.init_from={run.path}", "data.seq_len=96")
    again = train_in(tmp_path / "again", *start, "lora.num_virtual_tokens=6")
    found, before = (Manifest.read(one.manifest).results for one in (again, run))
    assert found["initial_val_loss"] == pytest.approx(before["tuned_val_loss"], rel=1e-6)
    train_in(tmp_path / "other", *start, "lora.num_virtual_tokens=7", code=2)
    assert "lora.num_virtual_tokens" in capsys.readouterr().err


def test_the_plan_counts_virtual_tokens(tiny_config, rows_file, cache):
    """After a run, tokens, blocks and lengths are exact; before, they are estimated alike."""
    from mens_exp.corpus.source import load_rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.planning.estimate import make_plan
    from mens_exp.tokenizer.load import load_tokenizer

    many = 10  # without them, two of the documents fit into a block
    rows = ("data=jsonl", f"data.path={rows_file}", "data.seq_len=135")
    plain, config = (
        tiny_config(*rows),
        tiny_config(*rows, "lora=prompt_tuning", f"lora.num_virtual_tokens={many}"),
    )
    before, estimated = (make_plan(one, cache)["data"] for one in (plain, config))
    assert estimated["train_tokens"] == pytest.approx(
        before["train_tokens"] + many * estimated["train_rows"], abs=2
    )
    base = resolve(config.model, cache)
    tokenizer = load_tokenizer(config.tokenizer, base.directory)
    module = RowsDataModule(config, load_rows(config.data, cache), tokenizer, cache)
    plan = make_plan(config, cache)
    documents = module.train_documents
    assert plan["data"]["exact"]
    assert plan["trainable_parameters"] == many * 64
    assert plan["data"]["train_tokens"] == len(documents.ids) + many * len(documents)
    lengths = documents.lengths + many
    assert plan["data"]["longest_tokens"] == lengths.max() <= 135
    assert plan["data"]["typical_tokens"] == round((lengths**2).sum() / lengths.sum())
    assert plan["data"]["train_blocks"] == len(module.blocks)
    assert 2 * documents.lengths.max() <= 135
    for block in module.blocks:
        assert sum(lengths[block]) <= 135
    for number, batch in enumerate(module.in_blocks()):
        assert batch.tokens == sum(lengths[module.blocks[number]])


def test_documents_are_cut_to_the_room_that_virtual_tokens_leave(tiny_config):
    """Of 40 tokens, 6 are virtual; both documents of a pair have their own."""
    from mens_exp.corpus.source import labelling_of

    labelling = labelling_of(tiny_config(*PROMPT, "data.seq_len=40"))
    assert labelling.document_tokens == 34
    assert labelling.record()["virtual_tokens"] == MANY
    assert "virtual_tokens" not in labelling_of(tiny_config()).record()
    pairs = tiny_config(*PROMPT, "data.seq_len=40", "objective=dpo")
    assert labelling_of(pairs).document_tokens == 14
    pairs.lora.num_virtual_tokens = 19
    (problem,) = check_lora(pairs)
    assert problem.expected == "at most 18"


def test_rounds_after_the_first_continue_without_the_text(tiny_config, tmp_path):
    """An adapter has one starting point: the text, and then the round before."""
    from mens_exp.tasks.round_commands import RoundCommands

    text = ("lora.prompt_tuning_init=text", "lora.prompt_tuning_init_text=Answer.")
    typed = ("task=rejection_sampling", "rejection_sampling.start=last", *PROMPT, *text)
    commands = RoundCommands(config=tiny_config(*typed), typed=typed, output=tmp_path)
    assert set(text) <= set(commands.training(1))
    later = commands.training(2)
    assert any(one.startswith("lora.init_from=") for one in later)
    assert not any("prompt_tuning_init" in one for one in later)
    assert PROMPT[1] in later
