from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import pydoc
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode


def _stand_in():
    spec = importlib.util.spec_from_file_location(
        "stand_in_hub", Path(__file__).with_name("stand_in_hub.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    __import__("sys").modules[spec.name] = module  # dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stand_in():
    return _stand_in()


@pytest.fixture
def hub(stand_in, monkeypatch):
    """The stand-in hub, with nobody logged in."""
    from huggingface_hub import constants

    with stand_in.stand_in_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no such file")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield served


@pytest.fixture(scope="session")
def portable(train_in, shelf):
    """A run whose records contain only relative paths; do not change it."""
    from mens_exp.artifacts.run_dir import RunDir

    def train(place):
        place.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            overrides = ["trainer.max_steps=1", "data=stdlib", "model=tiny_llama"]
            train_in(Path("run"), *overrides, without="data.path")

    return RunDir(shelf("portable", train) / "run")


def _real_texts(number):
    """Paragraphs of the standard library's documentation, with code and numbers."""
    texts = [pydoc.plain(pydoc.render_doc(name)) for name in ("json", "textwrap", "decimal", "re")]
    parts = [line for text in texts for line in text.splitlines() if line.strip()]
    extra = ["  two  spaces", "tab\tand\r\nnewline", "Ünïcödé 漢字 🙂 café", "it's we'll 123456.78"]
    extra += ["x = [\n    1,\n    24,\n]", "a  24\t7 \n\n  9"]
    return [*extra, *parts][:number]


@pytest.fixture(scope="session")
def real_texts():
    """A function that returns the requested number of lines of real text."""
    return _real_texts


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {  # as llama.cpp splits texts, one expression after the other
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"],
    "qwen2": [rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"],
}


def _split(text, expression):
    """Cut a text into the matches of an expression and what lies between them."""
    import regex

    ends = sorted({at for found in regex.finditer(expression, text) for at in found.span()})
    return [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


def _merged(word, ranks):
    """Merge the pair of the lowest rank until none is left."""
    while len(word) > 1:
        rank, at = min(
            (ranks.get(pair, math.inf), at) for at, pair in enumerate(itertools.pairwise(word))
        )
        if rank == math.inf:
            break
        word = [*word[:at], word[at] + word[at + 1], *word[at + 2 :]]
    return word


def _byte_level_ids(file):
    """Return a function that encodes a text as llama.cpp does with the tokenizer of a GGUF."""
    import gguf

    fields = gguf.GGUFReader(file).fields
    read = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges")}
    name = fields["tokenizer.ggml.pre"].contents()
    ids = {token: id_ for id_, token in enumerate(read["tokens"])}
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(read["merges"])}
    shown = bytes_to_unicode()

    def encode(text):
        pieces = [text]
        for expression in _SPLITS[name]:
            pieces = [part for piece in pieces for part in _split(piece, expression)]
        found = []
        for piece in filter(None, pieces):
            word = "".join(shown[one] for one in piece.encode())
            is_whole = name == "llama-bpe" and word in ids
            found += [ids[part] for part in ([word] if is_whole else _merged([*word], ranks))]
        return found

    return encode


@pytest.fixture(scope="session")
def same_ids():
    """Compare the tokenizer of a GGUF file, as a reader reads it, with a directory's own.

    A byte-level tokenizer is read by code of our own, because transformers ignores how the file
    says that texts are split. The others are read by transformers.
    """
    from mens_exp.model.quiet import quiet

    def compare(source, file, *, strip=False):
        import gguf
        from transformers import AutoTokenizer

        theirs = Tokenizer.from_file(str(source / "tokenizer.json"))
        texts = [text.strip() if strip else text for text in _real_texts(200)]
        assert len(texts) == 200
        wanted = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
        if gguf.GGUFReader(file).fields["tokenizer.ggml.model"].contents() == "gpt2":
            assert list(map(_byte_level_ids(file), texts)) == wanted
            return
        with quiet():
            read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        assert read(texts, add_special_tokens=False).input_ids == wanted

    return compare


@pytest.fixture(scope="session")
def trained_vocabulary():
    """Train a small byte-level BPE vocabulary with a given pre-tokenizer."""
    from tokenizers import decoders, trainers

    def trained(splitting):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = splitting
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            _real_texts(400),
            trainers.BpeTrainer(
                vocab_size=310,
                special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        return tokenizer

    return trained


@pytest.fixture(scope="session")
def source_of(
    family_base,
    trained_vocabulary,
    tmp_path_factory,
):
    """A family's small random model, whose tokenizer has merges; do not change it."""
    root = tmp_path_factory.mktemp("sources")

    @functools.cache
    def made(family):
        source = shutil.copytree(family_base(family).directory, root / family)
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained_vocabulary(gpt2).save(str(source / "tokenizer.json"))
        return source

    return made
