"""sft_play.data: which rows are read, what of them is trained, in which order; with tokenizers built here, so that ids are known."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sft_play.config.schema import Config
from sft_play.data.check import check_lines, check_rows
from sft_play.data.prepare import MOST_HELD_OUT, hold_out, prepare
from sft_play.data.render import DEFAULT_TEMPLATE, IGNORE_INDEX, Rendered, RenderError, render, render_prompt, stop_ids
from sft_play.data.rows import Message, Row
from sft_play.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PLAIN = (  # no token of its own, and no stop
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PHI3 = (  # ends every conversation with eos, so that none is the beginning of a longer one
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
REWRITING = CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' or loop.last else '(cut)')")  # as templates do that shorten the history
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "phi3": ["<|user|>", "<|assistant|>", "<|end|>"],
}
LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = ["What is red? A rose is red.", "user: What is blue?\nassistant: The sea is blue, 12 miles.\n\n", "It is a rose.  Two   blanks, naïve 🙂"] * 5


@cache
def tokenizer(
    template: str | None, special: str = "", trim_offsets: bool = False, bos: bool = False, strip: bool = False, drops_blanks: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens, split as by GPT-2 or Llama 3; `special` names a family whose marks it has; `strip`: they swallow blanks behind them."""
    marks = SPECIAL.get(special, [])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if special == "llama3":
        words = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    if drops_blanks:
        bpe.normalizer = normalizers.Replace(" ", "")
    bpe.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    added = [AddedToken(text, special=True, normalized=False, rstrip=strip) for text in ("<eos>", "<pad>", *marks)]
    bpe.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=added, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    )
    names = {"bos_token": next(text for text in marks if "b" in text)} if bos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>", **names)
    made.chat_template = template
    return made


def row(*contents: str, system: str | None = None) -> Row:
    """A conversation that the user begins."""
    turns = [Message(("user", "assistant")[number % 2], content) for number, content in enumerate(contents)]
    return Row(tuple(([Message("system", system)] if system else []) + turns), "rows.jsonl:7")


def trained(rendered: Rendered, tok: PreTrainedTokenizerFast) -> list[str]:
    """Decode every run of labelled tokens."""
    runs: list[list[int]] = [[]]
    for label in rendered.labels:
        if label == IGNORE_INDEX:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tok.decode(run) for run in runs if run]


def assert_consistent(rendered: Rendered) -> None:
    """Labels are the ids, or nothing; the first token is never predicted."""
    assert len(rendered.ids) == len(rendered.labels)
    assert all(label in (IGNORE_INDEX, token) for label, token in zip(rendered.labels, rendered.ids, strict=True))
    assert rendered.labels[0] == IGNORE_INDEX


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# Rendering

FAMILIES = [("chatml", CHATML, "<|im_end|>"), ("llama3", LLAMA3, "<|eot_id|>"), ("gemma", GEMMA, "<end_of_turn>"), ("phi3", PHI3, "<|end|>")]


@pytest.mark.parametrize(("family", "template", "stop"), FAMILIES)
@pytest.mark.parametrize("options", [{}, {"trim_offsets": True}, {"strip": True}], ids=str)
def test_labels_are_the_answer_and_its_stop_token(family: str, template: str, stop: str, options: dict[str, bool]) -> None:
    tok = tokenizer(template, family, bos="bos_token" in template, **options)
    for answer in ("A rose is red.", "12", "naïve 🙂", "two   blanks\n\n\tand a tab"):
        rendered = render(row("What is red?", answer), tok)
        assert trained(rendered, tok) == [answer + stop]
        assert_consistent(rendered)


def test_the_mask_of_a_chatml_row_by_eye() -> None:
    tok = tokenizer(CHATML, "chatml")
    rendered = render(row("a", "b", system="s"), tok)
    shown = [tok.decode([token]) if label == IGNORE_INDEX else f"[{tok.decode([token])}]" for token, label in zip(rendered.ids, rendered.labels, strict=True)]
    assert "".join(shown) == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b][<|im_end|>]\n"


@pytest.mark.parametrize(("family", "template", "stop"), FAMILIES)
def test_every_assistant_turn_is_trained(family: str, template: str, stop: str) -> None:
    tok = tokenizer(template, family, bos="bos_token" in template)
    rendered = render(row("What is red?", "A rose.", "And blue?", "The sea.", "Thanks", "You are welcome."), tok)
    assert trained(rendered, tok) == [f"A rose.{stop}", f"The sea.{stop}", f"You are welcome.{stop}"]
    assert_consistent(rendered)


@pytest.mark.parametrize(("family", "template", "stop"), [*FAMILIES, ("", PLAIN, "<eos>"), ("", None, "<eos>")])
def test_what_is_trained_follows_the_prompt_that_use_will_send(family: str, template: str | None, stop: str) -> None:
    tok = tokenizer(template, family, bos="bos_token" in (template or ""))
    conversation = row("What is red?", "A rose.", "And blue?", "The sea.")
    rendered = render(conversation, tok)
    for turn in (1, 3):
        prompt = render_prompt(conversation.messages[:turn], tok)
        assert rendered.ids[: len(prompt)] == prompt
        assert rendered.labels[len(prompt) - 1] == IGNORE_INDEX
        assert rendered.labels[len(prompt)] != IGNORE_INDEX


def test_a_template_without_a_stop_gets_eos_behind_the_last_answer() -> None:
    tok = tokenizer(PLAIN)
    assert trained(render(row("What is red?", "A rose."), tok), tok) == [" A rose.\n<eos>"]
    assert trained(render(row("What is red?", "A rose.", "And blue?", "The sea."), tok), tok) == [" A rose.\n", " The sea.\n<eos>"]


def test_blanks_at_the_end_of_an_answer_are_trained_where_offsets_leave_blanks_out() -> None:
    tok = tokenizer("{% for m in messages %}{{ '|' + m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '|' }}{% endif %}", trim_offsets=True)
    assert trained(render(row("a", "b  c   "), tok), tok) == ["b  c   <eos>"]


def test_a_model_without_a_template_is_rendered_in_plain_words() -> None:
    tok = tokenizer(None)
    rendered = render(row("What is red?", "A rose.", "And blue?", "The sea."), tok)
    assert tok.decode(rendered.ids) == "### User:\nWhat is red?\n\n### Assistant:\nA rose.<eos>\n\n### User:\nAnd blue?\n\n### Assistant:\nThe sea.<eos>\n\n"
    assert trained(rendered, tok) == ["A rose.<eos>", "The sea.<eos>"]


def test_a_base_model_with_a_beginning_of_text_sees_it_once() -> None:
    tok = tokenizer(None, "llama3", bos=True)
    assert tok.decode(render(row("a", "b"), tok).ids) == "<|begin_of_text|>### User:\na\n\n### Assistant:\nb<eos>\n\n"
    assert tok.decode(render_prompt([Message("user", "a")], tok)) == "<|begin_of_text|>### User:\na\n\n### Assistant:\n"


def test_the_template_alone_writes_the_beginning_of_a_text() -> None:
    tok = copy.deepcopy(tokenizer(LLAMA3, "llama3", bos=True))
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", tok.bos_token_id)]
    )
    assert tok("a")["input_ids"][0] == tok.bos_token_id
    rendered = render(row("q", "a"), tok)
    assert rendered == render(row("q", "a"), tokenizer(LLAMA3, "llama3", bos=True))
    assert rendered.ids.count(tok.bos_token_id) == render_prompt([Message("user", "q")], tok).count(tok.bos_token_id) == 1


def test_a_template_that_rewrites_history_is_refused_by_name() -> None:
    tok = tokenizer(REWRITING, "chatml")
    assert trained(render(row("q", "a"), tok), tok) == ["a<|im_end|>"]
    with pytest.raises(RenderError, match=r"^rows.jsonl:7: the chat template writes turn 1 otherwise in a longer conversation, so its answer cannot be found"):
        render(row("q", "a", "q2", "a2"), tok)


def test_a_template_that_drops_reasoning_from_the_history_is_refused() -> None:
    template = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])")
    tok = tokenizer(template, "chatml")
    with pytest.raises(RenderError, match="writes turn 1 otherwise"):
        render(row("q", "<think>x</think>a", "q2", "a2"), tok)


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    tok = tokenizer("{{ messages | length }}" + CHATML, "chatml")
    with pytest.raises(RenderError, match=r"rows.jsonl:7: the chat template writes what is before turn 1 otherwise"):
        render(row("q", "a"), tok)


def test_a_token_over_the_seam_is_refused_by_name() -> None:
    template = PLAIN.replace("'assistant:'", "'assistant: '")
    for trim_offsets in (False, True):
        with pytest.raises(RenderError, match=r"rows.jsonl:7: the token ' .+' straddles the end of the prompt of turn 1"):
            render(row("What is red?", "A rose."), tokenizer(template, trim_offsets=trim_offsets))


def test_a_tokenizer_that_joins_the_blanks_at_the_end_of_a_prompt_is_no_straddling() -> None:
    tok = tokenizer(PLAIN.replace("'assistant:'", "'assistant:\n\n'").replace("': ' + m['content']", "':\n\n' + m['content']"))
    assert trained(render(row("a", "b"), tok), tok) == ["b\n<eos>"]


def test_a_tokenizer_that_drops_the_end_of_a_prompt_is_no_straddling() -> None:
    tok = copy.deepcopy(tokenizer(PLAIN.replace("'assistant:'", "'assistant: '"), drops_blanks=True))
    assert trained(render(row("a", "b c", "d", "e"), tok), tok) == ["bc\n", "e\n<eos>"]
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", tok.pad_token_id)])
    assert trained(render(row("a", "b c", "d", "e"), tok), tok) == ["bc\n", "e\n<eos>"]


def test_what_a_template_refuses_is_a_bad_row() -> None:
    with pytest.raises(RenderError, match=r"rows.jsonl:7: the chat template refuses the conversation: System role not supported"):
        render(row("q", "a", system="s"), tokenizer(GEMMA, "gemma", bos=True))


def test_a_stop_token_inside_an_answer_is_refused_and_inside_a_question_is_not() -> None:
    tok = tokenizer(CHATML, "chatml")
    for stop in ("<|im_end|>", "<eos>"):
        with pytest.raises(RenderError, match=r"rows.jsonl:7: messages\[1\] holds .* which ends an answer"):
            render(row("q", f"before {stop} after"), tok)
    assert trained(render(row("What is <|im_end|>?", "a mark"), tok), tok) == ["a mark<|im_end|>"]


def test_an_answer_at_the_very_beginning_leaves_its_first_token_out() -> None:
    tok = tokenizer("{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}")
    rendered = render(row("q", "abc def"), tok)
    assert_consistent(rendered)
    assert tok.decode(rendered.ids) == "abc def<eos>"


def test_stops_are_eos_and_the_ends_of_turns_that_the_tokenizer_has() -> None:
    for family, stop in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")):
        tok = tokenizer(None, family)
        assert stop_ids(tok) == {tok.eos_token_id, tok.convert_tokens_to_ids(stop)}
    assert stop_ids(tokenizer(None)) == {tokenizer(None).eos_token_id}


def test_the_default_template_needs_no_token_of_its_own() -> None:
    assert "<|" not in DEFAULT_TEMPLATE


# Splits and the ledger


def rows_of(count: int) -> list[Row]:
    return [row(f"q{n}", f"a{n}") for n in range(count)]


def test_a_held_out_split_is_disjoint_whole_and_the_same_every_time() -> None:
    rows = rows_of(40)
    train, held = hold_out(rows, 0.1, 42, "f")
    assert (train, held) == hold_out(list(rows), 0.1, 42, "f")
    assert len(held) == 4
    order = {id(item): number for number, item in enumerate(rows)}
    for part in (train, held):
        assert [order[id(item)] for item in part] == sorted(order[id(item)] for item in part)
    assert sorted(order[id(item)] for item in train + held) == list(range(40))
    assert hold_out(rows, 0.1, 43, "f")[1] != held


@pytest.mark.parametrize(("rows", "fraction", "held"), [(2, 0.05, 1), (2, 0.49, 1), (3, 0.49, 1), (100, 0.05, 5), (20_000, 0.05, MOST_HELD_OUT)])
def test_at_least_one_and_at_most_500_rows_are_held_out(rows: int, fraction: float, held: int) -> None:
    assert [len(part) for part in hold_out(rows_of(rows), fraction, 1, "f")] == [rows - held, held]


def test_one_row_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"f.jsonl: one row cannot be split into training and validation; set DATA_VAL_PATH"):
        hold_out(rows_of(1), 0.1, 1, "f.jsonl")


def settings(tmp_path: Path, train: int = 20, **data: Any) -> Config:
    """A config whose training rows have answers of 1 to `train` words."""
    path = write(tmp_path / "train.jsonl", *[{"question": "q", "answer": "a " * n + "b"} for n in range(train)])
    max_seq_len = data.pop("max_seq_len", 2048)
    return Config.model_validate({"model": {"max_seq_len": max_seq_len}, "data": {"train_path": str(path), **data}})


def test_every_row_is_used_or_its_loss_is_named(tmp_path: Path) -> None:
    tok = tokenizer(CHATML, "chatml")
    full = prepare(settings(tmp_path), tok)
    lengths = sorted(len(item.ids) for part in (full.train, full.validation) for item in part.rendered)
    cut = prepare(settings(tmp_path, max_seq_len=lengths[10], max_lost=0.99), tok)
    for name, split in (("train", cut.train), ("validation", cut.validation)):
        ledger = cut.ledger[name]
        assert ledger.rows_in == ledger.rows_used + sum(ledger.dropped.values()) == full.ledger[name].rows_in
        assert ledger.rows_used == len(split.rows) == len(split.rendered)
        assert ledger.tokens == sum(len(item.ids) for item in split.rendered)
        assert ledger.trained_tokens == sum(item.trained_tokens for item in split.rendered)
        assert ledger.lost_trained_tokens + ledger.trained_tokens == full.ledger[name].trained_tokens
    assert sum(ledger.dropped["too_long"] for ledger in cut.ledger.values()) == sum(length > lengths[10] for length in lengths)
    assert max(len(item.ids) for item in cut.train.rendered) <= lengths[10]


def test_a_row_of_exactly_the_limit_is_used(tmp_path: Path) -> None:
    tok = tokenizer(CHATML, "chatml")
    full = prepare(settings(tmp_path), tok)
    longest = max(len(item.ids) for part in (full.train, full.validation) for item in part.rendered)
    assert prepare(settings(tmp_path, max_seq_len=longest, too_long="error"), tok).ledger == full.ledger


def test_too_much_lost_stops_the_run_and_says_which_length_would_do(tmp_path: Path) -> None:
    tok = tokenizer(CHATML, "chatml")
    longest = max(len(item.ids) for item in prepare(settings(tmp_path), tok).train.rendered)
    with pytest.raises(DataError) as error:
        prepare(settings(tmp_path, max_seq_len=longest - 4), tok)
    *named, last = str(error.value).splitlines()
    assert all(line.startswith(f"{tmp_path / 'train.jsonl'}:") and line.endswith(f"tokens, model.max_seq_len is {longest - 4}") for line in named)
    assert last.endswith(f"of the trained tokens; data.max_lost=0.05; set MODEL_MAX_SEQ_LEN={longest}, or raise DATA_MAX_LOST to go on without them")
    assert prepare(settings(tmp_path, max_seq_len=longest, too_long="error"), tok)


def test_too_long_is_an_error_where_that_is_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.too_long=error; set MODEL_MAX_SEQ_LEN=[0-9]+, or DATA_TOO_LONG=drop"):
        prepare(settings(tmp_path, max_seq_len=25, too_long="error", max_lost=0.9), tokenizer(CHATML, "chatml"))


def test_nothing_may_be_lost_and_nothing_is(tmp_path: Path) -> None:
    assert prepare(settings(tmp_path, max_lost=0), tokenizer(CHATML, "chatml")).ledger["train"].lost_fraction == 0


def test_rows_without_anything_to_train_are_counted_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if 'b' not in m['content'] %}{{ m['content'] }}{% endif %}{% endfor %}"
    rows = [{"question": "q", "answer": "b"}] * 3
    config = settings(tmp_path, val_path=str(write(tmp_path / "val.jsonl", *rows)))
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"train_path": str(write(tmp_path / "t.jsonl", {"question": "q", "answer": "x"}))})}
    )
    with pytest.raises(DataError, match=r"val.jsonl: the chat template leaves nothing to train on in any of 3 rows"):
        prepare(config, tokenizer(template))


def test_rows_that_cannot_be_proven_stop_the_run_and_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"question": "q", "answer": "a<eos>b"}] * 9, {"question": "q", "answer": "a"})
    config = Config.model_validate({"data": {"train_path": str(path), "val_path": str(path)}})
    with pytest.raises(DataError) as error:
        prepare(config, tokenizer(CHATML, "chatml"))
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"{path}:1: messages[1] holds <eos>")
    assert lines[-1] == "9 rows cannot be rendered so that their answers are known"


def test_given_files_are_used_as_they_are_and_test_defaults_to_validation(tmp_path: Path) -> None:
    tok = tokenizer(CHATML, "chatml")
    val = write(tmp_path / "val.jsonl", {"question": "v", "answer": "v"})
    test = write(tmp_path / "test.jsonl", {"question": "t", "answer": "t"}, {"question": "t", "answer": "t"})
    two = prepare(settings(tmp_path, val_path=str(val)), tok)
    assert (len(two.train), len(two.validation), two.test is two.validation) == (20, 1, True)
    assert [path.name for path in two.files] == ["train.jsonl", "val.jsonl"]
    three = prepare(settings(tmp_path, val_path=str(val), test_path=str(test)), tok)
    assert (len(three.test), sorted(three.ledger)) == (2, ["test", "train", "validation"])


def test_the_seed_of_the_split_is_data_seed_else_seed(tmp_path: Path) -> None:
    tok, base = tokenizer(CHATML, "chatml"), settings(tmp_path)

    def held(**train: Any) -> list[Row]:
        return prepare(base.model_copy(update={"train": base.train.model_copy(update=train)}), tok).validation.rows

    assert held(seed=1) == held(seed=1, data_seed=1) == held(seed=9, data_seed=1)
    assert len({held(seed=seed)[0].origin for seed in range(8)}) > 1


def test_the_ledger_is_plain_data_and_a_line_a_split(tmp_path: Path) -> None:
    ledger = check_rows(settings(tmp_path), tokenizer(CHATML, "chatml"))
    assert json.loads(json.dumps(ledger)) == ledger
    assert {"rows_in", "rows_used", "dropped", "tokens", "trained_tokens", "lost_fraction"} <= ledger.keys()
    assert (ledger["rows_in"], ledger["rows_used"], ledger["splits"]["validation"]["rows_used"]) == (19, 19, 1)
    assert check_lines(ledger)[0].startswith("train       rows_in=19 rows_used=19")
