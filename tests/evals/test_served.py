from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tool_rows import TOOLS, WITH_TOOLS

from mens_exp.errors import ConfigError, SetupError
from mens_exp.evals.engines import Generation, Request, ServerEngine
from mens_exp.rows.answers import messages_of


@contextmanager
def server(answer, status=200):
    """Serve one OpenAI-compatible route; yield its address and the list of requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((body, self.headers["Authorization"]))
            data = json.dumps(answer(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            """Say nothing."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", asked
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def echo(body):
    text = body["messages"][-1]["content"] + "\ndef rest(): pass"
    return {
        "choices": [{"message": {"content": text}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


def request(text, *stop):
    return Request(messages=({"role": "user", "content": text},), seed=2**40 + 5, stop=stop)


def engine(url, **changes):
    generation = Generation(max_new_tokens=9, batch_size=2, **changes)
    return ServerEngine(base_url=url, model="m", generation=generation)


def test_answers_come_back_in_order_with_the_servers_own_counts():
    """Text is cut at the stop string even if the server returned more."""
    with server(echo) as (url, asked):
        done = engine(url).complete([request("a", "\ndef"), request("b"), request("c", "\ndef")])
    assert [one.text for one in done] == ["a", "b\ndef rest(): pass", "c"]
    assert [one.is_finished for one in done] == [True, False, True]
    assert {(one.tokens_in, one.tokens_out) for one in done} == {(7, 3)}
    assert all(one.latency_ms is not None and one.latency_ms > 0 for one in done)
    body = next(body for body, _ in asked if body["messages"][0]["content"] == "a")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "stop": ["\ndef"],
    }


def test_drawing_hands_on_the_items_own_seed():
    """The seed is that of the item, reduced to 31 bits."""
    with server(echo) as (url, asked):
        engine(url, temperature=0.8, top_p=0.9).complete([request("a")])
    body, key = asked[0]
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.8, 0.9, (2**40 + 5) % 2**31)
    assert key is None


def test_a_key_comes_from_the_environment(monkeypatch):
    """If a variable is configured, it must be set."""
    generation = Generation(max_new_tokens=9, batch_size=1)
    with server(echo) as (url, asked):
        keyed = ServerEngine(
            base_url=url, model="m", generation=generation, api_key_env="KEY_OF_THE_SERVER"
        )
        monkeypatch.setenv("KEY_OF_THE_SERVER", "k1")
        keyed.complete([request("a")])
        assert asked[0][1] == "Bearer k1"
        monkeypatch.delenv("KEY_OF_THE_SERVER")
        with pytest.raises(ConfigError, match=r"eval\.api_key_env.*KEY_OF_THE_SERVER"):
            keyed.complete([request("a")])


def test_a_server_that_refuses_ends_the_evaluation():
    """The error shows the server's message; nothing is scored as wrong."""
    with (
        server(lambda _: {"error": "no such model"}, status=404) as (url, _),
        pytest.raises(SetupError, match=r"404.*no such model"),
    ):
        engine(url).complete([request("a")])


def test_a_server_that_says_something_else_ends_the_evaluation():
    """A response without choices or token counts is an error."""
    with (
        server(lambda _: {"choices": []}) as (url, _),
        pytest.raises(SetupError, match="did not answer"),
    ):
        engine(url).complete([request("a")])


def test_half_an_answer_ends_the_evaluation():
    """The connection closes before Content-Length bytes have arrived."""

    class Breaks(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Length", "999")
            self.end_headers()
            self.wfile.write(b'{"choices"')

        def log_message(self, *_):
            """Say nothing."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Breaks)
    thread = threading.Thread(target=httpd.handle_request)
    thread.start()
    with pytest.raises(SetupError, match="did not answer"):
        engine(f"http://127.0.0.1:{httpd.server_port}/v1").complete([request("a")])
    thread.join()
    httpd.server_close()


def test_half_a_character_is_replaced():
    """JSON can contain a lone surrogate, which neither files nor tokenizers can encode."""

    def half(body):
        said = echo(body)
        said["choices"][0]["message"]["content"] = "a\ud800b"
        return said

    with server(half) as (url, _):
        (one,) = engine(url).complete([request("a")])
    assert one.text == "a?b"


def test_no_server_ends_the_evaluation():
    """Nothing listens on port 1."""
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:1.*start it"):
        engine("http://127.0.0.1:1/v1").complete([request("a")])


def test_tools_and_calls_are_sent_as_the_protocol_has_them():
    """The oracle is the client library's own types; arguments are JSON strings."""
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
    from pydantic import TypeAdapter

    asking = Request(messages=tuple(messages_of(WITH_TOOLS)), seed=0)
    with server(echo) as (url, asked):
        engine(url).complete([asking])
    ((body, _),) = asked
    TypeAdapter(list[ChatCompletionMessageParam]).validate_python(body["messages"])
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
    assert body["tools"] == TOOLS
    call = body["messages"][2]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"city": 'Zü"rich', "days": 3}
