"""eval, infer and chat of weights that no run here has made: model folders and PEFT adapters."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from sft_play import cli
from sft_play.commands import use
from sft_play.commands.call import read_call
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.evaluation.generate import Generator
from sft_play.inference.chat import banner_lines
from sft_play.inference.load import load_run
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
        variables = {
            "RUN": str(folder),
            "DEVICE": "cpu",
            "TRAIN_OUTPUT_DIR": str(tmp_path / "outputs"),
            **({"DATA_TEST_PATH": str(held)} if command == "eval" else {}),
            **variables,
        }
        return CliRunner().invoke(cli.app, [command, *words], input=typed, env=variables)

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
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


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
        f"template of {taught_base}",
        "stops <|end|> (its base's)",
    ]
    answers = lines[-1].removeprefix("answers ")
    assert answers.startswith(str(tmp_path / "outputs" / "models" / "adapter-"))
    assert answers_in(answers) == [said for _, said in TESTED]
    assert sorted(adapter.iterdir()) == before


def test_the_base_stands_beside_an_adapter_as_it_scores_by_itself(call, adapter, taught_base):
    lines = call("eval", adapter, COMPARE="1").stdout.splitlines()
    (base,) = [line for line in lines if line.startswith("base ")]
    assert base.removeprefix("base ") == scores(call("eval", taught_base))


def test_a_whole_model_has_no_base_to_compare(call, taught_base):
    found = call("eval", taught_base, COMPARE="1").exception
    assert isinstance(found, ConfigError) and "does not say what it was made from" in str(found)


def test_weights_without_a_run_have_no_rows_of_their_own(call, taught_base):
    found = call("eval", taught_base, DATA_TEST_PATH="").exception
    assert isinstance(found, ConfigError) and "DATA_TEST_PATH=held.jsonl" in str(found)


def test_stops_that_no_answer_ends_with_are_a_warning(call, taught_base, tmp_path):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5}))
    result = call("eval", folder, TRAIN_GENERATION_MAX_NEW_TOKENS="16")
    assert "<|end|>, which is no stop of this model (generation_config.json)" in result.stdout
    assert "cut=2 at 16 tokens" in result.stdout


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


class CastsOfWeights(TorchDispatchMode):
    """Counts float32 tensors that are cast to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32:
            self.count += kwargs.get("dtype") == torch.bfloat16
        return func(*args, **kwargs)


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
        with CastsOfWeights() as casts:
            ids = generator.generate(trained.model, [[5, 6, 7]])
        found.append((ids, casts.count))
    (ids, casts), (same_ids, casts_of_frozen) = found
    assert ids.shape == (1, 5) and torch.equal(ids, same_ids)
    assert casts_of_frozen - casts == 4 * len(weights) > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model_name_or_path": None}, "names no base"),
        ({"base_model_name_or_path": "/no/such/base"}, "its base /no/such/base is not there"),
    ],
)
def test_an_adapter_without_its_base_says_what_to_write(adapter, tmp_path, change, said):
    changed(adapter, **change)
    with pytest.raises(EnvironmentFault, match=said):
        find_model(str(adapter), tmp_path)


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
    assert isinstance(found, CheckpointError) and "has no weights for some" in str(found)


def test_an_adapter_of_a_stretched_rope_is_refused_over_a_base_with_its_own(
    call, adapter, taught_base
):
    config = json.loads((taught_base / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (adapter / "config.json").write_text(json.dumps(config))
    found = call("eval", adapter).exception
    assert isinstance(found, CheckpointError) and "stretched rope" in str(found)


def test_a_sealed_folder_that_was_changed_is_refused(call, run, tmp_path):
    folder = shutil.copytree(run.path / "adapter", tmp_path / "copied")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    found = call("eval", folder).exception
    assert isinstance(found, CheckpointError) and "was sealed with" in str(found)


def test_an_adapter_that_was_trained_over_4_bits_says_that_its_base_is_not(adapter, tmp_path):
    (adapter / "stamp.json").write_text('{"mode": "qlora"}')
    assert find_model(str(adapter), tmp_path).was_packed()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model-Q8_0.gguf", "holds gguf files, which llama.cpp runs"),
        ("notes.txt", "neither a run"),
    ],
)
def test_a_folder_of_anything_else_says_what_to_name(tmp_path, file, said):
    (tmp_path / file).touch()
    with pytest.raises(EnvironmentFault, match=said):
        find_model(str(tmp_path), tmp_path / "outputs")


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("model.safetensors", r"has no weights \(\*.safetensors\); copy the whole model"),
        ("tokenizer*", "has no tokenizer; copy tokenizer.json and tokenizer_config.json"),
    ],
)
def test_a_model_that_is_not_whole_says_what_to_copy(taught_base, tmp_path, gone, said):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    for path in folder.glob(gone):
        path.unlink()
    with pytest.raises(EnvironmentFault, match=said):
        find_model(str(folder), tmp_path / "outputs")


def test_pickled_weights_are_not_loaded(taught_base, tmp_path):
    folder = shutil.copytree(taught_base, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EnvironmentFault, match=r"pytorch_model.bin, a pickle.* as safetensors"):
        find_model(str(folder), tmp_path / "outputs")


def test_merge_takes_runs_alone_and_says_so(call, taught_base):
    found = call("merge", taught_base, DATA_TEST_PATH="").exception
    assert isinstance(found, EnvironmentFault) and "make eval, infer and chat also" in str(found)


def test_a_folder_in_a_run_is_named_after_it(tmp_path):
    folder = ModelFolder(tmp_path / "a" / "export" / "safetensors", tmp_path, None)
    assert folder.name == "a-export-safetensors"
    assert folder.evaluation == tmp_path / "models" / "a-export-safetensors" / "eval"


def test_a_run_of_the_name_wins_over_a_folder(run, monkeypatch):
    monkeypatch.setenv("RUN", str(run.path))
    assert type(use.chosen_weights(read_call())) is RunFolder


def test_the_rows_that_are_scored_at_once_change_no_score(call, adapter):
    alone = scores(call("eval", adapter, TRAIN_EVAL_BATCH_SIZE="1"))
    assert scores(call("eval", adapter)) == alone


@pytest.mark.long
def test_several_processes_share_the_rows_of_a_model_folder(call, adapter, capfd):
    alone = scores(call("eval", adapter))
    assert call("eval", adapter, NUM_GPUS="2").exit_code == 0
    assert capfd.readouterr().out.count(alone) == 1, "the first process prints"
