from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir


@pytest.fixture
def asked(finished):
    return ["task=push", f"path={finished.path}", "push.repo=me/adapter", "hydra.run.dir=push"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def _token(hub, stand_in, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", stand_in.TOKEN)


@pytest.mark.usefixtures("_token")
def test_one_commit_holds_adapter_card_and_records(hub, stand_in, asked, here, finished):
    """The bytes match, the repository is private, and the manifest records the commit."""
    assert cli.main(asked) == 0
    (commit,) = hub.commits
    assert hub.repos == {"me/adapter": {"private": True}}
    assert (commit["repo"], commit["message"]) == ("me/adapter", "mens_exp run run")
    sent = {
        "adapter_config.json": finished.peft / "adapter_config.json",
        "adapter_model.safetensors": finished.peft / "adapter_model.safetensors",
        "chat_template.jinja": finished.peft / "chat_template.jinja",
        "tokenizer.json": finished.peft / "tokenizer.json",
        "tokenizer_config.json": finished.peft / "tokenizer_config.json",
        "README.md": finished.model_card,
        "mens_exp/manifest.json": finished.manifest,
        "mens_exp/config.yaml": finished.config,
        "mens_exp/adapter_manifest.json": finished.adapter / "adapter_manifest.json",
    }
    assert commit["files"] == {name: path.read_bytes() for name, path in sent.items()}
    results = Manifest.read(RunDir(here / "push").manifest).results
    assert (results["commit"], results["private"]) == (stand_in.COMMIT, True)
    assert results["url"] == f"{hub.url}/me/adapter"


@pytest.mark.usefixtures("_token")
def test_what_was_pushed_is_what_peft_loads(hub, asked, here, tiny_base, finished):
    """The repository's root is a PEFT directory that loads the trained matrices."""
    from peft import PeftModel
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    assert cli.main(asked) == 0
    for name, content in hub.commits[0]["files"].items():
        file = here / "clone" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    base = AutoModelForCausalLM.from_pretrained(tiny_base.directory)
    model = PeftModel.from_pretrained(base, here / "clone")
    trained = load_file(finished.peft / "adapter_model.safetensors")
    loaded = {
        name.replace(".default.", "."): value.numpy()
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    assert loaded.keys() == trained.keys()
    assert all((loaded[name] == trained[name]).all() for name in trained)


@pytest.mark.usefixtures("_token")
def test_the_token_is_written_nowhere(hub, stand_in, asked, here):
    """It is in no file of the run and in nothing that is uploaded."""
    assert cli.main(asked) == 0
    token = stand_in.TOKEN.encode()
    assert not [p for p in here.rglob("*") if p.is_file() and token in p.read_bytes()]
    assert not [name for name, content in hub.commits[0]["files"].items() if token in content]


def test_without_a_token_the_login_command_is_named(hub, asked, here, capsys):
    """Exit code 3, before a directory is created or a request is sent."""
    assert cli.main(asked) == 3
    assert "hf auth login" in capsys.readouterr().err
    assert hub.requests == []
    assert list(here.iterdir()) == []


def test_a_token_that_is_not_known_names_the_login_command(hub, asked, here, monkeypatch, capsys):
    """The manifest records the run as failed."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    assert cli.main(asked) == 3
    assert "hf auth login" in capsys.readouterr().err
    assert hub.commits == []
    assert Manifest.read(RunDir(here / "push").manifest).status == "failed"


@pytest.mark.usefixtures("_token", "here")
def test_a_public_repository_is_not_written_unless_asked(hub, asked, capsys):
    """An existing public repository is also written only with push.private=false."""
    hub.repos["me/adapter"] = {"private": False}
    assert cli.main(asked) == 2
    assert "push.private=false" in capsys.readouterr().err
    assert hub.commits == []
    again = [*asked[:-1], "hydra.run.dir=again", "push.private=false", "push.message=out"]
    assert cli.main(again) == 0
    assert hub.commits[0]["message"] == "out"


@pytest.mark.usefixtures("_token", "here")
def test_a_new_repository_is_public_when_asked(hub, asked):
    """push.private=false makes it public."""
    assert cli.main([*asked, "push.private=false"]) == 0
    assert hub.repos == {"me/adapter": {"private": False}}


@pytest.mark.usefixtures("_token", "here")
def test_a_hub_that_does_not_answer_is_the_environments_fault(asked, monkeypatch, capsys):
    """No server listens on that port."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(asked) == 3
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.usefixtures("_token", "here")
@pytest.mark.parametrize("repo", ["adapter", "me/", "https://host/me/adapter", "me/a/b"])
def test_a_repository_is_a_user_and_a_name(hub, asked, repo, capsys):
    """Any other name is refused before a request is sent."""
    assert cli.main([*asked, f"push.repo={repo}"]) == 2
    assert "<user>/<name>" in capsys.readouterr().err
    assert hub.requests == []
