from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mens_exp.config.objective import OBJECTIVES
from mens_exp.errors import ConfigError, DataError
from mens_exp.model import sources
from mens_exp.rows.answers import messages_of, prompt_text
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.roles import role_counts
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import HfTokenizer

PAIR = TrainingPair(prompt="Say hi.", response="hi")
LONG = TrainingPair(prompt="Say it.", response="x" * 100)
PROMPT = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = len("xuser\nSay hi.x\nxassistant\n")  # one token per marker
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """Return the byte-level tokenizer with the given chat template and tokenizer_config."""

    def made(template=None, config=None):
        directory = tmp_path_factory.mktemp("tokenizer")
        sources.write_byte_level_tokenizer(directory)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template, "utf-8")
        if config is not None:
            (directory / "tokenizer_config.json").write_text(config, "utf-8")
        return HfTokenizer.from_directory(directory)

    return made


@pytest.fixture(scope="module")
def tokenizer(tokenizer_of):
    return tokenizer_of()


def encoded(
    tokenizer,
    *pairs,
    objective="assistant",
    seq_len=10_000,
):
    labelling = Labelling(objective=objective, seq_len=seq_len)
    return encode(pairs or [PAIR], tokenizer, labelling)


def whole(tokenizer, documents):
    return str(tokenizer.core.decode(documents.ids.tolist(), skip_special_tokens=False))


def supervised(tokenizer, documents):
    ids = documents.ids[documents.supervised].tolist()
    return str(tokenizer.core.decode(ids, skip_special_tokens=False))


def test_answer_and_its_end_marker_are_learned(tokenizer):
    """Only the answer and its end marker are supervised."""
    documents = encoded(tokenizer)
    assert whole(tokenizer, documents) == f"{PROMPT}hi<|im_end|>"
    assert documents.supervised.tolist() == [False] * PROMPT_TOKENS + [True] * 3
    assert supervised(tokenizer, documents) == "hi<|im_end|>"


@given(prompt=TEXTS, response=TEXTS, system=st.none() | TEXTS)
def test_learned_text_is_exactly_the_answer(tokenizer, prompt, response, system):
    """For random texts the supervised part is the answer and the rest is the prompt."""
    pair = TrainingPair(prompt=prompt, response=response, system=system)
    documents = encoded(tokenizer, pair)
    assert supervised(tokenizer, documents) == f"{response}<|im_end|>"
    asked = tokenizer.unguard(prompt_text(pair, tokenizer))
    assert whole(tokenizer, documents) == asked + f"{response}<|im_end|>"


def fields_of(rows):
    """Return a value for each field that rows of an objective must have."""
    values = {"rejected": "no", "label": 1, "reward": 0.5}
    return tuple((name, values[name]) for name in sorted(rows.fields))


# Objectives for conversations; `fim` is for plain text, in test_infilling.py.
OF_CONVERSATIONS = [name for name in OBJECTIVES.built_in if name != "fim"]


@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5), limit=st.integers(8, 80))
def test_first_token_is_never_learned(tokenizer, texts, limit):
    """It has no predecessor to be predicted from, with any objective."""
    plain = [TrainingPair(prompt=prompt, response=response) for prompt, response in texts]
    for objective in OF_CONVERSATIONS:
        rows = Labelling(objective=objective, seq_len=limit).rows
        pairs = [replace(pair, fields=fields_of(rows)) for pair in plain]
        documents = encoded(tokenizer, *pairs, objective=objective, seq_len=limit)
        assert not documents.supervised[documents.offsets[:-1]].any()
        assert (documents.lengths <= limit // rows.together).all()
        assert len(documents) + documents.dropped == rows.together * len(pairs)
        each = np.split(documents.supervised, documents.offsets[1:-1])
        assert all(mask.any() for mask in each) or not len(documents)


def test_causal_learns_every_token_but_the_first(tokenizer):
    """The prompt is supervised too; the ids equal those of `assistant`."""
    causal, assistant = encoded(tokenizer, objective="causal"), encoded(tokenizer)
    assert causal.supervised.tolist() == [False] + [True] * (len(causal.ids) - 1)
    assert causal.ids.tolist() == assistant.ids.tolist()


def test_unknown_objective_is_refused(tokenizer):
    """An unknown objective is not mistaken for a known one."""
    with pytest.raises(ConfigError, match="the nearest is causal"):
        encoded(tokenizer, objective="casual")


@pytest.mark.parametrize("objective", OF_CONVERSATIONS)
def test_objectives_of_the_configuration_are_known(tokenizer, objective):
    """Every objective that validation accepts can be encoded."""
    rows = Labelling(objective=objective, seq_len=100).rows
    pair = replace(PAIR, fields=fields_of(rows))
    assert len(encoded(tokenizer, pair, objective=objective)) == rows.together


def test_long_document_is_cut_on_the_right(tokenizer):
    """The prompt and the beginning of the answer are kept; no end marker is added."""
    documents = encoded(tokenizer, LONG, seq_len=PROMPT_TOKENS + 10)
    assert documents.lengths.tolist() == [PROMPT_TOKENS + 10]
    assert supervised(tokenizer, documents) == "x" * 10
    assert (documents.truncated, documents.dropped) == (1, 0)


@pytest.mark.parametrize(("over", "truncated"), [(0, 0), (-1, 1)])
def test_document_of_the_limits_length_is_whole(tokenizer, over, truncated):
    """Only a longer document is truncated."""
    documents = encoded(tokenizer, seq_len=PROMPT_TOKENS + 3 + over)
    assert documents.truncated == truncated


def test_document_that_keeps_no_answer_is_dropped_and_counted(tokenizer):
    """Its prompt fills the limit; the other rows are kept."""
    wordy = TrainingPair(prompt="p" * 200, response="hi")
    documents = encoded(tokenizer, PAIR, wordy, PAIR, seq_len=100)
    assert (len(documents), documents.truncated, documents.dropped) == (2, 1, 1)
    assert supervised(tokenizer, documents) == "hi<|im_end|>" * 2
    assert len(encoded(tokenizer, wordy, objective="causal", seq_len=100)) == 1


def test_document_cut_to_its_first_token_is_dropped(tokenizer):
    """A single token has nothing to predict."""
    assert encoded(tokenizer, objective="causal", seq_len=1).dropped == 1
    assert encoded(tokenizer, objective="causal", seq_len=2).dropped == 0


def test_nothing_kept_is_no_document(tokenizer):
    """The arrays are empty, with a single offset."""
    documents = encoded(tokenizer, seq_len=8)
    assert (len(documents), documents.offsets.tolist(), documents.dropped) == (0, [0], 1)
    assert documents.ids.dtype == np.int32


def test_documents_lie_one_after_the_other(tokenizer):
    """Offsets give the documents, and lengths follow from them."""
    documents = encoded(tokenizer, PAIR, LONG)
    lengths = [PROMPT_TOKENS + 3, PROMPT_TOKENS + 101]
    assert documents.offsets.tolist() == [0, lengths[0], sum(lengths)]
    assert documents.lengths.tolist() == lengths


def test_rows_encoded_some_at_a_time_are_those_encoded_together(tokenizer, monkeypatch):
    """Encoding in parts equals encoding at once, even if some parts have no documents."""
    rows = [TrainingPair(prompt="p" * (9 * i), response="r" * (i + 1)) for i in range(1, 8)]
    together = encoded(tokenizer, *rows, seq_len=60)
    monkeypatch.setattr("mens_exp.rows.documents.ROWS_TOGETHER", 2)
    apart = encoded(tokenizer, *rows, seq_len=60)
    for name in ("ids", "supervised", "offsets"):
        one, other = getattr(apart, name), getattr(together, name)
        assert (one.tolist(), one.dtype) == (other.tolist(), other.dtype)
    assert (apart.dropped, apart.truncated) == (together.dropped, together.truncated)
    assert 0 < apart.dropped < len(rows)


def test_end_marker_that_is_also_padding_is_learned(
    tokenizer_of,
):
    """Labels are set by position, so pad = eos = end marker does not matter."""
    tokenizer = tokenizer_of(config='{"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}')
    assert tokenizer.pad_id == tokenizer.eos_id == 2
    assert supervised(tokenizer, encoded(tokenizer)) == "hi<|im_end|>"


def test_newline_behind_the_end_marker_is_not_learned(
    tokenizer_of,
):
    """SmolLM2's template adds a newline, after generation has stopped."""
    tokenizer = tokenizer_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    documents = encoded(tokenizer)
    assert whole(tokenizer, documents).endswith("hi<|im_end|>\n")
    assert supervised(tokenizer, documents) == "hi<|im_end|>"


def test_space_that_the_template_puts_before_the_answer_is_learned(
    tokenizer_of,
):
    """With Mistral's template the prompt ends before the space, so it must be generated."""
    tokenizer = tokenizer_of(
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    documents = encoded(tokenizer)
    assert whole(tokenizer, documents) == "[INST] Say hi.[/INST] hi<|im_end|>"
    assert supervised(tokenizer, documents) == " hi<|im_end|>"


def test_template_that_trims_the_answer_is_followed(
    tokenizer_of,
):
    """The template decides about white space around an answer."""
    tokenizer = tokenizer_of(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    padded = TrainingPair(prompt="p", response="\n  hi \n")
    assert supervised(tokenizer, encoded(tokenizer, padded)) == "hi<|im_end|>"


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ('{"eos_token": "<|endoftext|>"}', "<|endoftext|>"),
        ('{"eos_token": "<|im_end|>"}', "<|im_end|>"),
    ],
)
def test_template_without_end_marker_is_closed_by_the_end_of_sequence(tokenizer_of, config, end):
    """Otherwise the model would not learn to stop."""
    plain = (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}"
    )
    tokenizer = tokenizer_of(plain, config)
    assert supervised(tokenizer, encoded(tokenizer)) == f"hi\n{end}"


def test_answer_that_nothing_ends_is_refused(tokenizer_of):
    """Neither the template nor the tokenizer has an end token."""
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}|{% endfor %}", "{}")
    with pytest.raises(DataError, match="no token marks the end") as caught:
        encoded(tokenizer)
    assert caught.value.where == f"row {PAIR.id}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content if loop.first else 'no' }}<|im_end|>{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x:' if add_generation_prompt }}",
    ],
    ids=["alters the answer", "drops the answer", "alters the opening"],
)
def test_template_that_alters_a_row_is_refused(tokenizer_of, template):
    """The training text would differ from the row; the error names the row."""
    with pytest.raises(DataError, match="does not keep prompt and answer") as caught:
        encoded(tokenizer_of(template))
    assert caught.value.where == f"row {PAIR.id}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", ["''", "m.content | upper", "m.content[1:]"])
def test_template_that_drops_what_the_user_says_is_refused(tokenizer_of, content):
    """The answer would be learned without its question."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content if m.role != 'user' else "
        + content
        + " }}<|im_end|>{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    with pytest.raises(DataError, match="drops the row's prompt") as caught:
        encoded(tokenizer_of(template))
    assert caught.value.where == f"row {PAIR.id}"


def test_system_prompt_is_a_turn_of_its_own(tokenizer):
    """Without a system prompt the template's default is used."""
    told = TrainingPair(prompt="p", response="r", system="s")
    assert [turn["role"] for turn in messages_of(told)] == ["system", "user"]
    assert [turn["role"] for turn in messages_of(PAIR)] == ["user"]
    assert prompt_text(PAIR, tokenizer) == PROMPT


def test_ids_begin_with_those_of_the_prompt_alone(tmp_path):
    """Prompt and answer are tokenized apart: generation never sees a token across the boundary."""
    vocab = {token: i for i, token in enumerate(["<e>", "u", ":", "x", "\n", "\n\n", "a"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("\n", "\n")]))
    core.add_special_tokens([AddedToken("<e>", special=True)])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}u:\n{{ m.content }}{% if m.role != 'user' %}<e>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}u:\n{{ '' }}{% endif %}",
        "utf-8",
    )
    tokenizer = HfTokenizer.from_directory(tmp_path)
    pair = TrainingPair(prompt="x", response="\na")
    documents = encoded(tokenizer, pair)
    (prompt,) = tokenizer.encode_all([prompt_text(pair, tokenizer)])
    assert documents.ids.tolist() == [*prompt, vocab["\n"], vocab["a"], vocab["<e>"]]
    assert documents.supervised.tolist() == [False] * len(prompt) + [True] * 3


def test_answer_is_tokenized_as_a_continuation(tmp_path):
    """A tokenizer with a beginning-of-text mark must not add one to an answer."""
    vocab = {token: i for i, token in enumerate(["<e>", "▁", "u", ":", "x", "a"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken("<e>", special=True)])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}:"
        "{% else %}{{ m.content }}<e>{% endif %}{% endfor %}",
        "utf-8",
    )
    tokenizer = HfTokenizer.from_directory(tmp_path)
    documents = encoded(tokenizer, TrainingPair(prompt="x", response="a"))
    tokens = [core.id_to_token(token) for token in documents.ids.tolist()]
    assert tokens == ["▁", "u", ":", "x", ":", "a", "<e>"]
    assert documents.supervised.tolist() == [False] * 5 + [True] * 2


SPACED = {  # tokenizers that put a space before the first word of a text
    "first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first"),
    "always": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
}


@pytest.mark.parametrize("kind", SPACED)
def test_an_answer_behind_a_space_gets_no_second_one(tmp_path, kind):
    """The prompt ends in a space, so that prompt and answer are tokenized apart."""
    space = "Ġ" if kind == "bytes" else "▁"
    vocab = [*("<e>", space, "u", ":", "x", "a", "b", "\n", "Ċ", ".", "0"), f"{space}a"]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(vocab)}, merges=[(space, "a")]))
    core.pre_tokenizer = SPACED[kind]()
    core.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.Metaspace()
    core.add_special_tokens([AddedToken("<e>", special=True)])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}u:{{ m.content }}: "
        "{% else %}{{ m.content }}<e>{% endif %}{% endfor %}",
        "utf-8",
    )
    tokenizer = HfTokenizer.from_directory(tmp_path)
    pair = TrainingPair(prompt="x", response="ab")
    documents = encoded(tokenizer, pair)
    tokens = [core.id_to_token(token) for token in documents.ids.tolist()]
    assert tokens == [space, "u", ":", "x", ":", space, "a", "b", "<e>"]
    assert documents.supervised.tolist() == [False] * 6 + [True] * 3
    roles = role_counts([pair], documents, tokenizer, Labelling(objective="assistant", seq_len=99))
    assert (roles.why_unknown, roles.missed) == (None, 0)


def cut(tokenizer, row, limit):
    labelling = Labelling(objective="assistant", seq_len=limit, truncation="left")
    return encode([row], tokenizer, labelling)


def test_document_cut_on_the_left_keeps_its_end(tokenizer):
    """The labels move with the tokens: the end of the answer is supervised."""
    wordy = TrainingPair(prompt="p" * 200, response="hi")
    documents = cut(tokenizer, wordy, 30)
    assert whole(tokenizer, documents).endswith("pp<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>")
    assert documents.lengths.tolist() == [30]
    assert supervised(tokenizer, documents) == "hi<|im_end|>"
    assert (documents.truncated, documents.dropped) == (1, 0)


def test_token_behind_a_cut_is_not_learned(tokenizer):
    """Its predecessor was cut off."""
    documents = cut(tokenizer, LONG, 10)
    assert whole(tokenizer, documents) == "x" * 9 + "<|im_end|>"
    assert supervised(tokenizer, documents) == "x" * 8 + "<|im_end|>"


@pytest.mark.parametrize(("limit", "truncated"), [(PROMPT_TOKENS + 3, 0), (PROMPT_TOKENS + 2, 1)])
def test_document_of_the_limits_length_is_not_cut_on_the_left(tokenizer, limit, truncated):
    """Only a longer document is truncated."""
    assert cut(tokenizer, PAIR, limit).truncated == truncated


def test_begin_of_sequence_survives_a_cut_on_the_left(
    tokenizer_of,
):
    """A BOS token at the start survives; ChatML's marker, which opens every turn, is cut."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = tokenizer_of(template, '{"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}')
    documents = cut(tokenizer, LONG, 12)
    assert whole(tokenizer, documents) == "<|endoftext|>" + "x" * 10 + "<|im_end|>"
    assert supervised(tokenizer, documents) == "x" * 9 + "<|im_end|>"
    assert not whole(tokenizer_of(), cut(tokenizer_of(), LONG, 12)).startswith("<|im_start|>")


def test_causal_learns_a_conversation_once(tokenizer):
    """All turns are in one document."""
    row = TrainingPair(history=(("a", "b"),), prompt="c", response="d")
    documents = encoded(tokenizer, row, objective="causal")
    assert len(documents) == 1
    assert documents.supervised.sum() == len(documents.ids) - 1
