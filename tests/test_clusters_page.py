"""docs/how-to/clusters.md has the commands of the files in docker/, and they are valid."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from mens_exp.config.overrides import check
from mens_exp.planning.checks.machine import check_processes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "clusters.md").read_text("utf-8")
MANIFEST = (ROOT / "docker" / "kubernetes.yaml").read_text("utf-8")
# Job and Service with all that they refer to; the file names its source.
SCHEMAS = json.loads((ROOT / "tests" / "support" / "kubernetes.json").read_text("utf-8"))
KINDS = {"Job": "io.k8s.api.batch.v1.Job", "Service": "io.k8s.api.core.v1.Service"}
SERVICE, JOB = yaml.safe_load_all(MANIFEST)
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
COMMAND = [*CONTAINER["command"], *CONTAINER["args"]]


def validated(document):
    schema = {**SCHEMAS, "$ref": f"#/$defs/{KINDS[document['kind']]}"}
    jsonschema.Draft202012Validator(schema).validate(document)


def flags(command):
    """Return the flags of torchrun itself."""
    own = command[: command.index("-m")]
    return dict(word.removeprefix("--").partition("=")[::2] for word in own[1:])


def overrides(command):
    return command[command.index("mens_exp") + 1 :]


def torchruns():
    """Return the torchrun commands that the page shows in full."""
    joined = PAGE.replace("\\\n", " ")
    found = re.findall(r"^    (torchrun .*)$", joined, re.MULTILINE)
    return [shlex.split(re.sub(r"<[^>]*>", "FILLED", line)) for line in found]


def test_the_manifest_is_what_kubernetes_accepts():
    """Both documents are valid by the strict schemas of the Kubernetes API."""
    for document in (SERVICE, JOB):
        validated(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["completionMod"], "Indexed"),
        (["parallelism"], "two"),
        (["template", "spec", "restartPolicy"], ["Never"]),
        (["template", "spec", "containers", 0, "environment"], []),
        (["template", "spec", "containers", 0, "args"], "torchrun"),
        (["template", "spec", "containers"], None),
    ],
)
def test_a_wrong_key_or_type_is_refused(path, value):
    """The schemas do refuse errors."""
    document = copy.deepcopy(JOB)
    node = document["spec"]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validated(document)


def test_the_page_shows_the_manifest():
    """Word for word."""
    (shown,) = re.findall(r"```yaml title=\"docker/kubernetes.yaml\"\n(.*?)```", PAGE, re.DOTALL)
    assert shown == MANIFEST


def test_the_manifests_command_is_the_pages():
    """Except for the machine's number and the first machine's name."""
    shown, _ = torchruns()
    assert overrides(COMMAND) == overrides(shown)
    ours, theirs = flags(COMMAND), flags(shown)
    assert theirs.pop("node-rank") == theirs.pop("master-addr") == "FILLED"
    assert ours.items() >= theirs.items()
    assert ours.keys() - theirs.keys() == {"node-rank", "master-addr"}


def test_the_parts_of_the_manifest_fit_each_other():
    """Numbers, names, ports and volumes that appear in several places agree."""
    spec, said = JOB["spec"], flags(COMMAND)
    settings = dict(word.partition("=")[::2] for word in overrides(COMMAND))
    assert (
        spec["completions"]
        == spec["parallelism"]
        == int(said["nnodes"])
        == int(settings["trainer.num_nodes"])
    )
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == int(said["nproc-per-node"]) == int(settings["trainer.devices"])
    job, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert said["master-addr"] == f"{job}-0.{service}"  # the host name of the first pod
    assert POD["subdomain"] == service
    assert SERVICE["spec"]["clusterIP"] == "None"  # headless: its name resolves to the pods
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": job}
    assert [port["port"] for port in SERVICE["spec"]["ports"]] == [int(said["master-port"])]
    names = {one["name"] for one in CONTAINER["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(COMMAND))) <= names
    mounted = {one["name"]: one["mountPath"] for one in CONTAINER["volumeMounts"]}
    assert mounted.keys() == {one["name"] for one in POD["volumes"]}
    for key in ("data.path", "hydra.run.dir"):
        assert settings[key].startswith(f"{mounted['shared']}/")


@pytest.mark.parametrize("processes", [8, 4])
def test_the_command_is_what_torchrun_starts(monkeypatch, processes):
    """Accepted with the variables of torchrun's second machine, and refused with other numbers."""
    told = {"RANK": processes, "LOCAL_RANK": 0, "WORLD_SIZE": 2 * processes}
    told |= {"LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    checked = check(overrides(COMMAND))
    assert checked.problems == ()
    monkeypatch.setattr("mens_exp.planning.machine.gpu_ids", lambda: range(8))
    found = [str(one) for one in check_processes(checked.cells[0].config)]
    assert all("trainer.devices" in one for one in found)
    assert bool(found) is (processes != 8)


TASK_TEXT = (ROOT / "docker" / "skypilot.yaml").read_text("utf-8")
TASK = yaml.safe_load(TASK_TEXT)
# A task and its resources, which SkyPilot validates one after the other; the file names its source.
OF_SKYPILOT = json.loads((ROOT / "tests" / "support" / "skypilot.json").read_text("utf-8"))


def accepted_by_skypilot(task):
    jsonschema.Draft202012Validator(OF_SKYPILOT["task"]).validate(task)
    jsonschema.Draft7Validator(OF_SKYPILOT["resources"]).validate(task["resources"])


def started_by_skypilot(tmp_path, rank):
    """Run the task's script with SkyPilot's variables; return the command of torchrun."""
    stand_in = tmp_path / "torchrun"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" torchrun "$@"\n')
    stand_in.chmod(0o755)
    told = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    script = TASK["run"].replace("/shared\n", f"{tmp_path}\n")
    environment = {**told, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_task_is_what_skypilot_accepts():
    """The task is valid by the schemas that SkyPilot uses."""
    accepted_by_skypilot(TASK)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["nodes"], 2),
        (["num_nodes"], "two"),
        (["run"], ["torchrun"]),
        (["envs"], {"HF-HOME": "x"}),
        (["resources", "accelerator"], "H100:8"),
        (["resources", "infra"], "nowhere"),
        (["resources", "image_id"], 7),
    ],
)
def test_a_wrong_key_or_type_of_the_task_is_refused(path, value):
    """These schemas do refuse errors, too."""
    task = copy.deepcopy(TASK)
    *parents, last = path
    node = task[parents[0]] if parents else task
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        accepted_by_skypilot(task)


def test_the_page_shows_the_task():
    """Word for word."""
    (shown,) = re.findall(r"```yaml title=\"docker/skypilot.yaml\"\n(.*?)```", PAGE, re.DOTALL)
    assert shown == TASK_TEXT


@pytest.mark.parametrize("rank", [0, 1])
def test_the_task_starts_the_pages_command_and_nothing_else(tmp_path, rank):
    """A shell runs the script on each machine, with its number and the first one's address."""
    command = started_by_skypilot(tmp_path, rank)
    shown, _ = torchruns()
    assert overrides(command) == overrides(shown)
    expected = {**flags(shown), "node-rank": str(rank), "master-addr": "10.0.0.7"}
    assert flags(command) == expected
    settings = dict(word.partition("=")[::2] for word in overrides(command))
    assert TASK["num_nodes"] == int(expected["nnodes"]) == int(settings["trainer.num_nodes"])
    gpus = TASK["resources"]["accelerators"].partition(":")[2]
    assert gpus == expected["nproc-per-node"] == settings["trainer.devices"]
    (mounted,) = TASK["volumes"]
    for place in (settings["data.path"], settings["hydra.run.dir"], TASK["envs"]["HF_HOME"]):
        assert place.startswith(f"{mounted}/")


def test_the_other_commands_of_the_page_compose():
    """The plan is valid, and the resume command has the run directory of the first command."""
    (plan,) = re.findall(r"^    python -m mens_exp (.*)$", PAGE, re.MULTILINE)
    assert check(shlex.split(plan)).problems == ()
    first, again = torchruns()
    (resumed,) = overrides(again)
    assert f"hydra.run.dir={resumed.removeprefix('resume=')}" in overrides(first)
    assert flags(first) == flags(again)
