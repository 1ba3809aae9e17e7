from __future__ import annotations

import io
import json

import pytest

from mens_exp import cli
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.task import ChatConfig
from mens_exp.report import terminal
from mens_exp.tasks.chat import Conversation
from mens_exp.tokenizer.implementations import HfTokenizer


@pytest.fixture
def talk(tiny_backend, tiny_base):
    from contextlib import nullcontext

    backend = tiny_backend(live=True)
    return Conversation(
        backend=backend,
        tokenizer=HfTokenizer.from_directory(tiny_base.directory),
        settings=ChatConfig(max_new_tokens=4),
        seed=1,
        conditions={"base": backend.base_only, "tuned": nullcontext},
    )


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """Run task=chat with what is typed, and return its transcript."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, typed=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        arguments = ["task=chat", "chat.max_new_tokens=3", "hydra.run.dir=talk", *overrides]
        assert cli.main(arguments) == 0
        directory = RunDir(tmp_path / "talk")
        manifest = Manifest.read(directory.manifest)
        assert manifest.status is Status.SUCCEEDED
        assert manifest.outputs["transcript.json"] == sha256_file(directory.transcript)
        return json.loads(directory.transcript.read_text("utf-8"))

    return run


def test_each_model_sees_its_own_answers_and_no_others(talk, monkeypatch):
    """The second prompt contains the first question and the model's own reply to it, no other."""
    seen = []
    talk.ask("one", lambda _answers: None)
    talk.turns[0]["answers"]["base"]["text"] = "I am base"
    talk.turns[0]["answers"]["tuned"]["text"] = "I am tuned"
    render = HfTokenizer.render

    def spy(self, messages, **options):
        seen.append(messages)
        return render(self, messages, **options)

    monkeypatch.setattr(HfTokenizer, "render", spy)
    talk.ask("two", lambda _answers: None)
    assert [[m["content"] for m in messages] for messages in seen] == [
        ["one", "I am base", "two"],
        ["one", "I am tuned", "two"],
    ]


def test_answers_grow_by_a_token_each(talk):
    """Each model's text is shown after every token, so that both stream side by side."""
    shown = []
    talk.ask("one", lambda a: shown.append((a["base"].tokens, a["tuned"].tokens)))
    assert shown[: min(len(shown), 2)] == [(1, 1), (2, 2)][: len(shown)]
    assert shown[-1] == tuple(
        talk.turns[0]["answers"][name]["tokens"] for name in ("base", "tuned")
    )


def test_a_prompt_is_encoded_as_in_training(talk):
    """A chat prompt has the ids that come before the answer in a training row."""
    from mens_exp.rows.documents import Labelling
    from mens_exp.rows.encode import encode
    from mens_exp.rows.schema import TrainingPair

    row = TrainingPair(prompt="What is two?", response="2", system="Be brief.")
    encoded = encode([row], talk.tokenizer, Labelling(objective="assistant", seq_len=512))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is two?"},
    ]
    (ids,) = talk.tokenizer.encode_prompts([messages])
    assert encoded.ids[: len(ids)].tolist() == ids
    assert not encoded.supervised[: len(ids)].any()
    assert encoded.supervised[len(ids)]


def test_one_prompt_is_answered_in_plain_sections(chat, finished, capsys):
    """Output to a pipe has each model's answer under its title, and no input is requested."""
    said = chat(f"path={finished.path}", "chat.prompt=hello")
    (turn,) = said["turns"]
    assert turn["user"] == "hello"
    assert set(turn["answers"]) == {"base", "tuned"}
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "tiny_llama"
    assert f"tuned ({finished.path})" in lines


def test_typed_lines_are_turns_until_the_end_of_input(chat, finished, capsys):
    """/reset and /system start a new conversation; an unknown command is reported and no turn."""
    typed = "one\n\ntwo\n/reset\nthree\n/system Be brief.\nfour\n/quit\n"
    turns = chat(f"path={finished.path}", typed=typed)["turns"]
    assert [(t["user"], t["system"], t["continues"]) for t in turns] == [
        ("one", None, False),
        ("two", None, True),
        ("three", None, False),
        ("four", "Be brief.", False),
    ]
    assert "/quit is unknown" in capsys.readouterr().out


def test_the_base_model_alone_can_be_talked_to(chat):
    """With path=base the command's own model answers, in a single column."""
    said = chat("path=base", "model=tiny_llama", "trainer=cpu", "chat.prompt=hello")
    assert said["subject"] == "base"
    assert set(said["turns"][0]["answers"]) == {"base"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "no run to talk to"),
        (["path=latest"], "no run found"),
        (["path=base", "prompt=' '"], "prompt: is empty"),
        (["path=latest", "model=tiny_llama"], "model: has no effect with task=chat"),
        (["path=latest", "optim.lr=1"], "optim.lr: has no effect with task=chat"),
        (["path=base", "model=tiny_llama", "chat.temperature=-1"], "chat.temperature: out of"),
    ],
)
def test_what_a_chat_cannot_do_is_refused(
    tmp_path,
    monkeypatch,
    capsys,
    overrides,
    said,
):
    """An impossible chat is refused before a run directory is created."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["task=chat", *overrides]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_settings_of_a_chat_have_no_effect_elsewhere(capsys):
    """Settings of a chat are refused in training, where they have no effect."""
    assert cli.main(["model=tiny_llama", "prompt=hi", "chat.temperature=1"]) == 2
    said = capsys.readouterr().err
    assert "prompt: has no effect with task=train" in said
    assert "chat.temperature: has no effect with task=train" in said


def test_columns_stand_side_by_side_and_a_cursor_marks_what_goes_on():
    """Both texts share their lines, and a cursor marks the one that is still being written."""
    answers = {"base": ("left", True), "tuned": ("right", False)}
    asked = terminal.conversation(answers, {"base": "B", "tuned": "T"})
    shown = terminal.streamed(asked, 70).plain
    (line,) = [line for line in shown.splitlines() if "left" in line]
    assert "right▌" in line
    assert "left▌" not in line


def test_a_model_cannot_steer_the_terminal():
    """Escape sequences in an answer are printed as text, and line breaks are kept."""
    asked = terminal.conversation({"base": ("a\x1b[2Jb\n\tc\x07", True)}, {"base": "B"})
    lines = [line.plain for line in terminal.lines([asked], 200, is_plain=True)]
    assert lines == ["B", "a\\x1b[2Jb", "    c\\x07"]
