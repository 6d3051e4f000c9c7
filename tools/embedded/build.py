"""Builds the files under data/: conversations, corpus, tokenizer and the pre-trained tiny Llama."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.embedded.corpus import corpus_text, split_documents
from tools.embedded.pretraining import PretrainConfig, initialize_markers, new_model, pretrain
from tools.embedded.task import make_splits
from tools.embedded.tokenizer import train_tokenizer


def data_files() -> dict[str, str]:
    """Return {path under data/: text} of every generated text file."""
    files = {"corpus/town.txt": corpus_text()}
    for split, conversations in make_splits().items():
        lines = []
        for conversation in conversations:
            row = {"messages": conversation.messages()}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        files[f"desk/{split}.jsonl"] = "".join(lines)
    return files


def build_data(out: Path) -> None:
    """Write every generated text file under `out`, each whole or not at all."""
    for name, text in data_files().items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)


def build_model(out: Path, config: PretrainConfig | None = None) -> float:
    """Train tokenizer and model on `out`/corpus and write `out`/tiny_llama.

    Return the final loss in nats a token.
    """
    config = config or PretrainConfig()
    torch.manual_seed(config.seed)
    documents = split_documents((out / "corpus" / "town.txt").read_text(encoding="utf-8"))
    tokenizer = train_tokenizer(documents, config.vocab_size)
    model = new_model(config, tokenizer)
    parameters = model.num_parameters()
    print(
        f"model parameters={parameters} vocab={len(tokenizer)} documents={len(documents)}",
        flush=True,
    )
    loss = pretrain(model, tokenizer, config)
    initialize_markers(model, tokenizer)
    save_model(model, tokenizer, out / "tiny_llama")
    return loss


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16, configs, tokenizer and chat template to `folder`, or nothing."""
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.to(torch.bfloat16).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for path in staging.iterdir():
            path.chmod(0o644)
        staging.chmod(0o755)
        replace_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(staging: Path, folder: Path) -> None:
    """Move `staging` to `folder`; what was there is deleted."""
    old = staging.with_name(staging.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(staging, folder)
    shutil.rmtree(old, ignore_errors=True)
