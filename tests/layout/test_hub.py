from __future__ import annotations

import re
import socket

import pytest
from huggingface_hub import constants

from mens_exp.config.model import HfModel
from mens_exp.errors import ConfigError, MensError, ModelFileError, SetupError
from mens_exp.layout import hub as hub_snapshot
from mens_exp.layout import hub as ours
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.shape import check_weights, shape_of
from mens_exp.model.sources import resolve

NAME = "lab/tiny-model"


@pytest.fixture
def model(hub, base):
    """Put the two-layer model of these fixtures on the hub, with many unneeded files."""
    files = {file.name: file.read_bytes() for file in base.iterdir()}
    clutter = dict.fromkeys(
        ["pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors", "model.py"],
        b"never to be fetched",
    )
    repository = hub.new()
    repository.commit(files | clutter)
    hub.repositories[NAME] = repository
    return HfModel(id=NAME)


def commit(hub):
    return str(hub.repositories[NAME].refs["main"])


def refusal(model):
    with pytest.raises(MensError) as caught:
        ours.describe(model)
    return caught.value


def away(monkeypatch):
    """Disconnect the network in a process that has made no request."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_snapshot.forget()


def test_a_branch_is_put_down_as_its_commit(hub, model):
    """Within a process the answer stays the same when the branch moves."""
    first = commit(hub)
    assert ours.pinned(model).revision == first
    hub.repositories[NAME].commit({"config.json": b"{}"})
    assert commit(hub) != first
    assert ours.pinned(model).revision == first
    asked = len(hub.requests)
    assert hub_snapshot.commit_of(NAME, None) == first
    assert len(hub.requests) == asked
    hub_snapshot.forget()
    assert ours.pinned(model).revision == commit(hub)


def test_a_directory_is_put_down_whole(hub, base, monkeypatch):
    """The path is absolute, so a run may resume from another directory; the hub is not asked."""
    monkeypatch.chdir(base.parent)
    assert ours.pinned(HfModel(id="base")) == HfModel(id=str(base))
    assert hub.requests == []


def test_headers_are_read_before_weights(hub, model, base):
    """Dimensions and tensors are those of the directory, and no shard is fetched."""
    found = ours.describe(model)
    assert found.tensors == read_directory(base).tensors
    assert shape_of(model) == shape_of(HfModel(id=str(base)))
    check_weights(found)
    assert not list(found.path.glob("*.safetensors"))


def test_bytes_to_download_are_those_of_the_missing_shards(hub, model, base):
    """By hand: both shards, then none."""
    shards = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert ours.bytes_to_download(model) == shards
    ours.download(model)
    assert ours.bytes_to_download(model) == 0
    assert ours.bytes_to_download(HfModel(id=str(base))) == 0


def test_only_what_is_needed_is_downloaded(hub, model, base):
    """Shards, tokenizer and configuration are equal; no pickle, duplicate or code is fetched."""
    directory = ours.download(model)
    assert directory.name == commit(hub)
    for file in base.iterdir():
        assert (directory / file.name).read_bytes() == file.read_bytes()
    assert {file.name for file in directory.iterdir()} == {file.name for file in base.iterdir()}
    for clutter in ("pytorch_model.bin", "consolidated", "onnx", "model.py"):
        assert not [line for line in hub.asked(clutter) if "/resolve/" in line]


def test_code_is_downloaded_where_it_is_asked_for(hub, model):
    """It comes from the same commit as the weights."""
    model.trust_remote_code = True
    assert (ours.download(model) / "model.py").is_file()


def test_a_pinned_commit_is_what_is_downloaded(hub, model):
    """The branch has moved since."""
    model.revision = commit(hub)
    hub.repositories[NAME].commit({"config.json": b"another"})
    directory = ours.download(model)
    assert directory.name == model.revision
    assert (directory / "config.json").read_bytes() != b"another"
    assert not hub.asked("/resolve/main/")


def test_a_cached_model_needs_no_network(hub, model, monkeypatch):
    """It is found by branch and by commit without a request."""
    directory = ours.download(model)
    hub.requests.clear()
    away(monkeypatch)
    assert ours.pinned(model).revision == directory.name
    assert ours.download(model) == directory
    assert ours.describe(HfModel(id=NAME, revision=directory.name)).shards
    assert hub.requests == []


def test_a_model_that_is_not_cached_needs_one(hub, model, monkeypatch):
    """The environment error gives the command that fetches the model."""
    away(monkeypatch)
    error = refusal(model)
    assert isinstance(error, SetupError)
    assert error.exit_code == 3
    assert "HF_HUB_OFFLINE is set" in str(error)
    assert f"hf download {NAME}" in str(error)


def test_a_half_downloaded_model_needs_one(hub, model, monkeypatch):
    """With one shard missing it fails offline, and online only that shard is fetched."""
    directory = ours.download(model)
    (directory / "shard-1.safetensors").resolve().unlink()
    (directory / "shard-1.safetensors").unlink()
    away(monkeypatch)
    assert refusal(model).exit_code == 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub_snapshot.forget()
    hub.requests.clear()
    ours.download(model)
    assert (directory / "shard-1.safetensors").is_file()
    assert not hub.asked("shard-0")


def test_a_hub_that_is_down_is_told(hub, model):
    """The error exits with code 3 and says which server answered badly."""
    hub.broken = True
    error = refusal(model)
    assert error.exit_code == 3
    assert hub.url in str(error)


def test_no_server_at_all_is_told(hub, monkeypatch):
    """Nothing listens on the port."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refusal(HfModel(id="lab/never-seen")).exit_code == 3


def test_a_network_that_swallows_packets_holds_nobody_up(hub, monkeypatch):
    """A server that accepts connections and never answers is given up."""
    monkeypatch.setattr(hub_snapshot, "_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        error = refusal(HfModel(id="lab/never-seen"))
    assert error.exit_code == 3
    assert "Timeout" in str(error)


def test_a_gated_model_names_the_login(hub, model):
    """The error gives the page where the terms are accepted."""
    hub.repositories[NAME].gated = True
    error = refusal(model)
    assert (error.exit_code, error.where) == (2, "model.id")
    assert f"{hub.url}/{NAME}" in str(error)
    assert "hf auth login" in str(error)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("lab/tiny-modell", NAME),
        ("lap/tiny-model", NAME),
        ("Qwen/Qwen2.5-7B-Instuct", "Qwen/Qwen2.5-7B-Instruct"),
        ("openai-comunity/gpt2", "openai-community/gpt2"),
    ],
)
def test_a_mistyped_id_names_the_nearest(hub, model, wrong, right):
    """Hub models by owner or name and the presets are searched."""
    error = refusal(HfModel(id=wrong))
    assert isinstance(error, ModelFileError)
    assert error.found == wrong
    assert f"the nearest is {right}" in str(error)


def test_an_id_like_no_other_is_still_refused(hub, model):
    """There is no suggestion, but the login for a private model is mentioned."""
    error = refusal(HfModel(id="zzzz/9999"))
    assert "nearest" not in str(error)
    assert "hf auth login" in str(error)


def test_a_wrong_revision_names_the_nearest(hub, model):
    """Existing branches are searched."""
    error = refusal(HfModel(id=NAME, revision="mian"))
    assert isinstance(error, ConfigError)
    assert (error.where, error.found) == ("model.revision", "mian")
    assert "the nearest is main" in str(error)


def test_a_commit_that_is_not_there_is_refused(hub, model):
    """It has the form of a commit but is unknown to the hub."""
    assert refusal(HfModel(id=NAME, revision="0" * 40)).where == "model.revision"


def test_a_model_without_safetensors_is_refused(hub, model):
    """The error lists the other formats, which are not fetched."""
    files = dict(hub.repositories[NAME].commits[commit(hub)])
    for name in [name for name in files if "safetensors" in name]:
        del files[name]
    hub.repositories[NAME].commit(files)
    error = refusal(model)
    assert "contains no safetensors weights" in str(error)
    assert error.found == "pytorch_model.bin"
    assert not [line for line in hub.asked(".bin") if "/resolve/" in line]


def test_a_damaged_header_is_refused(hub, model):
    """The error comes before any weight is fetched."""
    files = dict(hub.repositories[NAME].commits[commit(hub)])
    files["shard-0.safetensors"] = b"\\x10" + bytes(7) + b"no header at all"
    hub.repositories[NAME].commit(files)
    assert "is not a safetensors header" in str(refusal(model))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere", "~/nowhere", "a/b/c"])
def test_a_path_that_leads_nowhere_is_not_looked_up(hub, path):
    """Text written as a path is treated as one."""
    assert "is not a directory" in str(refusal(HfModel(id=path)))
    assert hub.requests == []


def test_what_is_no_id_is_refused(hub):
    """It is neither a directory nor a valid hub id."""
    error = refusal(HfModel(id="my model"))
    assert isinstance(error, ConfigError)
    assert error.where == "model.id"


def test_a_full_disk_is_told_before_the_download(hub, model, monkeypatch):
    """The error gives needed and free bytes before any shard is requested."""
    usage = hub_snapshot.shutil.disk_usage("/")
    monkeypatch.setattr(hub_snapshot.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(SetupError, match="10 bytes free"):
        ours.download(model)
    assert not hub.asked("shard")


def damage(directory):
    """Flip a bit of a shard in the hub's cache, and return the shard's name."""
    shard = max(directory.glob("*.safetensors"))
    blob = shard.resolve()
    assert re.fullmatch("[0-9a-f]{64}", blob.name)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 0x80
    blob.write_bytes(bytes(content))
    return shard.name


def test_a_shard_that_rotted_in_the_cache_is_fetched_again(hub, model, tmp_path):
    """The hub's digest detects it, and the new bytes equal the repository's."""
    first = resolve(model, tmp_path)
    name = damage(first.directory)
    hub_snapshot.forget()
    again = resolve(model, tmp_path)
    assert again.made_again == (name,)
    assert again.weights_sha256 == first.weights_sha256
    assert resolve(model, tmp_path).made_again == ()


def test_a_shard_that_rotted_is_refused_where_no_hub_answers(hub, model, tmp_path, monkeypatch):
    """A damaged shard is never trained on."""
    first = resolve(model, tmp_path)
    damage(first.directory)
    away(monkeypatch)
    with pytest.raises(MensError):
        resolve(model, tmp_path)


def test_a_hub_that_sends_other_bytes_than_it_lists_is_refused(hub, model, tmp_path, monkeypatch):
    """After a second download the shard still has another digest."""
    first = resolve(model, tmp_path)
    name = damage(first.directory)
    monkeypatch.setattr(ours, "fetch_again", lambda *_: None)
    with pytest.raises(MensError, match="differs from the hub's file") as refused:
        resolve(model, tmp_path)
    assert name in str(refused.value)


def rot(directory, name):
    """Change a digit after a name in the snapshot, which leaves valid JSON."""
    blob = (directory / name).resolve()
    text = blob.read_text("utf-8")
    place = next(i for i, one in enumerate(text) if one.isdigit())
    blob.chmod(0o644)
    blob.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :], "utf-8")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_small_file_that_rotted_in_the_cache_is_fetched_again(hub, model, tmp_path, name):
    """A wrong number of heads or a wrong token id would not be noticed in the weights."""
    first = resolve(model, tmp_path)
    before = (first.directory / name).read_bytes()
    rot(first.directory, name)
    assert (first.directory / name).read_bytes() != before
    hub_snapshot.forget()
    again = resolve(model, tmp_path)
    assert again.made_again == (name,)
    assert (again.directory / name).read_bytes() == before


def test_a_small_file_that_rotted_is_refused_where_no_hub_answers(
    hub, model, tmp_path, monkeypatch
):
    """Even a plan does not read it."""
    rot(resolve(model, tmp_path).directory, "config.json")
    away(monkeypatch)
    with pytest.raises(
        ModelFileError, match=r"config\.json: differs from the hub's file"
    ) as refused:
        ours.describe(model)
    assert "connect to the hub" in str(refused.value)
