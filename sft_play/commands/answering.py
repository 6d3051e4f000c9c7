"""`make infer IN=prompts.jsonl OUT=answers.jsonl`: the prompts of a file, on every GPU.

Loads no torch until this process answers.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.commands.call import Call
from sft_play.commands.each_gpu import own_place, processes_of, run_on_each
from sft_play.config.loader import LoadedConfig
from sft_play.config.messages import refuse
from sft_play.config.sampling import SamplingRequest
from sft_play.data.prompts import Prompt, read_prompts
from sft_play.data.row_parsing import SystemPrompt
from sft_play.errors import DataError, StoppedOnRequest
from sft_play.progress import counted
from sft_play.runs import stamp
from sft_play.runs.answer_file import AnswerFile, PartsWatch
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder
from sft_play.runs.place import Place

SETTINGS = ("generation_max_new_tokens", "generation_num_beams")  # of train: answers depend on them


@dataclass(frozen=True)
class FileCall:
    """A call that asks for the answers to a file."""

    call: Call
    run: RunFolder
    loaded: LoadedConfig  # the run's settings, with those on top that were given
    sampling: SamplingRequest
    inputs: Path
    out: Path
    device: str  # cuda or cpu

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the file. Raises DataError."""
        columns = self.loaded.config.data.columns if self.loaded.is_set("data.columns") else {}
        found = read_prompts(self.inputs, columns, SystemPrompt.from_config(self.loaded.config))
        if not found:
            raise DataError(f"IN={self.inputs}: no prompts")
        return found

    def asked(self) -> dict[str, Any]:
        """Return what the answers depend on."""
        config = self.loaded.config
        return {
            "in": str(self.inputs.resolve()),
            "sha256": _digest(self.inputs),
            "run": str(self.run.path.resolve()),
            "weights_sha256": _digest_of_weights(self.run, config.tuning.mode),
            "data.system_prompt": config.data.system_prompt,
            **{f"train.{name}": getattr(config.train, name) for name in SETTINGS},
            **asdict(self.sampling),
        }


def answers_path(call: Call, run: RunFolder, inputs: Path) -> Path:
    """Return OUT, by default the name of the file in the run's folder."""
    out = call.environ.get("OUT", "").strip()
    return Path(out) if out else run.results / "answers" / f"{inputs.name.partition('.')[0]}.jsonl"


def inputs_of(call: Call, prompt: str | None) -> Path | None:
    """Return the file that IN names, None where there is none. Raises ConfigError."""
    inputs = call.environ.get("IN", "").strip()
    prompt = prompt or call.environ.get("PROMPT", "").strip()
    problems = []
    if inputs and prompt:
        problems.append(f"IN={inputs} and PROMPT: ask one of them")
    if call.environ.get("OUT", "").strip() and not inputs:
        problems.append("OUT: is for the answers to a file; name that with IN=prompts.jsonl")
    refuse(problems)
    return Path(inputs) if inputs else None


def answer_file(asked: FileCall, overrides: Sequence[str]) -> list[str]:
    """Answer the prompts of a file, on every GPU; return the lines to print.

    The same call goes on where an earlier one stopped. `overrides` are those of --set.

    Raises: StoppedOnRequest on Ctrl-C.
    """
    prompts = asked.prompts()
    file = AnswerFile(asked.out)
    place = own_place(asked.call.environ)
    if place is not None:
        _answer_share(asked, prompts, file, place, lambda _: None)
        return []
    file.begin(asked.asked())
    if not file.is_complete():
        with file.held():
            _answer_rest(asked, overrides, prompts, file)
    return [*_lines_of_errors(file), f"answers {file.path} rows={len(prompts)}"]


def _answer_rest(
    asked: FileCall, overrides: Sequence[str], prompts: Sequence[Prompt], file: AnswerFile
) -> None:
    """Answer what is not answered yet, and put all answers in order."""
    done = len(file.answered())
    places_weights = asked.loaded.config.model.device_map is not None
    count = 1 if places_weights else processes_of(asked.call)
    count = min(count, max(1, len(prompts) - done))
    try:
        with counted("answering", len(prompts), "prompts", done) as advance:
            if count == 1:
                _answer_share(asked, prompts, file, Place(0, 1, 0), advance)
            else:
                watch = PartsWatch(file)
                look = lambda: advance(watch.new_answers())  # noqa: E731
                run_on_each("infer", overrides, asked.call, asked.run, count, look)
                look()
    except (KeyboardInterrupt, StoppedOnRequest):
        done = len(file.answered())
        raise StoppedOnRequest(
            f"stopped: {done} of {len(prompts)} prompts are answered; the same command goes on"
        ) from None
    file.finish(len(prompts))


def _answer_share(
    asked: FileCall,
    prompts: Sequence[Prompt],
    file: AnswerFile,
    place: Place,
    advance: Callable[[int], None],
) -> None:
    from sft_play.inference.file_answers import answer_prompts
    from sft_play.inference.load import load_to_answer

    trained = load_to_answer(asked.run, asked.device, asked.loaded.config, asked.sampling)
    answer_prompts(trained, prompts, file, place, asked.sampling.seed, advance)


def _lines_of_errors(file: AnswerFile) -> list[str]:
    """Return a warning where prompts have a reason in place of an answer."""
    without = file.count_without_answer()
    if not without:
        return []
    return [f"warning: {without} prompts have no answer; their lines say why, under error"]


def _digest_of_weights(run: RunFolder, mode: str) -> str | None:
    """Return what tells the weights of a run, or those of a model folder, from all others."""
    if isinstance(run, ModelFolder):
        return stamp.digest_of_model(run.path)
    return _digest(run.weights(mode) / stamp.NAME)


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
