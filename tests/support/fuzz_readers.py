"""Readers of external files, their valid inputs, and the answers they may give.

A reader is given a file in a folder of its own. It may refuse it by one of our errors, or read it;
anything else is a fault. Where another program can read the same format, what was read is compared
with what that program finds.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

CORPORA = Path(__file__).parents[1] / "faults/corpora"
ROWS = [
    {"prompt": "What is 2 + 2?", "response": "4"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COUNTING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ '%5d' % ns.n }}{{ m.content[::2] * 3 }}{% endfor %}{{ range(4) | join('-') }}"
)
_GENERATING = (
    "{% for m in messages %}{% generation %}{{ m['content']|tojson }}{% endgeneration %}"
    "{% endfor %}{{ '{:>4}'.format(7) }}{{ strftime_now('%Y') }}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a prime."},
    {"role": "assistant", "content": "7"},
]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One reader.

    Attributes:
        file: name that the input gets.
        read: reads it, and returns what `check` looks at.
        seeds: of a finished run's directory, valid inputs to start from.
        beside: writes what has to lie next to it.
        check: compares what was read with what another program reads; raises AssertionError.
        native: whether the reader is code that coverage of Python does not see.
    """

    file: str
    read: Callable[[Path], Any]
    seeds: Callable[[Path], list[bytes]]
    beside: Callable[[Path, Path], None] | None = None
    check: Callable[[Path, Any], None] | None = None
    native: bool = False


def _json_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _read_rows(path: Path) -> Any:
    from mens_exp.rows.readers import read_rows

    return read_rows(path)


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings_in(one)


def _same_rows(path: Path, found: Any) -> None:
    """Compare rows with the standard library's reading of their lines."""
    texts = path.read_bytes().decode("utf-8-sig").split("\n")  # "\r" does not end a line
    lines = [json.loads(text) for text in texts if text.strip()]
    assert len(found.pairs) + len(found.bad) == len(lines), "rows were lost or made up"
    told = "\n".join(text for line in lines for text in _strings_in(line))
    for pair in found.pairs:
        if pair.conversation is None:
            assert pair.response.strip() in told, "a response that no line has"


def _same_cells(path: Path, found: Any) -> None:
    """Compare rows with the standard library's reading of their cells."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            lines = [cells for cells in csv.reader(file, strict=True) if cells]
        except csv.Error:
            assert found.bad, "a file that is no CSV"
            return
    assert len(found.pairs) + len(found.bad) == len(lines[1:]), "rows were lost or made up"
    told = "\n".join(cell for cells in lines for cell in cells)
    for pair in found.pairs:
        if pair.conversation is None:
            assert pair.response.strip() in told, "a response that no line has"


def _table(kind: str) -> Callable[[Path], list[bytes]]:
    def made(_: Path) -> list[bytes]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([ROWS[0], {"prompt": "and 3?", "response": "9"}])
        sink = io.BytesIO()
        if kind == "parquet":
            pq.write_table(table, sink)
        else:
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        return [sink.getvalue()]

    return made


def _bytes_of(*names: str) -> Callable[[Path], list[bytes]]:
    return lambda run: [(run / name).read_bytes() for name in names]


def _copies(source: str, *names: str) -> Callable[[Path, Path], None]:
    def beside(run: Path, directory: Path) -> None:
        for name in names:
            shutil.copy(run / source / name, directory / name)

    return beside


def _copied(source: Path, target: Path) -> None:
    shutil.copy(source, target)


def _read_v3(path: Path) -> Any:
    from mens_exp.artifacts.adapter_v3 import read_adapter

    return read_adapter(path.parent)


def _same_tensors(path: Path, found: Any) -> None:
    """Read the file by the format's documentation, with only struct and numpy."""
    data = path.with_name("adapter.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    _, tensors = found
    assert tensors.keys() == header.keys(), "other tensors than the header lists"
    for name, about in header.items():
        first, last = (8 + size + offset for offset in about["data_offsets"])
        values = np.frombuffer(data[first:last], np.float32).reshape(about["shape"])
        assert np.array_equal(tensors[name], values, equal_nan=True), f"{name} has other values"


def _read_v2(path: Path) -> Any:
    from mens_exp.artifacts.adapter_v2 import read_adapter_v2

    return read_adapter_v2(path.parent)


def _v2(run: Path) -> list[bytes]:
    from mens_exp.artifacts.adapter_v2 import lower
    from mens_exp.artifacts.adapter_v3 import read_adapter
    from mens_exp.artifacts.record import write_record
    from mens_exp.errors import MensError

    manifest, _ = read_adapter(run / "adapter")
    try:
        meta = lower(manifest)
    except MensError:
        return []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "meta.json"
        write_record(meta, place)
        return [place.read_bytes()]


def _read_peft(path: Path) -> Any:
    from mens_exp.layout.families import FAMILIES
    from mens_exp.layout.starting_adapter import read

    return read(path.parent, FAMILIES["llama"])


@cache
def _tokenizer_json() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(pattern=r"\w+|\s", behavior="isolated")
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special)
    core.train_from_iterator(["name a prime number be brief seven 7"], trainer)
    return str(core.to_str()).encode()


def _read_tokenizer(path: Path) -> Any:
    from mens_exp.tokenizer.implementations import HfTokenizer

    tokenizer = HfTokenizer.from_directory(path.parent)
    return tokenizer.last_id, tokenizer.pad_id, tokenizer.core.encode("name a prime " * 20).ids


def _plain_config(_: Path, directory: Path) -> None:
    names = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")


def _tokenizer_beside(_: Path, directory: Path) -> None:
    (directory / "tokenizer.json").write_bytes(_tokenizer_json())


def _read_template(path: Path) -> Any:
    from mens_exp.errors import DataError
    from mens_exp.tokenizer.templates import check_syntax, generated_spans, render

    try:
        template = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8", where=str(path)) from error
    check_syntax(template)
    generated_spans(template, CONVERSATION, eos_token="</s>")
    return render(template, CONVERSATION, add_generation_prompt=True, eos_token="</s>")


def _read_config(path: Path) -> Any:
    from mens_exp.config.compose import from_yaml, typed

    return typed(from_yaml(path))


def _record(place: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        from importlib import import_module

        module, _, name = place.rpartition(".")
        cls = getattr(import_module(f"mens_exp.artifacts.{module}"), name)
        return cls.read(path)

    return read


def _same_record(path: Path, found: Any) -> None:
    """Compare a record's numbers and texts with the standard library's JSON reader."""
    value = json.loads(path.read_text("utf-8"))
    for name, stored in value.items():
        read = getattr(found, name, stored)
        if isinstance(stored, str | int) or stored is None:
            assert read == stored, f"{name} was read as {read!r}"
        elif isinstance(stored, float):
            assert math.isclose(float(read), stored), f"{name} was read as {read!r}"


def _function(place: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        from importlib import import_module

        module, _, name = place.rpartition(".")
        return getattr(import_module(f"mens_exp.{module}"), name)(path)

    return read


def _read_bundle(path: Path) -> Any:
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.export.bundle import verify

    return verify(RunDir(path.parent))


def _bundle(run: Path) -> list[bytes]:
    sha256 = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    listing = {"format": "mens_exp_bundle", "version": 1, "files": {"config.yaml": sha256}}
    return [json.dumps(listing).encode()]


def _ledger(_: Path) -> list[bytes]:
    from mens_exp.artifacts.decision_ledger import EntryKind, append

    cycle = {"cycle": "one", "suite_digest": "ab" * 32, "seeds": [0, 1], "arms": ["a", "b"]}
    cycle |= {"factor": "backend", "kpi": "val_loss", "direction": "lower", "margin": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "ledger.jsonl"
        for name in ("one", "two"):
            append(place, EntryKind.CYCLE, lambda _, name=name: {**cycle, "cycle": name})
        return [place.read_bytes()]


def _read_harness(path: Path) -> Any:
    from mens_exp.evals.harness_files import read_task_files

    return read_task_files(path.parent, calls_functions=False)


def _read_request(path: Path) -> Any:
    from mens_exp.errors import DataError
    from mens_exp.export.serving import HttpError, checked, parsed

    try:
        body = parsed(path.read_bytes())
        return checked(body, is_chat="messages" in body, model="m", vocabulary=100)
    except HttpError as refused:
        said = json.loads(refused.body)["error"]["message"]
        if refused.status >= 500 or not said:
            raise ValueError(
                "the request's fault is called the server's, or not named"
            ) from refused
        raise DataError("the request is refused", where="request", found=said) from refused


def _request(_: Path) -> list[bytes]:
    chat = {"model": "m", "messages": CONVERSATION, "max_tokens": 5, "temperature": 0.5}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    more = {"stream": True, "stop": ["a"], "seed": 1, "top_p": 0.9, "n": 1, "tools": tools}
    plain = {"model": "m", "prompt": "Name a prime.", "max_tokens": 5, "stop": "."}
    return [json.dumps(one).encode() for one in (chat, chat | more, plain)]


def _harness(run: Path) -> list[bytes]:
    return [
        b"task: demo\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        + str(run / "telemetry.jsonl").encode()
        + b"\n"
        b"test_split: test\noutput_type: generate_until\ndoc_to_text: '{{prompt}}'\n"
        b"doc_to_target: '{{response}}'\nmetric_list:\n  - metric: exact_match\n"
    ]


def _read_directory(path: Path) -> Any:
    from mens_exp.layout.checkpoint_files import license_of, read_directory

    return read_directory(path.parent), license_of(path.parent)


def _model(run: Path, directory: Path) -> None:
    _tokenizer_beside(run, directory)
    for name, data in _MODEL.items():
        if not (directory / name).exists():
            (directory / name).write_bytes(data)


def _read_codes(path: Path) -> Any:
    """Read a published file as a model's codes; its metadata say how it was made."""
    import torch

    from mens_exp.layout.checkpoint_files import data_start, read_header
    from mens_exp.layout.prequantized import CODES
    from mens_exp.model.stored_weights import StoredTensors

    read_header(path)
    with path.open("rb") as file:
        header = json.loads(file.read(data_start(path))[8:])
    try:
        named = json.loads(header["__metadata__"]["quantization_config"])
    except (KeyError, TypeError, ValueError):
        named = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    described = {"quantization_config": named}
    (path.parent / "config.json").write_text(json.dumps(described), "utf-8")
    stored = StoredTensors(path.parent)
    found = {}
    for name, info in stored.directory.tensors.items():
        if info.dtype == CODES:
            codes = stored.codes(name, torch.device("cpu"))
            found[name] = (info.shape, codes.rows(0, len(codes.codes_OI)))
    return found


def _whole_and_finite(_: Path, found: Any) -> None:
    for shape, values in found.values():
        assert len(shape) == 1 or tuple(values.shape) == shape
        assert bool(values.isfinite().all())


def _published(_: Path) -> list[bytes]:
    """Return the published layers, each as `q_proj` of a model."""
    from safetensors import safe_open
    from safetensors.torch import save

    made = []
    for path in sorted((Path(__file__).parents[1] / "model" / "published").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {f"q_proj.{name}": file.get_tensor(name) for name in list(file.keys())}
            del tensors["q_proj.expected"]
            made.append(save(tensors, file.metadata()))
    return made


def _tensors() -> bytes:
    header = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


_MODEL = {
    "config.json": b'{"model_type": "llama", "vocab_size": 2, "hidden_size": 1}',
    "model.safetensors": _tensors(),
    "README.md": b"---\nlicense: apache-2.0\ntags: [a, b]\n---\n# A model\n",
}
_TASKS = {
    "task_id": "HumanEval/0",
    "prompt": "def f(a):\n    '''Return a.'''\n",
    "canonical_solution": "    return a\n",
    "test": "def check(candidate):\n    assert candidate(1) == 1\n",
    "entry_point": "f",
}
_SCORED = {"id": "a", "prompt": "Say hi.", "reference": "hi", "check": "exact"}


def _lines_of_tasks(_: Path) -> list[bytes]:
    return [_json_lines([_TASKS])]


READERS: dict[str, Reader] = {
    "rows_jsonl": Reader(
        file="rows.jsonl",
        read=_read_rows,
        seeds=lambda _: [_json_lines([row]) for row in ROWS] + [_json_lines([ROWS[0]] * 3)],
        check=_same_rows,
    ),
    "rows_json": Reader(
        file="rows.json", read=_read_rows, seeds=lambda _: [json.dumps([ROWS[0]]).encode()]
    ),
    "rows_csv": Reader(
        file="rows.csv",
        read=_read_rows,
        seeds=lambda _: [
            b"prompt,response\nWhat is 2 + 2?,4\nand 3?,9\n",
            '\ufeffinstruction,input,output\r\nAdd.,"1, 2",3\r\n"Say ""ho"".",,"a\nb"\r\n'.encode(),
        ],
        check=_same_cells,
    ),
    "rows_gzip": Reader(
        file="rows.jsonl.gz",
        read=_read_rows,
        seeds=lambda _: [gzip.compress(_json_lines([ROWS[0]] * 5), mtime=0)],
    ),
    "rows_parquet": Reader(
        file="rows.parquet", read=_read_rows, seeds=_table("parquet"), native=True
    ),
    "rows_arrow": Reader(file="rows.arrow", read=_read_rows, seeds=_table("arrow"), native=True),
    "adapter_v3": Reader(
        file="adapter_manifest.json",
        read=_read_v3,
        seeds=_bytes_of("adapter/adapter_manifest.json"),
        beside=_copies("adapter", "adapter.safetensors"),
        check=_same_tensors,
    ),
    "adapter_tensors": Reader(
        file="adapter.safetensors",
        read=_read_v3,
        seeds=_bytes_of("adapter/adapter.safetensors"),
        beside=_copies("adapter", "adapter_manifest.json"),
        check=_same_tensors,
        native=True,
    ),
    "adapter_v2": Reader(
        file="candle_qlora_adapter_meta.json",
        read=_read_v2,
        seeds=_v2,
        beside=lambda run, directory: _copied(
            run / "adapter/adapter.safetensors", directory / "candle_qlora_adapter.safetensors"
        ),
    ),
    "peft_config": Reader(
        file="adapter_config.json",
        read=_read_peft,
        seeds=_bytes_of("adapter/peft/adapter_config.json"),
        beside=_copies("adapter/peft", "adapter_model.safetensors"),
    ),
    "peft_tensors": Reader(
        file="adapter_model.safetensors",
        read=_read_peft,
        seeds=_bytes_of("adapter/peft/adapter_model.safetensors"),
        beside=_copies("adapter/peft", "adapter_config.json"),
        native=True,
    ),
    "tokenizer": Reader(
        file="tokenizer.json",
        read=_read_tokenizer,
        seeds=lambda _: [_tokenizer_json()],
        beside=_plain_config,
        native=True,
    ),
    "tokenizer_config": Reader(
        file="tokenizer_config.json",
        read=_read_tokenizer,
        seeds=lambda _: [
            json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ 1 }}"}).encode()
        ],
        beside=_tokenizer_beside,
    ),
    "template": Reader(
        file="chat_template.jinja",
        read=_read_template,
        seeds=lambda _: [
            TEMPLATE.encode(),
            b"{% macro m(x) %}{{ x|upper }}{% endmacro %}{{ m(messages[0].content) }}",
            _COUNTING.encode(),
            _GENERATING.encode(),
        ],
    ),
    "config": Reader(file="config.yaml", read=_read_config, seeds=_bytes_of("config.yaml")),
    "manifest": Reader(
        file="manifest.json",
        read=_record("manifest.Manifest"),
        seeds=_bytes_of("manifest.json"),
        check=_same_record,
    ),
    "telemetry": Reader(
        file="telemetry.jsonl",
        read=_function("artifacts.telemetry.read_events"),
        seeds=_bytes_of("telemetry.jsonl"),
    ),
    "validation": Reader(
        file="validation.jsonl",
        read=_function("artifacts.telemetry.read_document_losses"),
        seeds=_bytes_of("validation.jsonl"),
    ),
    "ledger": Reader(
        file="ledger.jsonl",
        read=_function("artifacts.decision_ledger.read_ledger"),
        seeds=_ledger,
    ),
    "bundle": Reader(
        file="bundle.json",
        read=_read_bundle,
        seeds=_bundle,
        beside=lambda run, directory: _copied(run / "config.yaml", directory / "config.yaml"),
    ),
    "checkpoint": Reader(
        file="step_00000002.ckpt",
        read=_function("tasks.adapter_anatomy.read_state"),
        seeds=_bytes_of("checkpoints/step_00000002.ckpt"),
        native=True,
    ),
    "humaneval": Reader(
        file="tasks.jsonl",
        read=_function("evals.program_suite.read_tasks"),
        seeds=_lines_of_tasks,
    ),
    "humaneval_gzip": Reader(
        file="tasks.jsonl.gz",
        read=_function("evals.program_suite.read_tasks"),
        seeds=lambda _: [gzip.compress(_json_lines([_TASKS]), mtime=0)],
    ),
    "harness_yaml": Reader(file="demo.yaml", read=_read_harness, seeds=_harness),
    "request": Reader(file="request.json", read=_read_request, seeds=_request),
    "model_config": Reader(
        file="config.json",
        read=_read_directory,
        seeds=lambda _: [_MODEL["config.json"]],
        beside=_model,
    ),
    "model_tensors": Reader(
        file="model.safetensors",
        read=_read_directory,
        seeds=lambda _: [_MODEL["model.safetensors"]],
        beside=_model,
    ),
    "model_card": Reader(
        file="README.md",
        read=_read_directory,
        seeds=lambda _: [_MODEL["README.md"]],
        beside=_model,
    ),
    "model_codes": Reader(
        file="model.safetensors",
        read=_read_codes,
        seeds=_published,
        beside=_tokenizer_beside,
        check=_whole_and_finite,
    ),
}


def inputs_of(name: str, run: Path) -> list[bytes]:
    """Return the initial inputs of a reader: its valid inputs and the committed corpus."""
    kept = sorted((CORPORA / name).glob("*")) if (CORPORA / name).is_dir() else []
    return [*READERS[name].seeds(run), *(path.read_bytes() for path in kept)]


def words_of(seeds: list[bytes]) -> list[bytes]:
    """Return words from valid inputs, and values that often break readers."""
    found = {word for seed in seeds for word in re.findall(rb"[\w.]{2,40}", seed[:20_000])}
    return sorted(found)[:400] + ODD


ODD = [
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"-Infinity",
        b"1e-400",
        b'""',
        b"[]",
        b"{}",
    ),
    *(b"9" * 5_000, b"[" * 5_000, b'{"a":' * 2_000, b"(" * 2_000, b"\\ud800", b"\xff\xfe", b"\0"),
    *(b"../../etc/passwd", b"/", b"!!python/object/apply:os.system [true]", b"&a [*a, *a]", b"*a"),
    *(
        b"${oc.env:HOME}",
        b"${a}",
        b"(a+)+$",
        b".*" * 20,
        b"%1000000000d",
        b"'x' * 10**9",
        b"|center(10**9)",
    ),
    *(b"{% for a in range(10**6) %}", b"{{ self }}", b"{% endfor %}", b"{{", b"}}", b"__class__"),
    *(struct.pack("<Q", 2**63), struct.pack("<Q", 2**40), struct.pack("<I", 2**31), b"\x80\x04."),
]
