"""Judge what a fault left behind, without using the package under test.

Every file is read as bytes, as plain JSON or as a torch checkpoint, and compared with that of an
undisturbed run. Allowed differences are listed here, each with its reason.
"""

from __future__ import annotations

import hashlib
import io
import json
import re

import torch

# SPARE: caches that only save the next run a second. DRAWN: files that the record may name as
# failed in a run that counts as done; they can be drawn again. SHOWN: pages and logs that show
# times, and Hydra's copy of the command.
SPARE = ("cache/reference/", "cache/data_contract/")
DRAWN = ("report.html", "MODEL_CARD.md", "run_summary.json", "training_skip_stats.json")
SHOWN = re.compile(r"(\.html|\.log|MODEL_CARD\.md|\.hydra/.*)$")
# JSON keys whose values are times, process sizes, or events on the way.
# `attempts` and `notes` count disturbances; a run's own outputs are hashed by
# `believed`; `search.journal` is Optuna's log, whose trials are in sweep.json.
PASSING = re.compile(
    r"(.*_utc|.*_s|.*_ms|system/.*|.*seconds|.*rss_bytes|peak_bytes|free|free_bytes|measured.*|perf/.*|mem/.*"
    r"|utc|attempts|notes|reason|pid|was_done_already|why|process_started|server|previous|sha256|entry_sha256|outputs"
    r"|environment|provenance|known|sent|peak_rss_bytes_of_processes|run_id|directory|overrides|resumed_from)"
)
# The parts of a checkpoint that training resumes from; callbacks' state contains times.
STATE = ("state_dict", "adapter", "optimizer_states", "lr_schedulers", "counters", "selected")
READ = (".json", ".jsonl", ".yaml")  # text that may contain a run's directory
JOURNALS = ("search.journal", "cache/ledger.jsonl")
# Files in which Slurm and the tasks of its arrays log their own starts.
SLURM_LOGS = re.compile(r"all/batch/")
LEFT_OVER = re.compile(r"(\.tmp|\.old|\.lock|\.taking|\.rename)$|/tmp[^/]*$|/\.sync-")


def read(root):
    """Return the content of every file below a directory, by relative path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def first(done, action):
    """Yield the problems in how the disturbed command ended."""
    if action in ("kill", "torn", "moment") and done.returncode < 0:
        return
    if done.returncode != 0:
        yield from (f"after the fault: {one}" for one in refusal(done))


def refusal(done):
    """Yield the problems in how a command failed: it must say what to do next."""
    said = done.stdout + done.stderr
    if done.returncode < 0:
        yield f"ended by signal {-done.returncode}"
    if "Traceback" in said:
        yield f"a traceback: {' '.join(said[said.index('Traceback') :].split())[-900:]}"
    elif "bug in mens_exp" in said:
        yield "calls itself a bug"
    elif "\n  next " not in said and "Go on with: " not in said and "sweep.resume=" not in said:
        yield f"no next step: {' '.join(said.split())[-400:]}"


def believed(root):
    """Yield runs that report success although a file of theirs differs from what they wrote."""
    for path in sorted(root.rglob("manifest.json")):
        if path.parent.parent == root or path.parent.parent.name == "all":
            yield from _believed(path)


def _believed(path):
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError:
        yield f"{path.parent.name}/{path.name} is half-written"
        return
    if manifest.get("status") != "succeeded":
        return
    for name, digest in manifest["outputs"].items():
        file = path.parent / name
        if not file.is_file():
            yield f"{path.parent.name} says succeeded without {name}"
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            yield f"{path.parent.name} says succeeded with another {name}"


def differences(root, expected, own, said=""):
    """Yield the differences between the files below a directory and those of an undisturbed run.

    Args:
        root: the directory.
        expected: content of the undisturbed files by name.
        said: what the commands printed: a sweep says there that it could not write its page.
        own: directory of the run that ended well, if it has one beside what it made. It is
            compared with own1; those of other commands stay as they were killed.
    """
    found = _renamed(read(root), own)
    if not own:
        expected = {name: data for name, data in expected.items() if not name.startswith("own")}
    for name in sorted(expected.keys() | found.keys()):
        if SLURM_LOGS.match(name):
            continue
        if name not in found:
            is_spare = name.endswith(DRAWN) and _says_so(found, name)
            is_spare |= name.endswith(DRAWN) and _names_its_pages(said, name)
            is_spare |= f"{name.rpartition('/')[2]} was not written: " in said
            if not is_spare and not name.startswith(SPARE):
                yield f"{name} is missing"
        elif name not in expected and name.endswith(".log"):
            continue  # of a process that failed
        elif name not in expected:
            if not LEFT_OVER.search(name):
                yield f"{name} is there"
            else:
                yield f"left over: {name}"
        elif found[name] != expected[name]:
            yield from (f"{name}: {one}" for one in _unlike(name, found[name], expected[name]))


def _renamed(found, own):
    """Keep the one successful run, renamed to the directory of an undisturbed one."""
    kept = {}
    for name, data in sorted(found.items()):
        top = name.partition("/")[0]
        if re.fullmatch(r"own\d", top) and top != own:
            continue
        if not re.fullmatch(r"own\d|out\d", top):
            kept[name] = data
            continue
        is_read = name.endswith(READ)
        text = re.sub(rb"(own|out)\d", rb"\g<1>1", data) if is_read else data
        kept[f"{top[:-1]}1/{name.partition('/')[2]}"] = text
    return kept


def _names_its_pages(said, name):
    """Return whether a sweep says that a job's pages were not written."""
    return f"Pages of {name.split('/')[-2]} were not written: " in said


def _says_so(found, name):
    """Return whether a run's record says that its pages could not be written."""
    record = found.get(f"{name.rpartition('/')[0]}/manifest.json", b"{}")
    return any(note.startswith("report failed: ") for note in json.loads(record).get("notes", ()))


def _unlike(name, found, expected):
    """Yield the differences of two contents beyond what is allowed."""
    if SHOWN.search(name) or name.endswith(JOURNALS):
        return
    try:
        ours, theirs = comparable(name, found), comparable(name, expected)
    except (ValueError, KeyError, RuntimeError) as error:
        yield f"cannot be read: {error}"
        return
    if name.endswith("plan.json") and _is_counted(found) != _is_counted(expected):
        del ours["tokens_total"], theirs["tokens_total"]  # one of the two is an estimate
    if ours != theirs:
        yield f"differs{_where(ours, theirs)}"


def _is_counted(plan):
    """Return whether the rows were already encoded, so that the plan has exact counts."""
    return json.loads(plan)["data"].get("train_blocks") is not None


def _where(ours, theirs, at=""):
    """Return the first places where two values differ."""
    if type(ours) is not type(theirs) or not isinstance(ours, dict | list):
        return f" at {at}: {str(ours)[:80]} for {str(theirs)[:80]}" if at else ""
    if isinstance(ours, list):
        if len(ours) != len(theirs):
            return f" at {at}: {len(ours)} for {len(theirs)}"
        pairs = [(number, *both) for number, both in enumerate(zip(ours, theirs, strict=True))]
    else:
        if ours.keys() != theirs.keys():
            return f" at {at}: keys {sorted(ours.keys() ^ theirs.keys())}"
        pairs = [(key, ours[key], theirs[key]) for key in ours]
    return next((_where(a, b, f"{at}.{key}") for key, a, b in pairs if a != b), "")


def comparable(name, data):
    """Return the part of a file that must be equal if the same work wrote it.

    Raises:
        ValueError: it is not whole JSON.
        RuntimeError: it is not a whole checkpoint.
    """
    if name.endswith(".ckpt"):
        return _numbers({key: torch.load(io.BytesIO(data))[key] for key in STATE})
    if name.endswith("telemetry.jsonl"):  # what was trained and measured; resuming adds events
        events = [json.loads(line) for line in data.splitlines()]
        return [_lasting(one) for one in events if one["event"] in ("step", "validation")]
    if name.endswith("checkpoints/sha256.json"):
        return sorted(json.loads(data))
    if name.endswith(".jsonl"):
        return [_lasting(json.loads(line)) for line in data.splitlines()]
    if not name.endswith(".json"):
        return data
    value = json.loads(data)
    if name == "own1/manifest.json":
        value.pop("config_digest")  # the next command may have used another directory
    if name.endswith("plan.json"):
        for estimated in ("data", "epochs", "memory_bytes", "disk_bytes", "time_s", "processes"):
            value.pop(estimated, None)  # depends on the cache and on earlier runs
    return _lasting(value)


def _numbers(value):
    """Convert tensors to plain values that can be compared."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.reshape(-1).view(torch.uint8).tolist()]
    if isinstance(value, dict):
        return {str(key): _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def _lasting(value):
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if not PASSING.fullmatch(k)}
    return [_lasting(one) for one in value] if isinstance(value, list) else value
