"""sft_play.plan.base_model: another kind of model, and incomplete files, in one sentence first."""

import ast
import json
import os
import re
import shutil
import struct
import time
from pathlib import Path

import pytest
from transformers import __version__

from sft_play.commands import call as calls
from sft_play.commands.init import init
from sft_play.commands.plan import plan_for_display
from sft_play.commands.train import prepare_run
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault, SftPlayError
from sft_play.plan.base_model import GENERATING, is_known_type, model_classes, require_base

TINY = PROJECT_ROOT / "data" / "tiny_llama"
SIZES = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9123456789\n"


def refused(name: str | Path, environ: dict[str, str] | None = None, **model: object) -> str:
    """Return the sentence that refuses a model."""
    config = Config.model_validate({"model": {"name": str(name), **model}})
    with pytest.raises((ConfigError, EnvironmentFault)) as error:
        require_base(config, environ or {})
    return str(error.value)


def accept(name: str | Path, environ: dict[str, str] | None = None, **model: object) -> None:
    """Raise where a model is refused."""
    config = Config.model_validate({"model": {"name": str(name), **model}})
    require_base(config, environ or {})


def is_accepted(name: Path, **model: object) -> bool:
    try:
        accept(name, **model)
    except SftPlayError:
        return False
    return True


@pytest.fixture
def folder(tmp_path):
    """A function that writes files into a folder; dicts as JSON."""

    def make(files):
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


@pytest.fixture
def copy(tmp_path):
    """A copy of the shipped model."""
    return shutil.copytree(TINY, tmp_path / "copy")


OTHER_FILES = {
    "adapter": (
        {"adapter_config.json": {"base_model_name_or_path": "org/base"}},
        "an adapter of org/base; set MODEL_NAME=org/base",
    ),
    "adapter next to a config": (
        {"adapter_config.json": {"base_model_name_or_path": "org/base"}, "config.json": SIZES},
        "an adapter of org/base; set MODEL_NAME=org/base",
    ),
    "run": (
        {"plan.json": {}, "adapter": ""},
        "a run; leave MODEL_NAME out, and set MODEL_ADAPTER=.* make merge RUN=.* MODEL_NAME=.*merged",
    ),
    "full run": ({"plan.json": {}, "model": ""}, "a run; set MODEL_NAME=.*model$"),
    "damaged adapter": ({"adapter_config.json": "{"}, "adapter_config.json: not valid JSON"),
    "adapter of nothing": ({"adapter_config.json": {}}, "names no base"),
    "adapter of a path": (
        {"adapter_config.json": {"base_model_name_or_path": "/no/such/base"}},
        "an adapter of /no/such/base, which is not here",
    ),
    "gguf": ({"m-Q4_K_M.gguf": ""}, "a folder of GGUF files, packed for llama.cpp"),
    "mistral": (
        {"params.json": {}, "consolidated.safetensors": "", "tekken.json": {}},
        "format of Mistral's .* upload of the same model that has a config.json",
    ),
    "diffusers": ({"model_index.json": {}}, "a diffusion pipeline"),
    "sentence-transformers": ({"modules.json": [], "config.json": SIZES}, "embeds texts"),
    "pointers": (
        {"config.json": SIZES, "tokenizer.json": POINTER, "model.safetensors": POINTER},
        "model.safetensors is a pointer of git LFS, .*, as are 1 more; run git lfs pull in",
    ),
    "index without a map": (
        {"config.json": SIZES, "model.safetensors.index.json": {}},
        "model.safetensors.index.json names no files; get the model again",
    ),
    "missing shards": (
        {
            "config.json": SIZES,
            "model.safetensors.index.json": {"weight_map": {"a": "1.safetensors", "b": "2.s"}},
        },
        r"2 of the 2 files that model.safetensors.index.json names are not there, 1.safetensors",
    ),
}


def test_a_folder_without_a_config_is_no_model_whatever_else_is_in_it(folder):
    path = folder({"notes.txt": ""})
    (path / "deep").mkdir()
    os.mkfifo(path / "deep" / "listener")
    assert "the folder has no config.json, so it is no transformers model" in refused(path)


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_folder_says_what_it_is(folder, kind):
    files, words = OTHER_FILES[kind]
    path = folder(files)
    said = refused(path)
    assert str(path) in said
    assert re.search(words, said), said


CONFIGS = {
    "bert": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "an encoder, which fills gaps in a text (BertForMaskedLM)",
    ),
    "nameless bert": (
        {"model_type": "modernbert"},
        "an encoder (modernbert), whose tokens see those that follow",
    ),
    "classifier": (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "a classifier or reward model (LlamaForSequenceClassification)",
    ),
    "t5": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "an encoder-decoder (T5ForConditionalGeneration)",
    ),
    "florence": (
        {"model_type": "florence2", "text_config": {"is_encoder_decoder": True}},
        "an encoder-decoder (florence2)",
    ),
    "vit": ({"model_type": "vit"}, "a model without a class that writes text after a prompt (vit)"),
    "unknown": (
        {"model_type": "llama9", "transformers_version": "9.1.0"},
        "its config.json (version 9.1.0 wrote it) says model_type=llama9, which transformers "
        f"{__version__} does not know; type make install TRANSFORMERS=newest, which may know it",
    ),
    "older": (
        {"model_type": "llama9", "transformers_version": "5.3.0.dev0"},
        "type make install TRANSFORMERS=newest, which",
    ),
    "own code": (
        {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
        "its model_type own is Python code next to its weights (configuration_own.OwnConfig); read "
        "it, then set MODEL_TRUST_REMOTE_CODE=true, or type make install TRANSFORMERS=newest",
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_of_no_causal_model_says_what_it_is(folder, kind):
    config, words = CONFIGS[kind]
    assert words in refused(folder({"config.json": {**SIZES, **config}}))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "architectures": ["LLaMAForCausalLM"]},
        {"model_type": "llama", "architectures": ["PeftModelForCausalLM"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {"model_type": "deepseek_v3", "auto_map": {"AutoConfig": "a.B"}},
        {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"},
    ],
)
def test_a_config_of_a_causal_model_is_accepted(folder, config):
    assert is_accepted(folder({"config.json": {**SIZES, **config}}))


def test_code_of_its_own_that_is_trusted_is_accepted(folder):
    config = {**SIZES, "model_type": "own", "auto_map": {"AutoModelForCausalLM": "a.Own"}}
    base = folder({"config.json": config})
    assert is_accepted(base, trust_remote_code=True) and not is_accepted(base)


def write_gguf(path: Path, **general: str | int | list[str]) -> Path:
    """Write the header of a GGUF file as llama.cpp's converter does."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    packed = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(general) + 1)
    for name, value in general.items():
        packed += text(f"general.{name}")
        if isinstance(value, str):
            packed += struct.pack("<I", 8) + text(value)
        elif isinstance(value, int):
            packed += struct.pack("<II", 4, value)
        else:
            packed += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    path.write_bytes(packed + text("llama.block_count") + struct.pack("<II", 4, 30))
    return path


def test_a_gguf_file_names_what_it_was_made_from_and_how_it_is_unpacked(tmp_path):
    file = write_gguf(
        tmp_path / "m.gguf",
        architecture="llama",
        file_type=3,
        name="Qwen3 8B",
        **{"base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B-Base"},
        languages=["en"],
    )
    for named in (file, tmp_path):
        said = refused(named)
        assert "general.base_model.0.repo_url=https://huggingface.co/Qwen/Qwen3-8B-Base, " in said
        assert "general.name=Qwen3 8B. " in said and "-m pip install gguf" in said
        command = said.split(" -c '")[1].removesuffix("'")
        assert str(file.parent) in command and ast.parse(command)


@pytest.mark.parametrize("size", [0, 4, 30, 50])
def test_a_gguf_file_that_ends_too_early_names_nothing(tmp_path, size):
    file = write_gguf(tmp_path / "m.gguf", name="a model")
    file.write_bytes(file.read_bytes()[:size])
    said = "or a name of the hub, packed for llama.cpp; set MODEL_NAME to a causal language"
    assert f"{said} model" in refused(file)


def test_a_file_is_no_folder(tmp_path):
    for name, words in (
        ("m.gguf", "packed for llama.cpp"),
        ("model.safetensors", "is a file, not a folder"),
    ):
        (tmp_path / name).touch()
        assert words in refused(tmp_path / name)


@pytest.mark.parametrize(
    "name, files, words",
    [
        ("org/Qwen3-8B-GGUF", {}, "such as Qwen3-8B"),
        ("org/it", {"adapter_config.json": {"base_model_name_or_path": "o/base"}}, "=o/base"),
        ("org/it", {"config.json": {**SIZES, "model_type": "bert"}}, "an encoder"),
    ],
)
def test_a_name_on_the_hub_is_looked_up_in_its_cache(tmp_path, name, files, words):
    snapshot = tmp_path / "models--org--it" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for path, content in files.items():
        (snapshot / path).write_text(json.dumps(content))
    assert words in refused(name, {"HF_HUB_CACHE": str(tmp_path)})


def test_a_model_with_an_adapter_beside_it_is_refused(copy):
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert "move adapter_config.json out of the folder" in refused(copy)


def test_a_weight_file_that_ends_too_early_is_refused(copy):
    accept(copy)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for size in (0, 5, 8 + length // 2, 8 + length, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert "model.safetensors is damaged, or ends too early" in refused(copy)


@pytest.mark.parametrize(
    "facts",
    [{"shape": [1 << 80]}, {"shape": [-64]}, {"dtype": "F99"}, {"shape": [1]}, {"dtype": 4}],
)
def test_a_header_that_the_bytes_contradict_is_refused(copy, facts):
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"] |= facts
    text = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    assert "model.safetensors is damaged" in refused(copy)


def test_consolidated_weights_beside_others_and_links_are_accepted(copy):
    (copy / "consolidated.safetensors").write_bytes(b"not looked at")
    (copy / "params.json").write_text("{}")
    (copy / "model.safetensors").rename(copy / "blob")
    (copy / "model.safetensors").symlink_to("blob")
    accept(copy)
    (copy / "blob").unlink()
    (copy / "config.json").rename(copy / "moved")
    assert "format of Mistral's" in refused(copy)


@pytest.mark.parametrize("command", ["plan", "init", "train"])
def test_every_command_says_it_first(folder, monkeypatch, command):
    path = folder({"config.json": {**SIZES, "model_type": "llama9"}})
    monkeypatch.chdir(path)
    (path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "response": "2"}\n')
    environ = {"DEVICE": "cpu", "MODEL_NAME": str(path), "DATA_TRAIN_PATH": "rows.jsonl"}
    call = calls.Call(invocation.read_invocation(environ), environ, ())
    run = {
        "plan": lambda: plan_for_display(call, False, False),
        "init": lambda: init(call),
        "train": lambda: prepare_run(call, False, False),
    }
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match="model_type=llama9, which transformers"):
        run[command]()
    assert time.monotonic() - began < 5  # seconds, on a busy host; a fifth of one on an idle one


def test_a_folder_without_weights_is_planned_and_not_trained(copy, monkeypatch):
    (copy / "model.safetensors").unlink()
    monkeypatch.chdir(copy)
    (copy / "rows.jsonl").write_text('{"prompt": "1 + 1?", "response": "2"}\n' * 20)
    environ = {"DEVICE": "cpu", "MODEL_NAME": str(copy), "DATA_TRAIN_PATH": "rows.jsonl"}
    call = calls.Call(invocation.read_invocation(environ), environ, ())
    assert plan_for_display(call, False, False).plan.fits
    with pytest.raises(EnvironmentFault, match=r"a config.json and no weights"):
        prepare_run(call, False, False)


def test_the_tables_are_those_that_transformers_has():
    from transformers.models.auto import modeling_auto

    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    multimodal = set(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values())
    assert model_classes(*GENERATING) == {
        name for name in causal | multimodal if isinstance(name, str)
    }
    assert all(is_known_type(name) for name in modeling_auto.CONFIG_MAPPING_NAMES)


def test_a_plan_says_that_weights_are_a_pickle(copy, monkeypatch):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    monkeypatch.chdir(copy)
    environ = {"DEVICE": "cpu", "MODEL_NAME": str(copy)}
    call = calls.Call(invocation.read_invocation(environ), environ, ())
    with pytest.raises(ConfigError, match="set MODEL_ALLOW_PICKLED_WEIGHTS=true"):
        plan_for_display(call, False, False)
