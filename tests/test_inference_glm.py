"""GLM ends a call with `<|observation|>`, another answer with `<|user|>`: so does all that is saved."""

import importlib
import json

import pytest
from record_files import write_rows
from test_data_template_table import OF_TRL, stops_of, tokenizer_of
from test_export_gguf import LLAMA_CPP
from test_inference_server import TEXT, serving
from tiny_models import write_base
from transformers import AutoTokenizer

from sft_play.commands.check_server import RemoteServer, check_server
from sft_play.config.sections.model import ModelSection
from sft_play.data.template_checks import TOOL
from sft_play.inference import convert_gguf
from sft_play.inference.chat import answer_all
from sft_play.inference.export import export_run
from sft_play.inference.gguf_tools import LlamaCpp
from sft_play.runs.exports import PARITY, ExportAsked, read_parity

TOOLS = [json.loads(json.dumps(TOOL).replace("zq1_tool", "add"))]
CALL = {"type": "function", "id": "c0", "function": {"name": "add", "arguments": {"a": "x"}}}
CALLED = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "A rose is red.", "tool_call_id": "c0"},
    {"role": "assistant", "content": "A rose."},
]
PLAIN = [{"role": "user", "content": "And blue?"}, {"role": "assistant", "content": "The sea."}]
WRITTEN = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"


@pytest.mark.slow
@pytest.mark.usefixtures("opens_here")
def test_a_call_and_an_answer_end_at_their_stops_in_use_export_and_server(
    train_run, tmp_path, monkeypatch
):
    tok = tokenizer_of(OF_TRL / "glm4moe.jinja", ModelSection())
    stops = tok.convert_tokens_to_ids(list(stops_of("glm4moe")))
    sizes = {"vocab_size": len(tok), "max_position_embeddings": 2048}
    base = write_base("glm4_moe", tmp_path / "base", tok, eos_token_id=stops, **sizes)
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stops}))
    records = {"messages": CALLED, "tools": TOOLS}, {"messages": PLAIN}
    rows = write_rows(tmp_path / "rows.jsonl", *records)
    run = train_run(
        {
            "model.name": base,
            "model.max_seq_len": 2048,
            "data.train_path": rows,
            "data.val_path": rows,
            "data.on_overlap": "allow",
            "data.reasoning": "empty",
            "tuning.mode": "full",
            "train.grad_accum": 1,
            "train.max_steps": 150,
            "train.learning_rate": 4e-3,
            "train.lr_scheduler_type": "cosine",
            "train.logging_steps": 50,
        }
    )
    (told,) = answer_all(run, "cpu", ["And blue?"])
    assert told.strip() == "The sea."
    export_run(run, ExportAsked("safetensors"), "cpu")
    export = run.path / "export" / "safetensors"
    for name in ("generation_config.json", "config.json"):
        eos = json.loads((export / name).read_text())["eos_token_id"]
        assert {*eos} == {*stops} and eos[0] == tok.convert_tokens_to_ids("<|user|>")
    if LLAMA_CPP is not None:
        tools = LlamaCpp.find(LLAMA_CPP)
        tools.convert(export, tmp_path / "glm.gguf", "BF16", "gpt-2")
        monkeypatch.syspath_prepend(tools.folder / "gguf-py")
        fields = importlib.import_module("gguf").GGUFReader(tmp_path / "glm.gguf").fields
        keys = (f"tokenizer.ggml.{kind}_token_id" for kind in convert_gguf.STOPS)
        assert {fields[key].contents() for key in keys} == {*stops}
    saved = AutoTokenizer.from_pretrained(export)
    prompts = {
        saved.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        ): answer
        for messages, tools, answer in (
            (CALLED[:1], TOOLS, WRITTEN),
            (CALLED[:3], TOOLS, "A rose."),
            (PLAIN[:1], None, "The sea."),
        )
    }
    with serving(run.path, tmp_path) as served:
        for prompt, answer in prompts.items():
            ((text, finish),) = served.texts(TEXT, {"prompt": prompt, "max_tokens": 128})
            assert (text.strip(), finish) == (answer, "stop")
        assert served.chat(messages=PLAIN[:1], max_tokens=64)["finish_reason"] == "stop"
        server = RemoteServer.at(f"http://127.0.0.1:{served.port}", None, None)
        lines = check_server(server, read_parity(export / PARITY))
    assert lines[-1] == "the server answers as the evaluated model does"
