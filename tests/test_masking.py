"""sft_play.masking: no token and no password is printed or written."""

import logging
import os
import sys
from pathlib import Path

import pytest
from calls import outcome_of

from sft_play.config import loader
from sft_play.errors import ConfigError
from sft_play.masking import holds_credential, mask_secrets
from sft_play.progress import VisibleFormatter

CANARY = "hf_CanaryCanaryCanary0123456789"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Authorization: Bearer {CANARY}", "Authorization: Bearer ***"),
        ("https://me:pass@host/a.jsonl: gone", "https://***@host/a.jsonl: gone"),
        ("http://0123456789abcdef@host", "http://***@host"),
        ("GET /x?access_token=0123456789&page=2", "GET /x?access_token=***&page=2"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=***"),
        ("{'password': 'correct-horse'}", "{'password': '***'}"),
        ("token=<0123456789abcdef>", "token=***"),
        ("password=<|correct-horse|>", "password=***"),
        ("per_token=0123456789abcdef", "per_token=***"),
        ("csrf_token: 0123456789", "csrf_token: ***"),
        (f"eos_token={CANARY}", "eos_token=***"),
        ("eos_token=</s> access_token=0123456789", "eos_token=</s> access_token=***"),
        ("stop_token=<|im_end|>0123456789", "stop_token=***"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert "***" in mask_secrets(text)
    assert mask_secrets(text).split("***")[0] == shown.split("***")[0]
    for secret in (CANARY, "pass@", "0123456789", "correct"):
        assert secret not in mask_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens=1234567890 trained=99999999",
        "the token '<|im_end|>' straddles the end of the prompt",
        "train.max_steps=10 (config.yaml:3); user@host; a@b.c",
        "https://huggingface.co/datasets/a/b",
        "tokens_per_second: 1234567890",
        "eos_token=<|im_end|>",
        "{'eos_token': '<|endoftext|>', 'pad_token': '<end_of_turn>'}",
        "model.image_token: <|vision_start|>",
        "stop_token=<|eot_id|>, nats_per_token=0.69314718 and 1.2345678e-05",
        "https://host/a.jsonl?eos_token=<|im_end|>",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert mask_secrets(text) == text and not holds_credential(text)


@pytest.mark.parametrize(
    "setting",
    [
        f"data.train_path=https://me:{CANARY}@host/a.jsonl",
        "data.train_path=[{path: 'https://host/a.jsonl?token=0123456789'}]",
        f"model.name=org/{CANARY}",
        f"train.run_name={CANARY}",
        f"model.template_kwargs={{token: {CANARY}}}",
    ],
)
def test_a_setting_with_a_credential_is_refused_as_it_would_be_written(setting: str) -> None:
    with pytest.raises(ConfigError, match="has a token or a password") as error:
        loader.load_merged(None, {}, [setting])
    assert CANARY not in str(error.value)


@pytest.mark.parametrize("text", [f"GET https://a:{CANARY}@host/x", f"token={CANARY}"])
def test_lines_of_logs_and_their_tracebacks_are_masked(text: str) -> None:
    try:
        raise OSError(text)
    except OSError as error:
        facts = {"msg": text, "levelname": "ERROR", "exc_info": (OSError, error, None)}
    line = VisibleFormatter("%(message)s").format(logging.makeLogRecord(facts))
    assert "***" in line and CANARY not in line


@pytest.mark.slow
@pytest.mark.long
def test_a_canary_is_nowhere_in_a_run_nor_in_what_it_prints(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "HF_TOKEN": CANARY,
        "WANDB_API_KEY": CANARY,
        "MLFLOW_TRACKING_URI": f"http://me:{CANARY}@127.0.0.1:9",
        "TRAIN_OUTPUT_DIR": str(tmp_path),
        "TRAIN_RUN_NAME": "canary",
        "TRAIN_MAX_STEPS": "2",
        "TRAIN_REPORT_TO": "tensorboard",
        "DEVICE": "cpu",
    }
    done = outcome_of([sys.executable, "-m", "sft_play", "train"], environ)
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "plan.json", "rank-0.log"} <= {path.name for path in written}
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
