"""The make variables that are no settings: config, run, machine, sampling. Pure."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sft_play.config.messages import NOT_UTF8, not_utf8, refuse, word

PORTS = 65535
FORCE_SINGLE = "UNSLOTH_FORCE_SINGLE_GPU"


def _variable(default: Any, meaning: str) -> Any:
    """A field that the variable of the same name in capitals fills."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Invocation:
    """How a command was called; None leaves the choice to the machine."""

    config: str | None = _variable(
        None,
        "Config file, or the name of one in configs/; unset is configs/tiny.yaml for the included "
        "model, configs/base.yaml for any other.",
    )
    run: str | None = _variable(
        None,
        "Training: the new run's name. Elsewhere: which run, unset is the latest with weights; "
        "eval, infer and chat also take a model folder or an adapter.",
    )
    resume: str | None = _variable(
        None,
        "Training: auto continues with the run of the name in RUN, never does not, and a run or a "
        "checkpoint is where a new run continues from; unset is auto if RUN is set.",
    )
    elastic: bool = _variable(
        False, "1: a run that continues may have another number of processes (train.elastic)."
    )
    num_gpus: int | None = _variable(
        None,
        "Processes on this machine, one a GPU; unset is every GPU, or one process on a CPU. "
        "Several on a CPU need DEVICE=cpu, and a core each.",
    )
    deepspeed_config: str | None = _variable(
        None, "DeepSpeed JSON of train-deepspeed; unset is configs/deepspeed_zero2.json."
    )
    tb_port: int = _variable(6006, "Port of TensorBoard.")
    device: Literal["auto", "cpu", "cuda"] = _variable(
        "auto", "Where to compute; auto is cuda if there is a GPU."
    )
    nnodes: int = _variable(1, "Machines of the run.")
    node_rank: int = _variable(0, "Number of this machine, from 0 to NNODES - 1.")
    master_addr: str = _variable("127.0.0.1", "Address of machine 0, the same on every machine.")
    master_port: int | None = _variable(
        None, "Port on machine 0 where the processes meet; unset is a free one."
    )
    gpus: str | None = _variable(
        None,
        "Hardware to plan for instead of this machine's, such as 2xH200, 4x4090, 8xA100-80 or "
        "1x24GiB.",
    )
    exact: bool = _variable(False, "1: make plan traces the real model, without its weights.")


def read_invocation(environ: Mapping[str, str]) -> Invocation:
    """Return the variables, typed; an empty one is unset.

    Raises: ConfigError that lists every wrong one.
    """
    words = Words(environ)
    invocation = Invocation(
        config=words.text("CONFIG"),
        run=words.text("RUN"),
        resume=words.text("RESUME"),
        elastic=words.choice("ELASTIC", ("0", "1")) == "1",
        num_gpus=words.whole_number("NUM_GPUS", 1),
        deepspeed_config=words.text("DEEPSPEED_CONFIG"),
        tb_port=words.whole_number("TB_PORT", 1, PORTS) or Invocation.tb_port,
        device=words.choice("DEVICE", ("auto", "cpu", "cuda")) or Invocation.device,
        nnodes=words.whole_number("NNODES", 1) or Invocation.nnodes,
        node_rank=words.whole_number("NODE_RANK", 0) or Invocation.node_rank,
        master_addr=words.text("MASTER_ADDR") or Invocation.master_addr,
        master_port=words.whole_number("MASTER_PORT", 1, PORTS),
        gpus=words.text("GPUS"),
        exact=words.choice("EXACT", ("0", "1")) == "1",
    )
    if not words.problems and invocation.node_rank >= invocation.nnodes:
        last = invocation.nnodes - 1
        write = f"write a number from 0 to {last}" if last else "write NODE_RANK=0"
        words.problems.append(
            f"NODE_RANK={invocation.node_rank} with NNODES={invocation.nnodes}: {write}, "
            "or a larger NNODES"
        )
    if is_single_process_forced(environ):
        invocation = _as_single_process(invocation, words.problems)
    refuse(words.problems)
    return invocation


def is_single_process_forced(environ: Mapping[str, str]) -> bool:
    """Return whether Unsloth's variable asks for one process, on one GPU."""
    return Words(environ).is_on(FORCE_SINGLE)


def _as_single_process(invocation: Invocation, problems: list[str]) -> Invocation:
    """Return the call with one process; one that asks for several too is a problem."""
    for name, number in (("NUM_GPUS", invocation.num_gpus), ("NNODES", invocation.nnodes)):
        if number not in (None, 1):
            problems.append(f"{name}={number} with {FORCE_SINGLE}=1: leave one of them out")
    return replace(invocation, num_gpus=1)


class Words:
    """Reads variables by type; `problems` collects what cannot be read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        """Return a text; None if it is unset, empty, or a problem."""
        text = self.environ.get(name, "").strip()
        if not_utf8(text):
            self.problems.append(f"{name}={text} {NOT_UTF8}")
        return text or None

    def is_on(self, name: str) -> bool:
        """Return whether a switch of another program is on."""
        return (self.text(name) or "").lower() in ("1", "true", "yes")

    def whole_number(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return a whole number from `low` to `high`; None if it is unset or a problem."""
        text = self.text(name)
        if text is None:
            return None
        if re.fullmatch(r"[0-9]{1,18}", text) and low <= int(text) <= (high or int(text)):
            return int(text)
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        self.problems.append(f"{name}={word(text)}: write a whole number {bounds}")
        return None

    def number(self, name: str, is_allowed: Callable[[float], bool], bounds: str) -> float | None:
        """Return a finite number that is allowed; None if it is unset or a problem."""
        text = self.text(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and is_allowed(number):
            return number
        self.problems.append(f"{name}={word(text)}: write a number {bounds}")
        return None

    def choice(self, name: str, choices: tuple[str, ...]) -> Any:
        text = self.text(name)
        if text is None or text in choices:
            return text
        self.problems.append(
            f"{name}={word(text)}: write {', '.join(choices[:-1])} or {choices[-1]}"
        )
        return None


SAMPLING_VARIABLES = frozenset({"TEMPERATURE", "TOP_P", "TOP_K", "SEED"})


@dataclass(frozen=True)
class SamplingRequest:
    """What a call asks of sampling; None is what the base's generation_config.json says."""

    temperature: float | None = None  # 0: always the most likely token
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        # scores divided by a smaller one may overflow
        return self.temperature is not None and self.temperature < 1e-3

    @property
    def asks_nothing(self) -> bool:
        return self.temperature is None and self.top_p is None and self.top_k is None


def read_sampling(environ: Mapping[str, str]) -> SamplingRequest:
    """Return what the variables ask for. Raises ConfigError that lists every wrong one."""
    words = Words(environ)
    request = SamplingRequest(
        temperature=words.number("TEMPERATURE", lambda number: number >= 0, "of at least 0"),
        top_p=words.number("TOP_P", lambda number: 0 < number <= 1, "above 0, at most 1"),
        top_k=words.whole_number("TOP_K", 1),
        seed=words.whole_number("SEED", 0) or 0,
    )
    if request.is_greedy and (request.top_p, request.top_k) != (None, None):
        words.problems.append("TEMPERATURE=0 draws nothing; leave TOP_P and TOP_K out")
    refuse(words.problems)
    return request
