from __future__ import annotations

import hashlib
import json

import pytest
from tokenizers import AddedToken, Tokenizer

from mens_exp.errors import ModelFileError
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.tokenizer.templates import CHATML

TURN = [{"role": "user", "content": "U"}]
BRACKETS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_own_template_wins(configured):
    """This holds even if it is not ChatML."""
    tokenizer = configured(chat_template=BRACKETS)
    assert tokenizer.template_source == "the tokenizer's own"
    assert tokenizer.render(TURN, add_generation_prompt=True) == "[U]"
    assert tokenizer.template_sha256 == hashlib.sha256(BRACKETS.encode()).hexdigest()


def test_chatml_serves_where_there_is_no_template(configured):
    """The record says that the template is not the model's."""
    tokenizer = configured()
    assert tokenizer.template_source == "ChatML"
    assert tokenizer.chat_template == CHATML


def test_template_file_wins_over_the_config(written, configured):
    """This is also transformers' order."""
    (written / "chat_template.jinja").write_text("file", "utf-8")
    assert configured(chat_template="config").chat_template == "file"


def test_default_of_several_templates_is_taken(configured):
    """Some models have a list of named templates."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": BRACKETS}]
    assert configured(chat_template=named).chat_template == BRACKETS


def test_several_templates_without_a_default_are_refused(
    configured,
):
    """Using ChatML instead would be a guess."""
    with pytest.raises(ModelFileError, match="none called default"):
        configured(chat_template=[{"name": "tool_use", "template": "T"}])


def test_special_tokens_reach_the_template(configured):
    """They may be strings or objects; null ones are absent."""
    tokenizer = configured(
        bos_token={"content": "<B>", "lstrip": False},
        sep_token="<S>",  # not a password
        chat_template="{{ bos_token }}{{ sep_token }}{{ eos_token }}{{ cls_token }}",
    )
    assert tokenizer.render(TURN, add_generation_prompt=False) == "<B><S><|im_end|>"


@pytest.mark.parametrize(
    ("decoder", "expected"), [(None, "<|endoftext|>"), ({"0": {"content": "a"}}, "<|im_end|>")]
)
def test_older_token_file_counts_where_the_config_is_older(written, configured, decoder, expected):
    """special_tokens_map.json is read unless the config has added_tokens_decoder."""
    (written / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}', "utf-8")
    assert configured(added_tokens_decoder=decoder).special_tokens["eos_token"] == expected


def test_answer_ends_with_end_of_sequence_or_the_templates_marker(
    configured,
):
    """The marker is the first control token after an answer."""
    closing = "{% for m in messages %}{{ m.content }} <|im_start|>\n{% endfor %}"
    assert configured().end_ids == {2}
    assert configured(eos_token="<|endoftext|>").end_ids == {0, 2}  # not a password
    assert configured(chat_template=closing, eos_token=None).end_ids == {1}
    assert configured(chat_template=BRACKETS, eos_token=None).end_ids == set()


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [0, 2, 9]}}, {0, 2, 9}),
        ({"generation_config.json": {"eos_token_id": 0}, "config.json": {"eos_token_id": 9}}, {0}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, {9}),
        ({"config.json": {"text_config": {"eos_token_id": [9]}}}, {9}),
        ({"config.json": {"eos_token_id": [-1, 10**6, "2", True, None]}}, set()),
    ],
)
def test_the_end_tokens_of_the_model_end_an_answer_too(written, configured, files, ends):
    """As in transformers, those of config.json count only without others; unknown ids do not."""
    for name, settings in files.items():
        (written / name).write_text(json.dumps(settings), "utf-8")
    tokenizer = configured()
    assert tokenizer.end_ids == {2} | ends
    assert tokenizer.turn_end_ids == {2}


def test_template_that_refuses_small_talk_is_read(configured):
    """The error is raised when the rows are encoded, and names the row."""
    assert configured(chat_template="{{ raise_exception('no') }}").end_ids == {2}


def test_padding_falls_back_to_the_end_of_sequence(configured):
    """The last fallback is 0; padding is masked by position and never by id."""
    assert configured().pad_id == 0
    assert configured(pad_token=None).pad_id == 2
    assert configured(pad_token="<absent>").pad_id == 2  # not a password
    assert configured(pad_token=None, eos_token=None).pad_id == 0


def test_nothing_is_added_cut_or_padded(written):
    """Settings in the file for special tokens, truncation and padding are ignored."""
    core = Tokenizer.from_file(str(written / "tokenizer.json"))
    core.enable_padding(length=8)
    core.enable_truncation(max_length=2)
    from tokenizers.processors import TemplateProcessing

    core.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    core.save(str(written / "tokenizer.json"))
    ids = HfTokenizer.from_directory(written).encode_all(["abc", "a"])
    assert [len(each) for each in ids] == [3, 1]


def test_tokens_that_are_added_but_no_controls_are_text(written):
    """Only tokens marked special are control tokens."""
    core = Tokenizer.from_file(str(written / "tokenizer.json"))
    core.add_tokens([AddedToken("plain", special=False)])
    core.save(str(written / "tokenizer.json"))
    tokenizer = HfTokenizer.from_directory(written)
    (ids,) = tokenizer.encode_all(["plain"])
    assert ids == [tokenizer.last_id]
    assert tokenizer.last_id not in tokenizer.special_ids


def test_identity_is_the_content_of_the_file(written):
    """It is the SHA-256 of tokenizer.json."""
    content = (written / "tokenizer.json").read_bytes()
    assert HfTokenizer.from_directory(written).sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "is not a tokenizer"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", json.dumps(["a"]), "is not a JSON object"),
    ],
)
def test_damaged_file_is_named(written, name, content, reason):
    """The error exits with code 2 and comes before the tokenizer is used."""
    if content is None:
        (written / name).unlink()
    else:
        (written / name).write_text(content, "utf-8")
    with pytest.raises(ModelFileError, match=reason) as caught:
        HfTokenizer.from_directory(written)
    assert caught.value.where == str(written / name)


def test_tokenizer_without_config_is_read(written):
    """With tokenizer.json alone the template is ChatML, without an EOS token."""
    (written / "tokenizer_config.json").unlink()
    tokenizer = HfTokenizer.from_directory(written)
    assert (tokenizer.special_tokens, tokenizer.eos_id) == ({}, None)
    assert tokenizer.end_ids == {2}
