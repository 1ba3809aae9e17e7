from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.planning import machine
from mens_exp.planning.throughput_model import Entry, append, ledger_path
from mens_exp.rows import packing


def test_a_plan_is_a_run_that_only_says_what_would_be_done(tiny_run, tmp_path, capsys):
    """The table, plan.json and the event agree, and nothing is trained."""
    run = RunDir(tmp_path / "run")
    assert cli.main([*tiny_run, "task=plan", f"hydra.run.dir={run.path}"]) == 0
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    assert (plan["steps"], plan["tokens_per_step"]) == (4, 384)
    events = {e["event"]: e["payload"] for e in read_events(run.telemetry)}
    assert events["plan"] == plan
    said = capsys.readouterr().out  # "up to" unless another test has encoded the rows
    assert re.search(r"4 of (up to )?384 tokens", said)
    manifest = Manifest.read(run.manifest)
    assert (manifest.task, manifest.status) == ("plan", Status.SUCCEEDED)
    assert not run.adapter.exists()
    assert not run.checkpoints.exists()


PACKED = [
    # A row has about 60 tokens: one fills a block of 100, and three fill one of 192.
    ("two epochs", ["data.seq_len=100", "trainer.max_epochs=2"]),
    ("of several rows", ["data.seq_len=192", "trainer.max_epochs=2"]),
    ("rows of many lengths", ["data.seq_len=240", "trainer.max_epochs=3", "data.path={varied}"]),
    ("padded", ["data.seq_len=100", "trainer.max_epochs=1", "data.packing=false"]),
    ("the steps end it", ["data.seq_len=100", "trainer.max_epochs=9", "trainer.max_steps=5"]),
]


@pytest.mark.parametrize(("name", "overrides"), PACKED, ids=[name for name, _ in PACKED])
def test_a_plan_over_encoded_rows_has_the_steps_of_the_run(
    train_in, rows_file, tmp_path, name, overrides
):
    """Steps, warm-up, blocks, epochs and tokens agree with the run's own records.

    Dividing tokens by the length gives no blocks: half of a block stays empty if rows are long.
    """
    varied, few = tmp_path / "varied.jsonl", tmp_path / "few.jsonl"
    rows = [{"prompt": f"Add {n}.", "response": "x" * (10 + n * n % 170)} for n in range(32)]
    varied.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    few.write_text("".join(rows_file.read_text("utf-8").splitlines(keepends=True)[:24]), "utf-8")
    told = [
        f"data.path={few}",
        *("trainer.max_steps=-1", "schedule=linear", "schedule.warmup_steps=null"),
        *("schedule.warmup_frac=0.3", *(one.format(varied=varied) for one in overrides)),
    ]
    run = train_in(tmp_path / "run", *told)
    planned = train_in(tmp_path / "plan", *told, "task=plan")
    plan = json.loads(planned.plan.read_text(encoding="utf-8"))
    manifest, data = Manifest.read(run.manifest), plan["data"]
    assert data["exact"]
    assert plan["steps"] == manifest.results["steps"]
    assert plan["epochs"] == manifest.facts["epochs"]
    rates = [
        one["payload"]["optim/lr"]
        for one in read_events(run.telemetry)
        if "optim/lr" in one["payload"]
    ]
    assert len(rates) == plan["steps"]
    assert plan["warmup_steps"] == rates.index(max(rates)) + 1
    seq_len = manifest.facts["seq_len"]
    filled = manifest.facts["packing_efficiency_frac"]
    assert data["train_blocks"] == pytest.approx(data["train_tokens"] / seq_len / filled, rel=2e-4)
    if name != "the steps end it":
        assert plan["tokens_total"] == manifest.results["tokens"]
    if name in {"two epochs", "rows of many lengths"}:  # what a division would have planned
        fewest = -(-data["train_tokens"] // seq_len)
        assert plan["steps"] > -(-manifest.facts["epochs"] * fewest // plan["effective_batch"])


WRITTEN = [
    ("adapter.select=best", "trainer.val_check_interval=4", "lora.r=64"),
    ("lora=lokr", "lora.r=3"),
    ("lora.init=pissa", "lora.r=64"),
    ("backend=full", "quant=none"),
]


@pytest.mark.parametrize("overrides", WRITTEN, ids=str)
def test_a_plan_has_the_size_of_the_files_of_a_run(train_in, tmp_path, overrides):
    """Headers of safetensors and torch's archives take less than 64 KiB, and values far more."""
    run = train_in(tmp_path / "run", *overrides, "checkpoint.every_n_steps=1")
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    disk = plan["disk_bytes"]
    weights = run.weights if overrides[0] == "backend=full" else run.adapter
    peft = sum(one.stat().st_size for one in run.peft.glob("*.safetensors"))
    own = sum(one.stat().st_size for one in weights.glob("*.safetensors"))
    assert 0 <= own - disk["adapter"] < 1 << 14
    assert 0 <= peft - disk["peft"] < 1 << 14 if disk["peft"] else peft == 0
    largest = max(one.stat().st_size for one in run.checkpoints.glob("*.ckpt"))
    assert 0 <= largest - disk["checkpoint"] < 1 << 16
    assert sum(one.stat().st_size for one in run.path.rglob("*")) < disk["in_run"]
    facts = Manifest.read(run.manifest).facts
    assert plan["trainable_parameters"] == facts["trainable_parameters"]
    assert plan["parameters"] == 94_528  # torch's count of tiny_llama, norms included
    if weights == run.weights:
        assert plan["parameters"] == facts["trainable_parameters"]


def test_a_plan_that_cannot_count_blocks_says_about(train_in, tmp_path, capsys, monkeypatch):
    """Rows that are not encoded, or too many to pack for a plan, give a lower bound marked ≈."""
    told = ["data.seq_len=101", "trainer.max_epochs=2", "trainer.max_steps=-1"]

    def plan(name):
        run = train_in(tmp_path / name, *told, "task=plan")
        return json.loads(run.plan.read_text(encoding="utf-8")), capsys.readouterr().out

    cold, said = plan("cold")
    assert f"steps         ≈ {cold['steps']} of 202 tokens ≈ " in said
    assert "train_blocks" not in cold["data"]
    train_in(tmp_path / "run", *told)
    capsys.readouterr()
    warm, said = plan("warm")
    assert warm["steps"] > cold["steps"]
    tokens = f"{2 * warm['data']['train_tokens']:,} tokens"
    assert f"steps         {warm['steps']} of up to 202 tokens = {tokens}" in said
    monkeypatch.setattr(packing, "_CACHED_FROM", 1)
    many, said = plan("many")
    assert many["data"]["train_blocks"] is None
    assert f"steps         ≈ {many['steps']} of 202 tokens ≈ " in said
    train_in(tmp_path / "again", *told)
    capsys.readouterr()
    assert plan("packed")[0]["steps"] == warm["steps"]


def test_a_plan_never_imports_torch(tiny_run, tmp_path):
    """A plan answers in about a second, as nothing heavy is imported."""
    arguments = [*tiny_run, "task=plan", f"hydra.run.dir={tmp_path / 'run'}"]
    code = (
        "import sys\nfrom mens_exp import cli\n"
        f"code = cli.main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'lightning', 'peft', 'wandb'} & sys.modules.keys()\n"
        "print(sorted(heavy), file=sys.stderr)\nsys.exit(code or bool(heavy))"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_plan_shows_the_first_rows_as_they_are_trained(tiny_run, tmp_path, capsys):
    """Two rows are printed token by token, with the answer and its end in brackets."""
    run = tmp_path / "run"
    assert cli.main([*tiny_run, "task=plan", "data.show=2", f"hydra.run.dir={run}"]) == 0
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line.startswith("Row ")]
    assert [line.split(",")[0] for line in rows] == ["Row 1", "Row 2"]
    assert "rows.jsonl:" in rows[0]
    assert "│A│d│d│·│" in said
    assert said.count("⟦d│e│f│·│a│d│d│_") == 2
    assert said.count("│<|im_end|>⟧") == 2


def test_row_that_loses_its_answer_is_shown_as_dropped(tiny_run, tmp_path, capsys):
    """The prompt has 25 tokens: a limit of 27 keeps two of the answer's, and one of 25 none."""
    for limit, told in ((27, "30 cut off"), (25, "nothing learned is within 25 tokens")):
        overrides = ["task=plan", "data.show=1", f"data.seq_len={limit}"]
        run = f"hydra.run.dir={tmp_path / str(limit)}"
        assert cli.main([*tiny_run, *overrides, run]) == 0
        assert told in capsys.readouterr().out


def test_rows_are_shown_by_a_plan_only(tiny_run, tmp_path, capsys):
    """In other tasks the setting has no effect, and is refused."""
    assert cli.main([*tiny_run, "data.show=1", f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert "data.show: has no effect with task=train" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_plan_says_what_a_file_was_taken_for(tiny_run, tmp_path, capsys):
    """The plan has the format, the number of rows, and the columns that are not read."""
    rows = [{"q": f"p{n}", "a": "r", "lang": "en"} for n in range(30)]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    columns = "data.columns={prompt:q,response:a}"
    overrides = [f"data.path={path}", columns, "task=plan", f"hydra.run.dir={tmp_path / 'run'}"]
    kept = [text for text in tiny_run if not text.startswith("data.path")]
    assert cli.main([*kept, *overrides]) == 0
    said = "".join(capsys.readouterr().out.split())
    assert "q.jsonl:30pairrows;columnsleftout:lang" in said


def test_row_of_several_documents_is_shown_one_by_one(tiny_run, tmp_path, capsys):
    """A template that changes earlier answers makes one document of each of a row's two answers."""
    template = tmp_path / "last.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}:{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant!:{% endif %}",
        "utf-8",
    )
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    turns = [{"role": role, "content": text} for role, text in talk]
    rows = [{"messages": turns, "group": str(n)} for n in range(30)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    kept = [text for text in tiny_run if not text.startswith("data.path")]
    overrides = [f"data.path={path}", f"tokenizer.chat_template={template}", "data.show=1"]
    run = f"hydra.run.dir={tmp_path / 'run'}"
    assert cli.main([*kept, *overrides, "task=plan", run]) == 0
    said = capsys.readouterr().out
    assert "document 1 of 2: " in said
    assert "document 2 of 2: " in said
    assert ("⟦b│<|im_end|>⟧" in said, "⟦d│<|im_end|>⟧" in said) == (True, True)


def test_a_plan_names_the_runs_it_rests_on(tiny_run, tmp_path, monkeypatch):
    """Three similar runs, a fifth above the formula, raise the next estimate."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    run = RunDir(tmp_path / "first")
    assert cli.main([*tiny_run, "task=plan", f"hydra.run.dir={run.path}"]) == 0
    first = json.loads(run.plan.read_text(encoding="utf-8"))
    assert first["memory_bytes"]["runs"] == []
    formula = first["memory_bytes"]["formula"]
    for number in range(3):
        append(
            ledger_path(tmp_path / "cache"),
            Entry(
                utc="2026-11-20T05:58:01.123Z",
                device=first["device"]["name"],
                family="llama",
                backend="qlora",
                run_id=str(number),
                contract="ab" * 32,
                parameters=first["parameters"],
                tokens_per_step=first["tokens_per_step"],
                predicted_peak_bytes=formula,
                measured_peak_bytes=round(1.2 * formula),
                flop_per_step=None,
                predicted_step_s=None,
                measured_step_s=None,
            ),
        )
    run = RunDir(tmp_path / "second")
    assert cli.main([*tiny_run, "task=plan", f"hydra.run.dir={run.path}"]) == 0
    second = json.loads(run.plan.read_text(encoding="utf-8"))["memory_bytes"]
    assert (second["runs"], second["formula"]) == (["0", "1", "2"], formula)
    assert second["estimate"] == pytest.approx(1.2 * formula, rel=1e-6)


def test_a_plan_shows_what_this_machine_lacks(
    tiny_run,
    tmp_path,
    capsys,
    monkeypatch,
):
    """The figures are shown with the problem; the run itself is refused."""
    found = machine.look("cpu")
    poor = dataclasses.replace(found, free_bytes=1 << 20)
    monkeypatch.setattr(machine, "look", lambda _: poor)
    run = RunDir(tmp_path / "plan")
    assert cli.main([*tiny_run, "task=plan", f"hydra.run.dir={run.path}"]) == 0
    assert "does not fit into the memory" in capsys.readouterr().out
    assert cli.main([*tiny_run, f"hydra.run.dir={tmp_path / 'run'}"]) == 3
    assert "does not fit into the memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_plan_and_its_manifest_say_where_a_preset_differs(tiny_run, tmp_path, capsys):
    """Preset deviations are listed as typed, followed by our own default."""
    run = RunDir(tmp_path / "run")
    overrides = ["preset=litgpt_like", "task=plan", f"hydra.run.dir={run.path}"]
    assert cli.main([*tiny_run, *overrides]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 'lora.targets=["qv"] (["all_linear"])' in said
    assert "quant.double_quant=false (true)" in said
    found = Manifest.read(run.manifest).facts["differs_from_default"]
    assert found["seed"] == {"default": 42, "found": 1337}
    assert json.loads(run.plan.read_text(encoding="utf-8"))["differs_from_default"] == found
