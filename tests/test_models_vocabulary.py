"""Tokens that a model does not know are found in its weight files, before a weight is loaded."""

import json
import logging
import resource
import shutil
import struct

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
)

from sft_play.config.schema import Config
from sft_play.data import splits
from sft_play.data.splits import UsedTokens, find_used_tokens
from sft_play.data.store import IMAGE, RECORD, SampleArrays, Split, Store, StoreWriter
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import EnvironmentFault
from sft_play.models.vocabulary import UNTRAINED, check_vocabulary, find_matrices, untrained_tokens

PAD, END, SYSTEM, USER, ASSISTANT = range(5)  # added tokens of the tokenizer that ships
WORD = 900
EMBEDDING = "model.embed_tokens.weight"


def config_of(folder, mode: str = "lora", allow_untrained_tokens: bool = False, **lora) -> Config:
    tuning = {"mode": mode, "allow_untrained_tokens": allow_untrained_tokens, "lora": lora}
    return Config.model_validate({"model": {"name": str(folder)}, "tuning": tuning})


def use_of(ids, trained=()) -> UsedTokens:
    return UsedTokens(
        np.array(sorted(ids)), np.array(sorted(trained), dtype=np.int64), Split.whole([])
    )


def check(folder, ids=(END, USER, ASSISTANT, WORD), trained=(END, WORD), **settings) -> None:
    config = config_of(folder, **settings)
    check_vocabulary(config, load_tokenizer(config), use_of(ids, trained))


def refused(folder, **settings) -> str:
    """Return the message that refuses the tokens of a model."""
    with pytest.raises(EnvironmentFault) as caught:
        check(folder, **settings)
    return str(caught.value)


def set_rows(folder, rows: dict[int, torch.Tensor | float], name: str = EMBEDDING) -> None:
    tensors = load_file(folder / "model.safetensors")
    for token, row in rows.items():
        tensors[name][token] = row
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def row_of(folder, token: int, name: str = EMBEDDING) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name][token]


@pytest.fixture
def base(tiny_base, tmp_path):
    """A copy of the tiny model's folder, to change; its head is tied."""
    return shutil.copytree(tiny_base, tmp_path / "model")


@pytest.fixture
def untied(tokenizer, tmp_path):
    """The folder of a model whose head is a matrix of its own, in several files."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "untied")
    tokenizer.save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def shard(folder) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def add_tokens(folder, *tokens: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids(list(tokens))


def resize(folder, rows: int, dtype: torch.dtype, **how) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows, **how)
    model.to(dtype).save_pretrained(folder)


# Ids without a row


def test_a_trained_model_passes_in_every_mode(base, untied):
    for folder in (base, untied):
        for mode in ("lora", "qlora", "full"):
            check(folder, mode=mode)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_an_id_that_the_embedding_has_no_row_for_is_refused_with_its_text(base, mode):
    (new,) = add_tokens(base, "<|tool|>")
    message = refused(base, ids=(END, WORD, new), mode=mode)
    assert f"model.name={base} embeds {new} tokens" in message
    assert f"<|tool|> (id {new})" in message
    check(base, ids=(END, WORD), mode=mode)  # a token that no row holds needs no embedding


def test_padding_needs_a_row_too(base):
    (new,) = add_tokens(base, "<|fill|>")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = "<|fill|>"
    tokenizer.save_pretrained(base)
    assert f"<|fill|> has id {new};" in refused(base)


def test_the_tensor_says_how_many_rows_there_are_rather_than_the_config(base):
    config = json.loads((base / "config.json").read_text())
    rows = config["vocab_size"]
    (base / "config.json").write_text(json.dumps({**config, "vocab_size": rows + 64}))
    assert f"embeds {rows} tokens" in refused(base, ids=(WORD, rows))


@pytest.mark.parametrize("kind", ["absent", "bin"])
def test_without_safetensors_the_config_says_how_many_rows_there_are_and_the_rest_is_logged(
    base, kind, caplog
):
    set_rows(base, {USER: 0.0})
    if kind == "bin":
        torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    with caplog.at_level(logging.INFO):
        check(base)
    assert "was not looked at" in caplog.text
    assert "embeds" in refused(base, ids=(WORD, 10**6))


def test_the_vocabulary_of_a_multimodal_model_is_its_language_models(tokenizer, tmp_path):
    Gemma3Config(text_config={"vocab_size": 7000}).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    check(tmp_path, ids=(END, 6999))
    assert "embeds 7000 tokens" in refused(tmp_path, ids=(END, 7000))


# Rows that were never trained


@pytest.mark.parametrize("scale", [0.0, UNTRAINED / 2])
def test_a_token_whose_row_is_zero_or_almost_is_refused_where_embeddings_are_frozen(base, scale):
    set_rows(base, {USER: row_of(base, WORD) * scale})
    for mode in ("lora", "qlora"):
        message = refused(base, mode=mode)
        for words in (
            f"<|user|> (id {USER})",
            EMBEDDING,
            f"tuning.mode={mode}",
            "MODEL_NAME",
            "TUNING_MODE=full",
            "TUNING_LORA_TRAINABLE_TOKENS='<|user|>'",
        ):
            assert words in message
        assert "<|assistant|>" not in message


def test_untrained_rows_are_fine_where_embeddings_are_trained_or_no_row_holds_the_token(base):
    set_rows(base, {SYSTEM: 0.0, USER: 0.0})
    check(base, mode="full")
    check(base, target_modules=["q_proj", "embed_tokens"])
    check(base, modules_to_save=["embed_tokens"])
    check(base, trainable_tokens=["<|system|>", "<|user|>"])
    assert "TOKENS='<|system|>,<|user|>'" in refused(base, trainable_tokens=["<|system|>"])
    check(base, allow_untrained_tokens=True)
    check(base, ids=(END, ASSISTANT, WORD))


def test_short_rows_ordinary_tokens_and_padding_accuse_nobody(base):
    set_rows(base, {USER: row_of(base, USER) * 20 * UNTRAINED, WORD: 0.0})
    for padding in (row_of(base, END), 0.0):
        set_rows(base, {PAD: padding})
        check(base)


def test_a_copy_is_untrained_and_its_original_is_not(base):
    set_rows(base, {ASSISTANT: row_of(base, END)})
    check(base, ids=(END, USER, WORD))
    message = refused(base)
    assert f"<|assistant|> (id {ASSISTANT})" in message and "that of <|end|>" in message
    # reserved rows that are all alike
    set_rows(base, dict.fromkeys((SYSTEM, USER, ASSISTANT), row_of(base, WORD)))
    message = refused(base)
    assert "<|user|>" in message and message.count("that of <|system|>") == 2


@pytest.mark.parametrize(
    "dtype, tokens",
    [
        (torch.float32, ("<|tool|>", "<|call|>")),
        (torch.bfloat16, ("<|tool|>",)),
        (torch.float16, ("<|tool|>", "<|call|>")),
    ],
)
def test_tokens_whose_rows_a_resize_has_just_made_are_refused(base, dtype, tokens):
    new = add_tokens(base, *tokens)
    resize(base, new[-1] + 1, dtype)
    assert refused(base, ids=(END, WORD, *new)).count("is the mean of all") == len(tokens)
    check(base, ids=(END, WORD))


def test_ten_small_steps_of_training_make_a_new_row_a_trained_one(base):
    new = add_tokens(base, "<|tool|>", "<|call|>")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(new[-1] + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    ids = torch.tensor([[USER, *range(40, 50), new[0], *range(60, 70), new[1], END]])
    for _ in range(10):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(base)
    check(base, ids=(END, USER, WORD, *new))


def test_rows_behind_the_vocabulary_change_nothing(base, tokenizer):
    resize(base, len(tokenizer), torch.float32, pad_to_multiple_of=512)
    config = config_of(base)
    assert find_matrices(config)[0].rows > len(tokenizer)
    check(base)
    (new,) = add_tokens(base, "<|tool|>")  # has a row, which nobody trained
    assert "is the mean of all" in refused(base, ids=(END, WORD, new))


# The head


def test_a_token_that_is_written_needs_a_row_of_the_head_and_one_that_is_only_read_does_not(untied):
    reserved = row_of(untied, WORD, "lm_head.weight")
    set_rows(untied, {SYSTEM: reserved, USER: reserved, END: 0.0}, "lm_head.weight")
    check(untied, ids=(END, SYSTEM, USER, WORD), trained=(WORD,))
    message = refused(untied, ids=(END, SYSTEM, USER, WORD), trained=(END, USER, WORD))
    assert "lm_head.weight is zero" in message and "lm_head.weight is that of <|system|>" in message
    check(
        untied,
        ids=(END, USER, WORD),
        trained=(END, USER, WORD),
        target_modules=["q_proj", "lm_head"],
    )


# Where files lie


def test_sharded_files_are_read_through_their_index(untied):
    set_rows(untied, {USER: 0.0})
    set_rows(untied, {END: 0.0}, "lm_head.weight")
    shard(untied)
    embedding, head = find_matrices(config_of(untied))
    assert embedding.path != head.path and (embedding.name, head.name) == (
        EMBEDDING,
        "lm_head.weight",
    )
    assert f"{EMBEDDING} is zero" in refused(untied)
    assert "lm_head.weight is zero" in refused(untied, ids=(END, WORD))
    embedding.path.unlink()
    check(untied, ids=(WORD,), trained=(WORD,))
    assert find_matrices(config_of(untied))[0] is None


def test_the_hubs_cache_is_looked_into_without_asking_the_hub(untied, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(untied, cached / "snapshots" / ("0" * 40))
    embedding, head = find_matrices(config_of("some/model"))
    assert embedding.path.is_relative_to(cached) and head.path.is_relative_to(cached)
    assert find_matrices(config_of("some/other")) == (None, None)


@pytest.mark.parametrize(
    "name, text",
    [
        ("model.safetensors", "broken"),
        ("model.safetensors.index.json", "{"),
        ("model.safetensors.index.json", "{}"),
    ],
)
def test_files_that_cannot_be_read_are_class_13(base, name, text):
    (base / "model.safetensors").unlink()
    (base / name).write_text(text)
    assert f"model.name={base}: " in refused(base)


def test_an_embedding_is_found_by_its_name_wherever_the_model_keeps_it(base):
    tensors = load_file(base / "model.safetensors")
    for name in (
        "transformer.wte.weight",
        "wte.weight",
        "gpt_neox.embed_in.weight",
        "language_model.model.embed_tokens.weight",
    ):
        others = {
            "model.layers.61.language_model.embed_tokens.weight": torch.ones(2, 2),
            "transformer.wpe.weight": torch.ones(2, 2),
        }
        save_file({name: tensors[EMBEDDING], **others}, base / "model.safetensors")
        assert find_matrices(config_of(base))[0].name == name


def test_a_matrix_is_read_row_by_row_and_never_as_a_whole(base, tokenizer):
    rows, features = 1 << 20, 2048  # 4 GiB in bfloat16, a hole on the disk
    size = rows * features * 2
    tensor = {"dtype": "BF16", "shape": [rows, features], "data_offsets": [0, size]}
    header = json.dumps({EMBEDDING: tensor}).encode()
    with (base / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "<|user|>" in refused(base)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < 256 << 20
    assert f"embeds {rows} tokens" in refused(base, ids=(WORD, rows))


def test_quantized_embeddings_are_left_alone(base, tokenizer):
    save_file(
        {EMBEDDING: torch.zeros(len(tokenizer), 8, dtype=torch.int8)}, base / "model.safetensors"
    )
    assert (
        untrained_tokens(find_matrices(config_of(base))[0], np.array([END, USER]), tokenizer) == {}
    )


# What the rows hold


def store_of(folder, *samples: tuple[list[int], list[bool]], file: str = "rows.jsonl") -> Store:
    with StoreWriter(folder) as writer:
        for number, (ids, trained) in enumerate(samples, start=1):
            record = np.zeros(1, RECORD)
            record["end"], record["number"] = len(ids), number
            record["weights"] = -1
            images = np.zeros(0, IMAGE), np.zeros(0, np.uint8)
            arrays = SampleArrays(np.array(ids), np.array(trained), np.zeros(0), record, *images)
            writer.append(arrays)
    return Store(folder, [file])


def test_the_use_of_stores_is_what_any_of_them_holds_and_where_first(tmp_path):
    one = store_of(tmp_path / "one", ([3, 7, 900], [False, True, False]), file="a.jsonl")
    two = store_of(tmp_path / "two", ([1, 2, 3], [False, False, True]), file="b.jsonl")
    used = find_used_tokens(Split.whole([one, two]))
    assert (used.ids.tolist(), used.trained_ids.tolist()) == ([1, 2, 3, 7, 900], [3, 7])
    assert [used.origin(token) for token in (3, 1, 4)] == ["a.jsonl:1", "b.jsonl:1", None]
    assert find_used_tokens(Split.whole([store_of(tmp_path / "none")])).ids.size == 0
    assert find_used_tokens(Split.whole([Store(tmp_path / "one", [])])).origin(3) is None


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 5])
def test_the_use_of_a_store_is_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, chunk_tokens):
    """A token that only opens samples is read and never written."""
    store = store_of(
        tmp_path / "rows",
        ([9, 5, 9], [True, True, False]),
        ([8], [True]),
        ([5, 8, 7], [True, False, True]),
    )
    monkeypatch.setattr(splits, "TOKENS_PER_SCAN", chunk_tokens)
    used = find_used_tokens(Split.whole([store]))
    assert (used.ids.tolist(), used.trained_ids.tolist()) == ([5, 7, 8, 9], [5, 7])
    origins = [used.origin(token) for token in (5, 7, 8, 9)]
    assert origins == [f"rows.jsonl:{number}" for number in (1, 3, 2, 1)]


def test_a_refusal_names_the_row_where_the_token_is_met_first(base, tmp_path):
    set_rows(base, {USER: 0.0})
    store = store_of(tmp_path / "rows", ([900], [True]), ([USER, 900, END], [False, True, True]))
    config = config_of(base)
    with pytest.raises(EnvironmentFault, match=r"<\|user\|> \(id 3, first in rows.jsonl:2\)"):
        use = find_used_tokens(Split.whole([store]))
        check_vocabulary(config, load_tokenizer(config), use)
