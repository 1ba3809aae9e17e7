from __future__ import annotations

import json

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.config.model import BundledModel, HfModel, RandomModel
from mens_exp.layout.model_cache import (
    damaged_files,
    hash_weights,
    is_whole,
    marked_weights,
    place_of,
    ready_directory,
    record_files,
)

MARK = "mens_exp_base.json"


@pytest.fixture(scope="session")
def bundled():
    model = typed(compose([[]])[0].values).model
    assert isinstance(model, BundledModel)
    return model


def random_model(**values):
    return RandomModel(name="tiny", **values)


def test_marked_directory_is_whole(base):
    """The mark has the digest of the weights."""
    record_files(base)
    assert is_whole(base)
    assert marked_weights(base) == hash_weights(base)


def _shorten(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda base: (base / MARK).unlink(),
        lambda base: (base / MARK).write_text("{", "utf-8"),
        lambda base: (base / MARK).write_text("[]", "utf-8"),
        lambda base: (base / MARK).write_text('{"sizes": []}', "utf-8"),
        lambda base: (base / MARK).write_text("{}", "utf-8"),
        lambda base: (base / "shard-1.safetensors").unlink(),
        lambda base: _shorten(base / "shard-1.safetensors"),
        lambda base: _shorten(base / "tokenizer.json"),
    ],
    ids=["unmarked", "cut", "list", "sizes", "empty", "gone", "short shard", "short tokenizer"],
)
def test_damaged_directory_is_not_whole(base, damage):
    """A damaged directory is written again."""
    record_files(base)
    damage(base)
    assert not is_whole(base)


def test_weights_hash_sees_every_byte_and_name(base):
    """The last byte and the name of a shard change it; the tokenizer does not."""
    hashes = [hash_weights(base)]
    (base / "tokenizer.json").write_text("{}", "utf-8")
    assert hash_weights(base) == hashes[0]
    shard = base / "shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    hashes.append(hash_weights(base))
    shard.rename(base / "other.safetensors")
    index = base / "model.safetensors.index.json"
    index.write_text(index.read_text("utf-8").replace("shard-0", "other"), "utf-8")
    hashes.append(hash_weights(base))
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("change", [{"init_seed": 1}, {"hidden_size": 128}, {"vocab_size": 384}])
def test_random_model_of_other_values_lies_elsewhere(tmp_path, change):
    """Each of these values changes the weights."""
    assert place_of(random_model(**change), tmp_path) != place_of(random_model(), tmp_path)
    assert place_of(random_model(), tmp_path).parent == tmp_path / "models"


def test_bundled_model_lies_by_its_content(tmp_path, bundled):
    """Another file changes the path; a corrected size does not."""
    place = place_of(bundled, tmp_path)
    values = {name: getattr(bundled, name) for name in bundled.__dataclass_fields__}
    assert place_of(BundledModel(**values | {"hidden_size": 1}), tmp_path) == place
    assert place_of(BundledModel(**values | {"sha256": "00"}), tmp_path) != place


def test_model_is_ready_when_it_is_made_and_whole(base, tmp_path):
    """A user's directory always is ready; a cached one is if it is marked."""
    assert ready_directory(HfModel(id=str(base)), tmp_path) == base
    model = random_model()
    place = place_of(model, tmp_path)
    assert ready_directory(model, tmp_path) is None
    place.parent.mkdir()
    base.rename(place)
    assert ready_directory(model, tmp_path) is None
    record_files(place)
    assert ready_directory(model, tmp_path) == place


def test_mark_is_plain_json(base):
    """It has file sizes by name, without the mark itself."""
    record_files(base)
    record = json.loads((base / MARK).read_text("utf-8"))
    assert record["sizes"]["shard-0.safetensors"] == (base / "shard-0.safetensors").stat().st_size
    assert MARK not in record["sizes"]


def flipped(file, at):
    """Flip one bit of a file without changing its size."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0x80
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["shard-1.safetensors", "config.json", "tokenizer.json"])
def test_one_bit_that_is_another_is_found(base, name):
    """Its size is right, but the file is reported as damaged, and no other is."""
    record_files(base)
    assert damaged_files(base) == []
    flipped(base / name, -2)
    assert is_whole(base)
    assert damaged_files(base) == [name]


def test_a_mark_without_hashes_vouches_for_nothing(base):
    """Earlier versions recorded only sizes."""
    record_files(base)
    record = json.loads((base / MARK).read_text("utf-8"))
    del record["sha256"]
    (base / MARK).write_text(json.dumps(record), "utf-8")
    assert damaged_files(base) == [MARK]


def test_a_mark_with_another_hash_of_the_weights_is_damaged(base):
    """Otherwise the wrong digest would be certified in the manifest."""
    record_files(base)
    record = json.loads((base / MARK).read_text("utf-8"))
    (base / MARK).write_text(json.dumps({**record, "weights_sha256": "0" * 64}), "utf-8")
    assert damaged_files(base) == [MARK]
