"""Rows of plain text for continued pre-training, supervised as a whole and without loss."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from mens_exp.corpus.split import group_of
from mens_exp.errors import DataError, Problems
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.rows.readers import Reading, read_rows
from mens_exp.rows.roles import role_counts, supervised_tokens
from mens_exp.rows.schema import TrainingPair, to_json
from mens_exp.rows.shapes import Role
from mens_exp.tokenizer.implementations import HfTokenizer, VoxTokenizer

TEXT = "It was a bright cold day in April."
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60).filter(str.strip)


@pytest.fixture(scope="module", params=[True, False], ids=["adds bos", "adds nothing"])
def directory(request, tmp_path_factory):
    """Return a tokenizer that adds BOS, as Llama's does, or one that does not, as Qwen's."""
    place = tmp_path_factory.mktemp("tokenizer")
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    if request.param:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    core.save(str(place / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return place


def row(text):
    return parse_row({"text": text}, "here:1")


def parts_of(found):
    bounds = found.offsets
    return [
        (found.ids[a:b].tolist(), found.supervised[a:b].tolist())
        for a, b in itertools.pairwise(bounds)
    ]


@given(text=TEXTS, seq_len=st.integers(8, 40), objective=st.sampled_from(["assistant", "causal"]))
def test_documents_are_what_transformers_makes_of_the_text(directory, text, seq_len, objective):
    """The oracle is transformers' call plus the end token; no target is lost or repeated."""
    whole = AutoTokenizer.from_pretrained(directory)
    ids = [*whole(text)["input_ids"], whole.eos_token_id]
    tokenizer = HfTokenizer.from_directory(directory)
    found = encode([row(text)], tokenizer, Labelling(objective=objective, seq_len=seq_len))
    assert (found.truncated, found.dropped) == (0, 0)
    learned = []
    for mine, supervised in parts_of(found):
        assert len(mine) <= seq_len
        assert supervised == [False] + [True] * (len(mine) - 1)
        learned += list(itertools.pairwise(mine))
    assert learned == list(itertools.pairwise(ids))


@given(texts=st.lists(TEXTS, min_size=1, max_size=4), seq_len=st.integers(8, 40))
def test_every_token_of_a_text_is_counted_as_learned(directory, texts, seq_len):
    """This holds between conversations too, since each token's author is counted."""
    tokenizer = HfTokenizer.from_directory(directory)
    labelling = Labelling(objective="assistant", seq_len=seq_len)
    pairs = [row(text) for text in texts]
    pairs.insert(1, TrainingPair(prompt="p", response="r" * 9))  # truncated at the smallest limits
    documents = encode(pairs, tokenizer, labelling)
    counts = role_counts(pairs, documents, tokenizer, labelling)
    assert counts.why_unknown is None
    assert counts.trained.sum() == documents.supervised.sum()
    assert counts.trained[Role.END_MARKER] >= len(texts)
    cut = [pairs[number] for number in counts.too_long if pairs[number].is_text]
    alone = encode(cut, tokenizer, labelling)
    assert supervised_tokens(cut, tokenizer, labelling) == alone.supervised.sum()
    assert counts.trained.sum() == alone.supervised.sum() + sum(
        encode([pair], tokenizer, labelling).supervised.sum()
        for number, pair in enumerate(pairs)
        if number not in counts.too_long or not pair.is_text
    )


def test_a_text_that_the_template_rendered_is_refused(directory):
    """Its control tokens would be trained as plain characters."""
    tokenizer = HfTokenizer.from_directory(directory)
    with pytest.raises(DataError, match="as if a chat template had rendered it") as caught:
        encode([row("\n<s>[user]hi</s>")], tokenizer, Labelling(objective="assistant", seq_len=64))
    assert "'messages'" in str(caught.value)
    inside = encode([row("hi </s>")], tokenizer, Labelling(objective="assistant", seq_len=64))
    end = tokenizer.eos_id
    assert (inside.ids == end).sum() == 1


def test_vox_learns_a_text_and_its_end():
    """There is one token per byte."""
    found = encode([row("ab")], VoxTokenizer(), Labelling(objective="assistant", seq_len=8))
    assert found.supervised.tolist() == [False, True, True]
    assert found.ids[-1] == VoxTokenizer().eos_id


def test_texts_are_read_from_every_kind_of_file(tmp_path):
    """JSON Lines, CSV and another column name are read."""
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.csv"
    lines.write_text(f'{{"text": "{TEXT}", "category": "novel"}}\n', "utf-8")
    table.write_text(f"body\n{TEXT}\n", "utf-8")
    (first,) = read_rows(lines).pairs
    (second,) = read_rows(table, Reading(columns={"text": "body"})).pairs
    assert (first.response, first.category, first.is_text) == (TEXT, "novel", True)
    assert second.response == TEXT
    assert parse_row(to_json(first), "again:1") == first


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": " "}, "'text' is empty"),
        ({"text": 3}, "'text' must be a string"),
        ({"text": "a", "system": "b"}, "unknown key 'system'"),
        ({"text": "a", "label": 1}, "unknown key 'label'"),
        ({"text": "a", "prompt": "b", "response": "c"}, "unknown key 'text'"),
    ],
)
def test_a_row_that_is_no_plain_text_is_refused(fields, said):
    """No part of a row is ignored."""
    with pytest.raises((DataError, Problems)) as caught:
        parse_row(fields, "here:1")
    assert said in str(caught.value)


def test_a_text_is_split_from_others_by_itself():
    """Grouped by their empty prompt, all texts would be on one side."""
    assert group_of(row("a  b")) == group_of(row("a b")) != group_of(row("c"))
    assert np.unique([group_of(row(str(number))) for number in range(9)]).size == 9
