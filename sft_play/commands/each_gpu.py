"""`make eval` and `make infer IN=...`: one process per GPU; they share a command's rows.

Each process is the same command with an index among them. Only computing processes load torch.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sft_play import stops
from sft_play.commands import use
from sft_play.commands.call import Call
from sft_play.config.invocation import SamplingRequest, read_sampling
from sft_play.config.loader import PACKAGE, LoadedConfig
from sft_play.config.messages import refuse
from sft_play.data.render import images_of
from sft_play.data.row_parsing import Prompt, SystemPrompt, read_prompts
from sft_play.errors import DataError, ExitClass, StoppedOnRequest, error_of_class
from sft_play.plan.launch import free_port
from sft_play.plan.ranks import visible_entries
from sft_play.progress import counted
from sft_play.runs import stamp
from sft_play.runs.answer_file import PLACE, AnswerFile, FanOutPlace, PartsWatch
from sft_play.runs.files import Json
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_END = 10.0  # after which a process that was asked to end is killed
SETTINGS = ("generation_max_new_tokens", "generation_num_beams")  # of train: answers depend on them


def score_run(call: Call, run: RunFolder) -> list[str]:
    """Score weights on rows, on every GPU or NUM_GPUS; return the lines to print.

    If there are several processes, the first one prints them itself.
    """
    asked = use.settings_with_given(call, run, "eval")
    device = call.machine.kind
    compares = use.compares(call, run)
    place = FanOutPlace.of_environment(call.environ)
    count = count_gpu_processes(call, asked)
    if place is None and count > 1:
        run_on_each("eval", call, run, count)
        return []
    from sft_play.inference.evaluate import evaluate_run

    lines = evaluate_run(run, device, asked, place, compares)
    return lines if place is None or place.number == 0 else []


@dataclass(frozen=True)
class FileCall:
    """A call that requests the answers to a file."""

    call: Call
    run: RunFolder
    loaded: LoadedConfig  # the run's settings, with the given ones on top
    sampling: SamplingRequest
    inputs: Path

    @classmethod
    def read(cls, call: Call, run: RunFolder, prompt: str | None) -> "FileCall | None":
        """Return the call for the file in IN; None without it. Raises ConfigError."""
        inputs, out = call.words.text("IN"), call.words.text("OUT")
        problems = []
        if inputs and (prompt or call.words.text("PROMPT")):
            problems.append(f"IN={inputs} and PROMPT: ask one of them")
        if inputs and call.words.text("IMAGE"):
            problems.append(f"IN={inputs} and IMAGE: the rows of a file name their own images")
        if out and not inputs:
            problems.append("OUT: is for the answers to a file; name that with IN=prompts.jsonl")
        refuse(problems)
        if inputs is None:
            return None
        loaded = use.settings_with_given(call, run, "infer")
        return cls(call, run, loaded, read_sampling(call.environ), Path(inputs))

    @property
    def out(self) -> Path:
        """OUT, by default the name of the file in the run's folder."""
        out = self.call.words.text("OUT")
        name = f"{self.inputs.name.partition('.')[0]}.jsonl"
        return Path(out) if out else self.run.results / "answers" / name

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the file. Raises DataError."""
        columns = self.loaded.config.data.columns if self.loaded.is_set("data.columns") else {}
        found = read_prompts(self.inputs, columns, SystemPrompt.from_config(self.loaded.config))
        if not found:
            raise DataError(f"IN={self.inputs}: no prompts")
        return found

    def asked(self, prompts: Sequence[Prompt]) -> Json:
        """Return everything that the answers depend on."""
        config = self.loaded.config
        weights = _digest(self.run.weights(config.tuning.mode) / stamp.NAME)
        if isinstance(self.run, ModelFolder):
            weights = stamp.digest_of_model(self.run.path)
        asked = {
            "in": str(self.inputs.resolve()),
            "sha256": _digest(self.inputs),
            "images_sha256": _digest_of_images(prompts),
            "run": str(self.run.path.resolve()),
            "weights_sha256": weights,
            "data.system_prompt": config.data.system_prompt,
        }
        asked |= {f"train.{name}": getattr(config.train, name) for name in SETTINGS}
        return asked | asdict(self.sampling)


def answer_file(asked: FileCall) -> list[str]:
    """Answer the prompts of a file, on every GPU; return the lines to print.

    An interrupted call resumes when repeated. Raises: StoppedOnRequest on Ctrl-C.
    """
    prompts = asked.prompts()
    file = AnswerFile(asked.out)
    place = FanOutPlace.of_environment(asked.call.environ)
    if place is not None:
        _answer_share(asked, prompts, file, place, lambda _: None)
        return []
    file.begin(asked.asked(prompts))
    if not file.is_complete():
        with file.held():
            _answer_rest(asked, prompts, file)
    without = file.count_without_answer()
    lines = [f"answers {file.path} rows={len(prompts)}"]
    if without:
        warning = f"warning: {without} prompts have no answer; their lines say why, under error"
        lines.insert(0, warning)
    return lines


def _answer_rest(asked: FileCall, prompts: Sequence[Prompt], file: AnswerFile) -> None:
    """Answer the remaining prompts, and sort all answers."""
    done = len(file.answered())
    count = min(count_gpu_processes(asked.call, asked.loaded), max(1, len(prompts) - done))
    try:
        with counted("answering", len(prompts), "prompts", done) as advance:
            if count == 1:
                _answer_share(asked, prompts, file, FanOutPlace(0, 1), advance)
            else:
                watch = PartsWatch(file)
                look = lambda: advance(watch.new_answers())  # noqa: E731
                run_on_each("infer", asked.call, asked.run, count, look)
                look()
    except (KeyboardInterrupt, StoppedOnRequest):
        done = len(file.answered())
        raise StoppedOnRequest(
            f"stopped: {done} of {len(prompts)} prompts are answered; the same command continues"
        ) from None
    file.finish(len(prompts))


def _answer_share(
    asked: FileCall,
    prompts: Sequence[Prompt],
    file: AnswerFile,
    place: FanOutPlace,
    advance: Callable[[int], None],
) -> None:
    from sft_play.inference.file_answers import answer_prompts
    from sft_play.inference.load import load_run

    device = asked.call.machine.kind
    trained = load_run(asked.run, device, asked.loaded.config).sampled(asked.sampling)
    answer_prompts(trained, prompts, file, place, asked.sampling.seed, advance)


def count_gpu_processes(call: Call, asked: LoadedConfig) -> int:
    """Return how many processes share the rows: one per GPU, or NUM_GPUS.

    It is one if the model itself is placed on several GPUs.
    """
    if asked.config.model.device_map is not None:
        return 1
    hardware = call.machine
    wanted = call.invocation.num_gpus
    if hardware.kind == "cpu":
        return wanted or 1
    return min(wanted or hardware.count, hardware.count)


def end_with_command(environ: Mapping[str, str]) -> None:
    """End this process with the command that started it, if that runs several."""
    place = FanOutPlace.of_environment(environ)
    if place is not None:
        stops.end_with_parent(parent=place.parent)


def run_on_each(
    command: str, call: Call, run: RunFolder, count: int, look: Callable[[], None] = lambda: None
) -> None:
    """Run `count` processes of a command to their end; `look` is called meanwhile.

    Raises: StoppedOnRequest after a signal, and the error class of a process that failed.
    """
    words = [word for override in call.overrides for word in ("--set", override)]
    paths = [str(PACKAGE.parent), call.environ.get("PYTHONPATH", "")]
    environ = dict(call.environ, RUN=str(run.path), PYTHONPATH=os.pathsep.join(filter(None, paths)))
    port = free_port()
    entries = visible_entries(call.environ.get("CUDA_VISIBLE_DEVICES"), count)
    children: list[subprocess.Popen] = []
    with stops.stopped_with("stopped"):
        try:
            for number in range(count):
                environ[PLACE] = f"{number}/{count}:{port}:{os.getpid()}"
                if call.invocation.device != "cpu":
                    environ["CUDA_VISIBLE_DEVICES"] = entries[number]
                line = [sys.executable, "-m", "sft_play", command, *words]
                children.append(subprocess.Popen(line, env=environ, stdin=subprocess.DEVNULL))
            while any(child.poll() is None for child in children):
                _refuse_failed(children, command)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                look()
            _refuse_failed(children, command)
        finally:
            _end(children)


def _refuse_failed(children: Sequence[subprocess.Popen], command: str) -> None:
    for number, child in enumerate(children):
        if child.poll():
            known = child.returncode in set(ExitClass)
            raise error_of_class(
                child.returncode if known else None,
                f"{command}: process {number} of {len(children)} ended with exit code "
                f"{child.returncode}; the reason is above",
            )


def _end(children: Sequence[subprocess.Popen]) -> None:
    """End the processes that still run."""
    for child in children:
        child.terminate()
    for child in children:
        try:
            child.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_images(prompts: Sequence[Prompt]) -> str | None:
    """Return a digest of names, sizes and times of the prompts' image files, None without any."""
    images = images_of([message for prompt in prompts for message in prompt.messages])
    paths = [image.path for image in images if image.path]
    stats = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest() if stats else None
