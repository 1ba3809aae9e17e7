from __future__ import annotations

import re

import pytest
import yaml
from omegaconf import OmegaConf

from mens_exp import cli
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.compose import compose, from_yaml, to_yaml, typed
from mens_exp.errors import MensError, Problems


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Write a config.yaml like a run's, with some values replaced by dotted key."""
    monkeypatch.chdir(tmp_path)
    text = to_yaml(compose([["model=tiny_llama"]])[0].values)

    def written(changes):
        values = yaml.safe_load(text)
        for key, value in changes.items():
            node = values
            *parents, last = key.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        return file

    return written


def refusal(file):
    with pytest.raises(MensError) as caught:
        typed(from_yaml(file))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_runs_own_configuration_comes_back_as_it_was(
    stored,
):
    """Every class of mens_exp and of torch that the built-in options name is trusted."""
    assert typed(from_yaml(stored({}))) == typed(compose([["model=tiny_llama"]])[0].values)


def test_a_function_to_run_is_refused(stored):
    """A user who wants to call a function must name it in a command."""
    said = refusal(stored({"suite.function": "evil.py:f"}))
    assert "suite.function: a stored configuration may not name a function to run" in said
    assert "evil.py:f" in said


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"backend._target_": "os.system"}, "backend._target_"),
        ({"optim._target_": "subprocess.Popen"}, "optim._target_"),
        ({"callbacks.facts._target_": "my_callbacks.Evil"}, "callbacks.facts._target_"),
        ({"callbacks.new": {"_target_": "builtins.exec"}}, "callbacks.new._target_"),
        ({"objective._target_": "mens_expevil.Loss"}, "objective._target_"),
        ({"model._target_": "torch.hub.load"}, "model._target_"),
        (
            {"callbacks.new": {"_target_": "lightning.Callback", "a": {"_target_": "torch.load"}}},
            "callbacks.new.a._target_",
        ),
        ({"optim": [{"_target_": "os.system"}]}, "optim.0._target_"),
        ({"optim._target_": ["os.system"]}, "optim._target_"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_class_nobody_vouched_for_is_refused(stored, changes, place):
    """The class is found anywhere in the file, and the message says how to allow it."""
    said = refusal(stored(changes))
    assert f": {place}: a stored configuration may not name this class" in said
    assert "name the same _target_ in a file of ./conf" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("note: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("seed: 7", "found duplicate key seed"),
    ],
)
def test_what_omegaconf_does_not_read_is_refused(stored, line, said):
    """Its loader constructs no objects, and takes no key twice."""
    file = stored({})
    file.write_text(f"{file.read_text('utf-8')}\n{line}\n", encoding="utf-8")
    with pytest.raises(yaml.YAMLError, match=said):
        OmegaConf.load(file)  # the oracle
    assert said in refusal(file)


def test_a_configuration_in_a_text_is_refused(stored):
    """OmegaConf would parse the text as YAML again, without any size limit."""
    file = stored({"backend._target_": "os.system"})
    written = file.read_text(encoding="utf-8")
    file.write_text(yaml.safe_dump(written, default_style="|"), encoding="utf-8")
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), str)
    assert OmegaConf.load(file).backend._target_ == "os.system"  # the file itself is the attack
    assert "found the file does not contain a mapping" in refusal(file)


def test_every_such_class_is_told_at_once(stored):
    """The user sees every untrusted class in one message."""
    file = stored({"optim._target_": "a.B", "backend._target_": "c.D"})
    with pytest.raises(Problems) as caught:
        from_yaml(file)
    assert len(caught.value.problems) == 2


def test_a_reference_to_the_environment_is_refused(stored, monkeypatch):
    """It would put a secret of this machine into the next record."""
    monkeypatch.setenv("SOME_SECRET", "hunter2")
    said = refusal(stored({"model.name": "${oc.env:SOME_SECRET}"}))
    assert "hold values, but no references" in said
    assert "hunter2" not in said


def test_a_class_that_conf_names_too_is_vouched_for(stored, tmp_path):
    """Any file of ./conf that has the same `_target_` allows it."""
    file = stored({"callbacks.mine": {"_target_": "my_callbacks.Mine", "every_n": 3}})
    assert "my_callbacks.Mine" in refusal(file)
    (tmp_path / "conf/callbacks").mkdir(parents=True)
    (tmp_path / "conf/callbacks/mine.yaml").write_text("_target_: my_callbacks.Mine\nevery_n: 5\n")
    assert typed(from_yaml(file)).callbacks["mine"].every_n == 3


def test_torchs_and_lightnings_classes_may_be_named(
    stored,
):
    """They are trusted, and keep their settings."""
    config = typed(
        from_yaml(
            stored(
                {
                    "optim": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
                    "callbacks.timer": {"_target_": "lightning.pytorch.callbacks.Timer"},
                }
            )
        )
    )
    assert config.optim.momentum == 0.9


def test_a_models_own_code_is_not_run_for_having_been_trusted_elsewhere(
    stored,
):
    """Permission in another user's command does not count; ./conf can allow it for that model."""
    model = {"source": "hf", "name": "hf", "id": "some/model", "trust_remote_code": True}
    file = stored({"model": {**model, "revision": None, "gradient_checkpointing": "auto"}})
    assert "model.trust_remote_code: a stored configuration may not run" in refusal(file)
    own = file.parent / "conf" / "model" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("id: another/model\ntrust_remote_code: true\n", encoding="utf-8")
    assert "for some/model" in refusal(file)
    own.write_text("id: some/model\ntrust_remote_code: true\n", encoding="utf-8")
    typed(from_yaml(file))


def test_a_missing_value_is_told(stored):
    """The message is not a traceback, even for a configuration of another version."""
    file = stored({})
    values = yaml.safe_load(file.read_text("utf-8"))
    del values["lora"]["targets"]
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert "no lora.targets" in refusal(file)


@pytest.mark.parametrize("task", ["resume", "evaluate", "chat"])
@pytest.mark.parametrize(
    "target", ["os.system", "torch.hub.load", "lightning.Trainer", "mens_exp.cli.main"]
)
def test_nothing_of_a_malicious_run_is_called(
    finished,
    tmp_path,
    monkeypatch,
    capsys,
    task,
    target,
):
    """Even in a trusted package, the target must be a class of the kind that its group expects."""
    import shutil

    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(finished.path, tmp_path / "theirs")
    config = run / "config.yaml"
    text = config.read_text("utf-8")
    config.write_text(
        re.sub(r"_target_: torch\.optim\.\w+", f"_target_: {target}", text), encoding="utf-8"
    )
    assert target in config.read_text("utf-8")
    manifest = Manifest.read(run / "manifest.json")  # attackers can update the digest
    manifest.outputs["config.yaml"] = sha256_file(config)
    manifest.write(run / "manifest.json")
    asked = {
        "resume": ["resume=theirs", "trainer.max_steps=9"],
        "evaluate": ["task=evaluate", "path=theirs"],
        "chat": ["task=chat", "path=theirs", "chat.prompt=hello"],
    }[task]
    assert cli.main(asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "optim._target_" in said
    assert target in said
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
