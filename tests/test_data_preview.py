"""sft_play.data.preview: which samples are shown, their spans, and the command."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from previews import LEDGER, TEXTS, sample_of, text_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from sft_play import cli
from sft_play.config.schema import Config
from sft_play.data.pipeline import build_run_data
from sft_play.data.preview import (
    SpanFinder,
    choose_samples,
    first_packed_sequence,
    in_marks,
    preview_sequences,
    token_counts,
)
from sft_play.data.preview_page import render_page
from sft_play.data.render import IGNORE_INDEX, RenderedSample
from sft_play.data.row_hashes import RowHashes
from sft_play.data.store import Split, Store, StoredSample, StoreWriter, to_arrays
from sft_play.data.trees import Units, find_units
from sft_play.plan.step import Layout

ROOT = Path(__file__).resolve().parents[1]
NO_CONFIG = ROOT / "tests" / "fixtures" / "empty.yaml"


@pytest.fixture(scope="module")
def blanks_as_underlines() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: ▁ for a space, one before the text, bytes for rare characters."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [
        AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")
    ]
    by_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["Plain words begin and end, a tab here: blank blank words"] * 9
    bpe.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=360, special_tokens=[*special, *by_bytes], show_progress=False
        ),
    )
    written = json.loads(bpe.to_str())
    written["added_tokens"] = written["added_tokens"][:3]  # bytes are plain tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token="</s>", bos_token="<s>"
    )


@pytest.fixture(params=["bytes of characters", "blanks as underlines"])
def any_tokenizer(request, tokenizer, blanks_as_underlines):
    return tokenizer if request.param == "bytes of characters" else blanks_as_underlines


# Spans


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_spans_are_the_decoded_ids(any_tokenizer, text):
    ids = any_tokenizer(text)["input_ids"] + [any_tokenizer.eos_token_id]
    spans = SpanFinder(any_tokenizer)(sample_of(ids))
    assert text_of(spans) == any_tokenizer.decode(ids) == text + any_tokenizer.eos_token
    assert [number for span in spans for number in span.ids] == ids
    assert [span.index for span in spans] == np.cumsum([0, *(len(span.ids) for span in spans)])[
        :-1
    ].tolist()


def test_texts_of_spans_are_the_decoded_ids_of_any_ids(tokenizer):
    draw = random.Random(0)
    for _ in range(200):  # most of these are bytes of no character
        ids = [
            draw.randrange(len(tokenizer)) if draw.random() < 0.5 else draw.randrange(5, 261)
            for _ in range(draw.randrange(1, 40))
        ]
        trained = [False, *(draw.random() < 0.5 for _ in ids[1:])]
        spans = SpanFinder(tokenizer)(sample_of(ids, trained))
        assert text_of(spans) == tokenizer.decode(ids), ids
        assert [span.is_trained for span in spans for _ in span.ids] == trained


def test_trained_spans_are_the_labels(prepared_rows, tokenizer):
    for sample in prepared_rows.train:
        spans = SpanFinder(tokenizer)(sample)
        assert [span.is_trained for span in spans for _ in span.ids] == (
            sample.labels != IGNORE_INDEX
        ).tolist()
        trained = [number for span in spans if span.is_trained for number in span.ids]
        assert trained == sample.labels[sample.labels != IGNORE_INDEX].tolist()
        assert trained[-1] == tokenizer.eos_token_id, "the stop token is shown as trained"


def test_a_character_that_is_trained_in_part_stands_with_the_token_that_ends_it(tokenizer):
    ids = tokenizer("🙂")["input_ids"]
    spans = SpanFinder(tokenizer)(sample_of(ids))  # the first token of a sample is never trained
    assert [(span.text, span.is_trained) for span in spans] == [("", False), ("🙂", True)]


def test_special_tokens_stand_alone(tokenizer):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": "Yes"}],
        return_dict=False,
    )
    special = [span.text for span in SpanFinder(tokenizer)(sample_of(ids)) if span.is_special]
    assert special == ["<|user|>", "<|assistant|>", "<|end|>"]


# Which samples


def split_of(folder: Path, samples: list[StoredSample]) -> Split:
    with StoreWriter(folder) as writer:
        writer.append(to_arrays(samples))
    return Split.whole([Store(folder)])


def plain(
    tokens: int, number: int, cut: int = 0, trained: tuple[bool, ...] | None = None
) -> StoredSample:
    mask = trained or (False, *[True] * (tokens - 1))
    ids = list(range(10, 10 + tokens))
    labels = [i if is_trained else IGNORE_INDEX for i, is_trained in zip(ids, mask, strict=True)]
    hashes = RowHashes(number, number, number)
    return StoredSample(RenderedSample(ids, labels), 0, number, hashes, cut)


def test_the_first_and_the_instructive_are_chosen(tmp_path):
    turns = (False, True, False, True)
    split = split_of(
        tmp_path,
        [
            plain(5, 1),
            plain(5, 2),
            plain(9, 3),
            plain(2, 4),
            plain(4, 5, cut=7),
            plain(4, 6),
            plain(3, 6),
            plain(4, 7, trained=turns),
        ],
    )
    assert choose_samples(split, 2) == {
        0: ["sample 1"],
        1: ["sample 2"],
        2: ["longest"],
        3: ["shortest"],
        4: ["shortened"],
        6: ["continues with a row"],
        7: ["several answers"],
    }


def units_of(lengths: np.ndarray) -> Units:
    return find_units(lengths, np.zeros_like(lengths), np.arange(1, 1 + len(lengths)), None)


def test_a_packed_example_is_a_sequence_of_several_documents():
    lengths = np.array([3, 4, 5, 2, 6, 8])
    layout = Layout(3, grad_accum=2, world_size=1, max_seq_len=10, fullest_step=3)
    found = first_packed_sequence(units_of(lengths), layout, seed=0)
    assert len(found) > 1
    assert sum(lengths[found]) <= 10
    assert (
        first_packed_sequence(
            units_of(np.array([10, 10, 10])),
            Layout(1, grad_accum=3, world_size=1, max_seq_len=10, fullest_step=3),
            seed=0,
        )
        == []
    )


def test_sequences_name_the_row_that_they_come_from(prepared_rows, tokenizer, rows):
    sequences = preview_sequences(prepared_rows, tokenizer, 2, Config(), packed=[0, 3])
    assert sequences[0].heading.startswith(f"train  {rows['train']}:1  ")
    assert sequences[1].documents[0].origin == f"{rows['train']}:2"
    assert [document.origin for document in sequences[-1].documents] == [
        f"{rows['train']}:1",
        f"{rows['train']}:4",
    ]
    assert sequences[-1].reasons == ("packed into one sequence",)
    sample = prepared_rows.train[0]
    told = f"{len(sample.ids)} tokens, {sample.trained_tokens} trained"
    assert token_counts(sequences[0].documents) == told


# The command


def test_the_command_prints_samples_and_the_path_of_the_page(tmp_path):
    env = {"TRAIN_OUTPUT_DIR": str(tmp_path), "CONFIG": "tiny"}
    words = ["preview", "--rows", "1", "--set", "train.packing=true"]
    done = CliRunner().invoke(cli.app, words, env=env)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[-1] == str(tmp_path / "preview.html")
    assert lines[0].startswith("── train  ")
    assert any("⟦" in line and "<|end|>⟧" in line for line in lines)
    assert any("packed into one sequence" in line for line in lines)
    assert "<mark>" in (tmp_path / "preview.html").read_text(encoding="utf-8")


def test_a_truncated_row_says_how_much_was_cut(tmp_path, rows, tokenizer):
    settings = {
        "train_path": str(rows["train"]),
        "val_path": str(rows["val"]),
        "too_long": "truncate_left",
        "max_lost": 0.9,
        "cache_dir": str(tmp_path),
    }
    config = Config.model_validate({"data": settings, "model": {"max_seq_len": 12}})
    data = build_run_data(config, tokenizer)
    (sequence,) = [
        sequence
        for sequence in preview_sequences(data, tokenizer, 0, config)
        if "shortened" in sequence.reasons
    ]
    record = next(record for record in data.train.records if record["cut"])
    assert f"┄┄ {record['cut']} tokens before this text were cut off" in in_marks(sequence)
    assert f"{record['cut']} tokens before this text were cut off" in render_page(
        {}, LEDGER, [sequence]
    )
