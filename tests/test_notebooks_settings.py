"""What a notebook sets is carried to a config, and what has no counterpart is named."""

from pathlib import Path
from typing import Any

import pytest
from notebook_files import FOLDER, write_notebook

from sft_play.config import loader
from sft_play.errors import ConfigError
from sft_play.notebooks import document as documents
from sft_play.notebooks import settings

LOAD = "m, t = FastLanguageModel.from_pretrained('a/b', load_in_4bit=False)"
TRAIN = "trainer = SFTTrainer(model=m, args=SFTConfig({}))\ntrainer.train()"


class Exported:
    """A config that was made of a notebook, as the loader reads it, and the report."""

    def __init__(self, path: Path, folder: Path, data: str | None = "rows.jsonl") -> None:
        text, report = settings.export(documents.read(path), data)
        written = folder / "config.yaml"
        written.write_text(text, encoding="utf-8")
        self.loaded = loader.load(str(written))
        self.report = "\n".join(report)

    def __getitem__(self, path: str) -> Any:
        return self.loaded.value(path)

    def sets(self, path: str) -> bool:
        return self.loaded.is_set(path)


def exported(tmp_path: Path, arguments: str = "", *cells: str) -> Exported:
    """Return the config of a small notebook whose SFTConfig has these arguments."""
    path = write_notebook(tmp_path / "in.ipynb", LOAD, *cells, TRAIN.format(arguments))
    return Exported(path, tmp_path)


def test_every_setting_of_the_alpaca_notebook_is_carried(tmp_path):
    made = Exported(FOLDER / "alpaca.ipynb", tmp_path, None)
    wanted = {
        "model.name": "unsloth/llama-3-8b",
        "model.max_seq_len": 2048,
        "tuning.mode": "qlora",
        "tuning.lora.r": 16,
        "tuning.lora.alpha": 16,
        "tuning.lora.dropout": 0,
        "tuning.lora.target_modules": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split(),
        "train.batch_size": 2,
        "train.grad_accum": 4,
        "train.warmup_steps": 5,
        "train.max_steps": 60,
        "train.learning_rate": 2e-4,
        "train.logging_steps": 1,
        "train.optim": "adamw_8bit",
        "train.weight_decay": 0.01,
        "train.lr_scheduler_type": "linear",
        "train.seed": 3407,
        "train.packing": False,
        "train.gradient_checkpointing": True,
        "train.output_dir": "outputs",
        "train.report_to": [],
        "data.train_path": "yahma/alpaca-cleaned",
    }
    assert {path: made[path] for path in wanted} == wanted
    for words in ("max_steps = 60 is kept", "EOS_TOKEN", ".map", "4-bit weights", "prompts too"):
        assert words in made.report


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "conversational",
            {
                "model.name": "unsloth/gemma-3-4b-it",
                "tuning.lora.r": 8,
                "tuning.lora.alpha": 8,
                "train.epochs": 1,
                "data.train_path": "mlabonne/FineTome-100k",
            },
        ),
        (
            "inferred_markers",
            {
                "tuning.mode": "lora",
                "tuning.lora.target_modules": "all-linear",
                "train.warmup_steps": 0.05,
                "train.packing": True,
                "train.save_steps": 50,
                "train.report_to": ["wandb"],
                "data.train_path": "talks.jsonl",
            },
        ),
        (
            "pretraining",
            {
                "tuning.lora.modules_to_save": ["embed_tokens", "lm_head"],
                "tuning.lora.use_rslora": True,
                "train.learning_rate": 5e-5,
            },
        ),
    ],
)
def test_other_styles_are_read_too(name, wanted, tmp_path):
    made = Exported(FOLDER / f"{name}.ipynb", tmp_path, None)
    assert {path: made[path] for path in wanted} == wanted


def test_what_has_no_setting_here_is_named_with_its_value(tmp_path):
    report = Exported(FOLDER / "pretraining.ipynb", tmp_path).report
    assert "cell 2: embedding_learning_rate = 1e-05 has no setting here" in report
    report = exported(tmp_path, "load_best_model_at_end=True").report
    assert "train.load_best_model_at_end is left out: nothing is evaluated" in report


def test_functions_that_reshape_rows_are_named(tmp_path):
    report = exported(tmp_path, "", "d = to_sharegpt(d, merged_prompt='{a}')").report
    assert "cell 2: to_sharegpt is not carried" in report


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ("max_steps=-1, num_train_epochs=2", "train.max_steps", None),
        ("per_device_train_batch_size=size // 2", "train.batch_size", 4),
        ("learning_rate=float(x)", "train.learning_rate", "auto"),
        ("optim='adamw_bnb_8bit'", "train.optim", "adamw_8bit"),
        ("optim='lion_32bit'", "train.optim", "lion"),
        ("optim='lion_8bit'", "train.optim", "lion_8bit"),
        ("optim='lomo'", "train.optim", "adamw_torch_fused"),
        (
            "lr_scheduler_type='warmup_stable_decay'",
            "train.lr_scheduler_type",
            "warmup_stable_decay",
        ),
        (
            "lr_scheduler_kwargs={'min_lr_rate': 0.2}, lr_scheduler_type='cosine_with_min_lr'",
            "train.lr_scheduler_kwargs",
            {"min_lr_rate": 0.2},
        ),
        ("evaluation_strategy='steps', eval_steps=7", "train.eval_steps", 7),
        ("bf16=not is_bfloat16_supported()", "train.bf16", "auto"),
        ("fp16=True", "train.fp16", True),
        ("neftune_noise_alpha=5", "train.neftune_noise_alpha", 5),
        ("max_length=512", "model.max_seq_len", 512),
        ("report_to=['tensorboard', 'wandb']", "train.report_to", ["tensorboard", "wandb"]),
        ("report_to='all'", "train.report_to", ["tensorboard"]),
        ("resume_from_checkpoint='x'", "train.resume_from", None),
        ("per_device_train_batch_size=0", "train.batch_size", "auto"),
    ],
)
def test_values_are_read_where_they_can_be_and_fit(arguments, path, value, tmp_path):
    assert exported(tmp_path, arguments, "size = 4", "size = size * 2")[path] == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("learning_rate=float(x)", "learning_rate = float(x)"),
        ("optim='lomo'", "optim = 'lomo'"),
        (
            "lr_scheduler_type='cosine_with_restarts', lr_scheduler_kwargs={'num_cycles': 2}",
            "train.lr_scheduler_kwargs is left out",
        ),
        ("per_device_train_batch_size=0", "per_device_train_batch_size = 0"),
        ("**more", "SFTConfig"),
        ("", "train.learning_rate"),
        ("max_length=8, max_seq_length=9", "max_seq_length = 9"),
    ],
)
def test_what_is_not_carried_is_named(arguments, words, tmp_path):
    assert words in exported(tmp_path, arguments).report


@pytest.mark.parametrize(
    ("load", "mode"),
    [
        ("'a'", "qlora"),
        ("'a', load_in_4bit=True", "qlora"),
        ("model_name='a', load_in_4bit=four", "lora"),
        ("'a', load_in_4bit=False, full_finetuning=True", "full"),
        ("'a', load_in_16bit=True", "lora"),
    ],
)
def test_the_bits_of_the_load_decide_the_mode(load, mode, tmp_path):
    cells = ("four = False", f"m, t = FastModel.from_pretrained({load})", TRAIN.format(""))
    made = Exported(write_notebook(tmp_path / "in.ipynb", *cells), tmp_path)
    assert made["tuning.mode"] == mode


def test_rows_of_a_hub_set_keep_split_and_subset(tmp_path):
    cells = (LOAD, "d = load_dataset('a/b', 'c', split='train_sft[:500]')", TRAIN.format(""))
    made = Exported(write_notebook(tmp_path / "in.ipynb", *cells), tmp_path, None)
    (source,) = made["data.train_path"]
    taken = (source.path, source.subset, source.split, source.part)
    assert taken == ("a/b", "c", "train_sft", "[:500]")


def test_the_users_rows_win(tmp_path):
    made = exported(tmp_path, "", "d = load_dataset('a/b', split='train')")
    assert made["data.train_path"] == "rows.jsonl"


def test_the_token_is_never_written(tmp_path):
    load = "m, t = FastModel.from_pretrained('a', token='hf_secret')"
    path = write_notebook(tmp_path / "in.ipynb", load, TRAIN.format("hub_token='hf_secret'"))
    text, report = settings.export(documents.read(path), "rows.jsonl")
    assert "hf_secret" not in text + "\n".join(report)


@pytest.mark.parametrize("name", ["vision", "speech", "grpo", "dpo", "embeddings", "inference"])
def test_other_kinds_of_training_are_refused_by_name(name):
    with pytest.raises(ConfigError, match="a config of SFT-Play is for supervised"):
        settings.export(documents.read(FOLDER / f"{name}.ipynb"), None)


@pytest.mark.parametrize(
    ("cells", "value"),
    [
        (("c = {'size': 3, 'x': f()}",), 3),
        (("c = {'size': 3}", "c['size'] = 4"), "auto"),
        (("c = {'size': 3}", "c.update(size=4)"), "auto"),
        (("c = load()",), "auto"),
        (("class c:\n    size = 3",), 3),
        (("class Settings:\n    size: int = 3\nc = Settings(size=4)",), "auto"),
        (("class Settings:\n    size = 3\nc = Settings()",), 3),
        (("class c:\n    size = 3\nc.size = 4",), "auto"),
        (("import settings as c",), "auto"),
    ],
)
def test_settings_in_a_dict_or_a_class_are_read(cells, value, tmp_path):
    size = "c['size']" if "{" in cells[0] else "c.size"
    arguments = f"per_device_train_batch_size={size}"
    assert exported(tmp_path, arguments, *cells)["train.batch_size"] == value


def test_keywords_of_a_dict_are_taken_one_by_one(tmp_path):
    made = exported(tmp_path, "**c", "c = dict()", "c = {'max_steps': 7, 'learning_rate': f()}")
    assert made["train.max_steps"] == 7
    assert "learning_rate = f(), which only running tells" in made.report


def test_held_out_rows_are_carried_as_a_share(tmp_path):
    made = exported(tmp_path, "", "s = d.train_test_split(test_size=0.1, seed=1)")
    assert made["data.val_size"] == 0.1
    made = exported(tmp_path, "", "s = d.train_test_split(test_size=200)")
    assert "train_test_split is not carried" in made.report


def test_a_trainer_of_the_notebooks_own_is_read_and_named(tmp_path):
    cells = ("class MyTrainer(SFTTrainer):\n    pass", "MyTrainer(args=SFTConfig(max_steps=3))")
    path = write_notebook(tmp_path / "in.ipynb", LOAD, *cells)
    made = Exported(path, tmp_path)
    assert made["train.max_steps"] == 3
    assert "MyTrainer is a trainer of the notebook's own" in made.report


def test_what_is_set_after_the_arguments_were_made_wins(tmp_path):
    later = "trainer.args.max_steps = 9\ntrainer.args.bf16 = True\ntrainer.args.foo = 1"
    cells = (LOAD, TRAIN.format("max_steps=60"), later)
    made = Exported(write_notebook(tmp_path / "in.ipynb", *cells), tmp_path)
    assert (made["train.max_steps"], made["train.bf16"]) == (9, True)
    assert "foo = 1 has no setting here" in made.report
    cells = (LOAD, "a = SFTConfig(max_steps=5)\na.max_steps = 6", "SFTTrainer(m, args=a).train()")
    made = Exported(write_notebook(tmp_path / "in.ipynb", *cells), tmp_path)
    assert made["train.max_steps"] == 6
