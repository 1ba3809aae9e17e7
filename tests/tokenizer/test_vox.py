from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.tokenizer.implementations import VOX_COMPOUNDS, VOX_VOCAB_SIZE, VoxTokenizer

VOX = VoxTokenizer()


def ids_by_definition(text):
    """Encode position by position, as in the specification."""
    data, ids, place = text.encode("utf-8", "surrogatepass"), [], 0
    while place < len(data):
        for index, compound in enumerate(VOX_COMPOUNDS):
            if data.startswith(compound.encode(), place):
                ids.append(98 + index)
                place += len(compound)
                break
        else:
            byte = data[place]
            ids.append(byte - 32 + 3 if 32 <= byte <= 126 else 1)
            place += 1
    return ids


def test_vocabulary_has_131_ids():
    """They are PAD, UNK, EOS, 95 printable characters and 33 compounds."""
    assert VOX_VOCAB_SIZE == 3 + 95 + 33 == 131
    assert VOX.last_id == 130


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        (" ", [3]),
        ("~", [97]),
        ("workflow", [98]),
        ("fn f", [103, 102 - 32 + 3]),
        ("fn", [102 - 32 + 3, 110 - 32 + 3]),
        ("->=>", [109, 110]),
        ("...", [112, 46 - 32 + 3]),
        ("===", [114, 61 - 32 + 3]),
        ("<|im_start|><|im_end|>", [117, 118]),
        ("```", [119]),
        ("@v0", [130]),
        ("@action", [124]),
        ("\n\t", [1, 1]),
        ("é", [1, 1]),
        ("€", [1, 1, 1]),
        ("\x7f", [1]),
        ("\ud800", [1, 1, 1]),
    ],
)
def test_ids_are_those_of_the_specification(text, ids):
    """By hand: ASCII is code - 29, and compounds count from 98 in the order of the list."""
    assert VOX.encode(text) == ids


def test_list_order_wins_over_length():
    """`@test` precedes no longer name, but `=>` precedes `==`, so `==>` is `==`, `>`."""
    assert VOX.encode("==>") == [114, 62 - 32 + 3]
    assert VOX.encode("=>=") == [110, 61 - 32 + 3]
    assert VOX.encode("<=>") == [116, 62 - 32 + 3]


compounded = st.lists(
    st.one_of(st.sampled_from(VOX_COMPOUNDS), st.text(max_size=4)), max_size=30
).map("".join)


@given(compounded)
def test_encoding_is_that_of_the_place_by_place_definition(text):
    """The texts have many compounds, characters of any script and control characters."""
    assert VOX.encode(text) == ids_by_definition(text)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_printable_ascii_comes_back(text):
    """Printable ASCII round-trips, with or without compounds."""
    assert VOX.decode(VOX.encode(text)) == text


@given(st.text())
def test_no_id_lies_outside_the_vocabulary(text):
    """Ids of text are from 1 to 130, and never PAD or EOS."""
    assert set(VOX.encode(text)) <= set(range(1, 131)) - {2}


@given(st.text())
def test_what_is_lost_shows_as_replacement_characters(text):
    """Each byte outside printable ASCII becomes one U+FFFD."""
    expected = "".join(
        chr(byte) if 32 <= byte <= 126 else "\ufffd" for byte in text.encode("utf-8")
    )
    assert VOX.decode(VOX.encode(text)) == expected


def test_decoding_drops_padding_and_end():
    """0 and 2 are dropped; 1 and ids beyond the vocabulary are shown."""
    assert VOX.decode([0, 36, 2, 1, 0, 131]) == "A\ufffd\ufffd"


def test_chatml_is_exact():
    """There is no newline after the last end marker, and markers are one id each."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = VOX.render(turns, add_generation_prompt=False)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
    ids = VOX.encode(text)
    assert ids[0] == 117
    assert ids[-1] == 118
    assert ids[-1] in VOX.end_ids & VOX.special_ids


def test_batches_are_encoded_one_by_one():
    """The texts of a batch are independent."""
    assert VOX.encode_all(["=", ">"]) == [[32], [33]]
