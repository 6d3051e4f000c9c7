"""What a resumed run may change: every setting by its class, before a weight is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError
from test_runs import facts

from sft_play.config import on_resume
from sft_play.config.on_resume import OnResume
from sft_play.config.schema import Config, kinds, settings
from sft_play.errors import CheckpointError
from sft_play.runs.files import write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.resumed import Resumed, refuse_other_steps, settings_of_run

SOME_VALUES = ("other", 3, 0.25, 0.75, 64, True, False, ["other"], [1], {"a": "b"})
NESTED = {"tuning": {"mode": "qlora"}, "train": {"max_steps": 50}}


def with_value(path: str, value: Any) -> Config:
    """Return the config of NESTED with one more setting."""
    values: dict[str, Any] = {name: dict(section) for name, section in NESTED.items()}
    *sections, name = path.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = value
    return Config.model_validate(values)


def changed(path: str) -> Config:
    """Return a valid config in which one setting has another value."""
    then = Config.model_validate(NESTED)
    words = [word for kind in kinds(settings()[path].annotation) for word in get_args(kind)]
    for value in (*words, *SOME_VALUES):
        try:
            found = with_value(path, value)
        except ValidationError:
            continue
        if found != then:
            return found
    raise AssertionError(f"no other value of {path}")


def resumed(settings: Config) -> Resumed:
    return Resumed(Path("outputs/run/checkpoints/checkpoint-5"), facts(settings))


@pytest.mark.parametrize(
    "path", sorted({*on_resume.MUST_MATCH} - {"train.epochs", "model.chat_template"})
)
def test_every_setting_that_must_match_is_refused_in_a_table(path):
    with pytest.raises(CheckpointError) as caught:
        resumed(Config.model_validate(NESTED)).refuse_changes(changed(path))
    assert f"  {path} " in str(caught.value)
    assert caught.value.exit_class == 12


@pytest.mark.parametrize(
    "path", [path for path, kind in on_resume.CLASSES.items() if kind is not OnResume.MUST_MATCH]
)
def test_every_other_setting_may_change(path):
    assert changed(path) != Config.model_validate(NESTED)
    assert resumed(Config.model_validate(NESTED)).refuse_changes(changed(path)) is None


def test_epochs_must_match_unless_a_number_of_steps_overrides_them():
    then = Config.model_validate({"train": {"epochs": 2}})
    more = Config.model_validate({"train": {"epochs": 3}})
    with pytest.raises(CheckpointError, match=r"train.epochs +2.0 +3.0"):
        resumed(then).refuse_changes(more)


@pytest.mark.parametrize("beside", [{"weight": 2}, {"columns": {"question": "q"}}])
def test_a_source_may_move_but_not_change_its_weight_or_columns(beside):
    def config(path: str, **own: Any) -> Config:
        return Config.model_validate({"data": {"train_path": [{"path": path, **own}, "b.jsonl"]}})

    before = resumed(config("a.jsonl", weight=3))
    assert before.refuse_changes(config("moved.jsonl", weight=3)) is None
    with pytest.raises(CheckpointError, match=r"  data\.train_path "):
        before.refuse_changes(config("a.jsonl", **{"weight": 3, **beside}))


def test_runs_of_versions_with_other_settings_are_read_and_resumed(tmp_path):
    config = with_value("tuning.encoders", "lora")
    folder = RunFolder(tmp_path)
    folder.write_config(config)
    written = tmp_path / "config.yaml"
    earlier = written.read_text().replace("encoders", "towers")
    earlier = earlier.replace("token_share", "time_budget")
    earlier = earlier.replace("  fast_path:", "  cuda_graphs: true\n  fast_path:")
    assert "towers_learning_rate" in earlier and "cuda_graphs" in earlier
    written.write_text(earlier)
    assert folder.read_config() == config
    (tmp_path / "plan.json").touch()
    asked = {"train.cuda_graphs": {"value": "false", "origin": "schema", "is_chosen": False}}
    write_json(tmp_path / "asked.json", {"command": "make train", "settings": asked})
    read = settings_of_run(str(tmp_path), has_config=False)
    assert read.layer["tuning.encoders"].value == "lora" and not read.unset
    saved = facts(config)
    tuning = {name.replace("encoders", "towers"): value for name, value in config.tuning}
    train = {name.replace("token_share", "time_budget"): value for name, value in config.train}
    train["cuda_graphs"] = False
    saved = replace(saved, config={**saved.config, "tuning": tuning, "train": train})
    assert Resumed(tmp_path, saved).then.tuning.encoders == "lora"


def test_a_stamp_of_another_version_is_named():
    saved = facts()
    saved = replace(saved, config={**saved.config, "gone": {"setting": 1}})
    with pytest.raises(CheckpointError, match=r"settings of another version \(gone: "):
        Resumed(Path("checkpoint-5"), saved).refuse_changes(Config())


@pytest.mark.parametrize(
    "name, counted, words",
    [
        ("checkpoint-50", (), "its stamp has step 5, so it was renamed"),
        ("checkpoint-5", ("row",), "counted each answer of a conversation as a row"),
    ],
)
def test_a_checkpoint_that_was_renamed_or_whose_steps_counted_answers_is_refused(
    name, counted, words
):
    for accepted in ((), ("sample",)):
        refuse_other_steps(Path("checkpoint-5"), facts(), "a", 32, *accepted)
    with pytest.raises(CheckpointError, match=words):
        refuse_other_steps(Path(name), facts(), "a", 32, *counted)
