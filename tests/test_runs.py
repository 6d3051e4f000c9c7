"""sft_play.runs: files that are whole, run folders that read back as written, stamps that refuse."""

import errno
import json
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault, ExitClass
from sft_play.plan.run_plan import read_plan
from sft_play.runs import checkpoints, stamp
from sft_play.runs import folder as folders
from sft_play.runs.files import entries, read_json, write_json, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.report import RunReport


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def filled(output: Path, name: str, settings: Config | None = None) -> RunFolder:
    folder = folders.create(output, name, "tiny")
    folder.write_config(settings or Config())
    write_text(folder.path / "plan.json", "{}")
    folder.write_report(RunReport(run=folder.name, status="planned"))
    return folder


# Files


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """Path.glob does so from Python 3.12 on: a run would begin again next to its checkpoints."""
    (tmp_path / "checkpoint-1").mkdir()
    assert [path.name for path in entries(tmp_path)] == ["checkpoint-1"]
    assert entries(tmp_path / "none") == entries(tmp_path / "checkpoint-1") == []

    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "listdir", unreadable)
    monkeypatch.setattr(os, "scandir", unreadable)
    for listing in (entries, checkpoints.list_checkpoints, folders.list_runs):
        with pytest.raises(OSError, match="Input/output error"):
            listing(tmp_path)


def test_a_file_holds_the_text_and_nothing_else_is_left(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "first\nzweite Zeile: ä\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "first\nzweite Zeile: ä\n".encode()
    assert os.listdir(tmp_path / "new") == ["a.txt"]


@pytest.mark.parametrize("fault", ["half a surrogate pair", "rename", "fsync"])
def test_a_failing_write_leaves_the_old_file_and_no_temporary(fault, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_text(path, "old")
    text = "new"
    if fault == "half a surrogate pair":
        text = "x" * 100_000 + "\ud800"
    else:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace" if fault == "rename" else "fsync", fail)
    with pytest.raises((OSError, UnicodeEncodeError)):
        write_text(path, text)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_who_may_read_a_file_is_the_umasks_to_say(tmp_path):
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "private", "x")
        os.umask(0o022)
        write_text(tmp_path / "shared", "x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "shared")] == [
        0o600,
        0o644,
    ]


def test_json_is_sorted_indented_and_utf8_and_nan_is_refused(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": ["ä"]})
    assert path.read_text("utf-8") == '{\n  "a": [\n    "ä"\n  ],\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))
    assert read_json(path) == {"a": ["ä"], "b": 1}, "the old file stays"


# Run folders


def test_a_name_that_is_taken_is_refused_with_what_to_type(tmp_path):
    folder = folders.create(tmp_path, "a", "tiny")
    assert folders.create(tmp_path, "a", "tiny") == folder, "nothing is in it"
    (folder.path / "mine").touch()
    with pytest.raises(ConfigError, match=f"^RUN=a: .*TRAIN_RESUME_FROM={tmp_path / 'a'}$"):
        folders.create(tmp_path, "a", "tiny")


def test_runs_of_one_second_get_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.time, "strftime", lambda _: "20260102-030405")
    names = [folders.create(tmp_path, None, "tiny").name for _ in range(3)]
    assert names == ["tiny-20260102-030405", "tiny-20260102-030405-2", "tiny-20260102-030405-3"]


@pytest.mark.parametrize("name", ["../out", ".hidden", "-x", "a;b", "a\n", "x" * 129])
def test_a_name_that_is_no_folders_name_is_refused_before_anything_is_made(name, tmp_path):
    with pytest.raises(ConfigError, match=f"RUN={name}"):
        folders.create(tmp_path / "outputs", name, "tiny")
    assert os.listdir(tmp_path) == []


def test_find_takes_a_name_a_path_or_the_latest(tmp_path):
    with pytest.raises(EnvironmentFault, match="make train"):
        folders.find(tmp_path, None)
    old, new = filled(tmp_path, "old"), filled(tmp_path, "new")
    os.utime(old.path / "plan.json", (1, 1))
    (tmp_path / "no_run").mkdir()
    assert folders.list_runs(tmp_path) == [old, new]
    assert folders.find(tmp_path, None) == new
    assert folders.find(tmp_path, "old") == old
    assert folders.find(tmp_path / "elsewhere", str(old.path)) == old
    for name, said in {"xyz": "RUN=xyz: .*`make runs`", "odl": r"did you mean old\?"}.items():
        with pytest.raises(EnvironmentFault, match=said):
            folders.find(tmp_path, name)


@pytest.mark.parametrize("text", ["no", "", " x ", "yes\n\n", "ä\u2028é", "x\ry"])
def test_the_worker_reads_the_config_that_was_written(text, tmp_path):
    written = config(
        data={"system_prompt": text, "train_path": text},
        tuning={"lora": {"target_modules": [text or "x", "no"]}},
        model={"revision": text},
        train={"learning_rate": 1e-7, "adam_epsilon": 1e-30, "epochs": 1e5, "seed": 2**32 - 1},
    )
    assert filled(tmp_path, "a", written).read_config() == written


@pytest.mark.parametrize("read", [RunFolder.read_config, read_plan])
def test_a_folder_that_is_no_run_says_so(read, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(EnvironmentFault, match="is no run folder"):
            read(RunFolder(path))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.yaml", "train: {batch_size: 0}", "config.yaml: train.batch_size"),
        ("config.yaml", "train: {gone_setting: 1}", "train.gone_setting: .*another version"),
        ("config.yaml", "a: [", "config.yaml: "),
        ("plan.json", "{", "plan.json: "),
    ],
)
def test_a_run_of_another_version_is_named_not_traced(name, text, words, tmp_path):
    folder = filled(tmp_path, "a")
    (folder.path / name).write_text(text)
    with pytest.raises(EnvironmentFault, match=words):
        read_plan(folder) if name == "plan.json" else folder.read_config()


# Stamps


def facts(settings: Config | None = None) -> stamp.Stamp:
    """Return a whole stamp of a run of these settings."""
    settings = settings or Config()
    binding = replace(
        stamp.wanted_stamp(settings), precision="a", tokenizer_digest="a", template_digest="a"
    )
    return stamp.Stamp(
        **vars(binding),
        run="run",
        run_id="1234",
        config=settings.model_dump(mode="json"),
        dtypes={"trained": ["float32"], "frozen": ["float32"]},
        seed=settings.train.seed,
        data_seed=settings.train.data_seed,
        data_digest="a",
        deepspeed_digest=None,
        effective_batch=32,
        global_step=5,
        strategy="single",
        template="a",
        versions=stamp.versions(),
        world_size=1,
    )


def stamped(folder: Path, settings: Config | None = None) -> Path:
    stamp.write(folder, facts(settings))
    return folder


def test_weights_in_use_over_another_base_are_refused_without_a_word_of_resuming(tmp_path):
    folder = stamped(tmp_path / "c")
    now = stamp.wanted_stamp(Config())
    assert stamp.stamp_of_base(folder, now).backend == "bnb"
    with pytest.raises(CheckpointError) as error:
        stamp.stamp_of_base(folder, replace(now, base_digest="other"))
    assert "base_digest: trained with " in str(error.value), error.value
    assert "Put back the files of" in str(error.value) and "resume" not in str(error.value).lower()


@pytest.mark.parametrize(("old", "new"), [("bnb", "unsloth"), ("unsloth", "bnb")])
def test_allow_backend_change_allows_the_backend_and_nothing_else(old, new, tmp_path):
    folder = stamped(tmp_path / "c", config(tuning={"backend": old}))
    other = stamp.wanted_stamp(config(tuning={"backend": new}))
    with pytest.raises(CheckpointError) as error:
        stamp.refuse_mismatch(folder, other)
    facts = f"{folder} backend: {old} {new} TUNING_BACKEND={old} TRAIN_ALLOW_BACKEND_CHANGE=true"
    assert all(fact in str(error.value) for fact in facts.split())
    assert error.value.exit_class == ExitClass.CHECKPOINT
    assert stamp.refuse_mismatch(folder, other, allow_backend_change=True).backend == old
    for change, said in (
        ({"backend": new, "mode": "qlora"}, "mode: the checkpoint has lora, this run qlora"),
        ({"lora": {"r": 8}}, "adapter: "),
    ):
        wanted = stamp.wanted_stamp(config(tuning=change))
        with pytest.raises(CheckpointError, match=said):
            stamp.refuse_mismatch(folder, wanted, allow_backend_change=True)


@pytest.mark.parametrize(
    ("section", "values", "name"),
    [
        ("tuning", {"mode": "full"}, "adapter"),
        ("tuning", {"mode": "qlora"}, "quantisation"),
        ("train", {"neftune_noise_alpha": 5}, "neftune_noise_alpha"),
        ("model", {"name": "org/other"}, "base_model"),
        ("model", {"revision": "v2"}, "base_revision"),
        *(
            ("tuning", {"lora": {name: value}}, "adapter")
            for name, value in {
                "r": 8,
                "alpha": 8,
                "target_modules": ["q_proj"],
                "use_rslora": True,
                "use_dora": True,
                "loraplus_lr_ratio": 16,
                "layers_to_transform": [0],
                "modules_to_save": ["norm"],
                "trainable_tokens": ["<s>"],
            }.items()
        ),
    ],
)
def test_what_would_train_something_else_is_a_difference(section, values, name):
    differing = stamp.differences(facts(), stamp.wanted_stamp(config(**{section: values})))
    assert any(line.startswith(f"{name}: the checkpoint has ") for line in differing)


@pytest.mark.parametrize("name", stamp.REQUIRED)
def test_a_stamp_that_lacks_a_fact_or_has_an_empty_one_is_refused(name, tmp_path):
    whole = asdict(facts())
    del whole[name]
    write_json(tmp_path / stamp.NAME, whole)
    with pytest.raises(CheckpointError, match=f"has no {name}, so it is not known"):
        stamp.read_stamp(tmp_path)
    if name not in stamp.MAY_BE_EMPTY:
        for empty in (None, "", {}, []):
            write_json(tmp_path / stamp.NAME, {**whole, name: empty})
            with pytest.raises(CheckpointError, match=f"has no {name}, so"):
                stamp.read_stamp(tmp_path)


@pytest.mark.parametrize(
    "section", [{"bnb_4bit_quant_type": "fp4"}, {"bnb_4bit_use_double_quant": False}]
)
def test_another_quantization_is_a_difference_under_qlora_alone(section):
    assert stamp.differences(
        facts(config(tuning={"mode": "qlora"})),
        stamp.wanted_stamp(config(tuning={"mode": "qlora", **section})),
    )
    assert not stamp.differences(facts(), stamp.wanted_stamp(config(tuning=section)))


def test_what_a_resume_may_change_is_no_difference():
    changed = config(
        train={"learning_rate": 1.0, "batch_size": 3, "seed": 7, "data_seed": 8},
        tuning={"lora": {"alpha": 32.0}},
    )
    assert stamp.differences(facts(), stamp.wanted_stamp(changed)) == []


def test_a_stamp_survives_its_file(tmp_path):
    whole = facts(config(tuning={"lora": {"target_modules": ["q_proj", "v_proj"]}}))
    for each in (whole, replace(whole, merged=True)):
        stamp.write(tmp_path, each)
        assert stamp.read_stamp(tmp_path) == each
    assert stamp.differences(stamp.read_stamp(tmp_path), whole) == []


@pytest.mark.parametrize("text", [None, "{", "\xff", "[1]"])
def test_a_missing_or_broken_stamp_is_refused(text, tmp_path):
    if text is not None:
        (tmp_path / "stamp.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"choose another|has no backend"):
        stamp.read_stamp(tmp_path)


def model_folder(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_base_weights_that_changed_in_one_place_are_refused(tmp_path):
    weights = bytearray(os.urandom(3_000_000))
    base = model_folder(tmp_path / "base", bytes(weights))
    settings = config(model={"name": str(base)})
    checkpoint = stamped(tmp_path / "c", settings)
    for position in (0, 1_234_567, len(weights) - 1):
        changed = bytearray(weights)
        changed[position] ^= 1
        (base / "model.safetensors").write_bytes(changed)
        with pytest.raises(CheckpointError, match="base_digest: the checkpoint has"):
            stamp.refuse_mismatch(checkpoint, stamp.wanted_stamp(settings))
    (base / "model.safetensors").write_bytes(weights)
    stamp.refuse_mismatch(checkpoint, stamp.wanted_stamp(settings))


def test_a_large_file_is_sampled_at_both_ends_and_between(tmp_path):
    base = model_folder(tmp_path / "base", b"")
    size = 40 << 20
    with (base / "model.safetensors").open("wb") as file:
        file.truncate(size)  # sparse
    digests = {stamp.digest_of_model(base)}
    for position in (0, size // 2, size - 1):
        with (base / "model.safetensors").open("r+b") as file:
            file.seek(position)
            file.write(b"\1")
        digests.add(stamp.digest_of_model(base))
    assert len(digests) == 4


def test_the_digest_covers_config_every_shard_and_no_token(tmp_path):
    base = model_folder(tmp_path / "base", b"abc")
    digests = [stamp.digest_of_model(base)]
    (base / "training_args.bin").write_bytes(b"secret")
    (base / "README.md").write_text("x")
    assert stamp.digest_of_model(base) == digests[0]
    (base / "model-2.safetensors").write_bytes(b"")
    digests.append(stamp.digest_of_model(base))
    (base / "config.json").write_text("{}")
    digests.append(stamp.digest_of_model(base))
    assert len(set(digests)) == 3


def test_a_base_that_was_moved_is_the_same_base(tmp_path):
    base = model_folder(tmp_path / "base", b"abc")
    before = facts(config(model={"name": str(base)}))
    base.rename(tmp_path / "moved")
    after = stamp.wanted_stamp(config(model={"name": str(tmp_path / "moved")}))
    assert stamp.differences(before, after) == []


def test_versions_name_what_is_installed():
    found = stamp.versions()
    assert {"torch", "transformers", "accelerate", "peft"} <= found.keys()
    assert all(version[0].isdigit() for version in found.values())
    json.dumps(found)


def test_texts_that_join_to_the_same_differ():
    assert stamp.digest_of_text("ab", "c") != stamp.digest_of_text("a", "bc")
