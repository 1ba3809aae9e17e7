"""Output files that changed after the run: every command that reads them refuses them."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.digest import refuse_changed_adapter, refuse_changed_model
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.model import HfModel
from mens_exp.errors import DataError, RequestError
from mens_exp.model.sources import resolve
from mens_exp.tasks.inputs import definition_of
from mens_exp.tasks.inputs import refuse_changed as refuse_changed_inputs

V3, PEFT = "adapter/adapter.safetensors", "adapter/peft/adapter_model.safetensors"


def flip(path):
    """Flip the sign of the last value; the file still loads."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(bytes(content))


@pytest.fixture
def copied(finished, tmp_path):
    """Copy a finished run, so that a test can damage it."""
    return RunDir(shutil.copytree(finished.path, tmp_path / "copied"))


def refused(capsys, tmp_path, *command, code=2):
    """Type a command that must be refused, and return its standard error."""
    assert cli.main([*command, f"hydra.run.dir={tmp_path / 'own'}"]) == code
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command",
    [
        ("task=merge", "logger=none", "path={run}"),
        ("task=export", "path={run}", "export.format=peft"),
        ("task=export", "path={run}", "export.format=bundle"),
        ("task=evaluate", "path={run}", "suite=heldout_syntax", "suite.items=1", "logger=none"),
        ("task=chat", "path={run}", "chat.prompt=hello"),
        ("model=tiny_llama", "trainer=cpu", "logger=none", "suite=none", "lora.init_from={run}"),
    ],
    ids=["merge", "peft", "bundle", "evaluate", "chat", "continue"],
)
def test_a_flipped_adapter_is_refused(copied, capsys, tmp_path, command):
    """One flipped sign in one matrix changes the hash, which no longer matches the manifest."""
    flip(copied.path / V3)
    said = refused(capsys, tmp_path, *(text.format(run=copied.path) for text in command))
    assert f"{V3}: " in said
    assert "has changed since" in said


def test_a_flipped_peft_directory_of_a_run_is_not_continued_from(copied, capsys, tmp_path):
    """A PEFT directory is read on its own, but it is checked against the manifest of its run."""
    flip(copied.path / PEFT)
    command = ["model=tiny_llama", "trainer=cpu", "logger=none", "suite=none"]
    said = refused(capsys, tmp_path, *command, f"lora.init_from={copied.peft}")
    assert f"{PEFT}: has changed since its run wrote it" in said


def test_a_peft_directory_of_nobody_is_continued_from_and_its_hash_recorded(
    copied, tmp_path, train_in, rows_file
):
    """Without a manifest to check against, the hash of what was read is recorded."""
    theirs = shutil.copytree(copied.peft, tmp_path / "theirs")
    flip(theirs / "adapter_model.safetensors")
    run = train_in(tmp_path / "run", f"lora.init_from={theirs}")
    recorded = Manifest.read(run.manifest).inputs["init_from"]
    original = json.loads(copied.manifest.read_text("utf-8"))["outputs"][PEFT]
    assert recorded["adapter_sha256"] != original
    assert recorded["path"] == str(theirs)


@pytest.mark.parametrize(
    "name", ["adapter/adapter_manifest.json", "config.yaml", "chat_template.jinja"]
)
def test_an_edited_record_of_the_adapter_is_refused(copied, capsys, tmp_path, name):
    """An edited alpha or base in the adapter's record would change what is merged."""
    file = copied.path / name
    file.write_text(file.read_text("utf-8") + "\n", "utf-8")
    said = refused(capsys, tmp_path, "task=merge", "logger=none", f"path={copied.path}")
    assert f"{name}: has changed since its run wrote it" in said


def test_a_template_whose_hash_an_older_run_did_not_list_is_compared_with_its_inputs(
    copied, capsys, tmp_path
):
    """Older runs list no hash of the template that a merge passes on; their inputs have it."""
    manifest = Manifest.read(copied.manifest)
    del manifest.outputs["chat_template.jinja"]
    manifest.write(copied.manifest)
    copied.chat_template.write_text(copied.chat_template.read_text("utf-8") + " ", "utf-8")
    for command in (["task=merge"], ["task=export", "export.format=peft"]):
        said = refused(
            capsys, tmp_path / command[-1].partition("=")[2], *command, f"path={copied.path}"
        )
        assert "inputs.chat_template_sha256: has changed since the run was trained on it" in said


def test_a_run_at_work_may_change_its_files(copied, capsys, tmp_path):
    """The manifest of a run at work has hashes of an earlier attempt, so they are not compared."""
    manifest = Manifest.read(copied.manifest)
    manifest.status = Status.STARTED
    manifest.write(copied.manifest)
    flip(copied.path / V3)
    assert cli.main(["task=inspect", f"path={copied.adapter}"]) == 0


def test_merged_weights_that_were_flipped_are_not_served(finished, tmp_path, capsys):
    """A merged model is checked against the manifest beside it before a server starts."""
    run = tmp_path / "merge"
    assert (
        cli.main(["task=merge", "logger=none", f"path={finished.path}", f"hydra.run.dir={run}"])
        == 0
    )
    flip(run / "merged" / "model.safetensors")
    said = refused(capsys, tmp_path, "task=serve", f"path={run / 'merged'}")
    assert "merged/model.safetensors: has changed since its run wrote it" in said


@pytest.fixture(scope="module")
def outputs(finished, tmp_path_factory):
    """A merged model and a PEFT directory outside any run; shared by all tests: copy them."""
    root = tmp_path_factory.mktemp("outputs")
    merge = ["task=merge", f"path={finished.path}", f"out={root / 'model'}", "parity.tokens=64"]
    assert cli.main([*merge, "parity.accept=true", f"hydra.run.dir={root / 'a' / 'merge'}"]) == 0
    export = ["task=export", f"path={finished.path}", "export.format=peft", f"out={root / 'peft'}"]
    assert cli.main([*export, f"hydra.run.dir={root / 'a' / 'export'}"]) == 0
    return root


@pytest.fixture
def output(outputs, tmp_path):
    """Copy one of them, so that a test can damage it."""
    return lambda name: shutil.copytree(outputs / name, tmp_path / name)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_merged_model_that_differs_from_its_certificate_is_no_base(output, cache, name):
    """No manifest lies above the model; parity.json beside it has the hashes."""
    model = output("model")
    resolve(HfModel(id=str(model)), cache)
    flip(model / name)
    with pytest.raises(DataError, match="has changed since its run wrote it") as refused:
        resolve(HfModel(id=str(model)), cache)
    assert refused.value.where == str(model / name)
    assert "delete parity.json" in str(refused.value)
    (model / "parity.json").unlink()
    refuse_changed_model(model)


def test_a_merged_model_s_card_may_be_edited(output):
    """The model card is meant to be edited, so only the other files have to match."""
    model = output("model")
    flip(model / "README.md")
    refuse_changed_model(model)


def test_a_certificate_that_cannot_be_read_vouches_for_nothing(output):
    """A damaged certificate is refused, or else one flipped bit would switch off the check."""
    model = output("model")
    text = (model / "parity.json").read_text("utf-8")
    (model / "parity.json").write_text(text.replace(":", ";", 1), "utf-8")
    with pytest.raises(DataError, match="cannot be read, so the files next to it"):
        refuse_changed_model(model)


@pytest.mark.parametrize(
    "command",
    [("task=serve", "path={model}"), ("task=export", "export.format=gguf", "path={model}")],
    ids=["serve", "gguf"],
)
def test_commands_refuse_a_merged_model_that_differs_from_its_certificate(
    output, capsys, tmp_path, command
):
    """The tokenizer is checked as well as the weights: other ids are other words."""
    model = output("model")
    (model / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes() + b" ")
    said = refused(capsys, tmp_path, *(text.format(model=model) for text in command))
    assert "tokenizer.json: has changed since its run wrote it" in said


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_exported_adapter_that_differs_from_its_certificate_is_refused(output, name):
    """The certificate is enough to check an exported adapter whose run is not at hand."""
    peft = output("peft")
    refuse_changed_adapter(peft)
    flip(peft / name)
    with pytest.raises(DataError, match="has changed since its run wrote it"):
        refuse_changed_adapter(peft)


def test_a_base_of_another_configuration_is_refused_by_every_reader(
    tiny_base, train_in, tmp_path, capsys
):
    """Equal weights with another epsilon are another model, which their hash does not show."""
    base = shutil.copytree(tiny_base.directory, tmp_path / "base")
    run = train_in(tmp_path / "run", "model=hf", f"model.id={base}", "trainer.max_steps=1")
    config = json.loads((base / "config.json").read_text("utf-8"))
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}), "utf-8")
    suite = ["suite=heldout_syntax", "suite.items=1", "logger=none"]
    for number, command in enumerate(
        [
            ["task=evaluate", *suite],
            ["task=chat", "chat.prompt=hello"],
            ["task=merge"],
            ["task=export", "export.format=peft"],
        ]
    ):
        said = refused(capsys, tmp_path / str(number), *command, f"path={run.path}")
        assert "inputs.base_config_sha256: has changed since the run was trained on it" in said
    assert cli.main([f"resume={run.path}", "trainer.max_steps=2"]) == 2
    assert "base_config_sha256" in capsys.readouterr().err
    assert cli.main(["task=inspect", f"path={run.path}", "inspect.verify=true"]) == 4
    assert "base_config_sha256" in capsys.readouterr().err
    (base / "config.json").write_text("{", "utf-8")
    assert cli.main(["task=inspect", f"path={run.path}", "inspect.verify=true"]) == 4


def test_code_of_a_base_is_recorded_where_it_is_run(tiny_base, cache, tmp_path):
    """Code in a base is recorded if it is run; a model made here has none."""
    assert definition_of(tiny_base) == {}
    base = shutil.copytree(tiny_base.directory, tmp_path / "base")
    (base / "modeling_own.py").write_text("one = 1\n", "utf-8")
    plain, trusting = (
        resolve(HfModel(id=str(base), trust_remote_code=code), cache) for code in (False, True)
    )
    before, without_code = definition_of(trusting), definition_of(plain)
    assert before.keys() == {"base_config_sha256", "base_code_sha256"}
    config_sha256 = hashlib.sha256((base / "config.json").read_bytes()).hexdigest()
    assert without_code == {"base_config_sha256": config_sha256}
    (base / "modeling_own.py").write_text("one = 2\n", "utf-8")
    assert definition_of(plain) == without_code
    with pytest.raises(
        RequestError, match="base_code_sha256: has changed since the run was trained on it"
    ):
        refuse_changed_inputs(before, definition_of(trusting))
