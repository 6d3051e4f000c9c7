"""The tiny base: its files are what the generator makes, its model learned."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tools.embedded import __main__ as program
from tools.embedded import corpus, model, task, town
from tools.embedded.model import CHAT_TEMPLATE, PretrainConfig, encode_documents
from tools.embedded.town import WORDS

DATA = Path(__file__).resolve().parent.parent / "data"
MODEL = DATA / "tiny_llama"
SPLITS = ("train", "val", "test")
MAX_ROW_TOKENS = 160
MAX_BYTES = 8_000_000


def read_rows(split: str) -> list[list[dict[str, str]]]:
    lines = (DATA / "desk" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def splits() -> dict[str, list[task.Conversation]]:
    return task.make_splits()


def test_files_are_what_the_generator_makes() -> None:
    for name, text in program.data_files().items():
        assert (DATA / name).read_bytes() == text.encode(), (
            f"{name} differs; run python -m tools.embedded --only data"
        )


def test_everything_shipped_is_at_most_8_megabytes() -> None:
    folders = (DATA / "tiny_llama", DATA / "corpus", DATA / "desk")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_splits_share_no_source_no_prompt_and_no_full_name(
    splits: dict[str, list[task.Conversation]],
) -> None:
    sources = [conversation.source for split in SPLITS for conversation in splits[split]]
    assert len(sources) == len(set(sources))
    prompts = [json.dumps(row[:-1]) for split in SPLITS for row in read_rows(split)]
    assert len(prompts) == len(set(prompts))
    trained = " ".join(message["content"] for row in read_rows("train") for message in row)
    names = {f"{first} {last}" for first in WORDS.first_names for last in WORDS.surnames}
    for split in ("val", "test"):
        held_out = " ".join(message["content"] for row in read_rows(split) for message in row)
        assert not [name for name in names if name in held_out and name in trained]


def test_every_conversation_renders_with_its_prompt_as_a_prefix(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for messages in (row for split in SPLITS for row in read_rows(split)):
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        ids, prompt_ids = tokenizer(text)["input_ids"], tokenizer(prompt)["input_ids"]
        assert text == f"{prompt}{messages[-1]['content']}<|end|>"
        assert ids[: len(prompt_ids)] == prompt_ids
        assert ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
        assert len(ids) <= MAX_ROW_TOKENS


def test_the_assistant_mask_covers_the_answers_and_their_end_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = next(
        row for row in read_rows("train") if len(row) > 3 and row[0]["role"] == "system"
    )
    out = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [i for i, on in zip(out["input_ids"], out["assistant_masks"], strict=True) if on]
    answers = [
        message["content"] + "<|end|>" for message in messages if message["role"] == "assistant"
    ]
    assert tokenizer.decode(trained) == "".join(answers)


def test_the_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="role tool is unknown"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    "text", ["Zoë Müller, K-417", "日本語 and \U0001f642", "tabs\tand\n\n  spaces ", "Ωμέγα\x00"]
)
def test_the_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_base_model_has_learned_its_text(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    stream = corpus.make_documents(seed=corpus.CORPUS_SEED + 1)
    losses, tokens = 0.0, 0
    for ids in encode_documents(tokenizer, [next(stream) for _ in range(40)]):
        row = torch.tensor([ids])  # (1, T)
        with torch.no_grad():
            losses += model(input_ids=row, labels=row).loss.item() * (len(ids) - 1)
        tokens += len(ids) - 1
    assert losses / tokens < 0.25 * math.log(model.config.vocab_size)


def test_the_model_fits_four_bit_blocks_and_ties_its_embeddings() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["hidden_size"] % 64 == config["intermediate_size"] % 64 == 0
    assert config["tie_word_embeddings"] and config["model_type"] == "llama"


def test_no_document_holds_a_role_marker_or_an_empty_line() -> None:
    text = (DATA / "corpus" / "town.txt").read_text(encoding="utf-8")
    assert "<|" not in text
    assert "\n\n\n" not in text
    assert len(corpus.split_documents(text)) > 1000


def test_the_package_imports_nothing_of_sft_play() -> None:
    for path in Path(town.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            assert not any(name.startswith("sft_play") for name in names), path


@pytest.mark.long
def test_the_builder_pretrains_and_saves_a_model_that_loads(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "town.txt").write_text(
        corpus.corpus_text(size_bytes=60_000), encoding="utf-8"
    )
    loss = model.build_model(tmp_path, PretrainConfig(steps=2, batch_tokens=1024))
    built = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny_llama")
    assert math.isfinite(loss) and loss < 1.2 * math.log(built.config.vocab_size)
    assert AutoTokenizer.from_pretrained(tmp_path / "tiny_llama").chat_template == CHAT_TEMPLATE
