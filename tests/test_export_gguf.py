"""`make export FORMAT=gguf`: Modelfiles, and with llama.cpp files that are opened and scored."""

import ast
import io
import os
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from families import FAMILIES, family

from sft_play.data.render import RenderError
from sft_play.data.templates import ChatTemplate
from sft_play.errors import CheckpointError, EnvironmentFault
from sft_play.inference import convert_gguf, gguf_tools
from sft_play.inference import exported as parity
from sft_play.inference.export import export_run
from sft_play.inference.export_gguf import GgufScores, SameTokens, added, turn_texts_of
from sft_play.inference.gguf_tools import LlamaCpp, UnknownPreTokenizer
from sft_play.inference.improvement import Losses
from sft_play.inference.modelfile import modelfile_text
from sft_play.runs import exports, seal
from sft_play.runs.exports import ExportAsked
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder
from tools.install import llama_cpp as install_llama_cpp

LLAMA_CPP = Path(os.environ["LLAMA_CPP"]) if "LLAMA_CPP" in os.environ else None


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = (
    [said("user", 'Hi {{ there }} "you"')],
    [said("user", "a"), said("assistant", "b"), said("user", "c")],
    [said("system", "S"), said("user", "a"), said("assistant", "b"), said("user", "c")],
)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mistral"}))
def test_a_modelfile_writes_what_the_chat_template_writes(name):
    tokenizer = family(name)
    texts = turn_texts_of(tokenizer)
    compared = 0
    for messages in CONVERSATIONS:
        try:
            expected = ChatTemplate(tokenizer).render_prompt(messages)
        except RenderError:  # a template that takes no system message
            continue
        assert added(tokenizer) + texts.render(messages) == expected
        compared += 1
    assert compared >= 2


def test_a_template_that_moves_the_system_message_gets_no_modelfile():
    """Mistral's stands in the last question, wherever that is."""
    assert turn_texts_of(family("mistral")) is None


def test_a_modelfile_names_the_file_the_template_the_stops_and_the_context():
    text = modelfile_text(
        "a.gguf", turn_texts_of(family("chatml")), ["<|im_end|>"], {"num_ctx": 131072}, "Be kind."
    )
    assert text.splitlines()[0] == "FROM ./a.gguf"
    user = '{{ if eq .Role "user" }}{{ "<|im_start|>user\\n" }}{{ .Content }}{{ end }}'
    assert text.count(user) == 1
    assert '<|im_start|>assistant\\n" }}"""\nSYSTEM "Be kind."' in text
    assert text.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 131072\n')


def values_of(modelfile: str) -> dict[str, list[str]]:
    """Return the values of a Modelfile as Ollama reads them, by command; stops under `stop`."""
    values: dict[str, list[str]] = {}
    rest = modelfile
    while rest:
        name, _, rest = rest.partition(" ")
        if name == "PARAMETER":
            name, _, rest = rest.partition(" ")
        value = ""
        while rest:
            character, rest = rest[0], rest[1:]
            if character in "\r\n" and unquoted(value.strip()) is not None:
                break
            value += character if character.isprintable() or character in "\t\r\n" else ""
        values.setdefault(name, []).append(unquoted(value.strip()))
    return values


def unquoted(value: str) -> str | None:
    """Return a value without its quotes, None where they are not closed yet."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            is_closed = len(value) >= 2 * len(quotes) and value.endswith(quotes)
            return value[len(quotes) : -len(quotes)] if is_closed else None
    return value


@pytest.mark.parametrize(
    "text",
    [
        "Be kind.",
        'Write """docstrings""" only.',
        'Never write """',
        '"Quoted"',
        'Two lines,\nand a "quote"\n',
        "Tabs\tand\r\nother ends",
        *('"', '""', '"""', "\\end", "<|im_end|>", "a\nb"),
    ],
)
def test_ollama_reads_a_system_prompt_and_a_stop_as_they_are(text):
    written = modelfile_text("a.gguf", turn_texts_of(family("chatml")), [text], {}, text)
    assert values_of(written)["SYSTEM"] == values_of(written)["stop"] == [text]


@pytest.mark.parametrize(
    "system",
    [
        'Write """\nas the first line',
        'Code:\n"""  \ndocstring',
        "A\u00a0space that stays",
        "全角\u3000スペース",
        "\U0001f469\u200d\U0001f4bb codes",
    ],
)
def test_a_system_prompt_that_system_cannot_hold_is_in_the_template(system):
    texts = turn_texts_of(family("chatml"))
    values = values_of(modelfile_text("a.gguf", texts, ["<|im_end|>"], {}, system))
    assert "SYSTEM" not in values and values["TEMPLATE"][0].isprintable()
    literals = re.findall(r'\{\{ ("(?:[^"\\]|\\.)*") \}\}', values["TEMPLATE"][0])
    assert ast.literal_eval(literals[0]) == f"<|im_start|>system\n{system}<|im_end|>\n"
    asked = [said("user", "a")]
    whole = texts.render([said("system", system), *asked])
    assert texts.with_system(system).render(asked) == whole


def test_a_stop_that_cannot_be_written_gets_no_modelfile():
    texts = turn_texts_of(family("chatml"))
    assert modelfile_text("a.gguf", texts, ["\u200b"], {}, None) is None


SCORES = GgufScores(
    Losses(eval_loss=1.02, run_loss=1.0, loss_before=3.0, rows=10),
    SameTokens(10, 10),
    rouge_l=0.5,
    run_rouge_l=0.5,
    answers=10,
    ended=10,
    run_ended=10,
)


def test_a_file_must_keep_the_gain_and_the_stops():
    assert SCORES.losses.gain_kept == pytest.approx(0.99) and SCORES.faults() == []
    worse = replace(SCORES, losses=replace(SCORES.losses, eval_loss=1.2))
    assert worse.faults() == [
        "it loses 10 % of the improvement, more than 5 %: eval_loss 1.200 instead of 1.000 (10 rows)"
    ]
    said = "llama.cpp gives other tokens in 1 of 10 rows"
    assert replace(SCORES, tokens=SameTokens(9, 10)).faults() == [said]
    late = replace(SCORES, ended=2)
    assert late.faults() == ["8 of 10 answers continue after the trained stop"]
    no_gain = replace(SCORES, losses=Losses(1.1, 1.0, 1.0, 10))
    assert no_gain.faults() == ["eval_loss 1.100 instead of 1.000 (10 rows)"]
    assert no_gain.as_json() == {
        "eval_loss": 1.1,
        "run_loss": 1.0,
        "loss_before": 1.0,
        "rows": 10,
        "tokens": {"same": 10, "rows": 10},
        "rouge_l": 0.5,
        "run_rouge_l": 0.5,
        "answers": 10,
        "ended": 10,
        "run_ended": 10,
        "gain_kept": None,
        "faults": no_gain.faults(),
    }


VOCABULARY = """
class SpecialVocab:
    special_token_ids = {"eos": 3, "eot": 0, "eom": 1}
    def add_to_gguf(self, path):
        open(path, "w").write(str(self.special_token_ids))
"""


def write_converter(folder: Path, text: str) -> LlamaCpp:
    """Write a script in the place of llama.cpp's converter."""
    (folder / gguf_tools.CONVERTER).write_text(f"import sys\ndef main():\n    {text}\n")
    (folder / "gguf.py").write_text(VOCABULARY)
    return LlamaCpp(folder, None)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "sys.exit('ERROR:hf-to-gguf:Model Abc is not supported')",
            CheckpointError,
            "does not take the model: Model Abc is not supported; a newer llama.cpp may",
        ),
        (
            "import no_such_module",
            EnvironmentFault,
            "No module named 'no_such_module'; make install",
        ),
        (
            "raise NotImplementedError('BPE pre-tokenizer was not recognized - update')",
            UnknownPreTokenizer,
            "^$",
        ),
    ],
)
def test_what_the_converter_does_not_take_is_told_with_what_to_do(tmp_path, text, kind, message):
    tools = write_converter(tmp_path, text)
    with pytest.raises(kind, match=message):
        tools.convert(tmp_path, tmp_path / "a.gguf", "BF16", None)


def test_a_pre_tokenizer_is_told_where_the_converter_knows_none():
    def known(self, tokenizer):
        if tokenizer == "unknown":
            raise NotImplementedError("BPE pre-tokenizer was not recognized")
        return "qwen2"

    find = convert_gguf.named(known, "gpt-2")
    assert (find(None, "known"), find(None, "unknown")) == ("qwen2", "gpt-2")


@pytest.mark.parametrize(("stops", "named"), [([68, 72, 2], [68, 72, 2]), (68, [68, 0, 1])])
def test_a_file_names_every_stop(tmp_path, stops, named):
    target = tmp_path / "a.gguf"
    tools = write_converter(tmp_path, "import gguf; gguf.SpecialVocab().add_to_gguf(sys.argv[3])")
    write_json(tmp_path / "generation_config.json", {"eos_token_id": stops})
    tools.convert(tmp_path, target, "BF16", None)
    assert list(ast.literal_eval(target.read_text()).values()) == named


def test_without_llama_cpp_the_error_says_where_it_comes_from(tmp_path, monkeypatch):
    with pytest.raises(
        EnvironmentFault, match=r"has no convert_hf_to_gguf.py .* make install-gguf"
    ):
        LlamaCpp.find(tmp_path)
    monkeypatch.setattr(gguf_tools, "bindings", lambda: None)
    LlamaCpp(tmp_path, None).require(["BF16"])
    with pytest.raises(EnvironmentFault, match="llama-cpp-python is not installed"):
        LlamaCpp(tmp_path, None).require(["BF16", "Q8_0"])


def test_the_converter_comes_out_of_the_source_distribution(tmp_path):
    source = tmp_path / "llama_cpp_python-1.tar.gz"
    wanted = ("convert_hf_to_gguf.py", "conversion/base.py", "gguf-py/gguf/a.py", "LICENSE")
    wanted += ("models/templates/a.jinja",)
    with tarfile.open(source, "w:gz") as archive:
        for name in (*wanted, "src/llama.cpp"):
            member = tarfile.TarInfo(f"llama_cpp_python-1/vendor/llama.cpp/{name}")
            archive.addfile(member, io.BytesIO())
    target = tmp_path / "share" / "llama.cpp"
    assert install_llama_cpp.unpack(source, target) == len(wanted)
    assert LlamaCpp.find(target).folder == target
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == set(wanted)


def require_llama_cpp() -> None:
    if gguf_tools.bindings() is None:
        pytest.skip("llama-cpp-python is not installed: make install-gguf")


@pytest.mark.gguf
@pytest.mark.usefixtures("opens_here")
def test_gguf_files_keep_the_gain_and_answer_as_the_run(finished, monkeypatch):
    require_llama_cpp()
    monkeypatch.setattr(parity, "MOST_TOKENS", 8)
    folder = finished("lora")
    asked = ExportAsked("gguf", quantizations=("BF16", "Q8_0", "Q4_K_M"), llama_cpp=LLAMA_CPP)
    lines = export_run(folder, asked, "cpu")
    target = folder.path / "export" / "gguf"
    assert seal.find_damage(target) is None
    assert any(line.startswith("pre-tokenizer gpt-2: ") for line in lines)
    assert "Modelfile: 8 of 8 prompts have the tokens of training" in lines
    report = read_json(target / "export.json")
    assert set(report) == {f"run-{kind}.gguf" for kind in asked.quantizations}
    assert all(facts["gain_kept"] > 0.95 for facts in report.values())
    opened = gguf_tools.require_bindings().Llama(str(target / "run-Q8_0.gguf"), verbose=False)
    rows = [row for row in exports.read_parity(target / exports.PARITY) if row.messages]
    answers = [
        opened.create_chat_completion(row.messages, temperature=0, max_tokens=8) for row in rows
    ]
    same = [
        answer["choices"][0]["message"]["content"].strip() == row.answer.strip()
        for answer, row in zip(answers, rows, strict=True)
    ]
    assert sum(same) >= len(rows) - 1, "near ties may part"
    counts = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert counts == [len(row.prompt_ids) for row in rows]


@pytest.mark.gguf
@pytest.mark.usefixtures("opens_here")
def test_a_file_with_other_tokens_is_not_published(finished):
    require_llama_cpp()
    folder = finished("lora")
    asked = ExportAsked(
        "gguf", folder.path / "other", None, ("BF16",), LLAMA_CPP, pre_tokenizer="qwen2"
    )
    said = r"run-BF16.gguf is not the model that was evaluated: .* other tok.*; FORMAT=safetensors"
    with pytest.raises(CheckpointError, match=said):
        export_run(folder, asked, "cpu")
    assert not (folder.path / "other").exists()


@pytest.mark.gguf
@pytest.mark.usefixtures("opens_here")
def test_a_model_type_that_llama_cpp_lacks_is_told(finished, tmp_path):
    require_llama_cpp()
    folder = RunFolder(shutil.copytree(finished("lora").path, tmp_path / "run"))
    export_run(folder, ExportAsked("safetensors"), "cpu")
    merged, target = folder.path / "merged", tmp_path / "gguf"
    config = read_json(merged / "config.json")
    write_json(merged / "config.json", {**config, "architectures": ["AbcForCausalLM"]})
    (merged / seal.NAME).unlink()
    seal.seal(merged)
    with pytest.raises(CheckpointError, match="AbcForCausalLM is not supported; a newer llama"):
        export_run(folder, ExportAsked("gguf", target, None, ("BF16",), LLAMA_CPP), "cpu")
    assert not target.exists()
