"""Layers and their precedence, the configs that ship, printed blocks, what `make config` shows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from sft_play.config import on_resume, present, reference
from sft_play.config.layers import displayed
from sft_play.config.loader import CONFIGS, LoadedConfig, environment, load_merged
from sft_play.config.schema import Config, SourceSection, env_name, settings
from sft_play.config.yaml_source import Located, read_mapping
from sft_play.errors import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"
PRINTED = FIXTURES / "printed_configs"
EMPTY = str(FIXTURES / "empty.yaml")
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, so that origins read `a.yaml:1`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def value(loaded: LoadedConfig, path: str) -> object:
    node: object = loaded.config
    for name in path.split("."):
        node = getattr(node, name)
    return node


def test_each_layer_overrides_the_one_before_and_names_itself(folder):
    path = "train.logging_steps"
    assert (value(load_merged(EMPTY), path), load_merged(EMPTY).origin[path]) == (
        "auto",
        "built-in default",
    )
    (folder / "low.yaml").write_text("train:\n  logging_steps: 1\n")
    (folder / "high.yaml").write_text("train:\n  logging_steps: 2\n")
    (folder / "a.yaml").write_text("include: [low.yaml, high.yaml]\n")
    assert load_merged("a.yaml").origin[path] == "high.yaml:2"
    (folder / "a.yaml").write_text("train:\n\n  logging_steps: 3\ninclude: [low.yaml, high.yaml]\n")
    loaded = load_merged("a.yaml")
    assert (value(loaded, path), loaded.origin[path]) == (3, "a.yaml:3")
    environ = {"TRAIN_LOGGING_STEPS": "4"}
    loaded = load_merged("a.yaml", environ)
    assert (value(loaded, path), loaded.origin[path]) == (4, "environment TRAIN_LOGGING_STEPS")
    target = {path: Located(5, "make train-x")}
    loaded = load_merged("a.yaml", environ, target=target)
    assert (value(loaded, path), loaded.origin[path]) == (5, "make train-x")
    loaded = load_merged("a.yaml", environ, [f"{path}=6"], target)
    assert (value(loaded, path), loaded.origin[path]) == (6, f"--set {path}")


def test_changed_settings_are_in_a_copy():
    config = load_merged(EMPTY).config
    changed = config.changed({"train.logging_steps": 7, "tuning.lora.r": 4})
    assert (changed.train.logging_steps, changed.tuning.lora.r) == (7, 4)
    assert (config.train.logging_steps, config.tuning.lora.r) == ("auto", 16)
    assert changed.changed({"train": config.train, "tuning.lora": config.tuning.lora}) == config


def test_a_preset_is_found_by_its_name_from_any_folder(folder):
    assert load_merged("small").source == CONFIGS / "small.yaml"
    (folder / "small").mkdir()
    assert load_merged("small").source == CONFIGS / "small.yaml", "a folder does not hide it"


def test_includes_are_relative_to_the_including_file_and_count_once(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "common.yaml").write_text("train: {epochs: 1, seed: 1}\n")
    (folder / "sub" / "left.yaml").write_text("include: common.yaml\ntrain: {epochs: 2}\n")
    (folder / "sub" / "right.yaml").write_text(
        "include: ../sub/common.yaml\ntrain: {save_steps: 7}\n"
    )
    (folder / "a.yaml").write_text("include:\n  - sub/left.yaml\n  - sub/right.yaml\n")
    train = load_merged("a.yaml").config.train
    assert (train.epochs, train.seed, train.save_steps) == (
        2,
        1,
        7,
    )  # right's second reading of common does not undo left


def test_merge_keys_and_anchors_keep_the_line_where_a_value_stands(folder):
    (folder / "a.yaml").write_text("train: &t\n  epochs: 2\n  seed: 3\n")
    assert load_merged("a.yaml").origin["train.seed"] == "a.yaml:3"
    (folder / "b.yaml").write_text(
        "<<: {train: {epochs: 2}, data: {val_size: 0.1}}\ntrain: {seed: 3}\n"
    )
    loaded = load_merged("b.yaml")
    assert (loaded.config.data.val_size, loaded.config.train.seed, loaded.config.train.epochs) == (
        0.1,
        3,
        "auto",
    )


def test_aliases_that_multiply_are_refused_in_no_time(folder):
    lines = ["x0: &x0 [1]"] + [
        f"x{n}: &x{n} {{{', '.join(f'k{i}: *x{n - 1}' for i in range(9))}}}" for n in range(1, 30)
    ]
    (folder / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"a.yaml:5: .*aliases repeat values.*over 20,000"):
        load_merged("a.yaml")


def source(path: str, weight: float) -> SourceSection:
    return SourceSection(path=path, weight=weight)


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ("train: {learning_rate: 2e-4}", "train.learning_rate", 2e-4),
        ("train: {batch_size: 010}", "train.batch_size", 10),
        ("train: {batch_size: '4'}", "train.batch_size", 4),
        ("train: {max_steps: 1e3}", "train.max_steps", 1000),
        ("train: {bf16: no}", "train.bf16", False),
        ("train: {eval_strategy: no}", "train.eval_strategy", "no"),
        ("train: {eval_strategy: false}", "train.eval_strategy", "no"),
        ("train: {run_name: 2024-01-01}", "train.run_name", "2024-01-01"),
        ('model: {revision: "4"}', "model.revision", "4"),
        ("model: {revision: null}", "model.revision", None),
        ("train:", "train.seed", 42),
        ("include:\ntrain: {seed: 1}", "train.seed", 1),
        ("", "train.seed", 42),
        ("\ufefftrain: {seed: 1}", "train.seed", 1),
        ("train:\r\n  seed: 1\r\n  epochs: 2\r\n", "train.epochs", 2.0),
        ("train:\n  <<: [{seed: 1}, {seed: 2}]\n", "train.seed", 1),
        (
            "tuning: {lora: {target_modules: [q_proj, v_proj]}}",
            "tuning.lora.target_modules",
            ["q_proj", "v_proj"],
        ),
        ("data: {train_path: [a.jsonl, b.csv]}", "data.train_path", ["a.jsonl", "b.csv"]),
        (
            "data: {train_path: {a.jsonl: 3, b/c: 0.5}}",
            "data.train_path",
            [source("a.jsonl", 3), source("b/c", 0.5)],
        ),
        (
            "data: {train_path: [a.jsonl, {path: b/c, weight: 2}]}",
            "data.train_path",
            ["a.jsonl", source("b/c", 2)],
        ),
        ("data: {columns: {question: problem}}", "data.columns", {"question": "problem"}),
    ],
)
def test_yaml_means_what_it_says(folder, text, path, wanted):
    (folder / "a.yaml").write_bytes(text.encode())
    got = value(load_merged("a.yaml"), path)
    assert (got, type(got)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("TRAIN_BATCH_SIZE", "auto", "auto"),
        ("TRAIN_BATCH_SIZE", " 4 ", 4),
        ("TRAIN_BATCH_SIZE", "010", 10),
        ("TRAIN_LEARNING_RATE", "1e-4", 1e-4),
        ("TRAIN_DATALOADER_PIN_MEMORY", "true", True),
        ("TRAIN_GRADIENT_CHECKPOINTING", "false", False),
        ("TRAIN_GRADIENT_CHECKPOINTING", "0", False),
        ("TRAIN_EVAL_STRATEGY", "no", "no"),
        ("TRAIN_MAX_STEPS", "null", None),
        ("TRAIN_MAX_STEPS", "", None),
        ("TRAIN_RUN_NAME", "2024", "2024"),
        ("MODEL_REVISION", "1.10", "1.10"),
        ("MODEL_REVISION", "none", None),
        ("MODEL_NAME", "null", "null"),
        ("MODEL_NAME", "a: b # c", "a: b # c"),
        ("TUNING_LORA_TARGET_MODULES", "all-linear", "all-linear"),
        ("TUNING_LORA_TARGET_MODULES", "q_proj", ["q_proj"]),
        ("TUNING_LORA_TARGET_MODULES", "q_proj, v_proj,", ["q_proj", "v_proj"]),
        ("TUNING_LORA_TARGET_MODULES", '["q_proj", v_proj]', ["q_proj", "v_proj"]),
    ],
)
def test_a_variable_is_read_by_the_type_of_its_setting(name, text, wanted):
    path = next(path for path in settings() if env_name(path) == name)
    got = value(load_merged(EMPTY, {name: text}), path)
    assert (got, type(got)) == (wanted, type(wanted))


def test_overrides_are_read_like_variables_and_a_bare_load_reads_no_environment(monkeypatch):
    monkeypatch.setenv("TRAIN_SEED", "7")
    assert environment()["TRAIN_SEED"] == "7"
    loaded = load_merged(
        EMPTY, overrides=["data.system_prompt=a=b", "train.max_steps=null", "train.batch_size=2"]
    )
    assert (
        loaded.config.data.system_prompt,
        loaded.config.train.max_steps,
        loaded.config.train.batch_size,
        loaded.config.train.seed,
    ) == ("a=b", None, 2, 42)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_that_ships_loads_and_opens_with_its_command(name):
    load_merged(f"{CONFIGS / name}.yaml")
    if name != "base":
        assert (CONFIGS / f"{name}.yaml").read_text().startswith("# make ")


def leaves(name: str) -> dict[str, object]:
    """The settings that one file sets, by dotted name."""
    found: dict[str, object] = {}

    def visit(node: dict[str, Located], prefix: str) -> None:
        for key, located in node.items():
            if isinstance(located.value, dict):
                visit(located.value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = located.value

    visit(read_mapping(Path(name)), "")
    return found


@pytest.mark.parametrize(
    "name", ["multi_gpu_config", "evaluation", "rtx4090_sli", "a100_pair", "h200_quad"]
)
def test_a_printed_block_loads_exactly_as_it_stands(name):
    loaded = load_merged(str(PRINTED / f"{name}.yaml"))
    for path, wanted in leaves(PRINTED / f"{name}.yaml").items():
        assert value(loaded, path) == wanted
        assert loaded.is_set(path)


@pytest.mark.parametrize("name", ["multi_gpu_config", "rtx4090_sli", "a100_pair", "h200_quad"])
def test_a_shipped_config_has_every_value_of_its_printed_block(name):
    shipped = leaves(CONFIGS / f"{name}.yaml")
    assert leaves(PRINTED / f"{name}.yaml").items() <= shipped.items()
    added = {"tuning.mode", "train.learning_rate", "train.epochs", "train.activation_offloading"}
    assert set(shipped) - set(leaves(PRINTED / f"{name}.yaml")) <= added


def test_each_printed_alternative_loads_and_all_at_once_are_refused_with_both_lines(folder):
    text = (PRINTED / "size_scaling.yaml").read_text()
    loaded = []
    for number, block in enumerate(re.split(r"\n\n", text)):
        (folder / f"{number}.yaml").write_text(block)
        train = load_merged(f"{number}.yaml").config.train
        loaded.append((train.batch_size, train.grad_accum))
    assert loaded == [(4, 4), (8, 4), (16, 2)]
    (folder / "all.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_merged("all.yaml")
    twice = [re.findall(r"\d+", line) for line in str(error.value).splitlines()]
    assert twice == [["9", "2"], ["11", "4"], ["16", "2"], ["18", "4"]]


def test_every_setting_has_a_sentence_and_a_variable_of_its_own():
    for path, field in settings().items():
        assert field.description and field.description.endswith("."), path
        assert 15 < len(field.description) < 200, path
    names = [env_name(path) for path in settings()]
    assert len(set(names)) == len(names)


def test_json_holds_every_value_and_every_origin_as_plain_data():
    loaded = load_merged("multi_gpu_config", {"TRAIN_BATCH_SIZE": "2"})
    shown = json.loads(json.dumps(present.settings_json(loaded)))
    assert shown["values"]["train"]["batch_size"] == 2
    assert shown["origin"]["train.batch_size"] == "environment TRAIN_BATCH_SIZE"
    assert set(shown["origin"]) == set(settings())
    assert Config.model_validate(shown["values"]) == loaded.config


def test_lines_are_aligned_and_name_origins():
    lines = present.as_lines(load_merged("multi_gpu_config", {"DATA_SYSTEM_PROMPT": "x" * 200}))
    assert len(lines) == len(settings())
    assert len({line.index(" = ") for line in lines}) == 1
    (line,) = [line for line in lines if line.startswith("train.ddp_bucket_cap_mb ")]
    origin = f"{displayed(CONFIGS / 'multi_gpu_config.yaml')}:26"
    assert line.split() == ["train.ddp_bucket_cap_mb", "=", "200", "#", origin]
    assert "x" * 200 in "\n".join(lines)


def test_the_page_has_the_tables_that_the_schema_makes():
    text = reference.PAGE.read_text(encoding="utf-8")
    assert text == reference.page(text), "run `python -m sft_play.config.reference`"


def test_the_config_room_loads_no_torch():
    code = (
        "import sys, sft_play.config.present, sft_play.config.reference, "
        "sft_play.config.deepspeed as d, sft_play.config.loader as l;"
        "l.load_merged('tiny', l.environment()); d.read_deepspeed_json('configs/deepspeed_zero3.json');"
        "print([name for name in ('torch', 'transformers', 'deepspeed', 'accelerate', 'numpy') if "
        "name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CONFIGS.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_setting_says_what_it_means_to_a_resumed_run():
    """A new setting has no class until its author has chosen one in config/on_resume.py."""
    assert set(on_resume.CLASSES) == set(settings())
    kinds = (on_resume.MUST_MATCH, on_resume.CONTENT, on_resume.PLANNED, on_resume.FREE)
    names = [name for kind in (*kinds, on_resume.OF_LAUNCH) for name in kind]
    assert len(names) == len(set(names)), "in two classes"


def plain(located: Located | object) -> object:
    """Return what a file says, without where."""
    value = getattr(located, "value", located)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(present.json_schema())
    return jsonschema.Draft202012Validator(present.json_schema())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_configs_that_ship_follow_the_json_schema(path, schema):
    errors = schema.iter_errors(plain(Located(read_mapping(path), 0)))
    assert [error.message for error in errors] == []


def test_the_json_schema_knows_no_misspelt_name_and_no_wrong_value(schema):
    for wrong in ({"train": {"epoch": 1}}, {"train": {"batch_size": 0}}, {"include": 1}):
        assert not schema.is_valid(wrong), wrong
    assert schema.is_valid({"include": ["a.yaml"]})
