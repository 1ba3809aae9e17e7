from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mens_exp.config.compose import compose, typed
from mens_exp.config.task import GgufDtype
from mens_exp.errors import MensError
from mens_exp.export.gguf import write_gguf
from mens_exp.layout.model_cache import locate_bundled

gguf = pytest.importorskip("gguf", reason="gguf is missing: pip install 'mens-exp[gguf]'")
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def copied(source, target):
    return shutil.copytree(source, target)


def header(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def smollm_splitting():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def split_by(pattern):
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    ("name", "splitting"),
    [
        ("gpt-2", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("smollm", smollm_splitting),
        ("llama-bpe", lambda: split_by(LLAMA3_SPLIT)),
        ("qwen2", lambda: split_by(LLAMA3_SPLIT.replace("{1,3}", ""))),
    ],
)
def test_a_byte_level_tokenizer_read_back_gives_the_same_ids(
    same_ids,
    name,
    splitting,
    trained_vocabulary,
    source_of,
    tmp_path,
):
    """Two hundred real texts, with the pre-tokenizer that the header names."""
    source = copied(source_of("llama"), tmp_path / "m")
    trained_vocabulary(splitting()).save(str(source / "tokenizer.json"))
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    values = header(tmp_path / "m.gguf")
    assert values["tokenizer.ggml.pre"] == name
    assert values["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert (values["tokenizer.ggml.tokens"][-1], values["tokenizer.ggml.token_type"][-1]) == (
        "[PAD319]",
        5,
    )
    same_ids(source, tmp_path / "m.gguf")


def test_the_bundled_tokenizer_is_that_of_its_file(same_ids, smollm2):
    """SmolLM2's splits off single digits; transformers' reader of GGUF files takes GPT-2's."""
    model = typed(compose([["model=smollm2_135m"]])[0].values).model
    same_ids(smollm2.directory, locate_bundled(model))


def with_bytes(vocab, merges):
    unknown = "<unk>"
    return models.BPE(vocab=vocab, merges=merges, unk_token=unknown, byte_fallback=True)


def sentencepiece_like(target, *, change=None):
    """Write a BPE as SentencePiece exports it: merges in the order of the merged tokens' scores."""
    from tokenizers import AddedToken, decoders

    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    words = ["th", "the", "in", "\u2581th", "\u2581the", "ing", "re", "\u2581in"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (word[:cut], word[cut:])
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in vocab and word[cut:] in vocab
    ]
    tokenizer = Tokenizer(with_bytes(vocab, merges))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    )
    if change is not None:
        change(tokenizer)
    tokenizer.save(str(target / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_sentencepiece_like_tokenizer_read_back_gives_the_same_ids(same_ids, source_of, tmp_path):
    """Scores replace merges; characters outside the vocabulary become byte tokens."""
    source = copied(source_of("llama"), tmp_path / "m")
    sentencepiece_like(source)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    values = header(tmp_path / "m.gguf")
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 6]
    assert "tokenizer.ggml.merges" not in values
    # transformers' reader adds no space before a text that has one; llama.cpp does, as here.
    same_ids(source, tmp_path / "m.gguf", strip=True)


def never_spaced(tokenizer):
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)


def replaced_alone(tokenizer):
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")


@pytest.mark.parametrize(
    ("change", "adds"), [(None, True), (never_spaced, False), (replaced_alone, False)]
)
def test_the_header_says_whether_a_space_stands_before_a_text(
    change,
    adds,
    source_of,
    tmp_path,
):
    """Two different normalizers add no space."""
    source = copied(source_of("llama"), tmp_path / "m")
    sentencepiece_like(source, change=change)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    assert header(tmp_path / "m.gguf")["tokenizer.ggml.add_space_prefix"] is adds


def spaced_unless_it_is(tokenizer):
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)


def spaced_at_first(tokenizer):
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def lowercased(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def out_of_order(tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    merges.append(merges.pop(merges.index(("\u2581", "the"))))  # the other split stays
    tokenizer.model = with_bytes(model["vocab"], merges)


def one_short(tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"] if pair != ["r", "e"]]
    tokenizer.model = with_bytes(model["vocab"], merges)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spaced_unless_it_is, "its normalizer and pre-tokenizer"),
        (spaced_at_first, "its normalizer and pre-tokenizer"),
        (lowercased, "its normalizer and pre-tokenizer"),
        (out_of_order, "the order of its merges"),
        (one_short, "its merges.*found re"),
    ],
)
def test_a_sentencepiece_like_tokenizer_that_scores_cannot_say_is_refused(
    change,
    said,
    source_of,
    tmp_path,
):
    """Readers would tokenize text differently."""
    source = copied(source_of("llama"), tmp_path / "m")
    sentencepiece_like(source, change=change)
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)


def without_merges(tokenizer):
    vocab = {t: i for t, i in tokenizer.get_vocab().items() if i < 259}
    tokenizer.model = models.BPE(vocab=vocab, merges=[])


def with_lowercase(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def with_another_splitting(tokenizer):
    tokenizer.pre_tokenizer = split_by(r"\p{L}+|\s+")


def with_a_prefix(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_two_ends(tokenizer):
    from tokenizers import processors

    end = "<|im_end|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end} {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )


def with_more_tokens(tokenizer):
    tokenizer.add_tokens([f"more {number}" for number in range(20)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_merges, "has no merges"),
        (with_lowercase, "its normalizer"),
        (with_another_splitting, "its pre-tokenizer"),
        (with_a_prefix, "its pre-tokenizer"),
        (with_two_ends, "what it adds to a text"),
        (with_more_tokens, "its largest id .* found 329 .* expected at most 319"),
    ],
)
def test_a_byte_level_tokenizer_without_a_name_is_refused(
    change,
    said,
    trained_vocabulary,
    source_of,
    tmp_path,
):
    """GGUF readers know pre-tokenizers by name and would guess at any other."""
    source = copied(source_of("llama"), tmp_path / "m")
    tokenizer = trained_vocabulary(pre_tokenizers.ByteLevel(add_prefix_space=False))
    change(tokenizer)
    tokenizer.save(str(source / "tokenizer.json"))
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)


def test_special_tokens_and_template_are_those_of_the_directory(source_of, tmp_path):
    """Whether BOS is added is recorded; without a chat template the header has none."""
    from tokenizers import processors

    source = copied(source_of("llama"), tmp_path / "m")
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    values = header(tmp_path / "m.gguf")
    assert "tokenizer.chat_template" not in values
    assert values["tokenizer.ggml.add_bos_token"] is False
    assert [values[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos", "padding")] == [1, 2, 0]
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(source / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
    (source / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    values = header(tmp_path / "m.gguf")
    assert values["tokenizer.chat_template"] == template
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.eot_token_id"] == 0
