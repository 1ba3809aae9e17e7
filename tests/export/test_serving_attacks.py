"""Malicious or careless clients, over real sockets, against a tiny model.

Each gets a JSON error in OpenAI's format with the right status, or is disconnected. Afterwards,
the next client with a good request gets its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from mens_exp import cli
from mens_exp.export import serving
from mens_exp.model.quiet import quiet as quiet_transformers

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role') }}{% endif %}{% if m.role != dropped %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls and dropped != 'calls' %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if tools and not drops_tools %}{{ tools | tojson }}{% endif %}"
)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def directory(tiny_base, tmp_path_factory):
    """A model directory with a chat template."""
    place = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(tiny_base.directory, place)
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


@contextlib.contextmanager
def quick(**changed):
    """Set the time limits for slow clients to a second instead of half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"header_s": 1, "body_s": 1, "write_s": 2, **changed}.items():
            patch.setenv(f"MENS_EXP_SERVE_LIMIT_{name.upper()}", str(value))
        yield


@pytest.fixture(scope="module")
def server(directory):
    with quick(), serving.serving(directory, host="127.0.0.1", port=0) as running:
        yield running


@pytest.fixture(autouse=True)
def _next_client_is_answered(request):
    """Check after each test that the server still answers."""
    yield
    if "server" in request.fixturenames:
        status, body = asked(request.getfixturevalue("server"), TEXT, good(prompt="Hello"))
        assert (status, len(body["choices"])) == (200, 1)


def port_of(server):
    return int(server.url.split(":")[2].split("/")[0])


def connected(server):
    # Far longer than any answer takes on a busy machine: the tests are about the server's limits.
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=300)


def head(method, path, *lines, host="127.0.0.1"):
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def posted(path, body, *lines, host="127.0.0.1"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    usual = ("Content-Type: application/json", f"Content-Length: {len(data)}")
    return head("POST", path, *usual, *lines, host=host) + data


def answer(one):
    """Read one response and return its status, headers and body."""
    file = one.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return status, headers, file.read(int(headers["content-length"]))
    chunks = b""
    while size := int(file.readline() or b"0", 16):
        chunks += file.read(size)
        file.readline()
    return status, headers, chunks


def sent(server, data):
    """Send raw bytes; return the status and the JSON of the response."""
    with connected(server) as one:
        one.sendall(data)
        status, _, body = answer(one)
    return status, json.loads(body)


def asked(server, path, body, *lines, method="POST"):
    if method != "POST":
        return sent(server, head(method, path, *lines))
    return sent(server, posted(path, body, *lines))


def good(**fields):
    return {"model": "tiny", "max_tokens": 2, "temperature": 0, **fields}


def first_tokens(server, count, **fields):
    """Request one token for each of `count` seeds."""
    usual = {"model": "tiny", "max_tokens": 1, "prompt": "Hello"}
    bodies = [{**usual, **fields, "seed": seed} for seed in range(count)]
    return [asked(server, TEXT, body)[1]["choices"][0]["text"] for body in bodies]


def test_tokens_are_drawn_from_the_whole_vocabulary(server, directory):
    """Sampling follows the model's distribution; transformers serve would default to top_k=50.

    The random model's distribution is nearly flat, so truncation to 50 tokens would show.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers(), torch.inference_mode():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        logits = model(tokenizer("Hello", return_tensors="pt").input_ids).logits[0, -1].double()
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(len(logits))]
    likeliest = {texts[token] for token in logits.topk(50).indices}
    rare = torch.tensor([text not in likeliest for text in texts])
    expected = torch.softmax(logits, 0)[rare].sum().item()
    drawn = first_tokens(server, 100, temperature=1)
    beyond = sum(text not in likeliest for text in drawn) / len(drawn)
    assert expected > 0.3
    assert beyond == pytest.approx(expected, abs=4 * (0.25 / len(drawn)) ** 0.5)
    assert first_tokens(server, 20, temperature=1) == drawn[:20]  # equal seeds, equal tokens
    for least in (0, 1e-300):
        assert set(first_tokens(server, 3, temperature=least)) == {texts[int(logits.argmax())]}
    assert len(set(first_tokens(server, 30, top_p=0.99))) > 10


SAMPLED = {"prompt": "Hello", "max_tokens": 12, "temperature": 1.5}


def sampled_here(directory, seed):
    """Sample with transformers in this process, as a request of `SAMPLED` asks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers(), torch.inference_mode(), torch.random.fork_rng():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = tokenizer(SAMPLED["prompt"], return_tensors="pt")
        settings = {"do_sample": True, "temperature": SAMPLED["temperature"], "top_k": 0}
        torch.manual_seed(seed)
        whole = model.generate(**ids, **settings, max_new_tokens=SAMPLED["max_tokens"])
    return tokenizer.decode(whole[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


def test_a_seeded_answer_does_not_depend_on_requests_that_arrive_meanwhile(server, directory):
    """Equal to transformers' own sampling, one after another and all at once, streamed or not."""

    def text(seed, *, is_streamed=False):
        body = {**SAMPLED, "seed": seed, "stream": is_streamed}
        with connected(server) as one:
            one.sendall(posted(TEXT, body))
            said = answer(one)[2].decode()
        events = [line.removeprefix("data: ") for line in said.split("\n") if line]
        return "".join(
            json.loads(event)["choices"][0].get("text") or ""
            for event in events
            if event != "[DONE]"
        )

    expected = [sampled_here(directory, seed) for seed in range(8)]
    assert len(set(expected)) == len(expected)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: text(seed, is_streamed=seed % 2 == 1), range(8)))
    assert found == expected
    assert [text(seed) for seed in range(8)] == expected


def test_a_seed_does_not_reach_the_next_request(server):
    """A request without a seed is answered with a new one, also after a request with a seed."""
    answers = []
    for _ in range(2):
        asked(server, TEXT, {**SAMPLED, "seed": 5})
        answers.append(asked(server, TEXT, SAMPLED)[1]["choices"][0]["text"])
    assert answers[0] != answers[1]


def test_an_evaluation_over_the_server_repeats_at_any_batch_size(server, tmp_path, capsys):
    """The recorded seed of an answer decides it, even while other answers are waiting."""
    items = tmp_path / "items.jsonl"
    asks = [{"id": str(n), "prompt": f"Hello {n}", "expected": "x"} for n in range(6)]
    items.write_text("".join(json.dumps(one) + "\n" for one in asks))
    command = ["task=evaluate", "path=base", "suite=jsonl", f"suite.path={items}"]
    command += ["eval.engine=openai", f"eval.base_url={server.url}", "eval.model=tiny"]
    command += ["eval.temperature=1.5", "suite.max_new_tokens=12"]
    found = []
    for place, batch_size in enumerate((1, 4, 4)):
        out = tmp_path / str(place)
        wanted = [f"suite.batch_size={batch_size}", f"hydra.run.dir={out}"]
        assert cli.main([*command, *wanted]) == 0, capsys.readouterr().err
        events = map(json.loads, (out / "events.jsonl").read_text("utf-8").splitlines())
        found.append({one["item_id"]: one["completion"] for one in events})
    assert len(set(found[0].values())) == len(asks)
    assert found[1] == found[2] == found[0]


@pytest.mark.parametrize("penalties", [{"frequency_penalty": 0.1}, {"presence_penalty": 1.5}])
def test_penalties_are_those_of_openai(server, directory, penalties):
    """The oracle: transformers' forward pass, with the formula of OpenAI's documentation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    frequency = penalties.get("frequency_penalty", 0)
    presence = penalties.get("presence_penalty", 0)
    with quiet_transformers(), torch.inference_mode():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = tokenizer("Hello", return_tensors="pt").input_ids[0].tolist()
        said, alone = [], []
        for _ in range(12):
            logits = model(torch.tensor([ids + said])).logits[0, -1]
            for token in set(said):
                logits[token] -= frequency * said.count(token) + presence
            said.append(int(logits.argmax()))
            alone.append(int(model(torch.tensor([ids + alone])).logits[0, -1].argmax()))
    assert said != alone
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 0, **penalties}
    answered = asked(server, TEXT, body)[1]["choices"][0]["text"]
    assert answered == tokenizer.decode(said, skip_special_tokens=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(server, stream):
    """The text before the stop sequence is returned, as in OpenAI's API."""
    drawing = {"prompt": "Hello", "max_tokens": 30, "temperature": 1.5, "seed": 3}
    whole = asked(server, TEXT, drawing)[1]["choices"][0]["text"]
    stop = next(two for two in map("".join, pairwise(whole[9:])) if two.isascii())
    body = {**drawing, "stop": [stop], "stream": stream}
    if not stream:
        (choice,) = asked(server, TEXT, body)[1]["choices"]
        text = choice["text"]
    else:
        with connected(server) as one:
            one.sendall(posted(TEXT, body))
            events = answer(one)[2].decode().split("\n\n")
        found = [json.loads(e[len("data: ") :]) for e in events if e and "[DONE]" not in e]
        text = "".join(one["choices"][0].get("text") or "" for one in found)
        choice = next(o["choices"][0] for o in found if o["choices"][0].get("finish_reason"))
    assert text == whole.partition(stop)[0]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_answer_that_ends_with_its_last_allowed_token_has_stopped(
    server, directory, path, stream
):
    """`length` is for answers that were cut off: an end token or a stop is the end of an answer."""

    def ending(max_tokens, **fields):
        about = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
        body = good(**about, **fields, max_tokens=max_tokens, stream=stream)
        with connected(server) as one:
            one.sendall(posted(path, body))
            said = answer(one)[2].decode()
        *_, last = [line for line in said.split("\n") if line and "[DONE]" not in line]
        found = json.loads(last.removeprefix("data: "))
        return found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]

    answered = asked(server, TEXT, good(prompt="Hello", max_tokens=9))[1]["choices"][0]["text"]
    if path == CHAT:
        said = asked(server, CHAT, good(messages=HELLO, max_tokens=9))[1]["choices"][0]
        answered = said["message"]["content"]
        config = json.loads((directory / "config.json").read_text())
        bias = {"logit_bias": {str(config["eos_token_id"]): 100}}
        assert [ending(most, **bias) for most in (1, 2)] == [(1, "stop"), (1, "stop")]
    stop = next(one for one in reversed(answered) if one.isascii())
    tokens, reason = ending(9, stop=stop)
    assert (reason, ending(tokens, stop=stop)) == ("stop", (tokens, "stop"))
    assert ending(tokens) == (tokens, "length")


def test_a_special_token_that_is_a_stop_ends_the_answer():
    """Clients use chat-template markers as stops, which decoding removes from the text."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from mens_exp.export import serving_generation

    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.add_special_tokens(["<turn>"])
    ended = serving_generation._Ended(serving_generation.Generation(stops=("<turn>",)), tokenizer)
    assert [bool(ended(torch.tensor([[token]]))[0]) for token in (0, 1, 2)] == [False, False, True]


def test_a_stop_text_is_found_wherever_pieces_meet():
    """For every split of a text into three pieces, no text is lost and none is sent too late."""
    from mens_exp.export import serving_generation

    async def joined(pieces, stops):
        queue = asyncio.Queue()
        for piece in [*pieces, None]:
            queue.put_nowait(piece)
        reading = serving_generation._Pieces(queue, serving_generation.Generation(stops=stops))
        return "".join([piece async for piece in until_none(reading)])

    async def until_none(reading):
        while (piece := await reading.get()) is not None:
            yield piece

    for text, stops, expected in [
        ("abcabd", ("abd",), "abc"),
        ("aaab", ("aab", "zz"), "a"),
        ("abcabc", ("abd",), "abcabc"),
        ("xyabz", ("ab", "y"), "x"),
    ]:
        for first in range(len(text) + 1):
            for second in range(first, len(text) + 1):
                pieces = [text[:first], text[first:second], text[second:]]
                assert asyncio.run(joined(pieces, stops)) == expected


def error_of(body):
    """Return the message of an error in OpenAI's format."""
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    return body["error"]["message"]


MALFORMED = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a text": b'"prompt"',
    "null": b"null",
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "an endless number": b'{"prompt": "x", "seed": ' + b"9" * 20_000 + b"}",
    "a large exponent": b'{"prompt": "x", "temperature": 1e999}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "closed deep lists": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "two documents": b'{"prompt": "x"}{"prompt": "y"}',
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", MALFORMED)
def test_body_that_is_no_request_is_400(server, name, path):
    """The body of the response is an error in OpenAI's format."""
    status, body = asked(server, path, MALFORMED[name])
    assert status == 400, body
    assert error_of(body)


# Values of each field that no server could honour.
WRONG = {
    "prompt": [None, "", 1, [], ["a", "b"], {}, True, [1, 2]],
    "messages": [
        *(None, [], "Hello", {}, [1], [[]], [{}], [None]),
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "x"}],
        [{"content": "x"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "assistant", "tool_calls": []}],
        [{"role": "assistant", "tool_calls": [1]}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
    "max_tokens": [0, -1, 1.5, "2", True, 10**9, 10**30, [], {}],
    "temperature": [-1, 3, "0", True, [], {}, 10**400],
    "top_p": [-0.1, 1.1, "1", True, []],
    "seed": [1.5, "1", 2**64, -(2**64), True, []],
    "stop": [1, [1], [""], "", {}, ["x"] * 1000, [["x"]]],
    "stream": ["yes", 1, [], {}],
    "stream_options": [True, [], {"include_usage": 1}, {"include": True}, {"include_usage": True}],
    "frequency_penalty": [-3, 3, "x", []],
    "suffix": ["x", 1],
    "n": [0, 2, "1", -1, True],
    "echo": [True, 0],
    "logprobs": [True, 0, 5],
    "presence_penalty": [-3, 3, "x", []],
    "generation_config": ['{"max_new_tokens": 1000000000}', "{", {}, '{"num_beams": 9999}'],
    "model": [1, [], {}, True],
    "no_such_field": [1, None],
}
OF_CHAT = {
    "logit_bias": [1, [], {"x": 1}, {"1": "x"}, {"999999999": 1}, {"-1": 1}, {"1": 101}],
    "tools": [1, {}, "x", [1], [None]],
    "chat_template_kwargs": [1, [], "x", {"tokenize": False}, {"return_tensors": "np"}],
    "response_format": [{"type": "json_object"}, 1],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 1],
    "parallel_tool_calls": [False, 0, "x"],
}


@pytest.mark.parametrize("field", [*WRONG, *OF_CHAT])
def test_field_of_a_wrong_value_is_400(server, field):
    """The error's `param` names the field."""
    paths = {"prompt": [TEXT], "messages": [CHAT]}.get(field, [CHAT, TEXT])
    for path in [CHAT] if field in OF_CHAT else paths:
        usual = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
        for value in {**WRONG, **OF_CHAT}[field]:
            status, body = asked(server, path, good(**{**usual, field: value}))
            assert status == 400, (path, field, value, body)
            assert error_of(body)
            assert body["error"]["param"] in {field, "messages"}, body
            assert body["error"]["type"] == "invalid_request_error"


RIGHT = {
    CHAT: [
        {"messages": HELLO},
        {"messages": HELLO, "model": None, "stop": None, "seed": None, "tools": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"messages": [{"role": "system", "content": ""}, *HELLO], "max_completion_tokens": 1},
        {"messages": HELLO, "logit_bias": {"5": -100, "6": 100}},
        {"messages": HELLO, "logit_bias": {}},
        {"messages": HELLO, "logit_bias": {"5": 2.5}, "user": "me", "n": 1, "logprobs": False},
        {"messages": HELLO, "tools": [], "tool_choice": "auto", "metadata": {}},
        {"messages": HELLO, "parallel_tool_calls": True, "stream_options": None},
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "x"},
            ]
        },
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "x"},
            ]
        },
    ],
    TEXT: [
        {"prompt": "Hello"},
        {"prompt": "Hello", "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["x", "y"]},
        {"prompt": "Hello", "temperature": 2, "frequency_penalty": 0.5, "presence_penalty": -1},
        {"prompt": "déjà 🦀", "stop": "\n", "echo": False, "best_of": 1},
    ],
}


@pytest.mark.parametrize("path", RIGHT)
def test_good_requests_are_answered(server, path):
    """Fields with a null or default value are accepted too."""
    for fields in RIGHT[path]:
        status, body = asked(server, path, good(**fields))
        assert status == 200, (fields, body)
        assert body["usage"]["completion_tokens"] <= 2


def test_models_are_listed(server):
    """The list has the served model, which can also be requested by name."""
    status, body = asked(server, "/v1/models", None, method="GET")
    assert status == 200
    assert [one["id"] for one in body["data"]] == ["tiny"]
    assert asked(server, "/v1/models/tiny", None, method="GET")[1]["object"] == "model"
    status, body = asked(server, "/v1/models/other", None, method="GET")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_another_model_is_404(server):
    """The error code is that of OpenAI's API."""
    for path, usual in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
        for name in ("gpt-5", "", "../tiny", "tiny@main", "x" * 10_000):
            status, body = asked(server, path, good(model=name, **usual))
            assert (status, body["error"]["code"]) == (404, "model_not_found"), name
            assert len(error_of(body)) < 500


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/responses", 404),
        ("POST", "/load_model", 404),
        ("POST", "/reset", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%00", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", TEXT, 405),
        ("POST", "/v1/models", 405),
        ("BREW", "/v1/models", 405),
        ("OPTIONS", CHAT, 405),
    ],
)
def test_unknown_route_and_method(server, method, path, status):
    """404 for a route; 405 with an Allow header for a method."""
    with connected(server) as one:
        one.sendall(head(method, path, "Content-Length: 0"))
        found, headers, body = answer(one)
    assert found == status
    assert error_of(json.loads(body))
    assert ("allow" in headers) == (status == 405)


def test_long_context_is_400(server):
    """The limit applies to the tokens of prompt and answer together."""
    for path, usual in (
        (CHAT, {"messages": [{"role": "user", "content": "word " * 50_000}]}),
        (TEXT, {"prompt": "word " * 50_000}),
        (TEXT, {"prompt": "word", "max_tokens": 1_000_000}),
    ):
        status, body = asked(server, path, good(**usual))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "tokens" in error_of(body)


def test_huge_body_is_413(server):
    """Refused by its Content-Length before it is read, or once its chunks pass the limit."""
    usual = ("Content-Type: application/json",)
    status, body = sent(server, head("POST", TEXT, *usual, "Content-Length: 99999999999"))
    assert status == 413
    assert error_of(body)
    with connected(server) as one:
        one.sendall(head("POST", TEXT, *usual, "Transfer-Encoding: chunked"))
        chunk = b"100000\r\n" + b"x" * 2**20 + b"\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(64):
                one.sendall(chunk)
            pytest.fail("64 MiB were taken")


STALLED = {
    "a length that lies": head("POST", TEXT, "Content-Type: application/json", "Content-Length: 99")
    + b'{"prompt"',
    "chunks without end": head(
        "POST", TEXT, "Content-Type: application/json", "Transfer-Encoding: chunked"
    )
    + b"5\r\n{",
    "slow headers": b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    "half a line": b"GET",
    "nothing": b"",
}
DRIPPING = {
    "headers": STALLED["slow headers"],
    "body": head("POST", TEXT, "Content-Type: application/json", "Content-Length: 500"),
}


@pytest.fixture(scope="module")
def waiting(server):
    """Run all stalling and all dripping clients at once; return what each got."""
    return dict(_waited(server))


def _waited(server):
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(STALLED) + len(DRIPPING)) as pool:
        ones = {name: stack.enter_context(connected(server)) for name in (*STALLED, *DRIPPING)}
        ends = {name: pool.submit(_stalled, ones[name], data) for name, data in STALLED.items()}
        ends |= {name: pool.submit(_dripping, ones[name], data) for name, data in DRIPPING.items()}
        for name, end in ends.items():
            yield name, end.result()


def _stalled(one, data):
    one.sendall(data)
    status, _, body = answer(one)
    return status, body, one.recv(10)


def _dripping(one, begun):
    """Send one byte at a time, for longer than a server with a time limit would accept."""
    one.sendall(begun)
    try:
        for _ in range(1_000):  # the first few take longer than the server's limit of a second
            one.sendall(b"x")
            time.sleep(0.1)
    except (BrokenPipeError, ConnectionResetError):
        return "cut off"
    return "served for ever"


@pytest.mark.parametrize("name", STALLED)
def test_client_that_sends_no_more_is_408_and_cut_off(waiting, server, name):
    """The limit applies wherever in the request the client stops."""
    status, body, rest = waiting[name]
    assert (status, rest) == (408, b"")
    assert error_of(json.loads(body))


@pytest.mark.parametrize("part", DRIPPING)
def test_slow_loris_is_cut_off(waiting, server, part):
    """Single bytes do not restart the timeout."""
    assert waiting[part] == "cut off"


BROKEN = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "two lengths": head("POST", TEXT, "Content-Length: 5", "Content-Length: 6") + b"xxxxxx",
    "a negative length": head("POST", TEXT, "Content-Length: -5"),
    "a bad chunk": head("POST", TEXT, "Transfer-Encoding: chunked") + b"zz\r\nxx\r\n",
    "another coding": head("POST", TEXT, "Transfer-Encoding: gzip"),
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "large headers": head("GET", "/v1/models", "X-Long: " + "x" * 200_000),
    "a bad name": head("GET", "/v1/models", "X Y: z"),
    "a bad version": b"GET /v1/models HTTP/9\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_refused_in_json(server, name):
    """No HTTP library would send these requests."""
    status, body = sent(server, BROKEN[name])
    assert 400 <= status < 500
    assert error_of(body)


def test_pipelined_requests_are_answered_in_their_order(server):
    """Good and bad requests share one connection."""
    ok = posted(TEXT, good(prompt="a"))
    bad = posted(TEXT, good(prompt=1))
    with connected(server) as one:
        one.sendall(ok + bad + head("GET", "/v1/models") + ok)
        file = one.makefile("rb")
        statuses = []
        for _ in range(4):
            statuses.append(int(file.readline().split()[1]))
            size = 0
            while (line := file.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            file.read(size)
    assert statuses == [200, 400, 200, 200]


def test_body_of_another_type_is_415(server):
    """It includes the types that a web page may send across origins without asking."""
    data = json.dumps(good(prompt="x")).encode()
    for line in ("Content-Type: text/plain", "X-None: 1"):
        request = head("POST", TEXT, line, f"Content-Length: {len(data)}") + data
        status, body = sent(server, request)
        assert status == 415
        assert "application/json" in error_of(body)


def test_other_host_is_refused(server):
    """A page that uses DNS rebinding cannot read answers."""
    status, body = sent(server, posted(TEXT, good(prompt="x"), host="evil.example"))
    assert status == 403
    assert "evil.example" in error_of(body)
    assert sent(server, posted(TEXT, good(prompt="x"), host="localhost:1"))[0] == 200


def crowd(server):
    """Open 300 silent connections and return their answers; None if opening took too long.

    The server closes silent connections after a second (408), and then accepts others.
    """
    with contextlib.ExitStack() as held:
        began = time.monotonic()
        opened = [held.enter_context(connected(server)) for _ in range(300)]
        last = answer(opened[-1])
        if time.monotonic() - began >= 1:
            return None
        return [*map(answer, opened[:-1]), last]


def test_many_connections_at_once(server):
    """128 connections are open at a time; each one above gets 503 with Retry-After."""
    found = next(filter(None, (crowd(server) for _ in range(10))), None)
    assert found is not None, "no connection was refused within a second"
    statuses = [status for status, _, _ in found]
    assert statuses[:120] == [408] * 120  # the server may not have closed all earlier connections
    assert statuses[128:] == [503] * 172
    for _, headers, body in found[128:]:
        assert headers["retry-after"] == "1"
        assert "too many connections" in error_of(json.loads(body))


def test_many_requests_at_once(server):
    """Each gets an answer, or 503 with Retry-After."""
    held = [connected(server) for _ in range(60)]
    statuses = []
    for one in held:
        one.sendall(posted(CHAT, good(messages=HELLO, max_tokens=8)))
    for one in held:
        status, headers, body = answer(one)
        statuses.append(status)
        if status != 200:
            assert error_of(json.loads(body))
            assert headers["retry-after"]
        one.close()
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 8


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["at once", "within"])
def test_client_that_goes_away_costs_no_answer(server, stream, when):
    """Generation stops when the client disconnects, so the next one need not wait for it."""
    body = good(prompt="Hello", stream=stream, max_tokens=1500, stop=["\0never"])
    alone_s = _answered_s(server)
    for _ in range(12):
        one = connected(server)
        one.sendall(posted(TEXT, body))
        if when == "within":
            if stream:
                assert b"200" in one.recv(64)
            else:
                time.sleep(0.05)
        one.close()
    assert _answered_s(server) < 3 + 20 * alone_s  # 18,000 more tokens would take far longer


def _answered_s(server):
    began = time.monotonic()
    assert asked(server, TEXT, good(prompt="Hello", max_tokens=1))[0] == 200
    return time.monotonic() - began


def test_client_that_takes_nothing_is_cut_off(monkeypatch):
    """Writing times out if the client does not read; a client that reads is served."""
    from mens_exp.export import serving_app

    monkeypatch.setattr(serving_app, "_LIMITS", serving_app.Limits(write_s=0.05))
    taken = []

    async def never(_):
        await asyncio.sleep(60)

    async def at_once(message):
        taken.append(message)

    with pytest.raises(serving_app._GoneError):
        asyncio.run(serving_app._Reply(never).json({}))
    asyncio.run(serving_app._Reply(at_once).json({}))
    assert [one["type"] for one in taken] == ["http.response.start", "http.response.body"]


def test_stream_is_whole(server):
    """The last event is [DONE], and the one before it has the token counts."""
    with connected(server) as one:
        one.sendall(posted(CHAT, good(messages=HELLO, stream=True, max_tokens=4)))
        status, headers, body = answer(one)
    events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] <= 4


def test_a_streamed_answer_is_the_text_of_the_whole_answer(server):
    """Also where it ends within a character; only the last event has a `finish_reason`."""
    cut = 0
    for seed in range(12):
        body = {"prompt": "Hello", "max_tokens": 6, "temperature": 1.5, "seed": seed}
        whole = asked(server, TEXT, body)[1]["choices"][0]["text"]
        with connected(server) as one:
            one.sendall(posted(TEXT, {**body, "stream": True}))
            text = answer(one)[2].decode()
        *events, _ = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        choices = [json.loads(one)["choices"][0] for one in events]
        assert "".join(one.get("text") or "" for one in choices) == whole
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in {"stop", "length"}
        cut += whole.endswith("\N{REPLACEMENT CHARACTER}")
    assert cut


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_stream_options_say_where_the_usage_stands(server, path, is_wanted):
    """The usage is a separate event without choices, as OpenAI's clients expect, or absent."""
    asks = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    options = {"stream": True, "stream_options": {"include_usage": is_wanted}}
    with connected(server) as one:
        one.sendall(posted(path, good(**asks, **options, max_tokens=3)))
        status, _, body = answer(one)
    *events, end = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    events = list(map(json.loads, events))
    assert (status, end) == (200, "[DONE]")
    told = [one["usage"]["completion_tokens"] for one in events if one.get("usage")]
    if is_wanted:
        last = events.pop()
        assert (last["choices"], last["object"]) == ([], events[0]["object"])
        assert len(told) == 1
        assert told[0] <= 3
    else:
        assert told == []
    assert all(one["choices"] and not one.get("usage") for one in events)
    assert events[-1]["choices"][0]["finish_reason"] in {"stop", "length"}


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def test_a_model_is_told_of_no_tool_where_none_may_be_called():
    """`tool_choice="none"` removes the tools from the prompt."""
    about = {"messages": HELLO, "tools": [TOOL]}

    def tools(**more):
        return serving.checked({**about, **more}, is_chat=True, model="m", vocabulary=9).get(
            "tools"
        )

    assert tools() == tools(tool_choice="auto") == [TOOL]
    assert tools(tool_choice="none") is None


def test_tools_that_the_template_drops_are_refused(server):
    """The prompt is the same without them, so the model could never call one."""
    body = good(messages=HELLO, tools=[TOOL])
    length = asked(server, CHAT, body)[1]["usage"]["prompt_tokens"]
    assert length > asked(server, CHAT, good(messages=HELLO))[1]["usage"]["prompt_tokens"] + 20
    body["chat_template_kwargs"] = {"drops_tools": True}
    status, said = asked(server, CHAT, body)
    assert (status, said["error"]["param"]) == (400, "tools")
    assert "the chat template drops the request's tools" in error_of(said)
    assert asked(server, CHAT, {**body, "tool_choice": "none"})[0] == 200


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("dropped", "message", "part"),
    [
        ("tool", {"role": "tool", "tool_call_id": "1", "content": "rain"}, "tool messages"),
        ("system", {"role": "system", "content": "Be brief"}, "system messages"),
        ("calls", {"role": "assistant", "content": "", "tool_calls": [CALL]}, "tool calls"),
    ],
)
def test_messages_that_the_template_drops_are_refused(server, dropped, message, part):
    """A model that never sees a tool's result or the system prompt would answer without it."""
    body = good(messages=[message, *HELLO])
    assert asked(server, CHAT, body)[0] == 200
    body["chat_template_kwargs"] = {"dropped": dropped}
    status, said = asked(server, CHAT, body)
    assert (status, said["error"]["param"]) == (400, "messages")
    assert f"the chat template drops the request's {part}" in error_of(said)


def test_the_template_gets_the_whole_message():
    """Text beside calls, parts and further fields; the call's arguments become an object."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "assistant", "content": parts, "tool_calls": [CALL], "refusal": None}
    (turn,) = serving.turns([{**message, "reasoning_content": "hm"}])
    function = {"name": "f", "arguments": {"x": 1}}
    assert turn == {
        "role": "assistant",
        "content": "onetwo",
        "reasoning_content": "hm",
        "tool_calls": [{**CALL, "function": function}],
    }
    assert serving.turns([{"role": "assistant", "content": None, "tool_calls": []}]) == [
        {"role": "assistant", "content": ""}
    ]


def test_the_end_does_not_wait_for_answers(directory):
    """Stopping the server neither waits for running answers nor for a silent client."""
    with quick(), serving.serving(directory, host="127.0.0.1", port=0) as running:
        held = [connected(running) for _ in range(6)]
        for one in held[1:]:
            one.sendall(posted(TEXT, good(prompt="Hello", max_tokens=200, stop=["\0never"])))
        time.sleep(0.3)
    # It stopped within the time limit, before it would have been killed.
    assert running.process.returncode not in {None, -signal.SIGKILL}
    for one in held:
        one.close()


TOKEN = "correct-horse-battery-staple"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_token_is_asked_for(directory, monkeypatch, host):
    """Every route except /health requires the token."""
    monkeypatch.setenv("MENS_EXP_SERVE_TOKEN", TOKEN)
    with quick(), serving.serving(directory, host=host, port=0) as running:
        assert TOKEN not in running.curl
        assert "$MENS_EXP_SERVE_TOKEN" in running.curl
        assert asked(running, "/health", None, method="GET")[0] == 200
        refused = ["X-None: 1", "Authorization: Bearer", "Authorization: Bearer wrong"]
        refused += [f"Authorization: Basic {TOKEN}", f"Authorization: Bearer {TOKEN}x"]
        refused += [f"Authorization: Bearer {TOKEN[:-1]}", "Authorization: Bearer \xe9"]
        for line in refused:
            for request in (posted(TEXT, good(prompt="x"), line), head("GET", "/v1/models", line)):
                with connected(running) as one:
                    one.sendall(request)
                    status, headers, body = answer(one)
                assert status == 401, line
                assert headers["www-authenticate"] == "Bearer"
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        line = f"Authorization: Bearer {TOKEN}"
        assert asked(running, TEXT, good(prompt="x"), line)[0] == 200
        other = posted(TEXT, good(prompt="x"), line, host="a.proxy.example")
        assert sent(running, other)[0] == 200


@pytest.mark.parametrize("token", [None, "", "short", "with a space in it it is none", "é" * 40])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_open_address_without_a_token_is_refused(monkeypatch, host, token):
    """The message says which variable to set, and does not repeat the token."""
    monkeypatch.delenv("MENS_EXP_SERVE_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("MENS_EXP_SERVE_TOKEN", token)
    (problem,) = serving.token_problems(host, "MENS_EXP_SERVE_TOKEN")
    assert "MENS_EXP_SERVE_TOKEN" in str(problem)
    assert token is None or len(token) < 6 or token not in str(problem)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_token(monkeypatch, host):
    """Only this machine can reach a loopback address."""
    monkeypatch.delenv("MENS_EXP_SERVE_TOKEN", raising=False)
    assert serving.token_problems(host, "MENS_EXP_SERVE_TOKEN") == []


def test_command_refuses_an_open_address_without_a_token(directory, tmp_path, monkeypatch, capsys):
    """Exit code 2 before a run directory is created; a token in the command is refused too."""
    from mens_exp import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MENS_EXP_SERVE_TOKEN", raising=False)
    assert cli.main(["task=serve", f"path={directory}", "serve.host=0.0.0.0"]) == 2
    assert "MENS_EXP_SERVE_TOKEN" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["task=serve", f"path={directory}", "serve.token=secret"]) == 2
    assert os.environ.get("MENS_EXP_SERVE_TOKEN") is None
