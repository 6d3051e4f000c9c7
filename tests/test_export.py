"""`make export`, `check-server`, `serve` and `push`: what leaves is what was scored."""

import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calls import outcome_of
from safetensors.torch import load_file, save_file
from tiny_server import Faults, TinyServer, serving
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
)
from typer.testing import CliRunner

from sft_kernels.process import Process
from sft_play import cli
from sft_play.commands import exports as export_commands
from sft_play.commands.check_server import (
    Completion,
    EndpointResults,
    RemoteServer,
    ServerChoice,
    check_server,
)
from sft_play.commands.exports import Address
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault, StoppedOnRequest
from sft_play.inference import export as export_module
from sft_play.inference import exported as parity
from sft_play.inference.export import export_run
from sft_play.inference.exported import answered, make_parity_rows
from sft_play.inference.load import TrainedModel
from sft_play.inference.merge import what_vllm_does_not_serve
from sft_play.models.export import plain_template, write_for_older_readers
from sft_play.plan.launch import free_port
from sft_play.runs import exports, seal
from sft_play.runs.exports import ExportAsked
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("opens_here")
SAFETENSORS = ExportAsked("safetensors")


@pytest.fixture(scope="module")
def exported(finished, opens_here) -> Path:
    """The safetensors export of a lora run."""
    folder = finished("lora")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(parity, "MOST_TOKENS", 8)
        export_run(folder, SAFETENSORS, "cpu")
    return folder.path / "export" / "safetensors"


@pytest.fixture
def copied(finished, exported, tmp_path) -> RunFolder:
    """A copy of that run, to change."""
    return RunFolder(shutil.copytree(finished("lora").path, tmp_path / "run"))


def test_an_export_is_sealed_and_plain_transformers_begins_its_answers_as_the_run(exported):
    assert seal.find_damage(exported) is None
    assert not (exported / "stamp.json").exists()
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    rows = exports.read_parity(exported / exports.PARITY)
    assert len(rows) >= 6 and sum(row.messages is not None for row in rows) >= 6
    for row in rows:
        assert tokenizer(row.prompt, add_special_tokens=False)["input_ids"] == row.prompt_ids
        ids = torch.tensor([row.prompt_ids])
        found = model.generate(ids, max_new_tokens=len(row.answer_ids), do_sample=False)
        assert found[0, ids.shape[1] :].tolist() == row.answer_ids
        assert row.answer_ends[-1] == len(row.answer)


def test_weights_of_an_export_are_the_merged_ones_and_take_no_second_place(exported):
    merged = exported.parents[1] / "merged" / "model.safetensors"
    assert (exported / "model.safetensors").stat().st_ino == merged.stat().st_ino


def test_programs_on_transformers_4_find_their_keys(exported):
    config = read_json(exported / "config.json")
    assert config["torch_dtype"] == config["dtype"] and config["rope_theta"] == 10000.0
    tokenizer = read_json(exported / "tokenizer_config.json")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in tokenizer
    assert tokenizer["chat_template"] == (exported / "chat_template.jinja").read_text()
    assert "generation -%}" not in tokenizer["chat_template"]


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_stretched_rope_reads_the_same_in_both(tmp_path, tokenizer):
    LlamaConfig(rope_parameters=LLAMA_3).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    write_for_older_readers(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert config["rope_theta"] == 500000.0
    expected = {name: value for name, value in LLAMA_3.items() if name != "rope_theta"}
    assert config["rope_scaling"] == expected
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before


def test_ropes_of_two_kinds_of_layers_read_the_same_in_both(tmp_path, tokenizer):
    Gemma3TextConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    write_for_older_readers(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before
    config = read_json(tmp_path / "config.json")
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1000000.0, 10000.0)


@pytest.mark.parametrize("dash", ["", "-"])
def test_a_template_without_generation_tags_writes_the_same(tokenizer, dash):
    marked = (
        "{% for m in messages %}\n {{ m.role }}: \n"
        f"  {{%{dash} generation {dash}%}}\n {{{{ m.content }}}} \n{{%{dash}endgeneration{dash}%}}\n"
        "{% endfor %}"
    )
    plain = plain_template(marked)
    assert "generation" not in plain
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def rendered(template: str) -> str:
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)

    assert rendered(plain) == rendered(marked)


def test_an_adapter_export_is_what_vllm_takes(finished, monkeypatch):
    monkeypatch.setattr(parity, "MOST_TOKENS", 8)
    folder = finished("lora")
    line, _ = export_run(folder, ExportAsked("adapter"), "cpu")
    assert "KL=0.0e+00" in line
    target = folder.path / "export" / "adapter"
    assert what_vllm_does_not_serve(target) == [] and seal.find_damage(target) is None
    text = (target / "README.md").read_text()
    assert "--enable-lora --max-lora-rank 16" in text


def test_an_adapter_that_vllm_refuses_is_named(tmp_path):
    saved = {"use_dora": True, "modules_to_save": ["lm_head"], "bias": "all", "r": 8}
    write_json(tmp_path / "adapter_config.json", saved)
    assert what_vllm_does_not_serve(tmp_path) == ["use_dora", "modules_to_save", "bias=all"]


@pytest.mark.long
def test_a_run_of_all_weights_exports_its_model_and_no_adapter(finished):
    folder = finished("full")
    with pytest.raises(ConfigError, match="trained every weight; FORMAT=safetensors"):
        export_run(folder, ExportAsked("adapter"), "cpu")
    lines = export_run(folder, SAFETENSORS, "cpu")
    assert lines[0].startswith("exported eval_loss=")
    assert "All weights of" in (folder.path / "export" / "safetensors" / "README.md").read_text()


def plant_in_merged(folder: RunFolder) -> Path:
    merged = folder.path / "merged"
    (merged / seal.NAME).unlink()
    return merged


def left_eos(merged: Path) -> None:
    """The stop of another base, which the model never says."""
    for name in ("generation_config.json", "config.json"):
        write_json(merged / name, {**read_json(merged / name), "eos_token_id": 7})


def other_template(merged: Path) -> None:
    path = merged / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|assistant|>", "<|user|>"))


def other_weights(merged: Path) -> None:
    tensors = load_file(merged / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (left_eos, "generation continues after the trained stop in 6 rows"),
        (other_template, "the chat template writes 2 prompts otherwise"),
        (other_weights, "KL="),
    ],
)
def test_what_is_not_the_evaluated_model_is_not_published(copied, plant, said):
    """The faults are sealed, as a program that wrote them would: only the scores find them."""
    plant(plant_in_merged(copied))
    seal.seal(copied.path / "merged")
    target = copied.path / "export" / "safetensors"
    shutil.rmtree(target)
    with pytest.raises(CheckpointError, match=said):
        export_run(copied, SAFETENSORS, "cpu")
    assert not target.exists() and not list(target.parent.glob(".*"))


@pytest.mark.long
def test_a_damaged_merge_is_made_anew(copied):
    other_weights(copied.path / "merged")
    lines = export_run(copied, SAFETENSORS, "cpu")
    assert lines[0].startswith("merged eval_loss=") and lines[-1].startswith("exported ")


@pytest.fixture(scope="module")
def taught_rows(taught_base, tokenizer, prepared_rows) -> list[exports.ParityRow]:
    """Parity of a model whose answers end."""
    model = AutoModelForCausalLM.from_pretrained(taught_base).eval()
    process = Process.alone(torch.device("cpu"))
    trained = TrainedModel(model, tokenizer, Config(), process, (tokenizer.eos_token_id,))
    rows = make_parity_rows(trained, prepared_rows.validation)
    assert sum(row.has_ended for row in rows) >= 6
    return rows


def test_margins_are_those_of_the_scores_that_chose_the_token(tiny_base, tokenizer):
    """A base's penalty reorders tokens: the plain scores would call a near tie sure."""
    model = AutoModelForCausalLM.from_pretrained(tiny_base).eval()
    trained = TrainedModel(model, tokenizer, Config(), Process.alone(torch.device("cpu")), ())
    found = []
    for penalty in (1.0, 1.5):
        model.generation_config.repetition_penalty = penalty
        row = answered(trained, [5, 6, 7], None)
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1].detach()
        seen = logits[[5, 6, 7]]
        logits[[5, 6, 7]] = torch.where(seen > 0, seen / penalty, seen * penalty)
        best, second = logits.topk(2).values.tolist()
        assert row.margins[0] == pytest.approx(best - second, abs=1e-3)
        found.append(row)
    assert found[0].margins[0] != found[1].margins[0]
    assert len(found[1].margins) == len(found[1].answer_ids)


def told(folder: Path, rows: list[exports.ParityRow], faults: Faults | None = None) -> list[str]:
    with serving(TinyServer(folder, faults)) as url:
        return check_server(RemoteServer.at(url, None, None), rows)


def test_a_server_of_the_same_weights_answers_as_the_evaluated_model(taught_base, taught_rows):
    lines = told(taught_base, taught_rows)
    assert lines[1] == "chat/completions rows=8 prompt tokens=8/8 stops=8/8 texts=8/8"
    assert lines[2] == "completions rows=8 prompt tokens=8/8 stops=8/8 texts=8/8"
    assert lines[-1] == "the server answers as the evaluated model does"


def test_a_server_without_chat_is_checked_by_completions(taught_base, taught_rows):
    lines = told(taught_base, taught_rows[:1], Faults(has_chat=False))
    assert lines[1].startswith("completions rows=1 ")


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (Faults(system_prompt="Be brief."), "chat template or system prompt"),
        (Faults(adds_token=0), "BOS token"),
        (Faults(forgets_stop=True), "stop"),
        (None, "after 0 characters, where .* nats"),
    ],
)
def test_a_server_that_does_otherwise_is_told_what(
    taught_base, tiny_base, taught_rows, faults, said
):
    with pytest.raises(CheckpointError, match=said):
        told(taught_base if faults else tiny_base, taught_rows[:1], faults)


def test_an_answer_that_parts_at_a_near_tie_is_none_of_the_servers_doing(taught_rows):
    row = replace(taught_rows[0], margins=[0.01] * len(taught_rows[0].margins))
    choice = ServerChoice(text="another", finish_reason="length")
    tally = EndpointResults("completions")
    tally.compare(row, Completion(choices=[choice]))
    assert (tally.ties, tally.differences) == (1, [])


def test_a_server_that_is_not_there_is_an_error_in_words():
    with pytest.raises(ConfigError, match="write http://host:port"):
        RemoteServer.at("localhost:8000", None, None)
    with pytest.raises(EnvironmentFault, match=r"make serve RUN=name starts a server"):
        RemoteServer.at(f"http://127.0.0.1:{free_port()}", None, None)


def test_what_is_served_listens_on_the_loopback_interface(exported):
    assert export_commands.server_of(exported, "run", Address("127.0.0.1", 8000), "cpu") is None
    assert len(export_commands.server_lines(exported, Address("127.0.0.1", 8000), "run")) == 2
    warned = export_commands.server_lines(exported, Address("0.0.0.0", 8000), "run")
    assert warned[-1].startswith("warning: BIND=0.0.0.0: whoever reaches this machine")


def test_a_server_whose_packages_are_missing_says_how_to_install_them():
    with pytest.raises(EnvironmentFault, match=r"needs no_such_package, which .* type .* -m pip"):
        export_commands.require_package(["no_such_package"], "no_such_package")


def called(folder: RunFolder, words: list[str], **variables: str):
    environ = {"TRAIN_OUTPUT_DIR": str(folder.path.parent), "RUN": folder.name, **variables}
    return CliRunner().invoke(cli.app, words, env={**dict.fromkeys(os.environ), **environ})


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["push"], {}, "REPO: "),
        (["push"], {"REPO": "model"}, "REPO=model: "),
        (["push"], {"REPO": "a/b", "SFT_PLAY_VARIABLES": "HF_TOKEN"}, "HF_TOKEN: "),
        (["train"], {"SFT_PLAY_VARIABLES": "HF_TOKEN"}, "HF_TOKEN: "),
        (["check-variables"], {"SFT_PLAY_VARIABLES": "HF_TOKEN"}, "HF_TOKEN: "),
        (["export"], {"FORMAT": "awq"}, "FORMAT=awq: write safetensors, gguf, adapter, "),
        (["export"], {"QUANT": "Q8_0"}, "QUANT: "),
        (["export"], {"FORMAT": "adapter", "MODEL_DTYPE": "bfloat16"}, "does not read it"),
        (["serve"], {"FORMAT": "adapter"}, "FORMAT=adapter: write safetensors, gguf, fp8, "),
        (["serve"], {"FORMAT": "gguf"}, "make export RUN=run FORMAT=gguf"),
        (["check-server"], {}, "URL: "),
    ],
)
def test_words_that_cannot_be_are_refused_before_anything_is_done(
    finished, exported, words, variables, said
):
    done = called(finished("lora"), words, **variables)
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


def test_a_push_without_a_network_is_an_error_in_words(finished, exported, tmp_path):
    folder = finished("lora")
    environ = {
        "PATH": os.environ["PATH"],
        "TRAIN_OUTPUT_DIR": str(folder.path.parent),
        "RUN": folder.name,
        "REPO": "a/b",
        "HF_TOKEN": "hf_not_a_token",
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    done = outcome_of([sys.executable, "-m", "sft_play", "push"], environ, 60)
    assert done.returncode == 13 and "hf_not_a_token" not in done.stderr
    assert "REPO=a/b: the hub cannot be reached" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_an_export_with_a_word_and_leaves_nothing(
    finished, tmp_path, monkeypatch, number
):
    def stop(*_: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(export_module, "write_files", stop)
    done = called(finished("lora"), ["export"], FORMAT="adapter", OUT=str(tmp_path / "out"))
    assert isinstance(done.exception, StoppedOnRequest)
    assert str(done.exception) == "export was stopped; nothing was published"
    assert not list(tmp_path.iterdir())


def test_a_damaged_export_is_not_pushed(copied):
    path = copied.path / "export" / "safetensors" / "config.json"
    path.write_text(path.read_text() + " ")
    done = called(copied, ["push"], REPO="a/b", FORMAT="safetensors")
    assert isinstance(done.exception, CheckpointError) and "was sealed with" in str(done.exception)
