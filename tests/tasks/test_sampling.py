"""eval.keep_passing through the command line: what it keeps and refuses, and what runs say later.

A server gives the answers, so that they are known; one test samples a tiny model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mens_exp import cli
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.telemetry import read_events
from mens_exp.errors import SetupError

TASKS = [
    {
        "task_id": f"own/{name}",
        "prompt": f'def {name}(number):\n    """{said} for the stock keeper of our own shop."""\n',
        "entry_point": name,
        "canonical_solution": f"    return {body}\n",
        "test": f"def check(candidate):\n    assert candidate(5) == {value}\n"
        f"    assert candidate(-2) == {other}\n",
    }
    for name, said, body, value, other in [
        (
            "crates_needed",
            "Tell how many crates of three hold a number of melons",
            "-(-number // 3)",
            2,
            0,
        ),
        (
            "shelf_label",
            "Return the label of a shelf",
            "f'shelf {number}'",
            "'shelf 5'",
            "'shelf -2'",
        ),
        ("never_solved", "Return the number of pallets plus nine", "number + 9", 14, 7),
    ]
]
# The model's answers to each function, one for each sample.
SAID = {
    "crates_needed": [
        "def crates_needed(number):\n    return -(-number // 3)\n",
        "def crates_needed( number ):\n    # rounded up\n    return -(-number//3)\n",  # the same
        "def crates_needed(number):\n    return number // 3\n",  # wrong
        "```python\ndef crates_needed(number):\n    return (number + 2) // 3\n```",
        "def crates_needed(number):\n    import math\n    return math.ceil(number / 3)\n",
    ],
    "shelf_label": ["def shelf_label(number):\n    return f'shelf {number}'\n"] * 5,
    "never_solved": ["def never_solved(number):\n    return 0\n", "", "?", "def", "pass"],
}
SAMPLES = ["eval.samples=5", "eval.temperature=0.8", "eval.seed=3"]


@contextmanager
def model_that_says(said, finish="stop"):
    """A server that gives each function's answers in turn, in whatever order it is asked."""
    lock, order = threading.Lock(), {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = next(n for n in said if f"{n}(" in body["messages"][-1]["content"])
            with lock:
                seeds = order.setdefault(name, {})
                text = said[name][seeds.setdefault(body.get("seed"), len(seeds))]
            choice = {"message": {"content": text}, "finish_reason": finish}
            usage = {"prompt_tokens": 7, "completion_tokens": 3}
            data = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            """Log nothing."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return path


@pytest.fixture(scope="module")
def sample(tasks, tmp_path_factory):
    """Sample from the server; return the run and the file of rows."""

    def drawn(*overrides, said=SAID, finish="stop", code=0):
        place = tmp_path_factory.mktemp("drawn")
        run, rows = RunDir(place / "run"), place / "rows.jsonl"
        with model_that_says(said, finish) as url:
            server = ["eval.engine=openai", f"eval.base_url={url}", "eval.model=stand-in"]
            server.append("suite.batch_size=1")  # one at a time, so that the answers have an order
            command = ["task=evaluate", "path=base", *server, "suite=humaneval", *SAMPLES]
            named = [f"suite.path={tasks}", f"eval.keep_passing={rows}"]
            found = cli.main([*command, *named, *overrides, f"hydra.run.dir={run.path}"])
        assert found == code
        return run, rows

    return drawn


@pytest.fixture(scope="module")
def drawn(sample):
    return sample()


def rows_in(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def passes(task, code):
    """Run an answer and the task's tests with Python itself, without any of our code."""
    program = f"{code}\n{task['test']}\ncheck({task['entry_point']})\n"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=False)
    return done.returncode == 0


def test_answers_that_pass_are_kept_once_each(drawn):
    """Layout and comments do not make another answer, and wrong answers are left out."""
    run, path = drawn
    rows = rows_in(path)
    crates = SAID["crates_needed"]
    expected = [crates[0], crates[3], crates[4], SAID["shelf_label"][0]]
    assert [
        row["messages"][-1]["content"] if "messages" in row else row["response"] for row in rows
    ] == expected
    assert {row["group"] for row in rows} == {
        "humaneval/own/crates_needed",
        "humaneval/own/shelf_label",
    }
    assert all(
        task["prompt"].strip() in row["prompt"]
        for row, task in zip(rows, [TASKS[0]] * 3 + [TASKS[1]], strict=True)
    )
    counts = Manifest.read(run.manifest).facts["rejection_sampling"]
    assert counts == {
        "prompts": 3,
        "sampled": 15,
        "passed": 9,
        "kept": 4,
        "repeated": 5,
        "over_limit": 0,
        "unfinished": 0,
        "unusable": 0,
        "alone": 0,
        "prompts_without_pass": 1,
        "prompts_of_both": 0,
        "file": str(path),
        "sha256": sha256_file(path),
    }
    (event,) = [e for e in read_events(run.telemetry) if e["event"] == "rejection_sampling"]
    assert event["payload"]["passed"] == 9
    assert "prompts without pass" in run.report.read_text("utf-8").lower()


def test_kept_answers_pass_when_python_itself_runs_them(drawn):
    """The kept answers pass when Python runs them, and those counted as failed do not."""
    by_id = {task["task_id"]: task for task in TASKS}
    for row in rows_in(drawn[1]):
        code = row["response"].replace("```python\n", "").replace("\n```", "\n")
        assert passes(by_id[row["provenance"]["item"]], code)
    assert not passes(TASKS[0], SAID["crates_needed"][2])
    assert not any(passes(TASKS[2], code) for code in SAID["never_solved"])


def test_rows_say_where_they_come_from(drawn):
    """Rows have what is needed to sample them again, and nothing that differs between two runs."""
    run, path = drawn
    rows = rows_in(path)
    card = Scorecard.read(run.scorecard)
    assert [row["provenance"]["sample"] for row in rows] == [0, 3, 4, 0]
    assert rows[1]["provenance"] == {
        "kind": "rejection_sampling",
        "model": "stand-in",
        "condition": "base",
        "suite": "humaneval",
        "suite_digest": card.suite_digest,
        "grading": card.generation["grading"],
        "sandbox": "bubblewrap",
        "engine": "openai",
        "seed": 3,
        "temperature": 0.8,
        "top_p": 1.0,
        "max_new_tokens": 512,
        "batch_size": 1,
        "item": "own/crates_needed",
        "sample": 3,
    }


def test_limit_of_a_prompt_keeps_the_first_ones(sample):
    """The limit keeps the first answers, and the same command writes the same bytes."""
    run, path = sample("eval.keep_per_prompt=2")
    assert [row["provenance"]["sample"] for row in rows_in(path)] == [0, 3, 0]
    assert Manifest.read(run.manifest).facts["rejection_sampling"]["over_limit"] == 1
    assert sample("eval.keep_per_prompt=2")[1].read_bytes() == path.read_bytes()


RUST = {
    "name": "own_crates",
    "prompt": "/// How many crates of three hold the melons of our shop?\n"
    "fn crates_needed(number: isize) -> isize {\n",
    "tests": "}\n\nfn main() {\n    assert_eq!(crates_needed(5), 2);\n}\n",
    "stop_tokens": ["\n}"],
}
SAID_RUST = [
    "    (number + 2) / 3\n",
    "```rust\nfn crates_needed( number:isize )->isize{(number+2)/3}\n```",  # the same
    "    number / 3\n",  # wrong
    "    if number % 3 == 0 { number / 3 } else { number / 3 + 1 }\n",
]


def test_rust_answers_are_told_apart_by_rustfmt(tmp_path):
    """After rustfmt, a body and a whole function in another layout are one answer."""
    for tool in ("bwrap", "rustc", "rustfmt"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install bubblewrap rustc rustfmt")
    tasks, rows = tmp_path / "tasks.jsonl", tmp_path / "rows.jsonl"
    tasks.write_text(json.dumps(RUST) + "\n")
    with model_that_says({"crates_needed": SAID_RUST}) as url:
        server = ["eval.engine=openai", f"eval.base_url={url}", "eval.model=stand-in"]
        command = ["task=evaluate", "path=base", *server, "suite=rust", "suite.batch_size=1"]
        drawn = ["eval.samples=4", "eval.temperature=0.8", f"eval.keep_passing={rows}"]
        out = RunDir(tmp_path / "run")
        named = [f"suite.path={tasks}", f"hydra.run.dir={out.path}"]
        assert cli.main([*command, *drawn, *named]) == 0
    kept = rows_in(rows)
    assert [row["response"] for row in kept] == [SAID_RUST[0], SAID_RUST[3]]
    assert {row["language"] for row in kept} == {"rust"}
    assert kept[0]["provenance"]["tools"]["rustc"].startswith("rustc ")
    counts = Manifest.read(out.manifest).facts["rejection_sampling"]
    assert (counts["passed"], counts["kept"], counts["repeated"]) == (3, 2, 1)


def test_answers_that_were_cut_are_not_kept(sample):
    """They pass, but would teach a model not to end; a note says that the file is empty."""
    run, path = sample(finish="length")
    manifest = Manifest.read(run.manifest)
    assert manifest.facts["rejection_sampling"]["unfinished"] == 9
    assert path.read_bytes() == b""
    assert any("no answer was kept" in note for note in manifest.notes)


@pytest.fixture(scope="module")
def mixed(drawn, rows_file, tmp_path_factory):
    """The sampled rows, mixed with others."""
    path = tmp_path_factory.mktemp("mixed") / "rows.jsonl"
    path.write_text(rows_file.read_text("utf-8") + drawn[1].read_text("utf-8"))
    return path


def test_training_on_the_rows_and_scoring_by_their_suite_is_refused(
    train_in, mixed, tasks, tmp_path, capsys
):
    """The data contract finds the suite's prompts in the rows: exit code 4, before step 1."""
    data = [f"data.path={mixed}", "data.val_frac=0.05", "data.heldout_frac=0.05"]
    suite = ["suite=humaneval", f"suite.path={tasks}", "suite.max_new_tokens=8"]
    run = train_in(tmp_path / "run", *data, *suite, code=4)
    assert "suite=humaneval" in capsys.readouterr().err
    part = Manifest.read(run.manifest).data_contract["overlap"][-1]
    assert {one["item"] for one in part["worst"]} >= {"own/crates_needed"}


def test_scoring_a_run_that_was_trained_on_the_rows_says_so(
    train_in, mixed, tasks, tmp_path, capsys
):
    """For a run trained without a suite, the manifest, the report and its notes name the items."""
    data = [f"data.path={mixed}", "data.val_frac=0.05", "data.heldout_frac=0.05"]
    trained = train_in(tmp_path / "trained", *data)
    out = RunDir(tmp_path / "scored")
    suite = ["suite=humaneval", f"suite.path={tasks}", "suite.max_new_tokens=8"]
    command = ["task=evaluate", f"path={trained.path}", *suite, f"hydra.run.dir={out.path}"]
    assert cli.main(command) == 0
    manifest = Manifest.read(out.manifest)
    worst = manifest.inputs["overlap"]["worst"]
    known = {one["item"] for one in worst if one["share"] >= 0.5}
    assert known
    assert known <= {"own/crates_needed", "own/shelf_label"}
    assert any("rows that the run was trained on" in note for note in manifest.notes)
    assert "rows that the run was trained on" in out.report.read_text("utf-8")


def test_scoring_by_other_tasks_says_nothing(train_in, rows_file, tasks, tmp_path):
    """Rows that share no prompt with the tasks leave no note."""
    trained = train_in(tmp_path / "trained", f"data.path={rows_file}")
    out = RunDir(tmp_path / "scored")
    suite = ["suite=humaneval", f"suite.path={tasks}", "suite.max_new_tokens=8"]
    command = ["task=evaluate", f"path={trained.path}", *suite, f"hydra.run.dir={out.path}"]
    assert cli.main(command) == 0
    manifest = Manifest.read(out.manifest)
    assert manifest.inputs["overlap"]["sharing"] == 0
    assert not any("trained on" in note for note in manifest.notes)


BASE = ["task=evaluate", "path=base", "model=tiny_llama", "trainer=cpu", "eval.keep_passing=rows"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["suite=mini_python"], "suite=mini_python is an evaluation"),
        (["suite=heldout_syntax"], "suite=heldout_syntax is an evaluation"),
        (["suite=humaneval"], "suite=humaneval is an evaluation"),
        (["suite=humaneval", "suite.path=x", "sandbox=none"], "no answer can pass if none is"),
        (["suite=jsonl", "suite.path=x", "task=train"], "only task=evaluate keeps"),
        (
            ["suite=jsonl", "suite.path=x", "eval.keep_passing=null", "eval.keep_per_prompt=2"],
            "keep_per_prompt: has no effect",
        ),
        (
            ["suite=jsonl", "suite.path=x", "eval.keep_passing=null", "ledger=x"],
            "ledger: has no effect",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(overrides, said, capsys):
    """Exit code 2, before anything is requested."""
    by_key = {text.partition("=")[0]: text for text in [*BASE, *overrides]}
    assert cli.main([*by_key.values()]) == 2
    assert said in capsys.readouterr().err


def test_tasks_of_a_benchmark_are_refused_under_any_name(tmp_path, capsys):
    """A renamed file of a benchmark's tasks is recognised: exit code 4."""
    from mens_exp.corpus.generator.generate import benchmark_tasks

    task = benchmark_tasks(0, 3)[2]
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"id": "mine", "prompt": task.prompt, "expected": "x"}) + "\n")
    command = ["suite=jsonl", f"suite.path={path}", f"eval.keep_passing={tmp_path / 'rows'}"]
    run = f"hydra.run.dir={tmp_path / 'run'}"
    assert cli.main([*BASE[:4], *command, run]) == 4
    assert "tasks of a benchmark are for scoring" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_file_that_is_there_is_not_written_over(sample, drawn, capsys):
    """Exit code 2, and the existing file is unchanged."""
    before = drawn[1].read_bytes()
    sample(f"eval.keep_passing={drawn[1]}", code=2)
    assert "the file already exists" in capsys.readouterr().err
    assert drawn[1].read_bytes() == before


def test_sandbox_that_does_not_work_is_an_error(sample, monkeypatch, capsys):
    """Exit code 3 and no file: unlike a scorecard, rows need the sandbox."""

    def broken(config):
        raise SetupError("a probe was not contained", found="network")

    monkeypatch.setattr("mens_exp.sandbox.opening.open_sandbox", broken)
    _, rows = sample(code=3)
    assert "no answer passed" in capsys.readouterr().err
    assert not rows.exists()


def test_suite_of_a_registered_cycle_is_refused(sample, drawn, tmp_path, capsys):
    """The suite is recognised by its digest in the ledger; other suites are not refused."""
    digest = Scorecard.read(drawn[0].scorecard).suite_digest
    for name, registered, code in (("same", digest, 4), ("other", "0" * 64, 0)):
        ledger = tmp_path / f"{name}.jsonl"
        opened = [
            "task=promote",
            "promote.open_cycle=cycle",
            f"ledger={ledger}",
            "promote.seeds=[0,1]",
        ]
        opened += [
            f"promote.suite_digest={registered}",
            "promote.arms=[4,8]",
            "promote.factor=lora.r",
        ]
        assert cli.main([*opened, f"hydra.run.dir={tmp_path / name}"]) == 0
        sample(f"ledger={ledger}", code=code)
    assert "a benchmark cycle is scored by this suite" in capsys.readouterr().err


def test_model_of_its_own_draws_the_same_rows_again(finished_with, tmp_path):
    """Only tuned answers, each with the adapter's hash; the batch size makes no difference."""
    run = finished_with("quant.compute_dtype=f32")  # in bf16 rounding depends on the batch size
    suite = tmp_path / "mine.jsonl"
    asked = [{"id": str(n), "prompt": f"Say {n}.", "expected": "."} for n in range(3)]
    suite.write_text("".join(json.dumps(one) + "\n" for one in asked))
    found = []
    for size in (1, 4):
        path = tmp_path / f"rows{size}.jsonl"
        command = ["task=evaluate", f"path={run.path}", "suite=jsonl", f"suite.path={suite}"]
        command += ["suite.check=regex", "suite.max_new_tokens=400", f"suite.batch_size={size}"]
        command += ["eval.samples=2", "eval.temperature=1", f"eval.keep_passing={path}"]
        out = RunDir(tmp_path / f"out{size}")
        assert cli.main([*command, f"hydra.run.dir={out.path}"]) == 0
        found.append(rows_in(path))
        assert list(Scorecard.read(out.scorecard).conditions) == ["tuned"]
    adapter = sha256_file(run.adapter / "adapter.safetensors")
    assert {row["provenance"]["adapter_sha256"] for row in found[0]} == {adapter}
    for rows in found:
        for row in rows:
            del row["provenance"]["batch_size"]
    assert found[0] == found[1]
