"""The arms of the data preparation benchmark: each prepares rows and reports what it took."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "data" / "tiny_llama"
MAX_SEQ_LEN = 1024  # more than the longest row has: nothing is cut, so samples can be compared
EFFECTIVE_BATCH = 128
BATCH_SIZE = 4
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Elapsed:
    """Seconds on the clock, and CPU seconds of a process and of those that it waited for."""

    seconds: float
    cpu_seconds: float

    def __add__(self, other: Elapsed) -> Elapsed:
        return Elapsed(self.seconds + other.seconds, self.cpu_seconds + other.cpu_seconds)


class Stopwatch:
    """Measures from its creation on."""

    def __init__(self):
        self.began = self._now()

    def read(self) -> Elapsed:
        """Return what elapsed since."""
        now = self._now()
        return Elapsed(now.seconds - self.began.seconds, now.cpu_seconds - self.began.cpu_seconds)

    @staticmethod
    def _now() -> Elapsed:
        own = resource.getrusage(resource.RUSAGE_SELF)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        return Elapsed(time.perf_counter(), cpu_seconds)


@dataclass(frozen=True)
class Memory:
    """Bytes of a process and all that it started."""

    rss: int = 0
    pss: int = 0  # counts a shared page once
    anonymous: int = 0  # of pss, what no file backs

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.rss + other.rss, self.pss + other.pss, self.anonymous + other.anonymous)

    def max(self, other: Memory) -> Memory:
        """Return the larger of each."""
        return Memory(
            max(self.rss, other.rss),
            max(self.pss, other.pss),
            max(self.anonymous, other.anonymous),
        )

    @classmethod
    def of(cls, process: psutil.Process) -> Memory:
        """Return the memory of a process and of its children now."""
        total = cls()
        for each in [process, *process.children(recursive=True)]:
            try:
                text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended
            kib = {}
            for line in text.splitlines()[1:]:
                name, _, rest = line.partition(":")
                kib[name] = int(rest.split()[0])
            total += cls(kib["Rss"] * 1024, kib["Pss"] * 1024, kib["Pss_Anon"] * 1024)
        return total


@dataclass(frozen=True)
class ArmReport:
    """What one run of an arm took and made.

    The process that starts it measures the last three.
    """

    seconds: float
    cpu_seconds: float
    samples: int
    tokens: int | None = None
    trained_tokens: int | None = None
    digest: str | None = None  # of ids and masks; None where rows were packed
    libraries: Memory | None = None  # before anything was prepared
    process_seconds: float | None = None
    load_before: float | None = None
    peak: Memory | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the report without what does not apply; an arm that counts tokens has a digest."""
        entry = asdict(self)
        kept = {name: value for name, value in entry.items() if value is not None}
        if self.tokens is not None:
            kept["digest"] = self.digest
        return kept

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> ArmReport:
        """Return what `as_json` wrote."""
        memories = {}
        for name in ("libraries", "peak"):
            if name in entry:
                memories[name] = Memory(**entry[name])
        return cls(**entry | memories)


def _report(elapsed: Elapsed, samples: int, ids: np.ndarray, trained: np.ndarray) -> ArmReport:
    """Return a report with a digest of the ids and masks of all samples in their order."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4"))
    digest.update(np.packbits(trained))
    return ArmReport(
        elapsed.seconds,
        elapsed.cpu_seconds,
        samples,
        tokens=len(ids),
        trained_tokens=int(np.count_nonzero(trained)),
        digest=digest.hexdigest()[:16],
    )


def ours(rows: Path, work: Path) -> ArmReport:
    """Prepare rows as the front end does.

    It reads, checks, hashes, tokenizes into a store, splits, and looks for overlap and duplicates.
    """
    from sft_play.config.schema import Config
    from sft_play.data.assemble import DataFacts
    from sft_play.data.ledger import PaddedTokens
    from sft_play.data.pipeline import build_run_data
    from sft_play.data.tokenizer import load_tokenizer

    config = Config(
        model={"name": str(TINY), "max_seq_len": MAX_SEQ_LEN},
        data={"train_path": str(rows), "cache_dir": str(work / "cache")},
    )
    tokenizer = load_tokenizer(config)
    stopwatch = Stopwatch()
    data = build_run_data(config, tokenizer)
    elapsed = stopwatch.read()
    facts = DataFacts(data.sources, PaddedTokens(0, 0, 0))
    made = {"config": config.model_dump(mode="json"), "data": facts.to_json()}
    (work / "data.json").write_text(json.dumps(made))
    (store,) = data.train.stores
    return _report(elapsed, len(store), store.ids, store.trained)


def ours_packed(rows: Path, work: Path) -> ArmReport:
    """Prepare rows and pack every step of the first epoch."""
    prepared = ours(rows, work)
    packed = ours_epoch(rows, work)
    return replace(
        prepared,
        seconds=prepared.seconds + packed.seconds,
        cpu_seconds=prepared.cpu_seconds + packed.cpu_seconds,
        samples=packed.samples,
        digest=None,
    )


def ours_epoch(rows: Path, work: Path) -> ArmReport:
    """Open what `ours` made, as every rank does, and pack every step of the first epoch."""
    from sft_play.config.schema import Config
    from sft_play.data.assemble import DataFacts, assemble
    from sft_play.data.order import StepSampler, fullest_step
    from sft_play.plan.layout import Layout

    made = json.loads((work / "data.json").read_text())
    libraries = Memory.of(psutil.Process())
    stopwatch = Stopwatch()
    data = assemble(Config(**made["config"]), DataFacts.from_json(made["data"]).sources)
    grad_accum = EFFECTIVE_BATCH // BATCH_SIZE
    layout = Layout(BATCH_SIZE, grad_accum, world_size=1, max_seq_len=MAX_SEQ_LEN)
    packed = layout.packed(fullest_step(data.train.lengths, layout, seed=0, epochs=1))
    sequences = sum(len(micro_batch) for micro_batch in StepSampler(data.train.lengths, packed, 0))
    elapsed = stopwatch.read()
    return ArmReport(elapsed.seconds, elapsed.cpu_seconds, sequences, libraries=libraries)


def trl(
    rows: Path,
    work: Path,
    processes: int | None = None,
    packing: bool = False,
    completions: bool = False,
) -> ArmReport:
    """Prepare rows as SFTTrainer does in its constructor, with loss on the answer alone.

    The answer is found by the template's generation marks, or by the column of the completion.
    """
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            stopwatch = Stopwatch()
            prepared = super()._prepare_dataset(*args, **kwargs)
            self.preparing = stopwatch.read()
            return prepared

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tiny = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    settings = SFTConfig(
        str(work / "run"),
        max_length=MAX_SEQ_LEN,
        assistant_only_loss=not completions,
        packing=packing,
        dataset_num_proc=processes,
        report_to="none",
        use_cpu=True,
    )
    stopwatch = Stopwatch()
    dataset = load_dataset("json", data_files=str(rows), split="train")
    loading = stopwatch.read()
    trainer = TimedTrainer(
        LlamaForCausalLM(tiny), settings, train_dataset=dataset, processing_class=tokenizer
    )
    prepared = trainer.train_dataset
    ids = _column(prepared, "input_ids")
    labels = _column(prepared, "labels")
    report = _report(loading + trainer.preparing, len(prepared), ids, labels != -100)
    return replace(report, digest=None) if packing else report


def _column(dataset: Any, name: str) -> np.ndarray:
    """Return the values of all rows one after the other."""
    return dataset.data.column(name).combine_chunks().flatten().to_numpy()


class Arm(NamedTuple):
    """What it does with (file of rows, work folder), and the shape of the rows that it reads."""

    run: Callable[[Path, Path], ArmReport]
    rows: str


ARMS = {
    "ours": Arm(ours, "messages"),
    "ours-alpaca": Arm(ours, "alpaca"),
    "ours-packed": Arm(ours_packed, "messages"),
    "ours-epoch": Arm(ours_epoch, "messages"),
    "trl": Arm(trl, "messages"),
    "trl-all-cores": Arm(partial(trl, processes=CORES), "messages"),
    "trl-completion": Arm(partial(trl, completions=True), "completion"),
    "trl-completion-all-cores": Arm(partial(trl, processes=CORES, completions=True), "completion"),
    "trl-packing-all-cores": Arm(partial(trl, processes=CORES, packing=True), "messages"),
}
