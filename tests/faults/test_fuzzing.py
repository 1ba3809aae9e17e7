"""Readers of untrusted files on mutated input: a small, seeded part of `make fuzz`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import fuzz_readers
import fuzzing
import pytest

SUPPORT = Path(fuzzing.__file__).parent
SEED = random.SystemRandom().randrange(2**32)  # printed with a failure


@pytest.mark.parametrize("name", fuzz_readers.READERS)
def test_valid_files_and_the_committed_corpus_are_read_or_refused(name, finished, tmp_path):
    """Valid files are read; nothing raises another error than `MensError` or is misread."""
    seeds = fuzz_readers.READERS[name].seeds(finished.path)
    for number, data in enumerate(fuzz_readers.inputs_of(name, finished.path)):
        fuzzing.laid_out(name, finished.path, tmp_path / "input", data)
        accepted, fault = fuzzing.fault_in(name, tmp_path / "input")
        assert fault is None, data[:200]
        assert accepted or number >= len(seeds)


def test_mutated_files_are_read_or_refused(finished, tmp_path):
    """Three readers drawn by a seed get 300 mutations each, each in a process of its own."""
    for name in random.Random(SEED).sample(sorted(fuzz_readers.READERS), 3):
        found = fuzzing.fuzzed(
            name, finished.path, seconds=60, inputs=300, seed=SEED, root=tmp_path / name
        )
        assert found["inputs"] > 0
        assert found["faults"] == [], f"{name}, seed {SEED}"


PLANTED = """
    import struct, sys, time
    from pathlib import Path
    sys.path.insert(0, {support!r})
    import fuzz_readers, fuzzing

    def read(path):
        data = path.read_bytes()
        if {kind!r} == "error":
            return {{}}[data]
        if {kind!r} == "hang":
            time.sleep(60)
        if {kind!r} == "memory":
            return bytes(2 ** 31)
        if {kind!r} == "end":
            import os, signal
            os.kill(os.getpid(), signal.SIGSEGV)
        return data

    def other(path, found):
        assert {kind!r} != "wrong", "a value that is not there"

    calls = []
    def first_is_well(path):
        calls.append(path)
        return None if len(calls) == 1 else read(path)

    fuzz_readers.READERS["planted"] = fuzz_readers.Reader(
        file="a", read=first_is_well, seeds=lambda _: [b"abc"], check=other
    )
    fuzzing.SCRIPT, fuzzing.HANG_S = Path(__file__), 0.5 if {kind!r} == "hang" else 5
    sys.exit(fuzzing.main())
"""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("error", "KeyError"),
        ("hang", "hangs: more than 0.5 s"),
        ("memory", "MemoryError"),
        ("end", "the process ended with -11"),
        ("wrong", "read otherwise: AssertionError"),
        ("none", "0 faults"),
    ],
)
def test_each_kind_of_fault_is_found(tmp_path, kind, said):
    """A planted reader fails in one way each time; one does not fail at all."""
    script = tmp_path / "planted.py"
    text = textwrap.dedent(PLANTED).format(support=str(SUPPORT), kind=kind)
    script.write_text(text, "utf-8")
    command = [sys.executable, str(script), "--readers", "planted", "--inputs", "3"]
    command += ["--minutes", "0.1", "--run", str(tmp_path), "--faults", str(tmp_path / "kept")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in ended.stdout, ended.stderr
    assert ended.returncode == (0 if kind == "none" else 1)
    assert (kind == "none") == (not list((tmp_path / "kept").glob("planted/*/input")))


def test_mutations_are_those_of_their_seed():
    """One seed always gives the same inputs; another seed gives others."""
    seeds, words = [b"{'a': 1}"], [b"null"]
    drawn = [
        [fuzzing.mutated(random.Random(seed), seeds, words) for _ in range(20)]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_large_inputs_are_not_cut_to_the_length_of_bred_ones():
    """A training state is longer than bred inputs; a truncated one would never be read."""
    seed = bytes(3 * fuzzing.LONGEST)
    drawn = [len(fuzzing.mutated(random.Random(n), [seed], [b"x"])) for n in range(40)]
    assert max(drawn) >= len(seed)


@pytest.mark.parametrize(
    ("seed", "read"),
    [
        (b'{"a": [1, {"b": "c"}], "d": null}', json.loads),
        (b'{"a": 1}\n{"b": [2]}\n', lambda text: list(map(json.loads, text.splitlines()))),
        (b"a:\n  b: [1, 2]\nc: d\n", bytes),
        (b"\x00\xff no text", None),
        (b"3", None),
    ],
)
def test_a_format_with_values_gets_others_and_stays_that_format(seed, read):
    """The seed itself is never modified, because the next input starts from it."""
    drawn = [fuzzing.restructured(random.Random(number), seed) for number in range(60)]
    if read is None:
        assert drawn == [None] * 60
        return
    values = [read(one) for one in drawn]
    assert len({repr(one) for one in values}) > 10
    assert read(seed) not in values or len(values) > values.count(read(seed))


def test_results_over_the_same_code_add_up_and_draw_other_inputs(tmp_path):
    """Results for other code start again at zero."""
    place, seeds = tmp_path / "fuzzing.json", []

    def run(code, inputs):
        earlier = fuzzing._stored(place, "template", code)
        seeds.append(earlier["inputs"])
        fuzzing._add(place, "template", earlier, {"inputs": inputs, "accepted": 1, "faults": []})
        return json.loads(place.read_text("utf-8"))["readers"]["template"]

    run("a", 300)
    assert (run("a", 50)["inputs"], run("a", 0)["accepted"]) == (350, 3)
    assert run("b", 7)["inputs"] == 7
    assert seeds == [0, 300, 350, 0]


def test_a_reader_s_code_is_that_which_runs_when_it_reads(finished, tmp_path):
    """The digest is stable for one reader and differs between two."""
    found = [
        fuzzing.code_of(name, finished.path, tmp_path / "seeds")
        for name in ("ledger", "ledger", "humaneval")
    ]
    assert found[0] == found[1] != found[2]


def test_inputs_that_libfuzzer_ran_are_counted_from_its_log():
    """The last number of its progress lines is the count."""
    log = "INFO: seed\n#2\tINITED cov: 1\n#1024\tpulse\n##### end\n#900\tNEW\n"
    assert fuzzing.executed(log) == 1024


def test_the_smallest_of_what_was_bred_is_kept(tmp_path, monkeypatch):
    """Only a limited number is kept, and none of more than 2,000 bytes."""
    monkeypatch.setattr(fuzzing, "CORPORA", tmp_path / "corpora")
    (tmp_path / "bred").mkdir()
    for size in (3, 1, 2_001, 2_000, 2):
        (tmp_path / "bred" / f"{size:016}{size:024}").write_bytes(b"x" * size)
    fuzzing.kept_corpus("template", tmp_path, most=3)
    kept = sorted((tmp_path / "corpora/template").iterdir())
    assert sorted(len(one.read_bytes()) for one in kept) == [1, 2, 3]


def test_inputs_that_nobody_breeds_are_not_kept(monkeypatch, capsys):
    """An input that is not used for breeding is not kept."""
    monkeypatch.setattr(sys, "argv", ["fuzzing.py", "--keep"])
    with pytest.raises(SystemExit, match="2"):
        fuzzing.main()
    assert "--keep adds what --guided breeds; give both" in capsys.readouterr().err
