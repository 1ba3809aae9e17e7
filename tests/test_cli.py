from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest

from mens_exp import __version__, cli
from mens_exp.artifacts.manifest import Manifest, Status


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def refused(here, capsys):
    """Run a command that must exit with 2 and leave nothing behind; return its message."""

    def said(*arguments, code=2):
        before = sorted(here.rglob("*"))
        assert cli.main(list(arguments)) == code
        assert sorted(here.rglob("*")) == before
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return " ".join(captured.err.split())

    return said


def subprocess_of(*arguments):
    """Run `python -m mens_exp`, and print the heavy modules that it imported on the last line."""
    heavy = {"torch", "transformers", "lightning", "peft", "wandb", "matplotlib", "bitsandbytes"}
    code = (
        f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}\n"
        "from mens_exp.cli import main\n"
        f"code = main({list(arguments)!r})\n"
        f"print(sorted({heavy!r} & sys.modules.keys()))\nsys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )


def test_help_shows_tasks_groups_and_documentation_and_loads_nothing_heavy():
    """New users read it first, so it must appear at once."""
    done = subprocess_of("--help")
    assert done.returncode == 0
    for word in ("train", "plan", "evaluate", "smollm2_135m", "lora", "Documentation", "--cfg job"):
        assert word in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_a_configuration_error_loads_nothing_heavy():
    """A typing mistake is reported before torch would be imported."""
    done = subprocess_of("lora.r=0", "backend=qlra")
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"


def test_cfg_shows_the_composed_configuration(here, capsys):
    """The overrides are applied, and no run is started."""
    assert cli.main(["--cfg", "job", "lora.r=8", "model=tiny_llama"]) == 0
    shown = capsys.readouterr().out
    assert "r: 8" in shown
    assert "name: tiny_llama" in shown
    assert list(here.iterdir()) == []


def test_cfg_checks_like_a_run_does(refused):
    """Showing a configuration reports typing mistakes, too."""
    assert "quant.duble_quant" in refused("--cfg", "job", "quant.duble_quant=true")


def test_cfg_with_resume_resumes_nothing(finished, capsys):
    """Showing a configuration never starts training."""
    assert cli.main(["--cfg", "job", f"resume={finished.path}"]) == 0
    assert f"resume: {finished.path}" in capsys.readouterr().out


# Each shell's flags without the user's settings, and the script that it evaluates.
SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], 'eval "$(mens-exp -sc install=bash)"'),
    "zsh": (
        ["-f", "-i"],
        'autoload -U compinit; compinit -u -D; eval "$(mens-exp -sc install=zsh)"',
    ),
    "fish": (["--no-config", "-i"], "mens-exp -sc install=fish | source"),
}


@pytest.mark.parametrize("program", ["mens-exp", "python -m mens_exp"])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_options_and_keys(shell_path, tmp_path, shell, program):
    """The tab key is pressed in a real shell, after a group's option and after a key."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is missing: apt-get install {shell}")
    flags, script = SHELLS[shell]
    environment = {"PATH": shell_path, "HOME": str(tmp_path), "TERM": "dumb", "LANG": "C.UTF-8"}
    with Terminal([shell, *flags], environment) as terminal:
        terminal.type(f"{script}; echo RE''ADY\n")
        terminal.wait_for("READY")
        terminal.type(f"echo {program} >/dev/null; {program} model=tiny_lla\t")
        terminal.wait_for("model=tiny_llama")
        terminal.type(" lora.alpha_pat\t")
        terminal.wait_for("lora.alpha_pattern")


@pytest.mark.parametrize("flag", ["--config-dir {}", "--config-dir={}", "-cd {}"])
def test_completion_offers_the_options_of_a_typed_directory(tmp_path, monkeypatch, capsys, flag):
    """Completion reads --config-dir too; a missing directory is an error, which shells hide."""
    option = tmp_path / "theirs" / "lora" / "narrow.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# A narrow one.\ndefaults: [all_linear, _self_]\nr: 2\n", "utf-8")
    line = f"mens-exp {flag.format(tmp_path / 'theirs')} lora=na"
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["lora=narrow"]
    monkeypatch.setenv("COMP_LINE", line.replace("theirs", "others"))
    assert cli.main(["-sc", "query=bash"]) == 2


class Terminal:
    """A program with its own terminal."""

    def __init__(self, command, environment):
        self.command, self.environment = command, environment

    def __enter__(self):
        master, slave = os.openpty()
        self.master, self.seen = master, ""
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *self.command],  # fish needs its own terminal
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=self.environment,
        )
        os.close(slave)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, text, seconds=60):
        """Read until a text appears, ignoring control sequences."""
        until = time.monotonic() + seconds
        while text not in re.sub(r"\x1b[\[\]()?>=][0-9;?]*[ -/]*[@-~]?|[\r\x08]", "", self.seen):
            assert time.monotonic() < until, self.seen
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        self.seen = ""


def test_another_shell_is_told_what_to_write(refused):
    """The message lists the supported shells."""
    said = refused("-sc", "install=tcsh")
    assert "install=<bash|zsh|fish>" in said


def test_hydra_help_shows_hydras_flags(capsys):
    """It shows Hydra's flags, and says which ones are not offered."""
    assert cli.main(["--hydra-help"]) == 0
    said = capsys.readouterr().out
    assert "--multirun,-m" in said
    assert "--experimental-rerun : Not offered" in said
    assert "Show the version of mens_exp" in said


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_is_told_its_own_line(shell, capsys):
    """Help and page have the line that the completion test uses."""
    line = SHELLS[shell][1].rpartition("; ")[2]
    assert cli.main(["--hydra-help"]) == 0
    (told,) = (one for one in capsys.readouterr().out.splitlines() if f"install={shell}" in one)
    assert told.strip().removeprefix(f"{shell.title()}:").strip() == line
    assert "Uninstall" not in told
    page = (Path(__file__).parents[1] / "docs/reference/cli.md").read_text("utf-8")
    assert f"| {shell} |" in page
    assert line in page.replace("&#124;", "|")


def test_version_is_ours(capsys):
    """Hydra would print its own version."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mens_exp {__version__}\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--frobnicate"], "unknown flag found --frobnicate"),
        (["--config-name", "mine"], "--config-name: primary config not found found mine"),
        (["--config-dir", "mine"], "--config-dir: is not a config directory found mine"),
        (["--config-path", "mine"], "--config-path: would hide the built-in config groups"),
        (
            ["--experimental-rerun", "x"],
            "--experimental-rerun: is not supported: it loads a pickle",
        ),
        (["--resolve", "model=tiny_llama"], "the flags do not go together"),
        (["--run", "--multirun", "model=tiny_llama"], "the flags do not go together"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_that_would_do_nothing_are_refused(refused, flags, said):
    """Ignoring them would suggest that they had an effect."""
    assert said in refused(*flags)


@pytest.mark.parametrize("flag", [["-m"], ["--config-dir", "."], ["--cfg", "job"]])
def test_settings_may_stand_before_and_behind_a_flag(capsys, monkeypatch, tmp_path, flag):
    """Hydra's own parser accepts none after a flag."""
    monkeypatch.chdir(tmp_path)
    rest = [] if "--cfg" in flag else ["--help"]
    assert cli.main(["model=tiny_llama", *flag, "seed=7", *rest]) == 0
    printed = capsys.readouterr().out
    assert "seed: 7" in printed if "--cfg" in flag else "fine-tune with QLoRA" in printed


# For each override: the dotted path or file, what was found, what is accepted.
BAD = {
    "quant.duble_quant=true": ["quant.duble_quant: unknown key", "nearest is quant.double_quant"],
    "+lora.foo=1": ["lora.foo: unknown key", "found +lora.foo=1"],
    "backend=qlra": ["backend: unknown option", "found qlra", "nearest is qlora"],
    "lora.r=0": ["lora.r: out of range", "found 0", ">= 1"],
    "lora.r=many": ["lora.r: wrong type", "found many", "a whole number"],
    "data.seq_len=4096": ["data.seq_len:", "found 4096", "at most 2048"],
}


@pytest.mark.parametrize("override", BAD)
def test_one_mistake_is_told_with_what_is_accepted(refused, override):
    """The command exits with 2 before a directory is created."""
    said = refused("model=tiny_llama", override)
    assert all(part in said for part in BAD[override]), said


def test_all_mistakes_of_a_command_are_told_together(refused):
    """Overrides, values and files, in one message."""
    said = refused("model=tiny_llama", "data=jsonl", "data.path=missing.jsonl", *BAD)
    for parts in ({name: parts[:2] for name, parts in BAD.items() if name != "lora.r=0"}).values():
        assert all(part in said for part in parts), said
    assert "data.path: no such file" in said
    assert "missing.jsonl" in said


def test_several_values_need_a_sweep(refused):
    """The message says to add -m."""
    assert "add -m" in refused("seed=1,2")


def test_a_row_that_is_no_json_is_told_by_file_and_line(refused, here):
    """Other bad rows of the file are reported too."""
    rows = here / "rows.jsonl"
    good = json.dumps({"prompt": "p", "response": "r"})
    missing = json.dumps({"prompt": "p"})
    rows.write_text(f"{good}\n{{not json\n{missing}\n", encoding="utf-8")
    said = refused("model=tiny_llama", "data=jsonl", f"data.path={rows}")
    assert f"{rows}:2" in said
    assert f"{rows}:3" in said
    assert "response" in said


def test_a_truncated_base_model_is_told_by_its_file(refused, tiny_base, here):
    """Otherwise a run would fail when it reads the missing weights."""
    copy = here / "model"
    shutil.copytree(tiny_base.directory, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused("model=hf", f"model.id={copy}", "data.seq_len=64")


def test_a_whole_base_model_directory_is_accepted(tiny_base, train_in, tmp_path):
    """An intact copy of the same kind trains."""
    run = train_in(tmp_path / "run", "model=hf", f"model.id={tiny_base.directory}")
    inputs = Manifest.read(run.manifest).inputs
    assert inputs["base_source"] == "directory"
    assert inputs["base_weights_sha256"] == tiny_base.weights_sha256


def test_no_supervised_token_is_told_when_the_rows_are_encoded(train_in, tmp_path, capsys):
    """Every prompt is longer than sixteen tokens; the run is recorded as failed."""
    run = train_in(tmp_path / "run", "data.seq_len=16", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert "no row has a supervised token left" in said
    assert "raise data.seq_len" in said
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.FAILED
    assert manifest.error is not None
    assert manifest.error["type"] == "DataError"
    assert manifest.error["remedy"] == "raise data.seq_len"
    assert manifest.error["exit_code"] == 2
    assert not run.adapter.exists()


def test_a_missing_gpu_is_the_environments_fault(
    train_in,
    tmp_path,
    monkeypatch,
    capsys,
):
    """Exit code 3."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train_in(tmp_path / "run", "trainer=gpu", code=3)
    assert "a CUDA build of torch" in capsys.readouterr().err


def test_a_bug_exits_with_1_and_keeps_its_record(
    train_in,
    tmp_path,
    monkeypatch,
    capsys,
):
    """The traceback is shown, with the path of the record."""
    from mens_exp.training.module import TrainingModule

    def broken(*_):
        raise ZeroDivisionError("by our own fault")

    monkeypatch.setattr(TrainingModule, "training_step", broken)
    run = train_in(tmp_path / "run", code=1)
    said = capsys.readouterr().err
    assert "ZeroDivisionError: by our own fault" in said
    assert f"A bug in mens_exp; the record: {run.path}" in said
    assert Manifest.read(run.manifest).status is Status.FAILED


def test_a_library_that_exits_ends_no_more_than_its_run(train_in, tmp_path, monkeypatch):
    """SystemExit makes the run failed, with exit code 1."""
    from mens_exp.training.module import TrainingModule

    def leaving(*_):
        sys.exit(7)

    monkeypatch.setattr(TrainingModule, "training_step", leaving)
    run = train_in(tmp_path / "run", code=1)
    error = Manifest.read(run.manifest).error
    assert error is not None
    assert error["type"] == "SystemExit"


def test_ctrl_c_before_a_run_is_open_exits_with_130(monkeypatch, capsys):
    """There is no traceback."""
    from mens_exp.tasks import resolve_references

    def interrupted(_config, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(resolve_references, "preflight", interrupted)
    assert cli.main(["model=tiny_llama"]) == 130
    assert capsys.readouterr().err == "Cancelled.\n"


def test_a_second_run_in_the_same_directory_is_refused(train_in, tmp_path, capsys):
    """The first run's adapter and record stay."""
    run = train_in(tmp_path / "run", "trainer.max_steps=1")
    manifest, adapter = run.manifest.read_bytes(), run.adapter / "adapter.safetensors"
    before = adapter.read_bytes()
    train_in(run.path, "seed=7", code=2)
    assert "a run already exists" in capsys.readouterr().err
    assert (run.manifest.read_bytes(), adapter.read_bytes()) == (manifest, before)


def test_the_result_names_the_report(train_in, tmp_path, capsys):
    """The losses are shown above it."""
    run = train_in(tmp_path / "run", "trainer.max_steps=1")
    said = capsys.readouterr().out
    assert f"Report: {run.report}" in said
    assert "Validation loss" in said


def test_runs_lie_under_outputs_by_task_and_experiment(tiny_run, here):
    """outputs/<task>/<experiment>/<utc>_<digest8> is also Hydra's run directory."""
    assert cli.main([*tiny_run, "task=plan"]) == 0
    (manifest,) = here.glob("outputs/plan/default/*_*/manifest.json")
    record = Manifest.read(manifest)
    assert manifest.parent.name.endswith(f"_{record.config_digest[:8]}")
    assert (manifest.parent / ".hydra" / "overrides.yaml").is_file()


def test_python_m_mens_exp_exits_with_the_code_of_the_command(here):
    """Errors go to standard error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for run, arguments, code in (
        (fork_server.run, ["lora.r=0"], 2),
        (fork_server.run, ["--version"], 0),
        (subprocess.run, ["task=plan"], 0),
    ):
        done = run(
            [sys.executable, "-m", "mens_exp", *arguments, "model=tiny_llama"],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == code, done.stderr
        assert bool(done.stdout) == (code == 0)


def test_a_reader_that_has_gone_ends_no_run(here):
    """With `… | head` the run succeeds, whichever of the two outputs is closed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for output, other in (("stdout", "stderr"), ("stderr", "stdout")):
        reader, writer = os.pipe()
        os.close(reader)
        done = fork_server.run(
            [sys.executable, "-m", "mens_exp", "task=plan", "model=tiny_llama"],
            check=False,
            env=environment,
            **{output: writer, other: subprocess.PIPE},
        )
        os.close(writer)
        assert done.returncode == 0, done
    manifests = sorted(here.glob("outputs/plan/**/manifest.json"))
    assert [Manifest.read(path).status for path in manifests] == [Status.SUCCEEDED] * 2


def test_a_used_directory_is_refused_before_hydra_writes_into_it(tiny_run, here, refused):
    """Hydra's own record of the overrides stays."""
    assert cli.main([*tiny_run, "task=plan", "hydra.run.dir=run"]) == 0
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert "a run already exists" in refused(*tiny_run, "task=plan", "seed=7", "hydra.run.dir=run")
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_a_used_sweep_directory_is_refused_as_well(tiny_run, here, refused):
    """The message says how to resume the sweep."""
    sweep = ["-m", *tiny_run, "task=plan", "seed=1,2", "hydra.sweep.dir=sweep"]
    assert cli.main(sweep) == 0
    assert len(list(here.glob("sweep/*/manifest.json"))) == 2
    said = refused(*sweep)
    assert "a sweep already exists here" in said
    assert "sweep.resume=sweep" in said


def test_the_same_command_twice_in_one_process_makes_two_runs(tiny_run, here):
    """The name of a run directory has the time of the command, not of the process."""
    for _ in range(2):
        assert cli.main([*tiny_run, "task=plan"]) == 0
    assert len(list(here.glob("outputs/plan/default/*/manifest.json"))) == 2


def test_a_sweep_takes_options_of_the_working_directory(tiny_run, here):
    """Each cell is composed from the copy made at launch."""
    for name, rate in (("slow", 1e-5), ("fast", 1e-3)):
        file = here / "conf" / "optim" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"defaults: [adamw, _self_]\nlr: {rate}\n", encoding="utf-8")
    mine = [text for text in tiny_run if not text.startswith("optim.")]
    assert cli.main(["-m", *mine, "task=plan", "optim=slow,fast"]) == 0
    configs = sorted(here.glob("outputs/multirun/default/*/*/config.yaml"))
    assert [("lr: 1.0e-05" in c.read_text("utf-8")) for c in configs] == [True, False]


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path, capsys):
    """The message names the setting, and there is no traceback."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    command = ["task=plan", "logger=none", f"hydra.run.dir={tmp_path / 'file' / 'run'}"]
    assert cli.main(command) == 3
    said = capsys.readouterr().err
    assert "hydra.run.dir: the run directory cannot be created" in said
    assert "Traceback" not in said
