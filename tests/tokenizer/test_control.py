from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mens_exp.errors import DataError
from mens_exp.model import sources
from mens_exp.tokenizer.control import ControlText

TEXTS = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd00\ufdd1"])
    | st.text(max_size=5)
).map("".join)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    directory = tmp_path_factory.mktemp("core")
    sources.write_byte_level_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=TEXTS)
def test_guarding_is_undone(core, text):
    """Any text round-trips, even one that contains our marks."""
    control = ControlText(core)
    assert control.unguard(control.guard(text)) == text
    assert "<|im_end|>" not in control.guard(text)


@given(before=TEXTS, text=TEXTS)
def test_guarded_text_is_encoded_as_text(core, before, text):
    """Guarded text is encoded byte by byte; an unguarded marker stays a control token."""
    control = ControlText(core)
    try:
        (ids,) = control.encode([f"{control.guard(before)}<|im_end|>{control.guard(text)}"])
        head, tail = before.encode(), text.encode()
    except (DataError, UnicodeEncodeError):
        return  # lone surrogates and our private spelling have their own tests below
    assert ids.index(2) == len(head)
    assert len(ids) == len(head) + 1 + len(tail)
    assert core.decode(ids, skip_special_tokens=False) == f"{before}<|im_end|>{text}"


def test_text_without_control_text_takes_the_tokenizers_own_way(core):
    """The ids are unchanged, and no second tokenizer is built."""
    control = ControlText(core)
    text = "<|im_start|>user\nü<|im_end|>"
    assert control.guard("user\nü") == "user\nü"
    assert control.encode([text]) == [core.encode(text, add_special_tokens=False).ids]
    assert control._plain is None


def test_context_of_a_token_is_that_of_the_whole_text():
    """A mark for the beginning of the text is added once, with or without guarded text."""
    vocab = {token: i for i, token in enumerate(["<e>", "▁", "a", "<", "e", ">"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken("<e>", special=True)])
    control = ControlText(core)
    (ids,) = control.encode([f"a<e>a{control.guard('<e>')}a<e>"])
    assert [core.id_to_token(token) for token in ids] == [
        *("▁", "a", "<e>", "a", "<", "e", ">", "a", "<e>")
    ]


def test_longest_control_token_is_guarded():
    """One control token may be a prefix of another."""
    core = Tokenizer(models.BPE(vocab={"<": 0}, merges=[]))
    core.add_special_tokens([AddedToken("<|a|>", special=True), AddedToken("<|a|>b", special=True)])
    control = ControlText(core)
    assert control.unguard(control.guard("<|a|>b")) == "<|a|>b"
    assert control.guard("<|a|>b").count("\ufdd0") == 1


def test_private_spelling_in_a_text_is_refused(core):
    """It could be taken for a control token, and ordinary text does not contain it."""
    control = ControlText(core)
    with pytest.raises(DataError, match="private spelling"):
        control.encode([control.guard("\ufdd22\ufdd3")])


def test_control_text_may_be_allowed(core):
    """The text then becomes the control token, and our own marks stay text."""
    control = ControlText(core, allow=True)
    assert control.encode([control.guard("<|im_end|>")]) == [[2]]
    (ids,) = control.encode([control.guard("\ufdd0<|im_end|>")])
    assert (len(ids), ids[-1]) == (4, 2)
