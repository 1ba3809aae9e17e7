"""Judge what a fault left behind, with nothing of the package that is judged.

Every file is read as bytes, as plain JSON or as a checkpoint of torch, and compared with that of
a run that nothing disturbed. What may differ is listed here, each with its reason.
"""

from __future__ import annotations

import hashlib
import io
import json
import re

import torch

# Pages and logs that show times, and what Hydra keeps of the command as it was typed.
# What the record names as failed, after which a run counts as done: it can be drawn again.
# They save the next run a second; nobody misses them.
SPARE = ("cache/reference/", "cache/data_contract/")
DRAWN = ("report.html", "MODEL_CARD.md", "run_summary.json", "training_skip_stats.json")
SHOWN = re.compile(r"(\.html|\.log|MODEL_CARD\.md|\.hydra/.*)$")
# Keys of JSON whose values are times, sizes of processes, or what happened to a run on its way.
# `attempts` and `notes` say how often it was disturbed; a run's own outputs are hashed by
# `believed`; `search.journal` is Optuna's log, whose trials sweep.json has.
PASSING = re.compile(
    r"(.*_utc|.*_s|.*_ms|system/.*|.*seconds|.*rss_bytes|peak_bytes|free|free_bytes|measured.*|perf/.*|mem/.*"
    r"|utc|attempts|notes|reason|pid|was_done_already|why|process_started|server|previous|sha256|entry_sha256|outputs"
    r"|environment|provenance|known|sent|peak_rss_bytes_of_processes|run_id|directory|overrides|resumed_from)"
)
# Of a checkpoint, what goes on from it; the state of callbacks has times.
STATE = ("state_dict", "adapter", "optimizer_states", "lr_schedulers", "counters", "selected")
READ = (".json", ".jsonl", ".yaml")  # text that may name a run's directory
JOURNALS = ("search.journal", "cache/ledger.jsonl")
# What Slurm and the tasks of its arrays write about their own starts.
SLURM_LOGS = re.compile(r"all/batch/")
LEFT_OVER = re.compile(r"(\.tmp|\.old|\.lock|\.taking|\.rename)$|/tmp[^/]*$|/\.sync-")


def read(root):
    """Return the content of every file below a directory, by its path there."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def first(done, action):
    """Yield what is wrong with how the disturbed command ended."""
    if action in ("kill", "torn", "moment") and done.returncode < 0:
        return
    if done.returncode != 0:
        yield from (f"after the fault: {one}" for one in refusal(done))


def refusal(done):
    """Yield what is wrong with a command that did not end well: it has to say what to do."""
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
    """Yield runs that say that they succeeded while a file of theirs is not what they wrote."""
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
    """Yield how the files below a directory differ from those of an undisturbed run.

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
            continue  # of a process that did not end well
        elif name not in expected:
            if not LEFT_OVER.search(name):
                yield f"{name} is there"
            else:
                yield f"left over: {name}"
        elif found[name] != expected[name]:
            yield from (f"{name}: {one}" for one in _unlike(name, found[name], expected[name]))


def _renamed(found, own):
    """Keep the one run that ended well, under the name of an undisturbed one."""
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
    """Tell whether a sweep says that a job's pages were not written."""
    return f"Pages of {name.split('/')[-2]} were not written: " in said


def _says_so(found, name):
    """Tell whether a run's record says that its pages could not be written."""
    record = found.get(f"{name.rpartition('/')[0]}/manifest.json", b"{}")
    return any(note.startswith("report failed: ") for note in json.loads(record).get("notes", ()))


def _unlike(name, found, expected):
    """Yield how two contents differ beyond what may."""
    if SHOWN.search(name) or name.endswith(JOURNALS):
        return
    try:
        ours, theirs = comparable(name, found), comparable(name, expected)
    except (ValueError, KeyError, RuntimeError) as error:
        yield f"cannot be read: {error}"
        return
    if name.endswith("plan.json") and _is_counted(found) != _is_counted(expected):
        del ours["tokens_total"], theirs["tokens_total"]  # one of them is an estimate
    if ours != theirs:
        yield f"differs{_where(ours, theirs)}"


def _is_counted(plan):
    """Tell whether the rows were already encoded, so that the plan counts them."""
    return json.loads(plan)["data"].get("train_blocks") is not None


def _where(ours, theirs, at=""):
    """Name the first places where two values differ."""
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
    """Return what two files of a name share when the same work made them.

    Raises:
        ValueError: it is not whole JSON.
        RuntimeError: it is not a whole checkpoint.
    """
    if name.endswith(".ckpt"):
        return _numbers({key: torch.load(io.BytesIO(data))[key] for key in STATE})
    if name.endswith("telemetry.jsonl"):  # what was trained and measured; a resumption adds events
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
        value.pop("config_digest")  # the next command may have had to write elsewhere
    if name.endswith("plan.json"):
        for estimated in ("data", "epochs", "memory_bytes", "disk_bytes", "time_s", "processes"):
            value.pop(estimated, None)  # what is cached by now and what earlier runs took
    return _lasting(value)


def _numbers(value):
    """Make tensors plain values that can be compared."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.reshape(-1).view(torch.uint8).tolist()]
    if isinstance(value, dict):
        return {str(key): _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def _lasting(value):
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if not PASSING.fullmatch(k)}
    return [_lasting(one) for one in value] if isinstance(value, list) else value
