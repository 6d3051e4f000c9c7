"""Random configs: what is written is read back, and what is resolved adds up."""

import functools
import json
import random
import string
import typing
from pathlib import Path

import pytest
import yaml

from sft_play.config import rules, yaml_source
from sft_play.config.loader import LoadedConfig, load_merged, nested
from sft_play.config.schema import Config, is_structured, kinds
from sft_play.config.schema import settings as settings_of
from sft_play.errors import ConfigError

settings = functools.cache(settings_of)
# texts that a YAML reader could take for something else
ODD_TEXTS = [
    "no", "on", "Yes", "y", "null", "~", "NULL", "true", "auto", "010", "0x1f", "1_000", "1:30",
    "1e-4", "-.5", ".inf", "2024-01-01", "4", "=", "<<", "a: b", "a #b", "# a", "- a", "* a", "&a",
    "!a", "{a", "[a", "'", '"', "%a", "@a", "`a", " a ", "é\u2028", "a\nb\n", "a\tb", "\\n", "?",
    ":",
]  # fmt: skip
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 100))]


def random_text(dice: random.Random) -> str:
    return dice.choice(
        [*ODD_TEXTS, "".join(dice.choices(string.printable.strip(), k=dice.randint(1, 12)))]
    )


def plain_text(dice: random.Random) -> str:
    return (
        "x" + "".join(dice.choices(string.ascii_letters + " ./-_", k=dice.randint(0, 12))).rstrip()
    )


def random_value(
    path: str, dice: random.Random, text: typing.Callable[[random.Random], str]
) -> object:
    """A valid value of a setting, by its type; texts come from `text`."""
    if path == "train.run_name":
        return (
            dice.choice([None, "a", "1e-4", "no", "2024-01-01", "010"])
            if text is random_text
            else "a-1"
        )
    if path == "data.columns":
        return {text(dice): text(dice) for _ in range(dice.randrange(3))}
    if path == "model.device_map":
        names = {text(dice): dice.choice([0, 7, "cpu"]) for _ in range(dice.randrange(3))}
        return dice.choice([None, "auto", "sequential", names])
    if path == "model.template_kwargs":
        return {text(dice): dice.choice([True, 0.5, text(dice)]) for _ in range(dice.randrange(3))}
    if path == "train.lr_scheduler_kwargs":
        return dice.choice([{}, {"num_cycles": 1 / 3}, {"power": 2}, {"decay_type": "1-sqrt"}])
    if path == "train.metric_for_best_model":
        return dice.choice(["eval_loss", "eval_rougeL"])
    if path == "train.metrics":
        return dice.sample(["rouge1", "exact_match", "json_valid"], dice.randint(1, 3))
    kind = dice.choice(sorted(kinds(settings()[path].annotation), key=str))
    if typing.get_args(kind):
        return dice.choice(typing.get_args(kind))
    if kind is list and path.startswith("data."):
        return [
            dice.choice([text(dice), {"path": text(dice), "weight": dice.choice([None, 0.5, 3.0])}])
            for _ in range(dice.randint(1, 3))
        ]
    if path == "train.report_to":
        return dice.sample(["tensorboard", "wandb", "mlflow", "trackio"], dice.randint(1, 3))
    if path == "tuning.lora.layers_to_transform" and kind is list:
        return [dice.randrange(100) for _ in range(dice.randint(1, 3))]
    if path == "model.add_tokens" and kind is list:
        return list({text(dice): None for _ in range(dice.randint(1, 3))})
    if kind is list:
        return [text(dice) for _ in range(dice.randint(1, 3))]
    if path == "tuning.lora.loraplus_lr_ratio" and kind is float:
        return dice.choice([1.0, 1 + 1 / 3, 16.0])
    if kind is float:
        return (
            dice.choice([1e-05, 5e-324, 0.25, 0.1 + 0.2, 1 / 3])
            if path == "data.val_size" or "adam_beta" in path
            else dice.choice([1e-05, 0.5, 2 / 3])
        )
    return {
        int: dice.randint(1, 10**6),
        bool: dice.random() < 0.5,
        str: text(dice),
        type(None): None,
    }[kind]


def random_rope(dice: random.Random) -> dict[str, object]:
    """Valid settings of model.rope_scaling: few of their combinations are."""
    rope = {path: None for path in settings() if path.startswith("model.rope_scaling.")}
    rope_type = dice.choice([None, "linear", "dynamic", "yarn", "llama3"])
    rope["model.rope_scaling.rope_type"] = rope_type
    if rope_type is not None:
        rope["model.rope_scaling.factor"] = dice.choice([1.0, 1 + 1 / 3, 4.0])
    for option, rope_types in rules.ROPE_OPTIONS.items():
        if rope_type in rope_types and dice.random() < 0.5:
            value = dice.randint(1, 9) if option.startswith("original") else 2 / 3
            rope[f"model.rope_scaling.{option}"] = value
    return rope


def random_config(seed: int, text: typing.Callable[[random.Random], str]) -> Config:
    """A valid config that breaks no rule."""
    dice = random.Random(seed)
    while True:
        ropes = random_rope(dice)
        values = {
            path: ropes[path] if path in ropes else random_value(path, dice, text)
            for path in settings()
        }
        if values["data.val_size"] == 5e-324:
            values["data.val_size"] = 0.25
        if values["train.eval_strategy"] == "no":  # then nothing compares checkpoints
            values["train.load_best_model_at_end"] = False
            values["train.early_stopping_patience"] = None
            values["train.metric_for_best_model"] = "eval_loss"
        elif values["train.load_best_model_at_end"]:
            values["train.save_strategy"] = values["train.eval_strategy"]
            values["train.save_steps"] = values["train.eval_steps"]
        config = Config.model_validate(nested(values))
        if not rules.broken(config, str):
            return config


def reloaded(path: Path, text: str) -> LoadedConfig:
    path.write_text(text, encoding="utf-8")
    return load_merged(str(path))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dumped_config_is_read_back_equal(tmp_path, seed):
    config = random_config(seed, random_text)
    text = yaml_source.dump(config.model_dump())
    loaded = reloaded(tmp_path / "a.yaml", text)
    assert loaded.config == config
    assert all(origin.split(":")[0].endswith("a.yaml") for origin in loaded.origin.values())
    assert Config.model_validate(yaml.safe_load(text)) == config


@pytest.mark.parametrize("seed", SEEDS)
def test_a_config_given_as_overrides_equals_the_same_as_a_file(tmp_path, seed):
    config = random_config(seed, plain_text)
    entries = [f"{path}={_spelled(config, path)}" for path in settings()]
    (tmp_path / "empty.yaml").touch()
    assert load_merged(str(tmp_path / "empty.yaml"), overrides=entries).config == config


def _spelled(config: Config, path: str) -> str:
    node: object = config.model_dump()
    for name in path.split("."):
        node = node[name]
    if is_structured(path) and isinstance(node, dict | list):
        return json.dumps(node)
    return (
        ",".join(map(str, node))
        if isinstance(node, list)
        else "null"
        if node is None
        else str(node)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_truncated_yaml_is_refused_with_a_sentence_or_read(tmp_path, seed):
    dice = random.Random(seed)
    text = yaml_source.dump(random_config(seed, random_text).model_dump())
    at = dice.randrange(len(text))
    broken = dice.choice(
        [text[:at], text[:at] + dice.choice("\t:{}[]&*!'\"#-\x00\ufffe") + text[at:]]
    )
    try:
        reloaded(tmp_path / "a.yaml", broken)
    except ConfigError as error:
        assert "a.yaml:" in str(error) or "(built-in" in str(error)
