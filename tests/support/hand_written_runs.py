"""Two cycles of three seeds, and a user's commands that compare and promote them.

burn does every task, qlora one or two of four. Every answer, every line and every figure is written
by hand, without the product's code.
"""

from __future__ import annotations

import hashlib
import json
import shutil

import yaml
from item_events import item_event

SEEDS = {"one": [1, 2, 3], "two": [4, 5, 6]}
OPENED, STARTED = "2126-01-01T00:00:00.000Z", "2126-01-02T00:00:00.000Z"
ITEMS = range(4)


def sha256(value):
    """Return the digest of a JSON value in its canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_of(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def signature(item):
    return f'def f{item}(a):\n    """Add {item}."""\n'


def asked(item):
    """Return the prompt of suite=humaneval."""
    how = "Complete this Python function. Answer with the code of the whole function only."
    return f"{how}\n\n```python\n{signature(item).rstrip()}\n```"


def task(item):
    return {
        "task_id": f"t{item}",
        "prompt": signature(item),
        "entry_point": f"f{item}",
        "canonical_solution": f"    return a + {item}\n",
        "test": f"def check(f):\n    assert f(1) == {1 + item}\n",
    }


def suite_digest():
    """Return the digest of a suite: tasks, prompts and limit."""
    tasks = [
        [
            {
                "id": f"t{item}",
                "prompt": signature(item),
                "entry_point": f"f{item}",
                "tests": f"{task(item)['test']}\n\ncheck(f{item})\n",
                "code": signature(item),
                "setup": "",
                "reference": task(item)["canonical_solution"],
            },
            asked(item),
        ]
        for item in ITEMS
    ]
    return sha256({"suite": sha256({"tasks": tasks, "max_new_tokens": 512}), "grading": 5})


SUITE = suite_digest()


def answer(item, *, is_right):
    """Return an answer of five statements: the highest richness, in canonical layout."""
    given = item if is_right else -99
    return f"def f{item}(a):\n    b = a\n    b += {given}\n    c = b\n    d = c\n    return d\n"


def line(item, condition, *, is_right):
    """Return the event line of an answer, written by hand."""
    why = dict.fromkeys(("tokens_in", "latency_ms"), "nobody counted")
    if not is_right:
        why |= dict.fromkeys(("repair_depth", "time_to_first_valid_ms"), "no attempt is valid")
    return item_event(
        item_id=f"t{item}",
        condition=condition,
        prompt=asked(item),
        reference=task(item)["canonical_solution"],
        completion=answer(item, is_right=is_right),
        error=None if is_right else "This test fails",
        tokens_in=None,
        tokens_out=30,
        pass_1=is_right,
        task_success=is_right,
        semantic_task_success=is_right,
        repair_depth=0 if is_right else None,
        error_count=0 if is_right else 1,
        latency_ms=None,
        time_to_first_valid_ms=5.0 if is_right else None,
        outcome="passed" if is_right else "assertion",
        style="whole",
        unknown=why,
    )


def does(backend, seed, item):
    return backend == "burn" or item < 1 + seed % 2


def figures(lines):
    """Return the metrics of one condition by hand: four items, one sample each."""
    shares = {
        "task_success": "task_success",
        "semantic_task_success": "semantic_task_success",
        "parse_rate": "parses",
        "compile_at_1": "compile_pass_1",
        "pass_at_1": "pass_1",
        "strictness": "strictness",
        "richness": "richness",
        "anti_stub": "anti_stub_pass",
        "tokens_out_mean": "tokens_out",
    }
    return {name: sum(one[field] for one in lines) / 4 for name, field in shares.items()}


class Run:
    """A run's directory that is edited with new digests, as a forger would."""

    def __init__(self, path):
        self.path = path
        self.events, self.card = path / "events.jsonl", path / "scorecard.json"
        self.manifest = path / "manifest.json"

    def lines(self):
        return [json.loads(text) for text in self.events.read_text("utf-8").splitlines()]

    def answer(self, lines):
        self.events.write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")

    def score(self, **changes):
        """Edit the scorecard; `conditions` are merged into the tuned model's."""
        told = json.loads(self.card.read_text("utf-8"))
        told["conditions"]["tuned"] |= changes.pop("tuned", {})
        self.card.write_text(json.dumps({**told, **changes}), "utf-8")

    def sum_up(self):
        """Write the metrics of the current lines."""
        sides = {name: [] for name in ("base", "tuned")}
        for one in self.lines():
            sides[one["condition"]].append(one)
        self.score(conditions={name: figures(some) for name, some in sides.items()})

    def rehash(self):
        """Update the digests in the manifest."""
        told = json.loads(self.manifest.read_text("utf-8"))
        for file in (self.events, self.card, self.path / "config.yaml"):
            told["outputs"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        self.manifest.write_text(json.dumps(told), "utf-8")

    def close(self):
        """Write the telemetry's last event, with the manifest's digest, as a run that ends does."""
        told = json.loads(self.manifest.read_text("utf-8"))
        digest = sha256({name: value for name, value in told.items() if name != "notes"})
        payload = {"status": told["status"], "results": {}, "manifest_sha256": digest}
        event = {"event": "run_finished", "payload": payload, "ts_ms": 1}
        file = self.path / "telemetry.jsonl"
        file.write_text(json.dumps(event) + "\n", "utf-8")
        self.tell(outputs={**told["outputs"], file.name: sha256_of(file)})

    def tell(self, **changes):
        """Edit values of the manifest."""
        told = json.loads(self.manifest.read_text("utf-8"))
        self.manifest.write_text(json.dumps({**told, **changes}), "utf-8")

    def edit(self, item, **changes):
        """Edit the tuned model's line of one item."""
        key = (f"t{item}", "tuned")
        lines = self.lines()
        assert any((one["item_id"], one["condition"]) == key for one in lines)
        self.answer(
            [one | changes if (one["item_id"], one["condition"]) == key else one for one in lines]
        )

    def forge(self, item, *, is_right):
        """Replace an item's answer, with everything derived from it and the digests."""
        self.edit(item, **line(item, "tuned", is_right=is_right))
        self.sum_up()
        self.rehash()


def run_of(study, backend, seed):
    for path in study.glob("*/manifest.json"):
        told = json.loads(path.read_text("utf-8"))
        if told["seed"] == seed and f"backend={backend}" in told["overrides"]:
            return Run(path.parent)
    raise AssertionError


def write_honest(root, study_at, name):
    """Write a cycle's runs: the study's own files, then answers and metrics by hand."""
    told = {"arms": (("backend=qlora",), ("backend=burn",)), "seeds": SEEDS[name]}
    study_at(root / name, suite=SUITE, started=STARTED, **told)
    for backend in ("qlora", "burn"):
        for seed in SEEDS[name]:
            run = run_of(root / name, backend, seed)
            config = run.path / "config.yaml"
            values = yaml.safe_load(config.read_text("utf-8"))
            path = str(root / "tasks.jsonl")
            values["suite"] = {"name": "humaneval", "path": path, "items": None}
            values["suite"] |= {"max_new_tokens": 512, "batch_size": 8}
            config.write_text(yaml.safe_dump(values), "utf-8")
            base = [line(item, "base", is_right=False) for item in ITEMS]
            tuned = [line(i, "tuned", is_right=does(backend, seed, i)) for i in ITEMS]
            run.answer([*base, *tuned])
            generation = {"engine": "hf", "samples": 1, "max_retries": 0, "grading": 5}
            run.score(suite="humaneval", generation=generation, sandbox="bubblewrap")
            run.sum_up()
            run.rehash()


def write_cycles(root, study_at):
    """Write both cycles' runs and the suite's file."""
    (root / "tasks.jsonl").write_text("".join(json.dumps(task(i)) + "\n" for i in ITEMS), "utf-8")
    for name in SEEDS:
        write_honest(root, study_at, name)
    return root


def forge(lab):
    """Let qlora fail at one more task in every part of the record."""
    run = lab.run("qlora", 2)
    run.forge(0, is_right=False)
    return run


class Lab:
    """Copies of the runs, a ledger with both cycles open, and a user's commands."""

    def __init__(self, honest, root, typed, frozen):
        """Copy the runs for editing, and open both cycles."""
        self.root, self.typed, self.tasks = root, typed, honest / "tasks.jsonl"
        self.ledger = root / "decisions.jsonl"
        self.runs = {name: shutil.copytree(honest / name, root / "runs" / name) for name in SEEDS}
        for name, seeds in SEEDS.items():
            cycle = {
                "cycle": name,
                "suite_digest": SUITE,
                "seeds": seeds,
                "arms": ["qlora", "burn"],
                "factor": "backend",
                "kpi": "task_success",
                "direction": "higher",
                "margin": 0.0,
                "frozen": {**frozen, "certificate": False},
            }
            self.write("cycle", cycle)

    def write(self, kind, body, version=2):
        """Append a line to the ledger in the format of version 2."""
        lines = self.ledger.read_text("utf-8").splitlines() if self.ledger.exists() else []
        entry = {
            "format": "mens_exp_decisions",
            "version": version,
            "number": len(lines) + 1,
            "utc": OPENED,
            "kind": kind,
            "cycle": None,
            "decision": None,
            kind: body,
            "previous": json.loads(lines[-1])["sha256"] if lines else None,
        }
        entry["sha256"] = sha256(entry)
        self.ledger.write_text("".join(f"{x}\n" for x in [*lines, json.dumps(entry)]), "utf-8")

    def entries(self):
        return [json.loads(text) for text in self.ledger.read_text("utf-8").splitlines()]

    def run(self, backend, seed):
        name = next(name for name, seeds in SEEDS.items() if seed in seeds)
        return run_of(self.runs[name], backend, seed)

    def out(self, name):
        return self.root / "verdicts" / name

    def compare(self, name, *overrides, ledger=False, code=0, out=None):
        """Compare a cycle's runs; return the output in one line."""
        more = [f"ledger={self.ledger}"] if ledger else []
        path = overrides[0] if overrides else f"path={self.runs[name]}"
        told = [path, f"out={out or self.out(name)}", "logger=none", *overrides[1:], *more]
        return " ".join(self.typed("task=compare", *told, code=code).split())

    def promote(self, *paths, code=4):
        """Request the promotion; return the output in one line."""
        chosen = paths or [self.out(name) for name in SEEDS]
        path = f"path=[{','.join(map(str, chosen))}]"
        asked_for = ["task=promote", "policy=burn_production", "policy.parity=false"]
        said = self.typed(*asked_for, path, f"ledger={self.ledger}", code=code)
        return " ".join(said.split())

    def decision(self):
        return self.entries()[-1]["decision"]

    def denied(self):
        """Return the reason for which the last decision refused the evidence."""
        rules = [rule for rule in self.decision()["rules"] if rule["rule"] == "evidence"]
        return "; ".join(str(r["observed"]) for r in rules if r["outcome"] != "passed")

    def notes(self, name):
        return json.loads((self.out(name) / "compare.json").read_text("utf-8"))["notes"]
