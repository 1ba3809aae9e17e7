from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from mens_exp.corpus.data_contract import (
    heldout_part,
    known_token_part,
    overlap_part,
    rows_part,
    token_part,
)
from mens_exp.corpus.row_files import Rows
from mens_exp.rows import cache as rows_cache
from mens_exp.rows.cache import CacheKey
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import VoxTokenizer

VOX = VoxTokenizer()
LABELLING = Labelling(objective="assistant", seq_len=200)
WORDS = "a b c d e f g h i j k l m n o p q r s t"


def pair(prompt, response="ok", **more):
    return TrainingPair(prompt=prompt, response=response, **more)


def rows(train, **sides):
    given = {"val": [], "heldout": [], **sides}
    return Rows(source="jsonl", train=list(train), sha256="0", **given)


def part_of(train, **sides):
    documents = encode(train, VOX, LABELLING)
    return rows_part(rows(train, **sides), documents, VOX, LABELLING)


def test_groups_and_rows_on_two_sides_are_counted():
    """Groups count by their own names, whatever the split used."""
    train = [pair("1", group="a.py"), pair("2", group="b.py"), pair("3")]
    found = part_of(train, val=[pair("4", group="b.py")], heldout=[pair("3"), pair("5")])
    assert found["groups_on_two_sides"] == ["b.py"]
    assert found["rows_on_two_sides"] == 1


def test_training_rows_are_held_against_some_of_many_held_out_rows(
    monkeypatch,
):
    """As many held-out rows as fit the memory are compared, and the record gives the number."""
    everyone = rows([pair(f"t{n}", WORDS) for n in range(3)], heldout=[pair("h", WORDS)] * 5)
    whole = heldout_part(everyone)
    monkeypatch.setattr("mens_exp.corpus.data_contract.MOST_ITEMS", 2)
    part = heldout_part(everyone)
    assert whole is not None
    assert part is not None
    assert (whole["items"], whole["against"]) == (5, "the held-out rows")
    assert (part["items"], part["against"]) == (2, "2 of the held-out rows, drawn evenly")
    assert part["rows_sharing"] == 3
    assert heldout_part(rows([pair("t", WORDS)])) is None


def test_conversations_that_repeat_an_answer_are_counted():
    """White space is normalized; rows with a single exchange do not count."""
    train = [
        pair("1", "Yes."),
        pair("2", "Yes.\n", history=(("1", " Yes."),)),
        pair("2", "No.", history=(("1", "Yes."),)),
    ]
    found = part_of(train)
    assert (found["conversations"], found["repeated_answers"]) == (2, 1)


def test_prompts_are_those_of_evaluation_in_every_kind_of_document():
    """Conversations, truncated documents and unsupervised rows do not count as different."""
    train = [
        pair("x" * 500),  # its answer lies beyond the limit
        pair("1", "y" * 500),  # truncated: not compared
        pair("2"),
        pair("b", "two", history=(("a", "one"),)),
    ]
    found = part_of(train)
    assert (found["prompts_checked"], found["prompts_otherwise"]) == (2, 0)


def test_plain_texts_are_not_held_against_prompts():
    """Plain text has no prompt, in one document or several; conversations are still checked."""
    train = [pair("", "a text"), pair("1"), pair("", "z" * 500), pair("2")]
    found = part_of(train)
    assert (found["prompts_checked"], found["prompts_otherwise"]) == (2, 0)
    everything = dataclasses.replace(LABELLING, objective="causal")
    documents = encode(train, VOX, everything)
    found = rows_part(rows(train), documents, VOX, everything)
    assert found["prompts_checked"] == 0


def test_documents_of_another_template_are_told():
    """The supervised part follows other token ids than evaluation uses."""
    train = [pair("1"), pair("2")]
    documents = encode(train, VOX, LABELLING)
    other = VoxTokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    found = rows_part(rows(train), documents, other, LABELLING)
    assert (found["prompts_checked"], found["prompts_otherwise"]) == (2, 2)


def test_a_mix_is_held_against_its_exact_shares():
    """By hand: of ten rows, 0.7 and 0.3 are seven and three."""
    sources = {"a": {"weight": 0.7, "rows": 5}, "b": {"weight": 0.3, "rows": 5}}
    found = part_of([pair("1")], taken={"mixed": {"rows": 10, "sources": sources}})
    assert found["mix_off"] == 2
    assert part_of([pair("1")])["mix_off"] is None


def test_half_of_an_item_in_one_row_is_contained():
    """By hand: twenty words have eight 13-grams; sixteen of them have four."""
    row = pair("Say it.", " ".join(WORDS.split()[:16]))
    found = overlap_part([pair("clean"), row, row], [("i", WORDS), ("j", "other")], "items")
    assert (found["items"], found["sharing"], found["contained"]) == (2, 1, 1)
    assert (found["contained_frac"], found["rows_sharing"]) == (0.5, 2)
    assert found["worst"] == [{"row": row.id, "item": "i", "shared": 4, "share": 0.5}]
    assert overlap_part([row], [], "nothing")["contained_frac"] == 0


@pytest.fixture
def key():
    return CacheKey(
        rows_sha256="r",
        tokenizer_sha256=VOX.sha256,
        template_sha256=VOX.template_sha256,
        special_tokens_sha256="s",
        date=None,
        allow_control_text=True,
        labelling=LABELLING,
    )


def test_the_token_part_is_counted_by_hand_and_kept(tmp_path, key, monkeypatch):
    """By hand: two rows of 10 supervised characters and one of 300, cut; then from the cache."""
    train = [pair("1", "y" * 10), pair("2", "z" * 10), pair("3", "w" * 300)]
    documents, counts = rows_cache.encoded(tmp_path, key, lambda: encode(train, VOX, LABELLING))
    made = token_part(train, documents, VOX, cache=tmp_path, key=key, counts=counts)
    part = made.tokens
    assert part["trained_by_role"] is not None
    assert part["tokens_by_role"] is not None
    assert part["tokens_by_role"]["user"] == 3
    kept = part["trained_by_role"]["assistant"] - 20
    assert 0 < kept < 200
    assert part["trained_tokens_lost"] == 300 - kept + 1  # and its end marker
    assert part["trained_tokens_lost_frac"] == pytest.approx((301 - kept) / (22 + 301), abs=1e-6)
    assert (part["ends"], part["ends_trained"], part["end_marker_trained"]) == (2, 2, True)
    assert part["end_marker_trained_frac"] == pytest.approx(2 / 3, abs=1e-6)
    assert (part["longest"], part["truncated"], part["nothing_to_learn"]) == (200, 1, 0)
    monkeypatch.setattr("mens_exp.corpus.data_contract.role_counts", None)
    again = token_part(train, documents, VOX, cache=tmp_path, key=key, counts=counts)
    assert again == made == known_token_part(tmp_path, key, counts)


def test_a_token_part_that_is_damaged_or_of_other_documents_is_not_known(tmp_path, key):
    """The token part is then computed again."""
    train = [pair("1")]
    documents, counts = rows_cache.encoded(tmp_path, key, lambda: encode(train, VOX, LABELLING))
    made = token_part(train, documents, VOX, cache=tmp_path, key=key, counts=counts)
    (file,) = (tmp_path / "data_contract").iterdir()
    text = file.read_text("utf-8")
    file.write_text(text.replace(counts.sha256, "0" * 64), "utf-8")
    assert known_token_part(tmp_path, key, counts) is None
    file.write_text(text[:40], "utf-8")
    assert known_token_part(tmp_path, key, counts) is None
    value = json.loads(text)
    value["tokens"]["trained_tokens_lost"] += 1
    file.write_text(json.dumps(value), "utf-8")
    assert known_token_part(tmp_path, key, counts) is None
    del value["sha256"]
    value["tokens"]["trained_tokens_lost"] -= 1
    file.write_text(json.dumps(value), "utf-8")  # format of earlier versions
    assert known_token_part(tmp_path, key, counts) is None
    again = token_part(train, documents, VOX, cache=tmp_path, key=key, counts=counts)
    assert again == made


def test_tokens_lost_of_answers_with_those_of_other_rows(tmp_path, key):
    """objective=kto also encodes each prompt with another row's answer, of any length."""
    labelling = Labelling(objective="kto", seq_len=40)
    train = [
        dataclasses.replace(pair(f"q{n}", "y" * n), fields=(("label", 1),))
        for n in (3, 60, 5, 80, 4)
    ]
    endless = dataclasses.replace(labelling, seq_len=10_000)
    kept, whole = (encode(train, VOX, one).supervised.sum() for one in (labelling, endless))
    key = dataclasses.replace(key, labelling=labelling)
    documents, counts = rows_cache.encoded(tmp_path, key, lambda: encode(train, VOX, labelling))
    made = token_part(train, documents, VOX, cache=tmp_path, key=key, counts=counts)
    assert made.tokens["trained_tokens_lost"] == whole - kept > 0


def test_documents_that_are_not_their_rows_leave_roles_unknown_with_the_reason(tmp_path, key):
    """Checks that need no roles still run."""
    train = [pair("1", "y" * 300)]
    documents, counts = rows_cache.encoded(tmp_path, key, lambda: encode(train, VOX, LABELLING))
    other = np.append(np.int32(5), documents.ids[1:])
    documents = dataclasses.replace(documents, ids=other)
    made = token_part(train, documents, VOX, cache=tmp_path, key=key, counts=counts)
    assert made.tokens["tokens_by_role"] is made.tokens["end_marker_trained"] is None
    assert train[0].id in made.unknown["tokens.tokens_by_role"]
    learned = counts.supervised_tokens
    assert made.tokens["trained_tokens_lost"] == 301 - learned
