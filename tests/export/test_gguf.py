from __future__ import annotations

import functools
import json
import pydoc
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mens_exp.config.task import GgufDtype
from mens_exp.errors import MensError
from mens_exp.export.gguf import write_gguf
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.model.resolve import BaseModel

gguf = pytest.importorskip("gguf", reason="gguf is missing: pip install 'mens-exp[gguf]'")
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def source_of(
    family_base: Callable[[str], BaseModel],
    trained_vocabulary: Callable[..., Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Return a family's small random model with a tokenizer that has merges; only to be read."""
    root = tmp_path_factory.mktemp("sources")

    @functools.cache
    def made(family: str) -> Path:
        source = shutil.copytree(family_base(family).directory, root / family)
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained_vocabulary(gpt2).save(str(source / "tokenizer.json"))
        return source

    return made


def copied(source: Path, target: Path) -> Path:
    return shutil.copytree(source, target)


def changed(directory: Path, file: str, **values: Any) -> Path:
    path = directory / file
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")
    return directory


def logits_of(directory: Path, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **how)
        logits: torch.Tensor = model(ids).logits
    return logits


def read_back(file: Path, ids: torch.Tensor, config: Any = None) -> torch.Tensor:
    from transformers import GgufConfig

    how = {} if config is None else {"config": config}
    unpacked = GgufConfig(dequantize=True)
    return logits_of(file.parent, ids, gguf_file=file.name, quantization_config=unpacked, **how)


def header(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_read_back_gives_the_same_logits(
    family: str, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """In F32, by transformers' own reader: names, orientation, and the order of q and k."""
    from transformers import AutoConfig

    source = source_of(family)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f32)
    ids = torch.arange(3, 67).reshape(2, 32)
    if family == "mistral":  # read as what it is written as, and the same within the window
        config, ids = None, ids[:, :5]
    else:
        config = AutoConfig.from_pretrained(source)
    found = read_back(tmp_path / "m.gguf", ids, config)
    assert (found - logits_of(source, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_header_alone_makes_the_same_model(
    family: str, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without config.json: heads, widths, norms and rotary base are in the file."""
    source = source_of(family)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f32)
    ids = torch.arange(3, 35)[None]
    assert (read_back(tmp_path / "m.gguf", ids) - logits_of(source, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("dtype", "most"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 254 + 2**-11)]
)
def test_matrices_are_rounded_and_vectors_are_not(
    dtype: str, most: float, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Relative to each value, or for Q8_0 to the largest of its block of 32; norms stay exact."""
    source = source_of("llama")
    write_gguf(source, tmp_path / "m.gguf", GgufDtype(dtype))
    found = tensors(tmp_path / "m.gguf")
    kept = load_file(source / "model.safetensors")["model.embed_tokens.weight"].float()
    table = found["token_embd.weight"]
    assert table.tensor_type.name == dtype.upper()
    read = torch.from_numpy(gguf.dequantize(table.data, table.tensor_type).copy())
    scale = kept.abs()
    if dtype == "q8_0":
        scale = scale.view(-1, 32).amax(1, keepdim=True).expand(-1, 32).reshape(kept.shape)
    assert ((read - kept).abs() <= most * scale + 1e-7).all()
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"


def test_the_same_directory_gives_the_same_bytes(
    source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """No time, no path, a fixed order."""
    for number in ("1", "2"):
        source = copied(source_of("llama"), tmp_path / f"from{number}")
        write_gguf(source, tmp_path / f"{number}.gguf", GgufDtype.f16)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "2.gguf").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "1.gguf").read_bytes()


def test_a_window_bounds_the_context(source_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The Llama graph has no window; up to its length the two are one."""
    write_gguf(source_of("mistral"), tmp_path / "m.gguf", GgufDtype.f16)
    assert header(tmp_path / "m.gguf")["llama.context_length"] == 5


def test_a_tied_head_is_written_once(source_of: Callable[[str], Path], tmp_path: Path) -> None:
    """GPT-2's is, tiny Llama's is not."""
    for family, has_head in (("gpt2", False), ("llama", True)):
        write_gguf(source_of(family), tmp_path / "m.gguf", GgufDtype.f32)
        assert ("output.weight" in tensors(tmp_path / "m.gguf")) is has_head


def test_a_tied_model_with_another_head_is_refused(
    source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """What transformers loads is the head that lies in the file; the same one twice is no harm."""
    source = copied(source_of("llama"), tmp_path / "m")
    changed(source, "config.json", tie_word_embeddings=True)
    with pytest.raises(MensError, match="has a head of its own"):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    assert "output.weight" not in tensors(tmp_path / "m.gguf")


def test_llama_3_scaling_is_written_as_factors(
    source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """By hand: wavelengths under 8192/4 are kept, over 8192/1 divided by 8, between blended."""
    source = copied(source_of("llama"), tmp_path / "m")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    changed(source, "config.json", rope_parameters=rope)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f32)
    factors = tensors(tmp_path / "m.gguf")["rope_freqs.weight"].data
    width = 2 * len(factors)
    for index, factor in enumerate(factors):
        wave = 2 * 3.141592653589793 * 500000.0 ** (2 * index / width)
        smooth = (8192 / wave - 1) / 3
        blend = 1 / ((1 - smooth) / 8 + smooth)
        expected = 1.0 if wave < 2048 else 8.0 if wave > 8192 else blend
        assert factor == pytest.approx(expected, rel=1e-4)
    assert {1.0, 8.0} < set(factors.round(3).tolist())


def test_linear_scaling_is_a_value_of_the_header(
    source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Positions divided by the factor."""
    source = copied(source_of("llama"), tmp_path / "m")
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    write_gguf(
        changed(source, "config.json", rope_parameters=rope), tmp_path / "m.gguf", GgufDtype.f32
    )
    values = header(tmp_path / "m.gguf")
    assert values["llama.rope.scaling.type"] == "linear"
    assert values["llama.rope.scaling.factor"] == 4.0
    assert "rope_freqs.weight" not in tensors(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("llama", {"model_type": "phi3"}, "models of this family are not written as GGUF"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act has no equal in GGUF"),
        ("gpt2", {"activation_function": "relu"}, "activation_function has no equal in GGUF"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx has no equal"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "scaling of the rotary frequencies .* found dynamic",
        ),
        ("llama", {"num_hidden_layers": 3}, r"layers\.2\..*found no such tensor"),
        ("llama", {"num_hidden_layers": 1}, "is no tensor of the model"),
        ("llama", {"num_key_value_heads": 4}, r"k_proj.*weights disagree|weights disagree"),
    ],
)
def test_a_model_that_gguf_cannot_say_is_refused(
    family: str,
    values: dict[str, Any],
    said: str,
    source_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """By name, and nothing is written."""
    source = changed(copied(source_of(family), tmp_path / "m"), "config.json", **values)
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "out" / "m.gguf", GgufDtype.f16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), "f32", "not finite in F32"),
        (float("inf"), "q8_0", "not finite in Q8_0"),
        (1e5, "f16", r"not finite in F16.*100000.*gguf\.dtype=f32"),
    ],
)
def test_a_weight_beyond_the_type_is_refused(
    value: float, dtype: str, said: str, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A half-written file is gone, and an earlier one stays."""
    source = copied(source_of("llama"), tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "m.gguf").write_bytes(b"earlier")
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype(dtype))
    assert (tmp_path / "m.gguf").read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gguf"]


def real_texts(number: int) -> list[str]:
    """Paragraphs of the standard library's own documentation, code and numbers among them."""
    texts = [pydoc.plain(pydoc.render_doc(name)) for name in ("json", "textwrap", "decimal", "re")]
    parts = [line for text in texts for line in text.splitlines() if line.strip()]
    extra = ["  two  spaces", "tab\tand\r\nnewline", "Ünïcödé 漢字 🙂 café", "it's we'll 123456.78"]
    return [*extra, *parts][:number]


@pytest.fixture(scope="session")
def trained_vocabulary() -> Callable[..., Tokenizer]:
    """Train a small byte-level BPE under a splitting."""
    from tokenizers import decoders, trainers

    def trained(splitting: Any) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = splitting
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            real_texts(400),
            trainers.BpeTrainer(
                vocab_size=310,
                special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        return tokenizer

    return trained


def split_by(pattern: str) -> Any:
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def same_ids(source: Path, file: Path) -> None:
    """Compare what transformers makes of the file with the directory's own tokenizer."""
    from transformers import AutoTokenizer

    theirs = Tokenizer.from_file(str(source / "tokenizer.json"))
    with quiet():
        read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = real_texts(200)
    assert len(texts) == 200
    wanted = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert read(texts, add_special_tokens=False).input_ids == wanted


@pytest.mark.parametrize(
    ("name", "splitting"),
    [
        ("gpt-2", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("llama-bpe", lambda: split_by(LLAMA3_SPLIT)),
        ("qwen2", lambda: split_by(LLAMA3_SPLIT.replace("{1,3}", ""))),
    ],
)
def test_a_byte_level_tokenizer_read_back_gives_the_same_ids(
    name: str,
    splitting: Callable[[], Any],
    trained_vocabulary: Callable[..., Tokenizer],
    source_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Two hundred real texts, under the splitting that the header names."""
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


def test_smollms_splitting_has_its_name(
    trained_vocabulary: Callable[..., Tokenizer],
    source_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Digits alone, then GPT-2's."""
    source = copied(source_of("llama"), tmp_path / "m")
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitting = pre_tokenizers.Sequence([digits, level])
    trained_vocabulary(splitting).save(str(source / "tokenizer.json"))
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    assert header(tmp_path / "m.gguf")["tokenizer.ggml.pre"] == "smollm"


def with_bytes(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    unknown = "<unk>"
    return models.BPE(vocab=vocab, merges=merges, unk_token=unknown, byte_fallback=True)


def sentencepiece_like(target: Path, *, change: Callable[[Any], None] | None = None) -> None:
    """Merge four words' letters as SentencePiece exports do: pairs in the order of one score."""
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
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
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


def test_a_sentencepiece_like_tokenizer_read_back_gives_the_same_ids(
    source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scores take the place of merges; bytes stand in for what the vocabulary lacks."""
    source = copied(source_of("llama"), tmp_path / "m")
    sentencepiece_like(source)
    write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)
    values = header(tmp_path / "m.gguf")
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 6]
    assert "tokenizer.ggml.merges" not in values
    same_ids(source, tmp_path / "m.gguf")


def spaced_at_first(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def lowercased(tokenizer: Any) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def out_of_order(tokenizer: Any) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    merges.append(merges.pop(merges.index(("\u2581", "the"))))  # its other split stays
    tokenizer.model = with_bytes(model["vocab"], merges)


def one_short(tokenizer: Any) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"] if pair != ["r", "e"]]
    tokenizer.model = with_bytes(model["vocab"], merges)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spaced_at_first, "its normalizer and pre-tokenizer"),
        (lowercased, "its normalizer and pre-tokenizer"),
        (out_of_order, "the order of its merges"),
        (one_short, "its merges.*found re"),
    ],
)
def test_a_sentencepiece_like_tokenizer_that_scores_cannot_say_is_refused(
    change: Callable[[Any], None],
    said: str,
    source_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """It would split text differently in every reader."""
    source = copied(source_of("llama"), tmp_path / "m")
    sentencepiece_like(source, change=change)
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)


def without_merges(tokenizer: Any) -> None:
    vocab = {t: i for t, i in tokenizer.get_vocab().items() if i < 259}
    tokenizer.model = models.BPE(vocab=vocab, merges=[])


def with_lowercase(tokenizer: Any) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def with_another_splitting(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = split_by(r"\p{L}+|\s+")


def with_a_prefix(tokenizer: Any) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_two_ends(tokenizer: Any) -> None:
    from tokenizers import processors

    end = "<|im_end|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end} {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )


def with_more_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens([f"more {number}" for number in range(20)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_merges, "its merges"),
        (with_lowercase, "its normalizer"),
        (with_another_splitting, "its pre-tokenizer"),
        (with_a_prefix, "its pre-tokenizer"),
        (with_two_ends, "what it adds to a text"),
        (with_more_tokens, "its largest id .* found 329 .* expected at most 319"),
    ],
)
def test_a_byte_level_tokenizer_without_a_name_is_refused(
    change: Callable[[Any], None],
    said: str,
    trained_vocabulary: Callable[..., Tokenizer],
    source_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Readers know splittings by name; another would be guessed at."""
    source = copied(source_of("llama"), tmp_path / "m")
    tokenizer = trained_vocabulary(pre_tokenizers.ByteLevel(add_prefix_space=False))
    change(tokenizer)
    tokenizer.save(str(source / "tokenizer.json"))
    with pytest.raises(MensError, match=said):
        write_gguf(source, tmp_path / "m.gguf", GgufDtype.f16)


def test_special_tokens_and_template_are_those_of_the_directory(
    source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A tokenizer that adds a begin of sequence says so; without a template there is none."""
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


@pytest.mark.slow
def test_smollm2_survives(
    cache: Path, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The default model: F32 to 1e-4, the others within their rounding, the same ids."""
    from mens_exp.model.resolve import resolve

    source = resolve(tiny_config("model=smollm2_135m").model, cache).directory
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("\n\n".join(real_texts(40))).ids[:256]])
    wanted = logits_of(source, ids)
    for dtype, most in (("f32", 1e-12), ("bf16", 1e-12), ("f16", 1e-6), ("q8_0", 5e-3)):
        file = tmp_path / f"{dtype}.gguf"
        write_gguf(source, file, GgufDtype(dtype))
        found = read_back(file, ids)
        if dtype == "f32":
            assert (found - wanted).abs().max() <= 1e-4
            same_ids(source, file)
        p, q = wanted.log_softmax(-1).double(), found.log_softmax(-1).double()
        kl = (p.exp() * (p - q)).sum(-1)
        print(f"{dtype}: mean KL {kl.mean():.2e}, max {kl.max():.2e}")  # noqa: T201  # the figures
        assert kl.mean() <= most
        file.unlink()
