"""sft_play.data.tokenizer and loading: tokenizer files as they are published."""

import base64
import importlib.util
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from families import tokenizer as made_tokenizer

from sft_play.config.schema import Config
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import EnvironmentFault

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
RANKS = {bytes([number]): number for number in range(256)} | {b"he": 256, b"the": 257}
TIKTOKEN = "".join(f"{base64.b64encode(text).decode()} {rank}\n" for text, rank in RANKS.items())
# a protobuf with one piece: <unk>, score 0, type 2
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
CONTROLS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
TEKKEN = {
    "config": {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+|.",
        "num_vocab_tokens": len(RANKS),
        "default_vocab_size": len(RANKS) + len(CONTROLS),
        "default_num_special_tokens": len(CONTROLS),
        "version": "v7",
    },
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(text).decode(), "token_str": None}
        for text, rank in RANKS.items()
    ],
    "special_tokens": [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(CONTROLS)
    ],
}
LLAMA = {"model_type": "llama"}


def write(folder: Path, **files: object) -> Path:
    """Write files whose names have two low lines for a dot: text, bytes or JSON."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def load(folder: Path):
    return load_tokenizer(Config.model_validate({"model": {"name": str(folder)}}))


def refusal(folder: Path) -> str:
    """Return the sentence that refuses the folder's tokenizer."""
    with pytest.raises(EnvironmentFault) as caught:
        load(folder)
    (line,) = str(caught.value).splitlines()
    return line.removeprefix(f"model.name={folder}: ")


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of a Llama with a tokenizer.json."""
    made_tokenizer(None).save_pretrained(tmp_path)
    return write(tmp_path, config__json=LLAMA)


def set_config(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    kept = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))


# Which tokenizer is taken


@pytest.mark.parametrize("model_type", ["mistral", "mistral3", "ministral3"])
def test_tokenizer_json_is_read_whatever_else_lies_beside_it(folder, model_type):
    write(folder, tekken__json=TEKKEN, config__json={"model_type": model_type})
    tok = load(folder)
    assert tok.is_fast
    assert tok.get_vocab() == made_tokenizer(None).get_vocab()


def test_mistral_common_is_not_asked_for_although_it_is_installed(folder, monkeypatch):
    from transformers.integrations.mistral import tokenizer as of_mistral

    monkeypatch.setattr(of_mistral, "is_mistral_common_available", lambda: True)
    write(folder, tekken__json=TEKKEN, config__json={"model_type": "mistral"})
    assert of_mistral.resolve_mistral_format(folder)[0]  # transformers' own choice
    assert load(folder).get_vocab() == made_tokenizer(None).get_vocab()


@pytest.mark.parametrize("model_type", ["mistral", "mistral3", "llama"])
def test_tekken_json_alone_is_converted_with_the_roles_of_its_tokens(tmp_path, model_type):
    tok = load(write(tmp_path, tekken__json=TEKKEN, config__json={"model_type": model_type}))
    ids = tok("the rose[INST]", add_special_tokens=False)["input_ids"]
    assert ids[0] == RANKS[b"the"] + len(CONTROLS)
    assert ids[-1] == CONTROLS.index("[INST]")
    assert (tok.bos_token, tok.eos_token, tok.unk_token) == ("<s>", "</s>", "<unk>")
    tok.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved")("the rose")["input_ids"] == tok("the rose")["input_ids"]


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "opt"])
def test_vocab_json_and_merges_txt_are_a_tokenizer(tmp_path, model_type):
    made = made_tokenizer(None, eos="<|endoftext|>")
    made.backend_tokenizer.model.save(str(tmp_path))
    tok = load(write(tmp_path, config__json={"model_type": model_type}))
    assert tok("A rose.")["input_ids"] == made("A rose.")["input_ids"]


def test_processor_files_need_no_package_for_images(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    image = {"image_processor_type": "SmolVLMImageProcessor"}
    write(
        folder,
        config__json={"model_type": "smolvlm"},
        preprocessor_config__json={**image, "processor_class": "SmolVLMProcessor"},
        processor_config__json={"processor_class": "SmolVLMProcessor"},
    )
    set_config(folder, processor_class="SmolVLMProcessor")
    assert load(folder).is_fast


# What is refused, in one sentence


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer__json": POINTER}, "tokenizer.json is a pointer of git-lfs, .* git lfs pull"),
        ({"tokenizer__model": POINTER}, "tokenizer.model is a pointer of git-lfs"),
        ({"tokenizer__model": "no model"}, "tokenizer.model is no file of sentencepiece or tikt"),
        (
            {"tokenizer__json": "{"},
            "Expecting property name .*; correct .*, or get the model again",
        ),
        ({"vocab__json": {"a": 0}}, "vocab.json is without merges.txt; copy"),
        ({"vocab__json": {"a": 0}, "merges__txt": ""}, "nothing says what .*GPT2Tokenizer$"),
        ({"qwen__tiktoken": TIKTOKEN}, "it has none of tokenizer.json, .*; copy those of its base"),
        ({}, "it has none of tokenizer.json, .*; copy those of its base into the folder"),
        (
            {"tokenizer_config__json": {"tokenizer_class": "Qwen2Tokenizer"}},
            "it has none of tokenizer.json",
        ),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path, files, reason):
    write(tmp_path, config__json=LLAMA, **files)
    assert re.match(f"no tokenizer could be loaded: {reason}", refusal(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [
        ("tokenizer.model", SENTENCEPIECE, "sentencepiece"),
        ("spiece.model", SENTENCEPIECE, "sentencepiece"),
        ("tokenizer.model", TIKTOKEN.encode(), "tiktoken"),
        ("tiktoken.model", TIKTOKEN.encode(), "tiktoken"),
    ],
)
def test_the_package_that_a_file_needs_is_named(tmp_path, name, content, package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    write(tmp_path, config__json={"model_type": "t5" if name == "spiece.model" else "llama"})
    (tmp_path / name).write_bytes(content)
    expected = f"{name} is a file of {package}, which is not installed: pip install {package}"
    assert expected in refusal(tmp_path)


def test_an_old_tekken_json_names_mistral_common(tmp_path):
    if importlib.util.find_spec("mistral_common"):
        pytest.skip("mistral-common is installed")
    old = {name: value for name, value in TEKKEN.items() if name != "special_tokens"}
    write(tmp_path, config__json=LLAMA, tekken__json=old)
    assert refusal(tmp_path).endswith("needs a package: pip install mistral-common")


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["t.T", None]}, ["t.T", None]])
def test_a_tokenizer_with_code_of_its_own_never_asks_and_names_the_setting(
    folder, monkeypatch, auto_map
):
    def ask(*_: object) -> str:
        raise AssertionError("it asked")

    monkeypatch.setattr("builtins.input", ask)
    write(folder, config__json={"model_type": "own"})
    set_config(folder, auto_map=auto_map, tokenizer_class="OwnTokenizer")
    assert refusal(folder).endswith("read that code, then set MODEL_TRUST_REMOTE_CODE=true")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "strange"},
        {"model_type": "own", "auto_map": {"AutoConfig": "c.C"}},
        {"hidden_size": 8},
    ],
)
def test_a_config_that_transformers_does_not_know_leaves_the_tokenizer_alone(folder, config):
    write(folder, config__json=config)
    assert load(folder).eos_token == "<eos>"


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token": ["<eos>"]},
        {"chat_template": [{"name": "x"}]},
        {"auto_map": {"AutoTokenizer": []}},
    ],
)
def test_a_tokenizer_config_that_is_wrong_is_one_sentence(folder, values):
    set_config(folder, **values)
    assert "correct its files, or get the model again" in refusal(folder)


# Special tokens


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("special_tokens_map.json", {"eos_token": "<|im_end|>"}),
        ("special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}}),
        ("generation_config.json", {"eos_token_id": "ID"}),
        ("generation_config.json", {"eos_token_id": ["ID", 0]}),
        ("config.json", {**LLAMA, "eos_token_id": "ID"}),
        ("config.json", {**LLAMA, "eos_token_id": [90000, "ID"]}),
        ("config.json", {"model_type": "gemma3", "text_config": {"eos_token_id": ["ID"]}}),
        (
            "config.json",
            {"model_type": "gemma3", "eos_token_id": None, "text_config": {"eos_token_id": "ID"}},
        ),
    ],
)
def test_an_eos_that_another_file_names_is_the_tokenizers(folder, caplog, file, content):
    im_end = made_tokenizer(None).convert_tokens_to_ids("<|im_end|>")
    # with these, transformers leaves special_tokens_map.json out
    set_config(folder, eos_token=None, added_tokens_decoder={"0": {"content": "<eos>"}})
    (folder / file).write_text(json.dumps(content).replace('"ID"', str(im_end)))
    with caplog.at_level(logging.INFO, "sft_play"):
        assert load(folder).eos_token_id == im_end
    assert f"tokenizer: eos is <|im_end|>, which {file} of {folder} names" in caplog.messages


@pytest.mark.parametrize("eos", [None, -1, 90000, [], "text"])
def test_no_eos_anywhere_is_refused(folder, eos):
    set_config(folder, eos_token=None)
    write(folder, generation_config__json={"eos_token_id": eos})
    assert refusal(folder).startswith("its tokenizer names no eos_token")


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_padding_is_eos_where_no_other_token_is_named(folder, pad):
    set_config(folder, pad_token=pad)
    assert load(folder).pad_token == "<eos>"
