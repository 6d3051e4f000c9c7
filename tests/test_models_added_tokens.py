"""model.add_tokens: rows of embedding and head that a base does not have."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from image_models import write_image_model
from marks import long
from rank_processes import run_ranks, train_on_two
from run_files import run_json
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sft_kernels.process import Process
from sft_play.config.loader import load_merged
from sft_play.config.schema import Config
from sft_play.data.pipeline import build_run_data
from sft_play.data.splits import UsedTokens
from sft_play.data.store import Split
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.inference.load import load_run
from sft_play.inference.merge import merge_run
from sft_play.models.load import load_base, load_model
from sft_play.models.parameters import count_parameters
from sft_play.models.vocabulary import check_vocabulary
from sft_play.plan.run_plan import read_plan

CPU = Process.alone(torch.device("cpu"))
TOKENS = ["<tool>", "</tool>"]
SETTING = json.dumps(TOKENS)


def config_of(base: Path, **model) -> Config:
    return Config.model_validate({"model": {"name": str(base), "add_tokens": TOKENS, **model}})


@pytest.fixture(scope="module")
def tool_rows(tmp_path_factory) -> dict[str, Path]:
    """Rows whose answers hold the added tokens."""
    folder = tmp_path_factory.mktemp("tools")
    files = {name: folder / f"{name}.jsonl" for name in ("train", "val")}
    for start, path in enumerate(files.values()):
        rows = [
            {"question": f"Count to {n}.", "answer": f"<tool>count {n}</tool> " + "1 " * n}
            for n in range(1 + 10 * start, 9 + 6 * start)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def resized_by_hand(base: Path, folder: Path) -> Path:
    """Write a base with the tokens and their rows, as a user without this setting would."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    means = [matrix.weight.data.double().mean(0) for matrix in matrices(model)]
    rows = len(means and matrices(model)[0].weight)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for matrix, mean in zip(matrices(model), means, strict=True):
        matrix.weight.data[rows:] = mean.to(matrix.weight.dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def matrices(model) -> list[torch.nn.Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


@pytest.mark.parametrize(
    "mode, ranks",
    [
        ("full", 1),
        long("lora", 2),
        long("qlora", 1),
        long("full", 2),
        long("lora", 1),
        long("qlora", 2),
    ],
)
def test_losses_are_those_of_a_base_that_was_resized_by_hand(
    plan_run, run_worker, losses_of, tiny_base, tool_rows, tmp_path, mode, ranks
):
    same = {
        "tuning.mode": mode,
        "data.train_path": tool_rows["train"],
        "data.val_path": tool_rows["val"],
    }
    by_hand = {"model.name": resized_by_hand(tiny_base, tmp_path / "base")}
    if mode != "full":
        by_hand["tuning.lora.trainable_tokens"] = SETTING
    folders = [
        plan_run({**same, **changes}, num_gpus=ranks)
        for changes in ({"model.add_tokens": SETTING}, by_hand)
    ]
    for folder in folders:
        exits = {run_worker(folder)} if ranks == 1 else set(run_ranks(folder, ranks))
        assert exits == {0}, run_json(folder)["cause"]
    added, resized = map(losses_of, folders)
    assert len(added) == 3 and added == resized


@pytest.mark.parametrize("model_type", ["llama", "gptj"])  # tied, and a head with a bias
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_new_rows_are_the_mean_of_all_others(base_of, tmp_path, model_type, form):
    base = base_of(model_type)
    stored = AutoModelForCausalLM.from_pretrained(base)
    if form == "bin":
        shutil.copytree(base, tmp_path, dirs_exist_ok=True)
        base = tmp_path
        (base / "model.safetensors").unlink()
        torch.save(stored.state_dict(), base / "pytorch_model.bin")
    grown = load_base(config_of(base, allow_pickled_weights=form == "bin"), CPU)
    compared = set()
    for (name, before), after in zip(
        stored.state_dict().items(), grown.state_dict().values(), strict=True
    ):
        if before.shape != after.shape:
            mean = before.double().mean(0, keepdim=True).to(before.dtype)
            assert torch.equal(after, torch.cat([before, mean, mean])), name
            compared.add(name.rpartition(".")[2])
        else:
            assert torch.equal(before, after), name
    assert compared == ({"weight", "bias"} if model_type == "gptj" else {"weight"})


@pytest.mark.parametrize(
    "mode, model_type",
    [
        ("full", "mistral"),
        long("full", "gptj"),
        ("full", "qwen3_moe"),
        long("lora", "gpt2"),
        ("lora", "gemma3"),
        long("lora", "phi"),
    ],
)
def test_the_plan_counts_the_rows_of_every_kind_of_model(plan_run, base_of, model_type, mode):
    changes = {"model.name": base_of(model_type), "tuning.mode": mode}
    before, after = (
        plan_run({**changes, **added}, may_trace=False)
        for added in ({}, {"model.add_tokens": SETTING})
    )
    one, two = (read_plan(folder).step for folder in (before, after))
    model = load_model(after.read_config(), CPU)
    counts = count_parameters(model)
    untied = 1 + (not two.model.is_tied)
    assert two.model.vocab - one.model.vocab == len(TOKENS)
    assert two.model.parameters - one.model.parameters == len(TOKENS) * two.model.hidden * untied
    if mode == "lora":
        assert two.trained_weights == counts.trainable
        return
    # what the plan leaves out of other classes it leaves out with the tokens, too
    earlier = count_parameters(load_model(before.read_config(), CPU))
    bias = len(TOKENS) * any("head.bias" in name for name, _ in model.named_parameters())
    more = counts.trainable - earlier.trainable - bias
    assert two.trained_weights - one.trained_weights == more


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_divided_weights_have_the_same_rows(plan_run, losses_of, tool_rows, strategy):
    settings = {
        "tuning.mode": "full",
        "model.add_tokens": SETTING,
        "data.train_path": tool_rows["train"],
        "data.val_path": tool_rows["val"],
    }
    runs = [plan_run({**settings, "train.strategy": "ddp"}, num_gpus=2)]
    zero = "configs/deepspeed_zero3.json" if strategy == "zero3" else None
    divided = {} if zero else {"train.strategy": strategy}
    runs.append(plan_run({**settings, **divided}, num_gpus=2, deepspeed_config=zero))
    for folder in runs:
        train_on_two(folder)
    ddp, other = map(losses_of, runs)
    assert other == pytest.approx(ddp, abs=1e-5)
    saved = load_file(runs[1].path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert len(saved) == 2306


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_adapters_over_divided_weights_are_refused(plan_run, strategy):
    zero = "configs/deepspeed_zero3.json" if strategy == "zero3" else None
    settings = {"model.add_tokens": SETTING} | ({} if zero else {"train.strategy": strategy})
    with pytest.raises(ConfigError, match=r"model.add_tokens.*PEFT reads complete weights"):
        plan_run(settings, num_gpus=2, deepspeed_config=zero)


@pytest.fixture(scope="module")
def trained(plan_run, run_worker, tool_rows):
    """A function that returns a finished run of a mode that added the tokens."""
    runs = {}

    def run(mode: str):
        if mode not in runs:
            runs[mode] = plan_run(
                {
                    "tuning.mode": mode,
                    "model.add_tokens": SETTING,
                    "data.train_path": tool_rows["train"],
                    "data.val_path": tool_rows["val"],
                    "train.max_steps": 6,
                    "train.save_strategy": "steps",
                    "train.save_steps": 3,
                    "train.reopen_saved": True,  # by plain transformers and PEFT
                }
            )
            assert run_worker(runs[mode]) == 0, run_json(runs[mode])["cause"]
        return runs[mode]

    return run


def row_of(model, token: str, tokenizer) -> torch.Tensor:
    return model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(token)]


@pytest.mark.usefixtures("opens_here")
@pytest.mark.parametrize("mode", ["lora", long("qlora")])
def test_adapter_and_merged_model_hold_the_rows(trained, tiny_base, mode):
    folder = trained(mode)
    checks = {check["name"]: check["passed"] for check in run_json(folder)["checks"]}
    assert checks["plain transformers opens the saved weights and says the same"]
    merge_run(folder)
    merged = folder.path / "merged"
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.config.vocab_size == len(tokenizer) == 2306
    assert tokenizer.decode(tokenizer("<tool>x</tool>")["input_ids"]) == "<tool>x</tool>"
    assert len(tokenizer("<tool></tool>")["input_ids"]) == 2
    rows = [row_of(model, token, tokenizer) for token in TOKENS]
    assert not torch.equal(*rows), "trained, and each by itself"
    base = load_file(tiny_base / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight[: len(base)], base), "all others frozen"
    used = load_run(folder, "cpu").model.get_input_embeddings()(torch.tensor([2304, 2305]))
    assert torch.equal(used, torch.stack(rows))


@pytest.mark.usefixtures("opens_here")
def test_a_full_run_saves_the_rows_with_all_others(trained):
    folder = trained("full")
    model = AutoModelForCausalLM.from_pretrained(folder.path / "model")
    tokenizer = load_tokenizer(config_of(folder.path / "model"))
    assert model.config.vocab_size == len(tokenizer) == 2306
    assert not torch.equal(*(row_of(model, token, tokenizer) for token in TOKENS))


def score(folder, when: str) -> float:
    return run_json(folder)["metrics"][when]["eval_loss"]


@pytest.mark.usefixtures("opens_here")
def test_later_runs_begin_with_the_trained_rows(train_run, plan_run, trained, tool_rows):
    earlier = trained("lora")
    merge_run(earlier)
    rows = {"data.train_path": tool_rows["train"], "data.val_path": tool_rows["val"]}
    merged = {"model.name": earlier.path / "merged"}
    for changes in (
        {"model.adapter": earlier.path},
        {**merged, "model.add_tokens": SETTING},
        merged,
    ):
        folder = train_run({**rows, **changes})
        assert score(folder, "before") == pytest.approx(score(earlier, "after"), abs=1e-5)
        assert read_plan(folder).step.model.vocab == 2306
    tokens = Config.model_validate({}).model.add_tokens
    assert tokens is None and "model.add_tokens" not in merged
    assert (
        plan_run({**rows, "model.adapter": earlier.path}).read_config().model.add_tokens == TOKENS
    )


@pytest.mark.parametrize("mode", [long("full"), "lora"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(train_run, trained, mode):
    whole = trained(mode)
    config = whole.read_config()
    folder = train_run(
        {
            "tuning.mode": mode,
            "model.add_tokens": SETTING,
            "data.train_path": config.data.train_path,
            "data.val_path": config.data.val_path,
            "train.max_steps": 6,
            "train.resume_from": whole.checkpoints / "checkpoint-3",
        }
    )
    (one,), (two,) = (run.weights(mode).glob("*.safetensors") for run in (whole, folder))
    expected = load_file(one)
    for name, tensor in load_file(two).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_token_in_the_rows_is_one_id_also_after_a_run_without_it(tiny_base, tool_rows, tmp_path):
    data = {"train_path": str(tool_rows["train"]), "cache_dir": str(tmp_path)}
    counts = {}
    for tokens in (None, TOKENS, None):
        model = {"name": str(tiny_base), "max_seq_len": 256, "add_tokens": tokens}
        config = Config.model_validate({"model": model, "data": data})
        samples = build_run_data(config, load_tokenizer(config)).train
        found = np.concatenate([sample.ids for sample in samples])
        labels = np.concatenate([sample.labels for sample in samples])
        counts[tokens is None] = len(found)
        if tokens:
            assert [(found == id_).sum() for id_ in (2304, 2305)] == [len(samples)] * 2
            assert {2304, 2305} <= set(labels.tolist())
        else:
            assert found.max() < 2304
    assert counts[False] < counts[True]


@pytest.mark.parametrize("value", ["[]", '["<a>", "<a>"]', '["<a>", " "]', '[""]', "[1]"])
def test_a_list_that_adds_nothing_new_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv("MODEL_ADD_TOKENS", value)
    with pytest.raises(ConfigError, match=r"model.add_tokens=.* write a list of tokens, each once"):
        load_merged(None, dict(os.environ), ())


def test_rows_and_complete_matrices_are_not_both_trained():
    words = ('model.add_tokens=["<a>"]', "tuning.lora.modules_to_save=lm_head")
    with pytest.raises(ConfigError, match=r"model.add_tokens=\[<a>\].* trains all its rows"):
        load_merged(None, {}, words)
    assert load_merged(None, {}, (*words, "tuning.mode=full", "tuning.lora.modules_to_save=null"))


def test_tokens_of_the_vocabulary_keep_their_ids(tiny_base, caplog):
    before = load_tokenizer(Config.model_validate({"model": {"name": str(tiny_base)}}))
    word = before.convert_ids_to_tokens(1592)
    tokens = ["<|user|>", word, "<new>"]
    after = load_tokenizer(config_of(tiny_base, add_tokens=tokens))
    assert after.convert_tokens_to_ids(tokens) == [3, 1592, 2304]
    assert f"model.add_tokens: {word} already in the vocabulary" in caplog.text
    assert after.added_tokens_decoder[3].special, "as in the base"


def test_spare_rows_of_the_base_are_used_first(tiny_base, tmp_path, plan_run):
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    model.resize_token_embeddings(2305)
    model.save_pretrained(tmp_path)
    load_tokenizer(Config.model_validate({"model": {"name": str(tiny_base)}})).save_pretrained(
        tmp_path
    )
    folder = plan_run({"model.name": tmp_path, "model.add_tokens": SETTING})
    grown = load_base(folder.read_config(), CPU)
    assert grown.config.vocab_size == read_plan(folder).step.model.vocab == 2306
    spare = model.get_input_embeddings().weight[2304]
    assert torch.equal(grown.get_input_embeddings().weight[2304], spare)
    one = load_base(config_of(tmp_path, add_tokens=["<tool>"]), CPU)
    assert one.config.vocab_size == 2305


def test_tokens_that_the_template_writes_between_turns_are_special(tiny_base, tmp_path):
    template = tmp_path / "turns.jinja"
    template.write_text(
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )
    config = config_of(
        tiny_base, add_tokens=["<turn>", "<end>", "<tool>"], chat_template=str(template)
    )
    tokenizer = load_tokenizer(config)
    ids = tokenizer.convert_tokens_to_ids(["<turn>", "<end>", "<tool>"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>"


def test_tokens_without_a_row_that_the_rows_hold_must_be_named(tiny_base, tmp_path):
    shutil.copytree(tiny_base, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    tokenizer.add_tokens(["<lost>"])
    tokenizer.save_pretrained(tmp_path)
    ids = np.array([5, 2304, 2305])
    use = UsedTokens(ids, ids, Split.whole([]))
    with pytest.raises(EnvironmentFault, match=r"<lost> .* write it into model.add_tokens"):
        check_vocabulary(config_of(tmp_path), load_tokenizer(config_of(tmp_path)), use)
    named = config_of(tmp_path, add_tokens=["<lost>", *TOKENS])
    check_vocabulary(named, load_tokenizer(named), use)
    assert load_base(named, CPU).config.vocab_size == 2307


def test_an_embedding_under_another_name_is_refused(base_of):
    with pytest.raises(ConfigError, match="no embedding under a name that is known"):
        load_base(config_of(base_of("mamba2")), CPU)


@pytest.mark.parametrize("model_type", ["gemma3", long("qwen3_vl")])
def test_the_language_model_of_an_image_model_gets_the_rows(tokenizer, tmp_path, model_type):
    base = write_image_model(model_type, tmp_path / "base", tokenizer)
    before = AutoConfig.from_pretrained(base).get_text_config().vocab_size
    spare = before - len(tokenizer)
    assert spare > 0
    tokens = [f"<tool {number}>" for number in range(spare + 2)]
    config = config_of(base, add_tokens=tokens)
    after = len(load_tokenizer(config))
    model = load_base(config, CPU)
    assert [len(matrix.weight) for matrix in matrices(model)] == [after] * 2
    assert before < after == model.config.get_text_config().vocab_size
