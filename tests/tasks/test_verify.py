"""The command task=inspect inspect.verify=true: every change is found and named, exit code 4."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil

import pytest
import yaml

from mens_exp import cli
from mens_exp.artifacts.certificate import Outcome
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.report.write import write_report

TENSORS = "adapter/adapter.safetensors"


def differing(found):
    assert found.verification is not None
    return [
        one["name"]
        for one in found.verification["checks"]
        if one["outcome"] not in {Outcome.EQUAL, Outcome.NOT_HERE}
    ]


def flip(path, position=-5):
    """Flip one bit of one byte; bytes near the end of a tensor file are values."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def edit(path, change):
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run, which a test may change."""
    return RunDir(shutil.copytree(finished.path, tmp_path / "runs" / "run"))


def test_an_untouched_run_is_what_its_records_say(run, inspect, tiny_base):
    """Outputs, record, adapter, base (here in the cache), tokenizer and rows agree."""
    found = inspect(run.path, "inspect.verify=true")
    assert found.verification is not None
    outcomes = {one["name"]: one["outcome"] for one in found.verification["checks"]}
    assert {name: one for name, one in outcomes.items() if one != Outcome.EQUAL} == {}
    for name in (
        *(f"outputs.{TENSORS}", "config_digest", "contract.digest", "results.tuned_val_loss"),
        *("inputs.base_weights_sha256", "inputs.data.rows_sha256", "step_00000004.ckpt: adapter"),
    ):
        assert name in outcomes


def test_one_flipped_byte_of_a_tensor_file_is_found(run, typed, inspect):
    """It is named by its hash, and as different from the state that it was written from."""
    flip(run.path / TENSORS)
    found = inspect(run.path, "inspect.verify=true", code=4)
    assert differing(found) == [f"outputs.{TENSORS}", "step_00000004.ckpt: adapter"]
    said = typed("task=inspect", f"path={run.adapter}", "inspect.verify=true", code=4)
    assert "is not what its records say" in said
    assert f"outputs.{TENSORS}" in said


def test_one_flipped_byte_of_a_training_state_is_found(run, inspect):
    """It is found by its digest; the adapter that was written from it still agrees."""
    flip(run.checkpoint(2))
    assert differing(inspect(run.path, "inspect.verify=true", code=4)) == [
        "checkpoints/step_00000002.ckpt"
    ]


def test_a_swapped_adapter_file_is_found(
    run,
    finished_with,
    inspect,
):
    """The adapter of another seed, undamaged and with the same shapes."""
    other = finished_with("seed=7")
    shutil.copy(other.path / TENSORS, run.path / TENSORS)
    assert f"outputs.{TENSORS}" in differing(inspect(run.path, "inspect.verify=true", code=4))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda value: value.update(seed=7), "seed"),
        (lambda value: value["results"].update(tuned_val_loss=1.0), "results.tuned_val_loss"),
        (lambda value: value.update(config_digest="0" * 64), "config_digest"),
        (lambda value: value["contract"]["settings"].update(seed=7), "contract.digest"),
        (
            lambda value: value["inputs"].update(base_weights_sha256="0" * 64),
            "inputs.base_weights_sha256",
        ),
        (
            lambda value: value["facts"]["lora_init_layers_sha256"].update({"l0.q": "0" * 64}),
            "facts.lora_init_sha256",
        ),
        (lambda value: value["facts"].update(quant="fp4"), "facts.quant"),
        (lambda value: value["outputs"].update({TENSORS: "0" * 64}), f"outputs.{TENSORS}"),
        *(
            (change, "manifest.json, all but its notes")
            for change in (
                lambda value: value["facts"].update(seq_len=1),
                lambda value: value["data_contract"].update(documents=1),
                lambda value: value["overrides"].append("seed=42"),
                lambda value: value["outputs"].pop("config.yaml"),
                lambda value: value["provenance"].update(commit="0" * 40),
                lambda value: value.update(started_utc="2026-01-01T00:00:00.000Z"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_edited_manifest_is_found(
    run,
    inspect,
    change,
    name,
):
    """By its configuration, its telemetry, the contract itself, or the base on disk."""
    edit(run.manifest, change)
    found = differing(inspect(run.path, "inspect.verify=true", code=4))
    assert {name, "manifest.json, all but its notes"} <= {*found}


def test_a_resumed_run_is_what_its_records_say_and_replays(broken, inspect, tmp_path):
    """The run was stopped in its fourth step and resumed from the second."""
    from mens_exp import cli

    stopped = broken(tmp_path / "stopped", 7)
    assert cli.main([f"resume={stopped.path}"]) == 0
    found = inspect(
        stopped.path, "inspect.verify=true", "inspect.replay=true", "inspect.replay_steps=4"
    )
    assert differing(found) == []
    assert found.replay is not None
    assert found.replay["identical_through"] == 4
    assert "resumed" in found.replay["conditions"][0]


def test_an_unpacked_bundle_is_held_against_its_list(run, typed, inspect, tmp_path):
    """The list covers the manifest too, which no output hash does."""
    import tarfile

    typed(
        "task=export",
        f"path={run.path}",
        f"out={tmp_path / 'run.tar.gz'}",
        "export.allow_absolute_paths=true",
    )
    with tarfile.open(tmp_path / "run.tar.gz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    (there,) = (tmp_path / "there").iterdir()
    assert differing(inspect(there, "inspect.verify=true")) == []
    edit(there / "manifest.json", lambda value: value["notes"].append("trust me"))
    found = differing(inspect(there, "inspect.verify=true", code=4))
    assert [name.partition(": ")[0] for name in found] == ["bundle"]
    assert found[0].endswith("manifest.json")


@pytest.mark.parametrize("name", ["run_summary.json", "training_skip_stats.json"])
def test_an_edited_or_deleted_view_for_other_programs_is_found(run, inspect, name):
    """The run hashes it with its other outputs."""
    edit(run.path / name, lambda value: value.update(schema="another"))
    assert differing(inspect(run.path, "inspect.verify=true", code=4)) == [f"outputs.{name}"]
    (run.path / name).unlink()
    assert differing(inspect(run.path, "inspect.verify=true", code=4)) == [f"outputs.{name}"]


def test_a_view_that_is_written_again_is_the_same(run):
    """A later rendering of the pages leaves the hashed views alone."""
    before = {file: file.read_bytes() for file in (run.run_summary, run.skip_stats)}
    write_report(run)
    assert {file: file.read_bytes() for file in before} == before


def test_files_without_a_hash_are_named(run, inspect, typed):
    """Pages are rendered after the manifest is closed, so that nothing states their hashes."""
    (run.adapter / "stray.json").write_text("{}", "utf-8")
    found = inspect(run.path, "inspect.verify=true")
    names = {text.removeprefix(f"{run.path}/") for text in found.verification["unchecked"]}
    assert {"report.html", "MODEL_CARD.md", "adapter/stray.json"} <= names
    assert not names & {"config.yaml", "run_summary.json", "manifest.json", "checkpoints/"}
    said = " ".join(typed("task=inspect", f"path={run.path}", "inspect.verify=true").split())
    assert "Not checked, as no record states a hash: " in said
    assert "MODEL_CARD.md" in said.partition("Not checked")[2]


def test_a_run_without_its_manifest_is_refused_by_name(run, typed, inspect):
    """It is not taken for a loose adapter; its adapter and states are not either."""
    run.manifest.unlink()
    said = typed("task=inspect", f"path={run.path}", code=2)
    assert "the run has lost its manifest.json" in said
    for place in (run.adapter, run.checkpoint(2)):
        found = inspect(place, "inspect.verify=true", code=4)
        assert differing(found) == ["manifest.json"]


def test_an_edited_adapter_manifest_is_found(run, inspect):
    """Twice the alpha makes another model of the same tensors."""
    edit(run.adapter / "adapter_manifest.json", lambda value: value.update(alpha=32))
    found = inspect(run.path, "inspect.verify=true", code=4)
    assert differing(found) == ["outputs.adapter/adapter_manifest.json"]


def test_a_run_of_an_earlier_release_is_what_its_records_say(run, inspect):
    """Without the keys that came later, a configuration has the digest recorded then."""
    values = yaml.safe_load(run.config.read_text("utf-8"))
    del values["compare"], values["eval"]["keep_passing"]
    run.config.write_text(yaml.safe_dump(values), "utf-8")
    *events, end = run.telemetry.read_text("utf-8").splitlines()
    last = json.loads(end)
    del last["payload"]["manifest_sha256"]
    run.telemetry.write_text("\n".join([*events, json.dumps(last), ""]), "utf-8")
    written = {file.name: sha256_file(file) for file in (run.config, run.telemetry)}
    edit(run.manifest, lambda value: value["outputs"].update(written))
    assert differing(inspect(run.path, "inspect.verify=true", code=4)) == ["config_digest"]
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    edit(run.manifest, lambda value: value.update(config_digest=digest))
    assert differing(inspect(run.path, "inspect.verify=true")) == []


def test_a_last_checkpoint_that_is_gone_is_reported(run, inspect):
    """Its recorded digest is shown; it is no error, as a bundle may leave checkpoints out."""
    (run.checkpoints / "step_00000004.ckpt").unlink()
    found = inspect(run.path, "inspect.verify=true")
    assert found.verification is not None
    (gone,) = [one for one in found.verification["checks"] if one["outcome"] == Outcome.NOT_HERE]
    assert gone["name"] == "checkpoints/step_00000004.ckpt"
    assert re.fullmatch("[0-9a-f]{64}", gone["recorded"])


def test_rows_that_changed_are_found_and_absent_ones_are_not_here(run, inspect, tmp_path):
    """A missing file of rows is no error; one with a changed word is."""
    rows = tmp_path / "rows.jsonl"
    config = run.config.read_text("utf-8")
    (line,) = [text for text in config.splitlines() if text.strip().startswith("path: /")]
    original = line.split(": ", 1)[1]
    shutil.copy(original, rows)
    run.config.write_text(config.replace(original, str(rows)), "utf-8")
    rows.write_text(rows.read_text("utf-8").replace("a", "e", 1), "utf-8")
    assert "inputs.data.rows_sha256" in differing(inspect(run.path, "inspect.verify=true", code=4))
    rows.unlink()
    found = inspect(run.path, "inspect.verify=true", code=4)  # its configuration was edited
    assert "inputs.data.rows_sha256" not in differing(found)
    assert found.verification is not None
    absent = [one for one in found.verification["checks"] if one["outcome"] == Outcome.NOT_HERE]
    assert [(one["name"], one["found"]) for one in absent] == [
        (f"inputs.data.{name}_sha256", None) for name in ("rows", "train", "val")
    ]


@pytest.fixture(scope="module")
def merged(finished, tmp_path_factory):
    """A run, its merge, and the record of the merge; shared by all tests: copy them."""
    from mens_exp import cli

    root = tmp_path_factory.mktemp("merged") / "all"
    root.mkdir()
    shutil.copytree(finished.path, root / "run")
    command = ["task=merge", "logger=none", f"path={root / 'run'}", f"out={root / 'model'}"]
    record = f"hydra.run.dir={root / 'record'}"
    assert cli.main([*command, record, "parity.tokens=64", "parity.accept=true"]) == 0
    return root


@pytest.fixture
def spoilt(merged, tmp_path):
    return shutil.copytree(merged, tmp_path / "all")


def test_a_merge_is_certified_again_figure_by_figure(spoilt, inspect):
    """On the machine that wrote it, every figure is the same to the last bit."""
    found = inspect(spoilt / "model", "inspect.verify=true")
    assert found.verification is not None
    checks = {one["name"]: one["outcome"] for one in found.verification["checks"]}
    assert checks["certificate: written.mean_kl"] == Outcome.EQUAL
    assert checks["certificate: requantized.worst_layer.relative_error"] == Outcome.EQUAL
    assert checks["files.model.safetensors"] == Outcome.EQUAL
    assert differing(found) == []


def test_without_the_run_that_wrote_it_the_trained_run_is_enough(spoilt, inspect):
    """The command is rebuilt from the certificate; without both runs, that is reported."""
    shutil.rmtree(spoilt / "record")
    found = inspect(spoilt / "model", "inspect.verify=true")
    assert found.verification is not None
    assert "certificate: written.mean_kl" in {one["name"] for one in found.verification["checks"]}
    shutil.rmtree(spoilt / "run")
    found = inspect(spoilt / "model", "inspect.verify=true")
    assert found.verification is not None
    absent = {
        one["name"] for one in found.verification["checks"] if one["outcome"] == Outcome.NOT_HERE
    }
    assert absent == {"certificate", "sources.adapter_sha256"}


@pytest.mark.parametrize("with_record", [True, False])
def test_an_edited_figure_of_a_certificate_is_found(spoilt, inspect, *, with_record):
    """A maximal KL is halved, and the verdict left as it was."""

    def prettier(value):
        value["comparisons"]["requantized"]["max_kl"] *= 0.5

    if not with_record:
        shutil.rmtree(spoilt / "record")
    edit(spoilt / "model" / "parity.json", prettier)
    found = differing(inspect(spoilt / "model", "inspect.verify=true", code=4))
    assert "certificate: requantized.max_kl" in found
    assert ("certificate of its run: requantized.max_kl" in found) == with_record


def test_an_edited_sentence_of_a_certificate_is_found(spoilt, inspect):
    """No figure depends on the sentence, but the run that wrote the certificate has a copy."""
    edit(spoilt / "model" / "parity.json", lambda value: value.update(reference="the best one"))
    found = differing(inspect(spoilt / "model", "inspect.verify=true", code=4))
    assert found == ["certificate of its run: text"]


def test_a_flipped_source_is_found_where_the_merge_read_it(finished, inspect, tmp_path):
    """The source is found by the path that the merge recorded, though outside ./outputs."""
    run = shutil.copytree(finished.path, tmp_path / "deep" / "study" / "run")
    out = ["task=merge", f"path={run}", f"out={tmp_path / 'model'}", "parity.tokens=64"]
    record = f"hydra.run.dir={tmp_path / 'record'}"
    assert cli.main([*out, record, "parity.accept=true"]) == 0
    flip(run / TENSORS)
    found = differing(inspect(tmp_path / "model", "inspect.verify=true", code=4))
    assert "sources.adapter_sha256" in found


def test_a_figure_of_an_unknown_machine_may_be_close(spoilt, inspect):
    """A thousandth more is close, with a note that says why that counts; a tenth more differs."""
    shutil.rmtree(spoilt / "record")
    before = json.loads((spoilt / "model" / "parity.json").read_text("utf-8"))
    figure = before["comparisons"]["requantized"]["worst_layer"]["relative_error"]
    for factor, code in ((1.001, 0), (1.1, 4)):

        def more(value, factor=factor):
            value["comparisons"]["requantized"]["worst_layer"]["relative_error"] = figure * factor

        edit(spoilt / "model" / "parity.json", more)
        found = inspect(spoilt / "model", "inspect.verify=true", code=code)
        assert found.verification is not None
        (check,) = [
            one for one in found.verification["checks"] if one["recorded"] == figure * factor
        ]
        assert check["outcome"] == (Outcome.CLOSE if code == 0 else Outcome.DIFFERS)
        assert "a machine that nothing names" in (check["note"] or "")


def test_a_flipped_byte_of_a_merged_model_is_found(spoilt, inspect):
    """The hash shows it, and a certificate of other files is not measured again."""
    flip(spoilt / "model" / "model.safetensors")
    found = inspect(spoilt / "model", "inspect.verify=true", code=4)
    assert differing(found) == ["files.model.safetensors"]


@pytest.mark.parametrize("place", ["model", "moved"])
def test_a_merge_whose_certificate_was_deleted_is_found(spoilt, inspect, place):
    """The run that wrote it has the hash of the certificate and of every other file."""
    if place == "moved":
        (spoilt / "model").rename(spoilt / place)
    (spoilt / place / "parity.json").unlink()
    found = inspect(spoilt / place, "inspect.verify=true", code=4)
    assert differing(found) == ["files.parity.json"]
    outcomes = {one["name"]: one["outcome"] for one in found.verification["checks"]}
    assert outcomes["files.model.safetensors"] == Outcome.EQUAL


def test_an_export_whose_certificate_was_deleted_is_found(spoilt, typed, inspect):
    """A copy of its files that a run did not write here has no certificate to lack."""
    out = spoilt / "exported"
    typed(
        *("task=export", "export.format=peft", f"path={spoilt / 'run'}", f"out={out}"),
        f"hydra.run.dir={spoilt / 'export'}",
    )
    (out / "parity.json").unlink()
    assert differing(inspect(out, "inspect.verify=true", code=4)) == ["files.parity.json"]
    shutil.copytree(out, spoilt / "copy")
    assert differing(inspect(spoilt / "copy", "inspect.verify=true")) == []


def test_a_file_too_many_and_one_too_few_are_found(spoilt, inspect):
    """A certificate covers all files, and no others."""
    (spoilt / "model" / "config.json").rename(spoilt / "model" / "generation_config.json")
    (spoilt / "model" / "config.json").write_text("{}", "utf-8")
    found = inspect(spoilt / "model", "inspect.verify=true", code=4)
    assert differing(found) == ["files.config.json", "files.generation_config.json"]


@pytest.mark.parametrize("form", ["v2", "peft"])
def test_an_exported_adapter_is_certified_again(
    run,
    typed,
    inspect,
    form,
):
    """Its tensors and PEFT's graph agree; one flipped byte of it is then found."""
    out = run.path.parent / "out"
    record = f"hydra.run.dir={run.path.parent / 'record'}"
    typed("task=export", f"path={run.path}", f"export.format={form}", f"out={out}", record)
    found = inspect(out, "inspect.verify=true")
    assert found.verification is not None
    assert "certificate: l0.q.relative" in {one["name"] for one in found.verification["checks"]}
    assert differing(found) == []
    (tensors,) = out.glob("*.safetensors")
    flip(tensors)
    assert differing(inspect(out, "inspect.verify=true", code=4)) == [f"files.{tensors.name}"]


def test_something_without_records_has_nothing_to_verify(run, inspect, tmp_path):
    """For an adapter directory outside any run this is reported, and is no error."""
    bare = shutil.copytree(run.adapter, tmp_path / "bare" / "adapter")
    found = inspect(bare, "inspect.verify=true")
    assert found.verification is not None
    (check,) = found.verification["checks"]
    assert (check["outcome"], check["recorded"]) == (Outcome.NOT_HERE, None)


def test_a_truncated_adapter_is_found_and_the_rest_verified(run, inspect, typed):
    """It has no layers to show; without inspect.verify=true it is refused."""
    whole = (run.path / TENSORS).read_bytes()
    (run.path / TENSORS).write_bytes(whole[:100])
    assert "not a valid safetensors file" in typed("task=inspect", f"path={run.path}", code=2)
    found = inspect(run.path, "inspect.verify=true", code=4)
    assert differing(found) == ["layers", f"outputs.{TENSORS}", "adapter"]
    assert "layers" in found.unknown


def test_a_certificate_whose_verdict_was_edited_is_found(spoilt, inspect):
    """The verdict contradicts the figures beside it, so the file is no certificate."""
    edit(spoilt / "model" / "parity.json", lambda value: value.update(passed=not value["passed"]))
    found = inspect(spoilt / "model", "inspect.verify=true", code=4)
    assert differing(found) == ["certificate", "files.parity.json"]
    assert found.certificate is None


def test_of_two_merges_of_one_run_each_is_held_against_its_own_record(spoilt, typed, inspect):
    """Neither a file both merges have nor equal tensors certified on other text identify one."""
    for name, overrides in {"other": ["parity.tokens=200"], "half": ["merge.dtype=bf16"]}.items():
        typed(
            *(
                "task=merge",
                "parity.tokens=64",
                "logger=none",
                f"path={spoilt / 'run'}",
                f"out={spoilt / name}",
                *overrides,
            ),
            *("parity.accept=true", f"hydra.run.dir={spoilt / f'a_{name}_record'}"),
        )
        assert differing(inspect(spoilt / name, "inspect.verify=true")) == []
    (spoilt / "model").rename(spoilt / "moved")
    found = inspect(spoilt / "half", "inspect.verify=true")
    assert found.verification is not None
    assert any(
        one["name"].startswith("merge a_half_record: ") for one in found.verification["checks"]
    )


@pytest.fixture(scope="module")
def study(finished, finished_with, tmp_path_factory):
    """Two arms, each scored by an evaluation, compared and decided on; nothing is promoted.

    Records name each other by path, so a test has to restore what it changes here.
    """
    root = tmp_path_factory.mktemp("study")
    arms = {"r16": finished, "r4": finished_with("lora.r=4")}
    for name, arm in arms.items():
        own = shutil.copytree(arm.path, root / name)
        suite = ("suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40", "logger=none")
        command = ("task=evaluate", f"path={own}", *suite, f"hydra.run.dir={root / name}_scored")
        assert cli.main(list(command)) == 0
    paths = ",".join(f"{root / name}_scored" for name in arms)
    command = ["task=compare", f"path=[{paths}]", "compare.primary=val_loss", "logger=none"]
    assert cli.main([*command, f"hydra.run.dir={root / 'compared'}"]) == 0
    decide = ["task=promote", "policy=burn_rnd", f"path={root / 'compared'}"]
    ledger = f"ledger={root / 'ledger.jsonl'}"
    assert (
        cli.main([*decide, ledger, f"hydra.run.dir={root / 'decided'}"]) == 4
    )  # nothing to promote
    return root


def links(found):
    """Return the outcome of each link of the chain."""
    outcomes = {}
    for check in found.verification["checks"]:
        outcomes.setdefault(check["link"], set()).add(str(check["outcome"]))
    return outcomes


CHAIN = [
    *("base", "rows", "encoded rows", "run", "checkpoints", "adapter"),
    *("scorecard", "comparison", "decision"),
]


@pytest.mark.parametrize(
    ("place", "last"),
    [
        ("decided", "decision"),
        ("compared/compare.json", "comparison"),
        ("r4_scored/scorecard.json", "scorecard"),
    ],
)
def test_the_chain_is_walked_from_its_end_to_the_base(study, inspect, place, last):
    """Every link is in the table and intact, for both arms if the record covers both."""
    found = inspect(study / place, "inspect.verify=true")
    assert found.kind == last
    assert links(found) == {link: {"equal"} for link in CHAIN[: CHAIN.index(last) + 1]}
    trained = {check["of"] for check in found.verification["checks"] if check["link"] == "rows"}
    assert len(trained) == (1 if last == "scorecard" else 2)
    assert found.lineage[-1]["role"] == "record"
    assert all(one["missing"] is None for one in found.lineage)


@contextlib.contextmanager
def flipped(*files):
    """Flip one bit of each file, and restore the files afterwards."""
    before = {file: file.read_bytes() for file in files}
    try:
        for file in files:
            flip(file)
        yield
    finally:
        for file, content in before.items():
            file.write_bytes(content)


def test_one_changed_byte_of_any_link_is_found_from_the_end(study, inspect):
    """Five files of three runs are changed; each is named with its run and its link."""
    changed = {
        ("r4", "adapter/adapter.safetensors"): "adapter",
        ("r16", "telemetry.jsonl"): "run",
        ("r4_scored", "events.jsonl"): "scorecard",
        ("r16_scored", "scorecard.json"): "scorecard",
    }
    state = study / "r16" / "checkpoints" / "step_00000002.ckpt"
    with flipped(state, *(study / run / name for run, name in changed)):
        found = inspect(study / "decided", "inspect.verify=true", code=4)
    odd = {
        (check["of"], check["name"], check["link"])
        for check in found.verification["checks"]
        if check["outcome"] == Outcome.DIFFERS
    }
    wanted = {(str(study / run), f"outputs.{name}", link) for (run, name), link in changed.items()}
    assert wanted <= odd
    assert (str(study / "r16"), "checkpoints/step_00000002.ckpt", "checkpoints") in odd
    rest = {"checkpoints", "comparison", "decision"}
    assert {link for *_, link in odd} == {*changed.values(), *rest}


@pytest.mark.parametrize("file", ["compared/compare.json", "ledger.jsonl"])
def test_one_changed_byte_of_the_last_links_is_found(study, inspect, file):
    """The decision has the comparison's digest, and the ledger its own chain of digests."""
    with flipped(study / file):
        found = inspect(study / "decided", "inspect.verify=true", code=4)
    assert "differs" in links(found)["decision"]


def test_a_comparison_whose_figures_were_edited_with_its_hash_is_found(study, inspect):
    """The hash in its run's manifest was edited too, so only recomputing it finds the edit."""
    file, manifest = study / "compared" / "compare.json", study / "compared" / "manifest.json"
    before = file.read_bytes(), manifest.read_bytes()

    def other(value):
        value["contrasts"][0]["kpis"]["val_loss"]["p"] = 0.01

    try:
        edit(file, other)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        edit(manifest, lambda value: value["outputs"].update({"compare.json": sha256}))
        found = inspect(study / "compared", "inspect.verify=true", code=4)
    finally:
        file.write_bytes(before[0])
        manifest.write_bytes(before[1])
    assert differing(found) == ["manifest.json, all but its notes", "comparison"]


def test_pages_of_a_comparison_are_hashed_in_its_run_and_named_elsewhere(study, inspect, tmp_path):
    """A copy, as of compare.out, has no manifest: its pages are named as not checked."""
    with flipped(study / "compared" / "compare.html", study / "compared" / "compare.md"):
        found = inspect(study / "compared", "inspect.verify=true", code=4)
    assert differing(found) == ["outputs.compare.html", "outputs.compare.md"]
    copy = tmp_path / "out"
    copy.mkdir()
    for name in ("compare.json", "compare.html", "compare.md"):
        shutil.copy(study / "compared" / name, copy)
    found = inspect(copy, "inspect.verify=true")
    pages = {str(copy / name) for name in ("compare.html", "compare.md")}
    assert pages <= set(found.verification["unchecked"])


def test_rows_of_another_encoding_are_found(run, inspect):
    """The recorded digest is of other tokens than the rows give."""
    edit(run.manifest, lambda value: value["inputs"]["data"].update(train_sha256="0" * 64))
    assert differing(inspect(run.path, "inspect.verify=true", code=4)) == [
        "inputs.data.train_sha256",
        "manifest.json, all but its notes",
    ]


def test_a_scorecard_that_its_answers_deny_is_found(study, inspect):
    """The manifest has the hash of the edited scorecard, but its answers contradict it."""
    scored = study / "r4_scored"
    file, manifest = scored / "scorecard.json", scored / "manifest.json"
    before = file.read_bytes(), manifest.read_bytes()
    value = json.loads(before[0])
    tuned = value["conditions"]["tuned"]
    name = next(name for name, kpi in tuned.items() if kpi == 0)
    tuned[name] = 1
    try:
        file.write_text(json.dumps(value), "utf-8")
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        edit(manifest, lambda value: value["outputs"].update({"scorecard.json": sha256}))
        found = inspect(scored, "inspect.verify=true", code=4)
    finally:
        file.write_bytes(before[0])
        manifest.write_bytes(before[1])
    assert "scorecard" in differing(found), name


def test_a_cut_ledger_lacks_the_decision_of_its_run(study, inspect):
    """The rest of the ledger is intact, but the run names an entry that is missing."""
    ledger = study / "ledger.jsonl"
    before = ledger.read_bytes()
    try:
        ledger.write_bytes(b"".join(before.splitlines(keepends=True)[:-1]))
        found = inspect(study / "decided", "inspect.verify=true", code=4)
    finally:
        ledger.write_bytes(before)
    assert "results.entry_sha256" in differing(found)


def test_the_table_has_a_line_a_link(study, typed):
    """One line per link in the chain's order, with a sign for its outcome."""
    said = typed("task=inspect", f"path={study / 'decided'}", "inspect.verify=true")
    table = said[said.index("Verified: ") :]
    places = [re.search(rf"^ *= +{link} +\d+ +\d+ equal *$", table, re.MULTILINE) for link in CHAIN]
    assert all(places)
    assert [one.start() for one in places] == sorted(one.start() for one in places)
