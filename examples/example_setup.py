"""What the examples share: their options, a preset's numbers, the rows as tokens.

`--config small|medium|large` are the files in configs/ that `make train CONFIG=small` reads, too.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments  # noqa: E402

from sft_play.config import loader  # noqa: E402
from sft_play.config.schema import Config  # noqa: E402
from sft_play.distributed import choose_dtype  # noqa: E402

IGNORED = -100  # the label of a token without loss
PER_DEVICE_BATCH_SIZE = 2
ACCUMULATION = 4


@dataclass(frozen=True)
class Setup:
    """The options of an example, and the preset that they name."""

    config: Config
    model_name: str
    rows_path: Path
    max_steps: int
    output_dir: Path

    @property
    def max_length(self) -> int:
        return self.config.model.max_seq_len

    def rows(self) -> list[dict[str, Any]]:
        """Return the conversations of the file, one a line."""
        return [json.loads(line) for line in self.rows_path.open(encoding="utf-8")]

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, with a token to pad with."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_name)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def dataset(self) -> Dataset:
        """Return the rows as tokens, padded to one length; every token of a row has a loss."""
        tokenizer = self.tokenizer()
        texts = [
            tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in self.rows()
        ]
        encoded = tokenizer(texts, truncation=True, max_length=self.max_length, padding=True)
        encoded["labels"] = [
            [token if is_real else IGNORED for token, is_real in zip(ids, mask, strict=True)]
            for ids, mask in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)
        ]
        return Dataset.from_dict(dict(encoded))

    def training_arguments(self) -> TrainingArguments:
        """Return arguments that suit one GPU and several alike."""
        dtype = choose_dtype()
        return TrainingArguments(
            output_dir=str(self.output_dir),
            per_device_train_batch_size=PER_DEVICE_BATCH_SIZE,  # of each GPU
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=self.config.train.learning_rate,
            max_steps=self.max_steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
            ddp_bucket_cap_mb=25,
            ddp_broadcast_buffers=False,
        )


def read_setup(description: str, output_dir: str) -> Setup:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", default="small", help="small, medium, large, or a file")
    parser.add_argument("--model", help="another model than the preset's: a name or a folder")
    parser.add_argument("--rows", type=Path, default=ROOT / "data" / "desk" / "train.jsonl")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output-dir", type=Path, default=Path(output_dir))
    options = parser.parse_args()
    config = loader.load_merged(options.config).config
    model_name = options.model or config.model.name
    return Setup(config, model_name, options.rows, options.max_steps, options.output_dir)
