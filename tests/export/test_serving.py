from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.errors import MensError, MissingExtra, RequestError, SetupError
from mens_exp.export import serving
from mens_exp.model.quiet import quiet
from mens_exp.tasks import export

PROMPT = "def add(x):"
TOKEN = "correct-horse-battery-staple"


def said_here(directory, new_tokens):
    """Generate greedily in this process, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet(), torch.inference_mode():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        mask = torch.ones_like(ids)
        whole = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
    return tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)


def asked(base_url, model, new_tokens):
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=TOKEN, max_retries=0)
    with client:
        done = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=new_tokens, temperature=0
        )
    return done.choices[0].text


def command(*overrides):
    return [sys.executable, "-m", "mens_exp", "task=serve", *overrides]


def test_the_server_says_what_greedy_generation_says(tiny_base, tmp_path):
    """The server's text equals greedy generation; SIGTERM stops it with exit code 0.

    The server requires a token, which is in none of its files and in none of its output.
    """
    directory = tiny_base.directory
    process = subprocess.Popen(
        command(f"path={directory}", "hydra.run.dir=run"),
        cwd=tmp_path,
        env={**os.environ, "MENS_EXP_SERVE_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        first, _, purpose, curl = (process.stdout.readline() for _ in range(4))
        assert purpose == "Next, to ask it something:\n"
        assert first.startswith(f"Serving {directory.name} at http://127.0.0.1:")
        url = first.split(" at ")[1].split(";")[0]
        assert curl.startswith(f'  curl {url}/completions -H "Authorization: Bearer $MENS_EXP_')
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        assert asked(url, directory.name, 24) == said_here(directory, 24) != ""
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Stopped." in process.stdout.read()
        assert not any(child.is_running() for child in children)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    record = Manifest.read(tmp_path / "run" / "manifest.json")
    assert record.status is Status.SUCCEEDED
    assert record.results["url"] == url
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


def test_a_server_that_dies_is_an_error(tiny_base, tmp_path, monkeypatch, capsys):
    """If another process kills it, the command fails with exit code 3 and the server's own code."""

    @contextlib.contextmanager
    def killed(*arguments, **settings):
        with serving.serving(*arguments, **settings) as server:
            os.killpg(server.process.pid, signal.SIGKILL)
            yield server

    monkeypatch.setattr(export, "serving", killed)
    run = tmp_path / "run"
    assert cli.main(["task=serve", f"path={tiny_base.directory}", f"hydra.run.dir={run}"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "the server ended by itself" in said
    assert f"exit code {-signal.SIGKILL}" in said
    assert Manifest.read(run / "manifest.json").status is Status.FAILED


def test_a_server_that_cannot_start_is_an_error(tiny_base, monkeypatch):
    """The message has its exit code."""
    monkeypatch.setattr(serving, "_ENTRY", "raise SystemExit(7)")
    with (
        pytest.raises(SetupError, match=r"ended before it answered .* exit code 7"),
        serving.serving(tiny_base.directory, host="127.0.0.1", port=0),
    ):
        pass


def test_nothing_outlives_the_block(tiny_base, monkeypatch):
    """A server that ignores SIGTERM is killed together with its child process."""
    stubborn = (
        "import signal, subprocess, sys; from http.server import *\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[-2])), H).serve_forever()\n"
    )
    monkeypatch.setattr(serving, "_ENTRY", stubborn)
    monkeypatch.setattr(serving, "_STOP_S", 0.5)
    with serving.serving(tiny_base.directory, host="127.0.0.1", port=0) as server:
        family = [psutil.Process(server.process.pid)]
        family += [one for one in family[0].children(recursive=True) if one.name() == "sleep"]
    assert len(family) == 2
    deadline = time.monotonic() + 10
    while any(one.is_running() and one.status() != "zombie" for one in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["a@b", "a:b.gguf"])
def test_a_name_that_means_something_else_is_refused(tmp_path, name):
    """The server would read the name as a revision or a file."""
    (tmp_path / name).mkdir()
    with (
        pytest.raises(RequestError, match="as a revision or a file"),
        serving.serving(tmp_path / name, host="127.0.0.1", port=0),
    ):
        pass


def test_a_port_that_is_taken_is_told_before_anything_loads():
    """An address of another machine is reported too; a free port is accepted."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = serving.address_problems("127.0.0.1", port)
        assert f"found 127.0.0.1:{port}" in str(problem)
        assert problem.where == "serve.port"
    (problem,) = serving.address_problems("192.0.2.1", 0)
    assert problem.where == "serve.host"
    assert serving.address_problems("127.0.0.1", 0) == []


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    """The problem is a `MissingExtra`, and says what to install."""
    assert serving.missing_packages() == []
    monkeypatch.setattr(serving, "_NEEDED", ("fastapi", "no_such_package"))
    (problem,) = serving.missing_packages()
    assert isinstance(problem, MissingExtra)
    assert "found no no_such_package" in str(problem)
    assert "pip install 'mens-exp[serve]'" in str(problem)


@pytest.mark.parametrize(
    ("is_chat", "path", "key"), [(True, "chat/", "messages"), (False, "", "prompt")]
)
def test_the_curl_line_asks_what_the_model_answers(is_chat, path, key):
    """The line uses the chat route only if the model has a chat template."""
    server = serving.Server(
        url="http://127.0.0.1:1/v1",
        model="it's",
        is_chat=is_chat,
        process=None,
    )
    assert server.curl.startswith(f"curl http://127.0.0.1:1/v1/{path}completions -H ")
    header, body = shlex.split(server.curl)[3], shlex.split(server.curl)[5]
    assert header == "Content-Type: application/json"
    assert json.loads(body)["model"] == "it's"
    assert f'"{key}": ' in server.curl


def test_an_adapter_is_refused_by_the_command(
    capsys,
    finished,
    tmp_path,
    monkeypatch,
):
    """Exit code 2 before a run directory is created."""
    from mens_exp import cli

    monkeypatch.chdir(tmp_path)
    path = finished.path
    assert cli.main(["task=serve", f"path={path}"]) == MensError.exit_code + 1
    said = capsys.readouterr().err
    assert "is an adapter, not a complete model" in said
    assert "task=merge" in said
    assert list(tmp_path.iterdir()) == []
