from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_rows import TRL, WITH_TOOLS

from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.roles import role_counts, supervised_tokens
from mens_exp.rows.schema import TrainingPair
from mens_exp.rows.shapes import Role
from mens_exp.tokenizer.implementations import VoxTokenizer

FAMILIES = ["chatml", "chatml_marked", "llama3", "qwen3", "gemma", "mistral", "phi3", "phi4"]
SPELLED = ["<|im_end|>", "<|eot_id|>", "</s>", "[/INST]", "\n\n", "\n", "system", "user\n"]
TEXTS = st.lists(
    st.sampled_from(SPELLED) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    min_size=1,
    max_size=3,
).map("".join)
SAID = TEXTS.filter(str.strip)


@st.composite
def weighed(draw, rows):
    """Draw a row in which some of the earlier answers are unsupervised."""
    row = draw(rows)
    given = draw(st.sets(st.integers(0, 3)))
    return replace(row, unlearned=tuple(sorted(n for n in given if n < len(row.history))))


ROWS = weighed(
    st.builds(
        TrainingPair,
        prompt=SAID,
        response=SAID,
        history=st.lists(st.tuples(SAID, SAID), max_size=2).map(tuple),
        system=st.none() | SAID,
    )
)
PAIR = TrainingPair(prompt="Say hi.", response="hi", system="Be kind.")


def counted(tokenizer, pairs, labelling):
    documents = encode(pairs, tokenizer, labelling)
    return role_counts(pairs, documents, tokenizer, labelling), documents


def by_role(counts):
    return {role.name: int(counts[role]) for role in Role}


def test_each_byte_of_a_small_row_is_its_author_s(published):
    """ChatML by hand: one token a byte and one a marker; the answer and its end are trained."""
    labelling = Labelling(objective="assistant", seq_len=500)
    found, documents = counted(published("chatml_marked"), [PAIR], labelling)
    assert found.why_unknown is None
    texts = {"SYSTEM": len("Be kind."), "USER": len("Say hi."), "ASSISTANT": len("hi")}
    total = len(documents.ids)
    assert by_role(found.tokens) == {
        **texts,
        "END_MARKER": 1,
        "TEMPLATE": total - sum(texts.values()) - 1,
    }
    assert by_role(found.trained) == {
        **dict.fromkeys(texts, 0),
        "TEMPLATE": 0,
        "ASSISTANT": 2,
        "END_MARKER": 1,
    }
    assert (found.ends, found.ends_trained, found.too_long) == (1, 1, [])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25)
@given(pairs=st.lists(ROWS, min_size=1, max_size=4), cut=st.integers(20, 400), left=st.booleans())
def test_every_document_is_placed_under_published_templates(
    published,
    family,
    pairs,
    cut,
    left,
):
    """For random texts and limits every token has a role, and no user token is supervised."""
    if family == "gemma":
        pairs = [TrainingPair(prompt=one.prompt, response=one.response) for one in pairs]
    labelling = Labelling(
        objective="assistant", seq_len=cut, truncation="left" if left else "right"
    )
    found, documents = counted(published(family), pairs, labelling)
    assert found.why_unknown is None
    assert found.tokens.sum() == len(documents.ids)
    assert found.trained.sum() == documents.supervised.sum()
    assert found.trained[Role.USER] == found.trained[Role.SYSTEM] == 0
    assert found.ends_trained == found.ends
    assert found.missed == 0


def test_a_cut_may_leave_an_answer_one_token_that_begins_in_the_template(published):
    """Found by chance: the newlines of template and answer form one token, the last kept."""
    row = TrainingPair(
        prompt="<|im_end|>",
        response="<|im_end|>",
        history=(("<|im_end|>[/INST]", "<|im_end|></s>\n\n"), ("\x80" * 3, "\n\n<|im_end|>")),
        system="<|im_end|>\U00010000",
    )
    labelling = Labelling(objective="assistant", seq_len=70)
    found, documents = counted(published("phi3"), [row], labelling)
    assert not documents.supervised[-1]
    assert found.missed == 0


@pytest.mark.parametrize("cut", range(20, 61))
def test_an_answer_that_is_given_and_not_learned_is_never_missed(published, cut):
    """The cut answer begins like the text before the last answer."""
    says = "<|im_end|>"
    history = ((says, says), (says, says))
    row = TrainingPair(prompt=says, response=says, history=history, unlearned=(1,))
    labelling = Labelling(objective="assistant", seq_len=cut)
    found, documents = counted(published("phi3"), [row], labelling)
    assert found.tokens.sum() == len(documents.ids)
    assert found.missed == 0


@pytest.mark.parametrize("objective", ["assistant", "causal", "last_k"])
@settings(max_examples=25)
@given(pairs=st.lists(ROWS, min_size=1, max_size=3), cut=st.integers(20, 400))
def test_every_document_of_vox_is_placed(objective, pairs, cut):
    """Vox has no offsets; its ids are bytes and compounds."""
    labelling = Labelling(objective=objective, seq_len=cut)
    pairs = [one for one in pairs if "<|im_" not in repr(one)]
    found, documents = counted(VoxTokenizer(), pairs, labelling)
    assert found.why_unknown is None
    assert found.tokens.sum() == len(documents.ids)


def test_masks_left_behind_by_a_cut_show_as_trained_user_tokens(
    published,
):
    """Labels shifted by eight tokens supervise the user's text."""
    labelling = Labelling(objective="assistant", seq_len=500)
    documents = encode([PAIR], published("chatml_marked"), labelling)
    documents.supervised[:] = [*documents.supervised[8:].tolist(), *[False] * 8]
    found = role_counts([PAIR], documents, published("chatml_marked"), labelling)
    assert found.trained[Role.ASSISTANT] == 0
    assert found.ends_trained == 0 < found.ends
    assert found.missed == len("hi")
    assert found.trained.sum() == 3


def test_documents_of_other_rows_are_not_told(published):
    """Roles are not guessed for a document that was not made from its row."""
    labelling = Labelling(objective="assistant", seq_len=500)
    documents = encode([PAIR], published("chatml_marked"), labelling)
    other = TrainingPair(prompt="Say ho.", response="ho", system="Be kind.")
    found = role_counts([other], documents, published("chatml_marked"), labelling)
    assert found.documents == 0
    assert other.id in str(found.why_unknown)


def test_what_the_limit_takes_is_told(published):
    """A row with 101 supervised tokens, cut after ten of them, keeps ten."""
    tokenizer = published("chatml_marked")
    long = TrainingPair(prompt="Say it.", response="x" * 100)
    endless = Labelling(objective="assistant", seq_len=500)
    first = encode([long], tokenizer, endless).supervised.tolist().index(True)
    cut = Labelling(objective="assistant", seq_len=first + 10)
    found, _ = counted(tokenizer, [TrainingPair(prompt="Say.", response="hi"), long], cut)
    assert (found.too_long, found.left_of_too_long) == ([1], 10)
    assert supervised_tokens([long], tokenizer, cut) == 101
    assert supervised_tokens([], tokenizer, cut) == 0
    assert (found.ends, found.ends_trained) == (1, 1)  # the end of the long row is truncated


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gptoss", "qwen3_5_think"])
def test_tokens_of_a_row_with_tools_have_their_authors(published, name):
    """Calls belong to the assistant and results to the tool; answers are supervised to the end."""
    tokenizer = published("chatml", template=(TRL / f"{name}.jinja").read_text("utf-8"))
    labelling = Labelling(objective="assistant", seq_len=100_000)
    found, documents = counted(tokenizer, [WITH_TOOLS, PAIR, WITH_TOOLS], labelling)
    assert (found.why_unknown, found.missed) == (None, 0)
    assert found.documents == len(documents)
    assert int(found.trained[Role.USER]) == 0
    calls = sum(len(text) for _, text in WITH_TOOLS.exchanges)
    assert int(found.trained[Role.ASSISTANT]) > 2 * calls
