"""eval, infer and chat of weights that no run here has made: model folders and PEFT adapters."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from casts import Casts
from terminals import called
from transformers.utils import logging as hf_logging

from sft_play.commands import use
from sft_play.commands.call import read_call
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.evaluation.generate import Generator
from sft_play.inference.chat import banner_lines
from sft_play.inference.load import load_run
from sft_play.runs.files import read_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder, find_model

TESTED = [("Count to 6.", "1 2 3 4 5 6"), ("Count to 3.", "1 2 3")]


@pytest.fixture(scope="module")
def run(counting_run, tmp_path_factory) -> RunFolder:
    """A copy of the run, to merge."""
    return RunFolder(shutil.copytree(counting_run.path, tmp_path_factory.mktemp("out") / "run"))


@pytest.fixture
def held(tmp_path):
    """A file of rows to score."""
    path = tmp_path / "held.jsonl"
    lines = [json.dumps({"question": asked, "answer": said}) for asked, said in TESTED]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def call(held, tmp_path):
    """A function that runs a command on a folder, in this process."""

    def invoke(command: str, folder, *words: str, typed: str = "", **variables: str):
        given = {"TRAIN_OUTPUT_DIR": tmp_path / "outputs"}
        given |= {"DATA_TEST_PATH": held} if command == "eval" else {}
        return called(folder, command, *words, typed=typed, **(given | variables))

    return invoke


@pytest.fixture
def adapter(run, tmp_path):
    """The run's adapter as PEFT saves one: no tokenizer, no stops, no stamp, no seal."""
    folder = tmp_path / "mine" / "adapter"
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(run.path / "adapter" / name, folder)
    return folder


def scores(result) -> str:
    """Return the scores in the output of eval, without the name of what was scored."""
    assert result.exit_code == 0, (result.output, result.exception)
    (line,) = [line for line in result.stdout.splitlines() if " eval_loss=" in line]
    return line.partition(" ")[2]


def answers_in(path: str) -> list[str]:
    """Return the answers in a file of lines."""
    return [json.loads(line)["answer"] for line in Path(path).read_text().splitlines()]


def changed(folder, **values) -> None:
    """Change an adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**read_json(path), **values}))


def test_an_adapter_and_a_merged_folder_score_as_the_run_does(call, run, adapter, opens_here):
    of_run = scores(call("eval", run.path))
    assert scores(call("eval", adapter)) == of_run
    assert scores(call("eval", run.path / "adapter")) == of_run
    assert call("merge", run.path).exit_code == 0
    assert scores(call("eval", run.path / "merged")) == of_run


def test_eval_says_what_it_took_from_the_folder_and_writes_outside_it(
    call, adapter, taught_base, tmp_path
):
    before = sorted(adapter.iterdir())
    lines = call("eval", adapter).stdout.splitlines()
    assert lines[1:4] == [
        f"model {adapter} over {taught_base} in float32",
        f"template of {taught_base}, because the adapter has none",
        "stops <|end|> (its base's)",
    ]
    answers = lines[-1].removeprefix("answers ")
    assert answers.startswith(str(tmp_path / "outputs" / "models" / "adapter-"))
    assert answers_in(answers) == [said for _, said in TESTED]
    assert sorted(adapter.iterdir()) == before


def test_the_template_of_an_adapter_is_its_own_or_that_of_its_base(call, adapter, taught_base):
    of_base = scores(call("eval", adapter))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(taught_base / name, adapter)
    found = call("eval", adapter)
    assert f"template of {taught_base}, because the adapter has none" in found.stdout
    assert scores(found) == of_base
    template = (taught_base / "chat_template.jinja").read_text()
    (adapter / "chat_template.jinja").write_text(f"Hello. {template}")
    found = call("eval", adapter)
    assert f"template of {adapter}, with which the adapter was trained" in found.stdout
    assert scores(found) != of_base
    (adapter / "tokenizer.json").unlink()
    assert scores(call("eval", adapter)) == scores(found)


def test_stops_that_no_answer_ends_with_are_a_warning(call, taught_base, tmp_path):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**read_json(path), "eos_token_id": 5}))
    result = call("eval", folder, TRAIN_GENERATION_MAX_NEW_TOKENS="16")
    assert "<|end|>, which is no stop of this model (generation_config.json)" in result.stdout
    assert "cut=2 at 16 tokens" in result.stdout


def test_what_transformers_warns_of_while_it_answers_is_not_printed(
    call, taught_base, tmp_path, caplog
):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**read_json(path), "max_length": 20}))  # next to max_new_tokens
    hf_logging.set_verbosity_warning()
    hf_logging.add_handler(caplog.handler)
    try:
        result = call("infer", folder, PROMPT="Who is here?")
    finally:
        hf_logging.remove_handler(caplog.handler)
    assert result.exit_code == 0
    assert [each.message for each in caplog.records if each.name.startswith("transformers")] == []


def test_a_tokenizer_without_a_template_is_said(call, taught_base, tmp_path):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    assert "template plain, of SFT-Play" in call("eval", folder).stdout


def test_infer_and_chat_answer_with_a_model_folder(call, taught_base, adapter, tmp_path):
    assert call("infer", taught_base, "Count to 3.").stdout == "1 2 3\n"
    asked = tmp_path / "asked.txt"
    asked.write_text("Count to 3.\nCount to 6.\n")
    result = call("infer", adapter, IN=str(asked))
    answers = result.stdout.split()[1]
    assert answers.startswith(str(tmp_path / "outputs" / "models"))
    assert answers_in(answers) == ["1 2 3", "1 2 3 4 5 6"]
    result = call("chat", adapter, typed="Count to 3.\n/save\n")
    assert result.stdout.startswith("1 2 3\nsaved ")
    assert str(tmp_path / "outputs" / "models") in result.stdout


def test_the_banner_of_a_chat_names_the_folder(adapter, taught_base, tmp_path):
    folder = find_model(str(adapter), tmp_path / "outputs")
    config = Config.model_validate(
        {"model": {"name": str(taught_base)}, "tuning": {"mode": "lora"}}
    )
    trained = load_run(folder, "cpu", config)
    assert banner_lines(folder, trained)[:2] == [f"model   {adapter}", f"base    {taught_base}"]


def test_adapters_are_cast_to_16_bits_once_for_an_answer(adapter, taught_base, tmp_path):
    values = {
        "model": {"name": str(taught_base), "dtype": "bfloat16"},
        "tuning": {"mode": "lora"},
        "train": {"bf16": True, "generation_max_new_tokens": 5},
    }
    config = Config.model_validate(values)
    trained = load_run(find_model(str(adapter), tmp_path), "cpu", config)
    weights = [name for name, _ in trained.model.named_parameters() if "lora_" in name]
    assert trained.process.compute_dtype == torch.bfloat16
    no_stop = (len(trained.tokenizer),)
    generator = Generator(trained.tokenizer, config.train, trained.process, saved_stops=no_stop)
    found = []
    for is_kept in (True, False):
        if not is_kept:  # as PEFT loads them
            trained.model.requires_grad_(False)
        with Casts(torch.float32, torch.bfloat16) as casts:
            ids = generator.generate(trained.model, [[5, 6, 7]])
        found.append((ids, casts.count))
    (ids, casts), (same_ids, casts_of_frozen) = found
    assert ids.shape == (1, 5) and torch.equal(ids, same_ids)
    assert casts_of_frozen - casts == 4 * len(weights) > 0


@pytest.mark.parametrize(
    ("command", "variables", "kind", "said"),
    [
        ("eval", {"COMPARE": "1"}, ConfigError, "whose base is not known"),
        ("eval", {"DATA_TEST_PATH": ""}, ConfigError, "data.test_path is empty"),
        ("merge", {"DATA_TEST_PATH": ""}, EnvironmentFault, "make eval, infer and chat"),
    ],
)
def test_what_a_whole_model_without_a_run_lacks_is_named(
    call, taught_base, command, variables, kind, said
):
    found = call(command, taught_base, **variables).exception
    assert isinstance(found, kind) and said in str(found)


@pytest.mark.parametrize(
    ("base", "said"), [(None, "names no base"), ("/no/such/base", "/no/such/base is not there")]
)
def test_an_adapter_without_its_base_says_what_to_write(adapter, tmp_path, base, said):
    changed(adapter, base_model_name_or_path=base)
    with pytest.raises(EnvironmentFault, match=said):
        find_model(str(adapter), tmp_path)


@pytest.mark.parametrize(
    ("gone", "new", "said"),
    [
        ("*", "model-Q8_0.gguf", "gguf"),
        ("*", "notes.txt", "neither a run"),
        ("model.safetensors", "a.txt", "no weights"),
        ("model.safetensors", "pytorch_model.bin", r"pytorch_model.bin, a pickle"),
        ("tokenizer*", "a.txt", "no tokenizer; copy tokenizer.json"),
    ],
)
def test_a_folder_that_is_no_whole_model_says_what_to_name_or_copy(
    taught_base, tmp_path, gone, new, said
):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    for path in folder.glob(gone):
        path.unlink()
    (folder / new).touch()
    with pytest.raises(EnvironmentFault, match=said):
        find_model(str(folder), tmp_path / "outputs")


def test_an_adapter_of_another_base_is_refused(call, adapter, base_of):
    changed(adapter, base_model_name_or_path=str(base_of("qwen3")))
    found = call("eval", adapter).exception
    assert isinstance(found, CheckpointError), found
    assert "is that the base it was trained on?" in str(found)


def test_an_adapter_whose_file_lacks_layers_is_refused(call, adapter):
    from safetensors.torch import load_file, save_file

    path = adapter / "adapter_model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if "layers.0" in name}
    save_file(tensors, path, metadata={"format": "pt"})
    found = call("eval", adapter).exception
    assert isinstance(found, CheckpointError) and "describes are missing, model.layers.1" in str(
        found
    )


def test_an_adapter_with_tensors_that_nothing_takes_is_refused(call, adapter, taught_base):
    changed(adapter, target_modules=["q_proj"])
    found = call("eval", adapter).exception
    assert isinstance(found, CheckpointError), found
    assert re.search(rf"tensors .*, model.layers.0.mlp\S+ first; is {taught_base} the", str(found))


def test_an_adapter_of_a_stretched_rope_is_refused_over_a_base_with_its_own(
    call, adapter, taught_base
):
    config = read_json(taught_base / "config.json")
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (adapter / "config.json").write_text(json.dumps(config))
    found = call("eval", adapter).exception
    assert isinstance(found, CheckpointError) and "RoPE scaling" in str(found)


def test_a_sealed_folder_that_was_changed_is_refused(call, run, tmp_path):
    folder = shutil.copytree(run.path / "adapter", tmp_path / "copied")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    found = call("eval", folder).exception
    assert isinstance(found, CheckpointError) and "was sealed with" in str(found)


def test_an_adapter_that_was_trained_over_4_bits_says_that_its_base_is_not(adapter, tmp_path):
    (adapter / "stamp.json").write_text('{"mode": "qlora"}')
    assert find_model(str(adapter), tmp_path).was_packed()


def test_a_folder_in_a_run_is_named_after_it(tmp_path):
    folder = ModelFolder(tmp_path / "a" / "export" / "safetensors", tmp_path, None)
    assert folder.name == "a-export-safetensors"
    assert folder.evaluation == tmp_path / "models" / "a-export-safetensors" / "eval"


def test_a_run_of_the_name_wins_over_a_folder(run, monkeypatch):
    monkeypatch.setenv("RUN", str(run.path))
    assert type(use.chosen_weights(read_call())) is RunFolder


@pytest.mark.long
def test_several_processes_share_the_rows_of_a_model_folder(call, adapter, capfd):
    alone = scores(call("eval", adapter))
    assert call("eval", adapter, NUM_GPUS="2").exit_code == 0
    assert capfd.readouterr().out.count(alone) == 1, "the first process prints"
