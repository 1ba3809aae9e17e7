from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is missing: pip install 'mens-exp[lm-eval]'")

import torch
from lm_eval.api.instance import Instance

from mens_exp.config.suite import LmEvalSuite
from mens_exp.errors import ConfigError, DataError, MissingExtra, Problems
from mens_exp.evals import harness_suite
from mens_exp.evals.harness_files import read_task_files
from mens_exp.evals.harness_model import GraphModel
from mens_exp.evals.harness_suite import files_of, lm_eval_suite
from mens_exp.tokenizer.implementations import HfTokenizer

CAPITALS = [
    {"question": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1},
    {"question": "The capital of Italy is", "choices": ["Rome", "Paris"], "answer": 0},
    {"question": "The capital of Spain is", "choices": ["Oslo", "Madrid", "Bern"], "answer": 1},
]
CHOICE = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
WRITTEN = """\
task: written
include: common.yaml
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - {name: stripped, filter: [{function: remove_whitespace}, {function: take_first}]}
"""
COMMON = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
TOLD = """\
task: told
include: common.yaml
output_type: loglikelihood
doc_to_target: " {{choices[answer]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
ROLLED = """\
task: rolled
include: common.yaml
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{choices[answer]}} and many other words that make it longer"
metric_list: [{metric: byte_perplexity}]
"""


@pytest.fixture
def directory(tmp_path):
    """Create four small tasks over three rows, one of each kind that the harness has."""
    data = tmp_path / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in CAPITALS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "capitals.yaml").write_text(CHOICE.format(data=data))
    (tasks / "common.yaml").write_text(COMMON.format(data=data))
    for name, text in {"written": WRITTEN, "told": TOLD, "rolled": ROLLED}.items():
        (tasks / f"{name}.yaml").write_text(text)
    return tasks


def suite_of(directory, cache, **settings):
    config = LmEvalSuite(path=str(directory), **settings)
    return lm_eval_suite(config, cache, calls_functions=False)


@pytest.fixture(scope="session")
def tokenizer(tiny_base):
    return HfTokenizer.from_directory(tiny_base.directory)


def model_of(backend, tokenizer):
    return GraphModel(backend, tokenizer, max_new_tokens=8, batch_size=2)


@pytest.fixture
def model(tiny_backend, tokenizer):
    return model_of(tiny_backend("backend=lora", "quant.compute_dtype=f32", live=True), tokenizer)


def test_likelihoods_and_answers_are_those_of_the_harness_own_model(
    tiny_backend, tiny_base, tokenizer
):
    """The oracle is lm_eval's HFLM on the same files, including texts longer than the model."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(tiny_base.directory),
        batch_size=2,
        max_length=tiny_backend("backend=lora").max_positions,
        device="cpu",
    )
    backend = tiny_backend("backend=lora", "quant.compute_dtype=f32")
    ours = model_of(backend, tokenizer)
    pairs = [
        ("The capital of France is", " Paris"),
        ("x = ", "[1, 2, 3]"),
        ("", "no context"),
        ("word " * 3 * backend.max_positions, " end"),
    ]
    scored = [
        Instance("loglikelihood", {}, pair, 0, ("t", number, 1))
        for number, pair in enumerate(pairs)
    ]
    with backend.base_only():
        ours_now = ours.loglikelihood(scored)
        told = theirs.loglikelihood(scored, disable_tqdm=True)
        for (ours_p, ours_is), (their_p, their_is) in zip(ours_now, told, strict=True):
            assert ours_p == pytest.approx(their_p, abs=1e-3)
            assert ours_is == their_is
        text = "some text to be rolled over " * backend.max_positions
        whole = [Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1))]
        assert ours.loglikelihood_rolling(whole) == pytest.approx(
            theirs.loglikelihood_rolling(whole, disable_tqdm=True), rel=1e-4
        )
        options = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
        asked = [
            Instance("generate_until", {}, (text, dict(options)), 0, ("t", number, 1))
            for number, text in enumerate(["def f(x):", "a much longer question, that is"])
        ]
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


def test_each_document_is_an_item_and_the_harness_figures_stand_beside_ours(
    directory, tmp_path, model
):
    """Accuracy from our events equals the harness's own; metrics that no task has are null."""
    suite = suite_of(directory, tmp_path)
    answered = suite.asked(model, "tuned")
    assert [event["item_id"] for event in answered.events] == [item.id for item in suite.items]
    assert len(answered.events) == 4 * 3
    by_task = {
        name: [event for event in answered.events if event["group"] == name] for name in suite.tasks
    }
    for name, metric in (("capitals", "acc"), ("told", "acc"), ("written", "exact_match@stripped")):
        mean = sum(bool(event["task_success"]) for event in by_task[name]) / 3
        assert answered.figures[f"{name}/{metric}"] == pytest.approx(mean)
    assert answered.figures["rolled/byte_perplexity"] > 1
    assert all(event["task_success"] is None for event in by_task["rolled"])
    assert "suite.metric" in by_task["rolled"][0]["unknown"]["task_success"]
    first = by_task["capitals"][0]
    assert first["reference"].strip() == "Paris"
    assert first["completion"].strip() in {"Rome", "Paris"}
    assert first["tokens_in"] > 0
    assert first["parses"] is None
    assert "judges texts, not code" in first["unknown"]["compile_pass_1"]
    assert by_task["written"][0]["tokens_out"] in range(1, 5)


def test_questions_are_turns_under_the_chat_template_of_training(directory, tmp_path, model):
    """A question has the same token ids as in training and in every other suite."""
    asked = suite_of(directory, tmp_path).asked(model, "tuned")
    plain = suite_of(directory, tmp_path, chat_template=False).asked(model, "tuned")
    turns = [{"role": "user", "content": CAPITALS[0]["question"]}]
    chat = model.texts.render(turns, add_generation_prompt=True)
    prompts = [
        next(e["prompt"] for e in one.events if e["item_id"] == "written/0")
        for one in (asked, plain)
    ]
    assert prompts == [chat, CAPITALS[0]["question"]]
    assert model.tok_encode(chat) == model.texts.encode_prompts([turns])[0]


def test_targets_pass_and_empty_answers_fail(directory, tmp_path):
    """The targets of each task pass; likelihood tasks have no targets to generate."""
    result = suite_of(directory, tmp_path).self_test(None)
    assert result is not None
    assert result.references == {"target": 9}
    assert result.problem is None


def test_a_task_that_judges_its_targets_wrong_is_not_scored(directory, tmp_path):
    """The self-test finds a filter that discards the correct answer."""
    path = directory / "written.yaml"
    path.write_text(path.read_text().replace("remove_whitespace", "lowercase"))
    result = suite_of(directory, tmp_path, tasks=["written"]).self_test(None)
    assert result is not None
    assert result.problem is not None
    assert "references judged wrong: written/0" in result.problem


def test_an_empty_answer_that_passes_is_not_scored(directory, tmp_path):
    """An empty target makes every empty answer correct."""
    path = directory / "written.yaml"
    path.write_text(path.read_text().replace('"{{choices[answer]}}"', '""'))
    result = suite_of(directory, tmp_path, tasks=["written"]).self_test(None)
    assert result is not None
    assert result.stubs_passed == ["written/0", "written/1", "written/2"]


def test_the_first_documents_alone_and_examples_before_them(directory, tmp_path, model):
    """`suite.items` and `suite.num_fewshot` limit the documents and add examples."""
    suite = suite_of(directory, tmp_path, tasks=["written"], items=2)
    assert [event["item_id"] for event in suite.asked(model, "base").events] == [
        "written/0",
        "written/1",
    ]
    path = directory / "capitals.yaml"
    path.write_text(path.read_text() + "fewshot_split: test\n")
    more = suite_of(directory, tmp_path, tasks=["capitals"], num_fewshot=2, chat_template=False)
    prompt = more.asked(model, "base").events[0]["prompt"]
    assert prompt.endswith("The capital of France is")
    assert prompt.count("The capital of") == 3


def test_base_and_tuned_are_asked_behind_the_same_examples(directory, tmp_path, model):
    """Examples are drawn for each request by the harness; both conditions get the same ones."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = directory.parent / "capitals.jsonl"
    rows = [
        {"question": f"The capital of {n} is", "choices": ["Rome", "Paris"], "answer": n % 2}
        for n in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (directory / "capitals.yaml", directory / "common.yaml"):
        path.write_text(path.read_text() + "fewshot_split: test\n")
    settings = {"tasks": ["capitals", "written"], "items": 3, "num_fewshot": 2}
    suite = suite_of(directory, tmp_path, chat_template=False, **settings)
    assert suite.self_test(None) is not None
    asked = [[e["prompt"] for e in suite.asked(model, "x").events] for _ in range(2)]
    assert asked[0] == asked[1]
    theirs = simple_evaluate(
        model,
        tasks=["capitals", "written"],
        num_fewshot=2,
        limit=3,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(directory), include_defaults=False),
    )
    named = ("capitals", "written")
    found = [one["arguments"][0][0] for name in named for one in theirs["samples"][name]]
    assert sorted(asked[0]) == sorted(found)


@pytest.mark.parametrize(
    ("added", "is_refused"),
    [
        ("", True),
        ("fewshot_split: test\n", False),
        ("fewshot_config: {samples: [{question: Q, choices: [a, b], answer: 0}]}\n", False),
    ],
)
def test_an_item_whose_own_answer_may_stand_among_its_examples_is_refused(
    directory, tmp_path, added, is_refused
):
    """The harness excludes an item from its examples only if both come from the same split."""
    path = directory / "capitals.yaml"
    path.write_text(path.read_text() + added)
    settings = {"tasks": ["capitals"], "num_fewshot": 1}
    if is_refused:
        with pytest.raises(DataError, match="own answer may be among its few-shot examples"):
            suite_of(directory, tmp_path, **settings)
    else:
        assert len(suite_of(directory, tmp_path, **settings).items) == 3
    assert len(suite_of(directory, tmp_path, tasks=["capitals"], num_fewshot=0).items) == 3


def test_answers_repeat_and_the_program_s_own_draws_are_untouched(directory, tmp_path, model):
    """The harness seeds Python's and NumPy's generators; their state is restored afterwards."""
    import random

    path = directory / "written.yaml"
    path.write_text(path.read_text().replace("max_gen_toks", "temperature: 1.0, max_gen_toks"))
    suite = suite_of(directory, tmp_path, tasks=["written"])
    before = random.getstate()
    texts = [[e["completion"] for e in suite.asked(model, "a").events] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert random.getstate() == before


def digest_of(directory, **settings):
    return files_of(LmEvalSuite(path=str(directory), **settings), calls_functions=False)


def test_the_digest_is_of_files_data_and_settings(directory):
    """Each of them changes the digest; settings that only affect speed do not."""
    first = digest_of(directory)
    assert digest_of(directory, batch_size=1) == first
    others = {digest_of(directory, items=2), digest_of(directory, tasks=["told"])}
    data = directory.parent / "capitals.jsonl"
    data.write_text(data.read_text().replace("Bern", "Riga"))
    others.add(digest_of(directory))
    common = directory / "common.yaml"
    common.write_text(common.read_text() + 'fewshot_delimiter: "\\n"\n')
    others.add(digest_of(directory))
    assert len(others | {first}) == 5


def test_the_digest_is_of_every_file_of_one_name(directory, monkeypatch):
    """Two data files named rows.jsonl in different directories both enter the digest."""
    for split in ("train", "test"):
        (directory.parent / split).mkdir()
        (directory.parent / split / "rows.jsonl").write_text(json.dumps(CAPITALS[0]) + "\n")
    monkeypatch.chdir(directory.parent)
    files = "{train: train/rows.jsonl, test: test/rows.jsonl}"
    path = directory / "capitals.yaml"
    path.write_text(CHOICE.format(data="x").replace("{test: x}", files))
    first = digest_of(directory, tasks=["capitals"])
    assert digest_of(Path("tasks"), tasks=["capitals"]) == first
    found = set()
    for split in ("train", "test"):
        rows = directory.parent / split / "rows.jsonl"
        rows.write_text(json.dumps(CAPITALS[1]) + "\n")
        found.add(digest_of(directory, tasks=["capitals"]))
    assert len(found | {first}) == 3


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("unsafe_code: true\n", "executes model output"),
        ("dataset_path: openai/gsm8k\n", "not files on this machine"),
        ("dataset_kwargs: {data_files: nowhere.jsonl}\n", "file not found"),
        ("dataset_kwargs: {}\n", "no data file is named"),
        ("include: told.yaml\n", "includes itself"),
        ("a: [\n", "is not valid YAML"),
    ],
)
def test_what_cannot_be_asked_here_is_refused(directory, added, said):
    """Code outside the sandbox and data that are not local are refused before loading."""
    path = directory / "told.yaml"
    kept = [
        line
        for line in path.read_text().splitlines()
        if line.partition(":")[0] != added.partition(":")[0]
    ]
    path.write_text("\n".join([*kept, added]))
    with pytest.raises((DataError, Problems), match=said):
        digest_of(directory)


def test_a_directory_of_data_has_a_largest_number_of_files(tmp_path, monkeypatch):
    """Beyond the limit the error says to name the directory of the data alone."""
    data, tasks = tmp_path / "data", tmp_path / "tasks"
    for folder in (data / "below", tasks):
        folder.mkdir(parents=True)
    (tasks / "one.yaml").write_text(f"task: one\ndataset_path: {data}\n", encoding="utf-8")
    for place in ("a.json", "below/b.json", "below/c.json"):
        (data / place).write_text("{}", encoding="utf-8")
    monkeypatch.setattr("mens_exp.evals.harness_files._MOST_FILES", 3)
    assert len(read_task_files(tasks, calls_functions=False).sha256) == 4  # and the task file
    (data / "d.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="has too many files") as caught:
        read_task_files(tasks, calls_functions=False)
    assert caught.value.expected == "at most 3"
    assert caught.value.remedy == "name the directory that holds this task's data alone"


def test_python_of_a_task_file_runs_with_task_evaluate_alone(directory, tmp_path):
    """Python in a task file is found before it is imported, and runs only in task=evaluate."""
    mark = tmp_path / "was_imported"
    (directory / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
        "def shown(doc): return 'Q: ' + doc['question']\n"
    )
    path = directory / "told.yaml"
    path.write_text(path.read_text() + "doc_to_text: !function own.shown\n")
    config = LmEvalSuite(path=str(directory), tasks=["told"])
    with pytest.raises((ConfigError, Problems), match="names Python"):
        lm_eval_suite(config, tmp_path, calls_functions=False)
    assert not mark.exists()
    suite = lm_eval_suite(config, tmp_path, calls_functions=True)
    assert suite.items[0].prompt == "Q: The capital of France is"
    assert mark.exists()


def test_an_unknown_task_is_refused_with_those_there_are(directory):
    """The error comes before anything is loaded."""
    with pytest.raises(ConfigError, match=r"is not in any task file.*nothing.*capitals, rolled"):
        digest_of(directory, tasks=["nothing"])


def test_without_task_files_there_is_no_suite(tmp_path):
    """Both an empty directory and a missing one are refused."""
    with pytest.raises(DataError, match="contains no task file"):
        digest_of(tmp_path)
    with pytest.raises(DataError, match="is not a directory"):
        digest_of(tmp_path / "nowhere")


def test_drawing_that_is_not_known_is_refused(directory, tmp_path, model):
    """Ignoring a task's beam search would report another score under its name."""
    path = directory / "written.yaml"
    path.write_text(path.read_text().replace("max_gen_toks", "num_beams: 4, max_gen_toks"))
    with pytest.raises(DataError, match=r"task written: generation_kwargs.*num_beams"):
        suite_of(directory, tmp_path, tasks=["written"]).asked(model, "base")


def test_what_the_harness_cannot_load_is_told(directory, tmp_path):
    """The error includes the harness's own message."""
    path = directory / "told.yaml"
    path.write_text(path.read_text() + "test_split: train\n")
    with pytest.raises(DataError, match=r"the harness cannot load the tasks.*train"):
        suite_of(directory, tmp_path, tasks=["told"])


def test_without_the_harness_its_extra_is_named(directory, monkeypatch):
    """The error names the extra to install, before any work is done."""
    monkeypatch.setattr(harness_suite, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'mens-exp\[lm-eval\]'"):
        digest_of(directory)


def test_likelihoods_are_finite_of_base_and_tuned(directory, tmp_path, model):
    """Base and tuned are one model with its adapter switched off and on."""
    suite = suite_of(directory, tmp_path, tasks=["rolled"])
    figures = []
    for block in (model.graph.base_only(), nullcontext()):
        with block:
            figures.append(suite.asked(model, "x").figures["rolled/byte_perplexity"])
    assert all(math.isfinite(one) for one in figures)
    assert figures[0] != figures[1]
