"""sft_play.models.export: any program that loads what a run saved stops where the run trained."""

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from families import family, tokenizer
from peft import AutoPeftModelForCausalLM
from run_files import run_json
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sft_play.config.invocation import SamplingRequest
from sft_play.data.render import IGNORE_INDEX, stop_ids
from sft_play.data.rows import Message
from sft_play.data.templates import ChatTemplate
from sft_play.inference import chat
from sft_play.inference.evaluate import evaluate_run
from sft_play.inference.load import load_run, sampling_of
from sft_play.inference.merge import merge_run
from sft_play.models.export import (
    read_stops,
    savable_generation_config,
    stops_of,
    trained_stops,
    with_eos,
    write_stops,
)

QUESTION = "What is blue?"
ANSWER = "The sea is blue."
LIMIT = 24  # the answer has fewer tokens


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Qwen2 base whose eos is not its template's stop. It gives the answer, the stop, more."""
    tok = family("chatml")
    answer = tok(ANSWER, add_special_tokens=False)["input_ids"]
    stop = tok.convert_tokens_to_ids("<|im_end|>")
    prompt_end = tok("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"][-1]
    assert tok.eos_token == "<|endoftext|>" and len({*answer, stop, prompt_end}) == len(answer) + 2
    # each token's embedding is its own direction, and the head maps it to the token that follows
    size = len(tok)
    hidden = -(-size // 8) * 8
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tok.eos_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    chain = [prompt_end, *answer, stop]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, hidden))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(0.01 * torch.randn(size, hidden))
        for token, following in zip([*chain, answer[0]], [*chain[1:], answer[0]], strict=False):
            model.lm_head.weight[following, token] = 1.0
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    # as some bases are published: transformers loads this, and refuses to save it
    facts = {"temperature": 0.7, "eos_token_id": tok.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def trained(base, plan_run, run_worker, opens_here):
    """Return a function that gives the finished run of a mode, the same one to every test."""
    runs = {}

    def run(mode):
        if mode not in runs:
            runs[mode] = plan_run(
                {
                    "model.name": base,
                    "tuning.mode": mode,
                    "train.learning_rate": 1e-5,
                    "train.predict_with_generate": True,
                    "train.generation_max_new_tokens": LIMIT,
                }
            )
            before = os.umask(0o022)
            try:
                assert run_worker(runs[mode]) == 0, run_json(runs[mode])["cause"]
                if mode != "full":
                    merge_run(runs[mode])
            finally:
                os.umask(before)
        return runs[mode]

    return run


def plain_answer(model, folder) -> str:
    """Return what transformers generates and decodes, with every token."""
    tok = AutoTokenizer.from_pretrained(folder)
    prompt = tok.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=LIMIT, do_sample=False)
    return tok.decode(ids[0, prompt["input_ids"].shape[1] :])


def test_the_base_runs_on_behind_its_templates_stop(base):
    shown = plain_answer(AutoModelForCausalLM.from_pretrained(base), base)
    assert shown.startswith(f"{ANSWER}<|im_end|>") and not shown.endswith("<|im_end|>")


@pytest.mark.parametrize("mode, name", [("full", "model"), ("lora", "merged")])
def test_plain_generation_from_a_saved_model_stops_at_the_trained_token(trained, mode, name):
    folder = trained(mode).path / name
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert plain_answer(model, folder) == f"{ANSWER}<|im_end|>"
    tok = AutoTokenizer.from_pretrained(folder)
    stop = tok.convert_tokens_to_ids("<|im_end|>")
    assert tok.eos_token == "<|im_end|>" and tok.pad_token == "<pad>"
    assert model.generation_config.eos_token_id[0] == stop
    assert json.loads((folder / "config.json").read_text())["eos_token_id"][0] == stop


def test_an_adapter_stops_there_with_the_generation_config_of_its_folder(trained):
    folder = trained("lora").path / "adapter"
    stops = GenerationConfig.from_pretrained(folder)
    model = AutoPeftModelForCausalLM.from_pretrained(folder, generation_config=stops)
    assert plain_answer(model, folder) == f"{ANSWER}<|im_end|>"


def test_the_code_of_an_adapters_readme_runs_and_answers(trained, capsys):
    folder = trained("lora")
    readme = (folder.weights("lora") / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    code = code.replace("Hello!", QUESTION).replace("=256", f"={LIMIT}")
    exec(code, {})
    assert capsys.readouterr().out == f"{ANSWER}\n"
    metrics = run_json(folder)["metrics"]
    assert f"| ROUGE-L | {metrics['before']['rougeL']:.4g} |" in readme
    assert f"| {metrics['after']['eval_loss']:.4g} |" in readme
    assert "`<|im_end|>`" in readme and "`<|endoftext|>`" in readme
    assert "| LoRA rank | 16 |" in readme and "More Information Needed" not in readme


def test_eval_infer_and_chat_stop_there_too(trained):
    folder = trained("lora")
    loaded = load_run(folder, "cpu")
    assert set(loaded.stops) == stop_ids(loaded.tokenizer) | {
        loaded.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    }
    assert chat.next_turn(loaded, [Message("user", QUESTION)]) == (ANSWER, False)
    after = run_json(folder)["metrics"]["after"]
    evaluate_run(folder, "cpu")
    again = json.loads((folder.evaluation / "again.json").read_text())
    assert again["rougeL"] == after["rougeL"] and again["cut_answers"] == after["cut_answers"] == 0


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_others_may_read_what_a_run_saved(trained, mode):
    folder = trained(mode).path
    closed = [
        path
        for path in folder.rglob("*")
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != 0o644
    ]
    assert closed == []


# The tokenizer that is saved

EOS_BETWEEN_TURNS = (
    "\n{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] }}"
    "{{ '<|im_end|>' if m['role'] == 'assistant' else eos_token }}{% endfor %}"
)


def test_a_template_that_writes_eos_writes_the_same_after_eos_is_another_token():
    tok = tokenizer(EOS_BETWEEN_TURNS, bos="<bos>")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    changed = with_eos(tok, tok.convert_tokens_to_ids("<|im_end|>"))
    assert (tok.eos_token, changed.eos_token) == ("<eos>", "<|im_end|>")
    text = ChatTemplate(tok).render_conversation(messages)
    assert "a<eos>" in text and ChatTemplate(changed).render_conversation(messages) == text
    assert changed.apply_chat_template(messages, tokenize=False) == text


@pytest.mark.parametrize("pad, expected", [("<pad>", "<pad>"), ("<eos>", "<pad>")])
def test_padding_is_no_token_that_ends_answers(pad, expected):
    tok = tokenizer(None)
    tok.pad_token = pad
    try:
        changed = with_eos(tok, tok.eos_token_id)
    finally:
        tok.pad_token = "<pad>"
    assert (changed.eos_token, changed.pad_token) == ("<eos>", expected)


def test_a_generation_config_that_cannot_be_saved_samples_or_is_left_out(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    assert savable_generation_config(model).do_sample is True
    model.generation_config = GenerationConfig(num_beams=1)
    model.generation_config.num_return_sequences = 3  # greedy search returns one
    assert savable_generation_config(model).num_return_sequences in (None, 1, 3)
    savable_generation_config(model).validate(strict=True)


def test_a_base_that_says_do_sample_false_stays_greedy_and_its_sampling_values_are_named(
    base, caplog
):
    model = AutoModelForCausalLM.from_pretrained(base)
    values = {"do_sample": False, "temperature": 0.6, "top_k": 20, "eos_token_id": 1}
    model.generation_config = GenerationConfig(**values)
    saved = savable_generation_config(model)
    assert "temperature=0.6, top_k=20 left out, because do_sample is false" in caplog.text
    saved.validate(strict=True)
    assert (saved.do_sample, saved.temperature, saved.eos_token_id) == (False, None, 1)
    assert sampling_of(saved, SamplingRequest()) is None


def test_settings_of_one_call_are_left_out_and_named(base, caplog):
    """With them generate() returns no ids, several answers, or wants another argument."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.generation_config = GenerationConfig(
        return_dict_in_generate=True, stop_strings=["a"], max_time=1e-4, repetition_penalty=1.1
    )
    model.generation_config.num_return_sequences = 2
    saved = savable_generation_config(model)
    assert "return_dict_in_generate=True, num_return_sequences=2, stop_strings=['a']" in caplog.text
    assert saved.repetition_penalty == 1.1
    model.generation_config = saved
    ids = torch.tensor([[5, 6, 7]])
    found = model.generate(input_ids=ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert found.shape == (1, 7)


def test_a_generation_config_that_is_left_out_keeps_its_stops(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.generation_config = GenerationConfig(eos_token_id=[3, 4], length_penalty=2.0)
    saved = savable_generation_config(model)
    assert saved.length_penalty != 2.0 and stops_of(model) == (3, 4)
    assert saved.eos_token_id == [3, 4]


# Stops of the base's own generation


def test_the_bases_own_stops_are_kept_behind_the_trained_one(prepared_rows):
    """GLM ends answers with <|user|>, Qwen's bases with <|endoftext|>: no template says so."""
    tok = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")
    rows = prepared_rows.train
    (stop,) = trained_stops(rows, tok)
    answered = int(next(label for label in rows[0].labels if label != IGNORE_INDEX))
    unused = max(set(range(len(tok))) - {int(id_) for row in rows for id_ in row.ids})
    assert trained_stops(rows, tok, (unused, stop)) == [stop, unused]
    assert trained_stops(rows, tok, (answered,)) == [stop], "an answer would be cut there"


def with_stop(base: Path, folder: Path, stop: int) -> tuple[int, Path]:
    """Return the stop of a base, and the folder of a copy that has another one, too."""
    path = shutil.copytree(base, folder) / "generation_config.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "eos_token_id": [facts["eos_token_id"], stop]}))
    return facts["eos_token_id"], folder


def test_a_run_stops_where_its_base_does_too(taught_base, plan_run, build_loop, tmp_path):
    stop, folder = with_stop(taught_base, tmp_path / "base", 4)
    trainer, _ = build_loop(plan_run({"model.name": folder, "train.max_steps": 1}))
    assert trainer.evaluator.generator.stops == sorted({stop, 4})
    staged = tmp_path / "staged"
    stops = trained_stops(
        trainer.rows.samples, trainer.engine.tokenizer, stops_of(trainer.engine.model)
    )
    write_stops(staged, stops, trainer.engine.tokenizer, trainer.engine.model)
    assert read_stops(staged) == (stop, 4)


def test_what_is_scored_stops_where_what_is_saved_does(
    taught_base, plan_run, build_loop, prepared_rows, tmp_path
):
    """A stop of the base that answers of the training rows hold, and no validation row does."""

    def answered(rows):
        return {int(label) for row in rows for label in row.labels if label != IGNORE_INDEX}

    inside = min(answered(prepared_rows.train) - answered(prepared_rows.validation))
    stop, folder = with_stop(taught_base, tmp_path / "base", inside)
    trainer, _ = build_loop(plan_run({"model.name": folder, "train.max_steps": 1}))
    assert trainer.evaluator.generator.stops == [stop]
