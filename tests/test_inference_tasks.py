"""`make eval TASKS=...`: tasks of lm-eval, and what is said where it is not installed."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sft_play import cli
from sft_play.commands import each_gpu
from sft_play.config.invocation import TasksAsked, read_tasks
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault

COUNTED = (6, 13, 8, 1, 11, 3)  # what the taught base has learnt
HEAD = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
doc_to_text: "Count to {{{{n}}}}{{{{', slowly' * (n % 3)}}}}."
metadata: {{version: 2.0}}
"""
# One that compares answers, and one that generates
CHOOSE = """
task: choose
output_type: multiple_choice
doc_to_choice: [" 5 5 5", " 1 2 3"]
doc_to_target: 1
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SAY = """
task: say
output_type: generate_until
doc_to_target: "{{range(1, n + 1) | join(' ')}}"
generation_kwargs: {until: ["|"], max_gen_toks: 64, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def own_tasks(tmp_path):
    """The YAML files of two tasks whose rows are a file here."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"n": n}) + "\n" for n in COUNTED))
    files = []
    for name, text in (("choose", CHOOSE), ("say", SAY)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text + HEAD.format(rows=rows, cache=tmp_path / "cache"))
        files.append(str(path))
    return ",".join(files)


@pytest.fixture
def evaluate(tmp_path):
    """A function that calls eval on a folder, in this process."""

    def invoke(folder, **variables: str):
        given = {"RUN": str(folder), "DEVICE": "cpu", "TRAIN_OUTPUT_DIR": str(tmp_path / "outputs")}
        return CliRunner().invoke(cli.app, ["eval"], env={**given, **variables})

    return invoke


def test_variables_name_tasks_and_how_they_are_asked():
    asked = {"TASKS": "a, b a", "LIMIT": "5", "FEWSHOT": "0", "TEMPLATE": "1"}
    assert read_tasks(asked) == TasksAsked(("a", "b"), 5, 0, True)
    assert read_tasks({"DATA_TEST_PATH": "held.jsonl"}) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"LIMIT": "5"}, "LIMIT: is for tasks of lm-eval; name them with TASKS=hellaswag"),
        ({"TASKS": "a", "LIMIT": "0.5"}, "LIMIT=0.5: write a whole number of at least 1"),
        ({"TASKS": "a", "DATA_TEST_PATH": "b"}, "TASKS and DATA_TEST_PATH: score them in two"),
    ],
)
def test_what_does_not_go_together_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        read_tasks(given)


def test_without_lm_eval_the_error_says_what_to_install(evaluate, taught_base, monkeypatch):
    real = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "lm_eval" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(each_gpu.importlib.util, "find_spec", hidden)
    found = evaluate(taught_base, TASKS="hellaswag").exception
    assert isinstance(found, EnvironmentFault)
    assert str(found).endswith("which is not installed: make install-tasks")


def needs_lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="make install-tasks brings it")


def test_tasks_are_scored_with_the_runs_template_and_stops(evaluate, taught_base, own_tasks):
    needs_lm_eval()
    result = evaluate(taught_base, TASKS=own_tasks, TEMPLATE="1")
    assert result.exit_code == 0, (result.output, result.exception)
    choose, say, scores = result.stdout.splitlines()
    assert choose.endswith(" choose acc=1.000 rows=6")
    assert say.endswith(" say exact_match=1.000 rows=6")
    facts = json.loads(Path(scores.removeprefix("scores ")).read_text())
    assert facts["say"]["version"] == 2.0
    assert facts["say"]["settings"] == {"fewshot": None, "limit": None, "template": True}
    result = evaluate(taught_base, TASKS=own_tasks.split(",")[0], LIMIT="2")
    facts = json.loads(Path(scores.removeprefix("scores ")).read_text())
    assert facts["choose"]["rows"] == 2 and facts["say"]["rows"] == 6


def test_the_base_is_asked_the_same_as_by_itself(evaluate, counting_run, taught_base, own_tasks):
    needs_lm_eval()
    alone = evaluate(taught_base, TASKS=own_tasks).stdout.splitlines()[:2]
    lines = evaluate(
        counting_run.path / "adapter", TASKS=own_tasks, COMPARE="1"
    ).stdout.splitlines()
    base = [line for line in lines if line.startswith("base ")]
    assert [line.partition(" ")[2] for line in base] == [line.partition(" ")[2] for line in alone]


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
def test_an_adapter_that_trained_a_tied_part_is_asked_as_it_is(tiny_base, tokenizer, part):
    needs_lm_eval()
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sft_play.inference.load import TrainedModel
    from sft_play.inference.tasks import TaskModel
    from sft_play.process import Process

    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=[part]))
    for parameter in model.parameters():
        parameter.data += 0.1 * parameter.requires_grad
    ids = torch.arange(10)[None]
    before = model.eval()(input_ids=ids).logits
    process = Process.alone(torch.device("cpu"))
    TaskModel(TrainedModel(model, tokenizer, Config(), process, ()), None)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("tasks", "kind", "said"),
    [
        ("helaswag", ConfigError, "no such task, and there is no such YAML file; did you mean"),
        ("mine.yaml", ConfigError, "no such task"),
    ],
)
def test_an_unknown_task_is_refused_with_its_like(evaluate, taught_base, tasks, kind, said):
    needs_lm_eval()
    found = evaluate(taught_base, TASKS=tasks).exception
    assert isinstance(found, kind) and said in str(found)


def test_a_task_whose_rows_are_not_there_is_of_the_machine(evaluate, taught_base, own_tasks):
    needs_lm_eval()
    path = own_tasks.split(",")[0]
    text = Path(path).read_text().replace("rows.jsonl", "gone.jsonl")
    Path(path).write_text(text)
    found = evaluate(taught_base, TASKS=path).exception
    assert isinstance(found, EnvironmentFault) and "their rows cannot be read" in str(found)


@pytest.mark.long
def test_processes_share_the_questions(evaluate, taught_base, own_tasks, capfd):
    needs_lm_eval()
    alone = evaluate(taught_base, TASKS=own_tasks).stdout.splitlines()
    assert evaluate(taught_base, TASKS=own_tasks, NUM_GPUS="2").exit_code == 0
    assert [line for line in capfd.readouterr().out.splitlines() if line in alone] == alone
