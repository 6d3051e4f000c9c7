"""Data preparation beside TRL's: from a file of rows to samples with loss masks, nothing cached.

python benchmarks/preparation.py           seconds, and whether the samples are equal
python benchmarks/preparation.py ours      without TRL, which requirements-bench.txt installs
python benchmarks/preparation.py --memory --rows 1000000 ours ours-epoch     peak memory

Every arm is a process of its own, and the arms take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.files import grid, number, read_as, write_as
from benchmarks.inputs import TINY, alpaca_rows
from benchmarks.machine import GIB, ROOT

MAX_SEQ_LEN = 1024  # more than the longest row has: nothing is cut, so samples can be compared
EFFECTIVE_BATCH = 128
BATCH_SIZE = 4
CORES = len(os.sched_getaffinity(0))
SAMPLE_SECONDS = 0.25  # between two readings of the memory
# of a process and all that it started; Pss counts a shared page once, Pss_Anon what no file backs
MEMORY = {"Rss": "rss", "Pss": "pss", "Pss_Anon": "anonymous"}
ARM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class ArmReport:
    """What one run of an arm took and made; the process that starts it measures the last three."""

    seconds: float
    cpu_seconds: float  # of the process and of those that it waited for
    samples: int
    tokens: int | None = None
    trained_tokens: int | None = None
    digest: str | None = None  # of ids and masks; None where rows were packed
    libraries: dict[str, int] | None = None  # memory before anything was prepared
    process_seconds: float | None = None
    load_before: float | None = None
    peak: dict[str, int] | None = None


def now() -> np.ndarray:
    """Return seconds on the clock, and CPU seconds of this process and its children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return np.array([time.perf_counter(), cpu_seconds])


def memory_now(process: psutil.Process) -> Counter[str]:
    """Return the bytes of a process and of its children."""
    found: Counter[str] = Counter()
    for each in [process, *process.children(recursive=True)]:
        try:
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        for line in text.splitlines()[1:]:
            name, _, rest = line.partition(":")
            if name in MEMORY:
                found[MEMORY[name]] += int(rest.split()[0]) * 1024
    return found


def make_report(took: np.ndarray, samples: int, ids: np.ndarray, trained: np.ndarray) -> ArmReport:
    """Return a report with a digest of the ids and masks of all samples in their order."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4"))
    digest.update(np.packbits(trained))
    counts = (samples, len(ids), int(np.count_nonzero(trained)))
    return ArmReport(*map(float, took), *counts, digest.hexdigest()[:16])


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
    began = now()
    data = build_run_data(config, tokenizer)
    took = now() - began
    facts = DataFacts(data.sources, PaddedTokens(0, 0, 0))
    made = {"config": config.model_dump(mode="json"), "data": facts.to_json()}
    (work / "data.json").write_text(json.dumps(made))
    (store,) = data.train.stores
    return make_report(took, len(store), store.ids, store.trained)


def ours_packed(rows: Path, work: Path) -> ArmReport:
    """Prepare rows and pack every step of the first epoch."""
    prepared, packed = ours(rows, work), ours_epoch(rows, work)
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
    from sft_play.plan.step import Layout

    made = json.loads((work / "data.json").read_text())
    libraries = memory_now(psutil.Process())
    began = now()
    data = assemble(Config(**made["config"]), DataFacts.from_json(made["data"]).sources)
    grad_accum = EFFECTIVE_BATCH // BATCH_SIZE
    layout = Layout(BATCH_SIZE, grad_accum, world_size=1, max_seq_len=MAX_SEQ_LEN)
    packed = layout.packed(fullest_step(data.train.lengths, layout, seed=0, epochs=1))
    sequences = sum(len(micro_batch) for micro_batch in StepSampler(data.train.lengths, packed, 0))
    return ArmReport(*map(float, now() - began), sequences, libraries=libraries)


def trl(rows: Path, work: Path, processes: int | None = None, packing: bool = False) -> ArmReport:
    """Prepare rows as SFTTrainer does in its constructor, with loss on the answer alone."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            began = now()
            prepared = super()._prepare_dataset(*args, **kwargs)
            self.preparing = now() - began
            return prepared

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    settings = SFTConfig(
        str(work / "run"),
        max_length=MAX_SEQ_LEN,
        assistant_only_loss=True,
        packing=packing,
        dataset_num_proc=processes,
        report_to="none",
        use_cpu=True,
    )
    began = now()
    dataset = load_dataset("json", data_files=str(rows), split="train")
    loading = now() - began
    trainer = TimedTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer)
    columns = trainer.train_dataset.data
    ids, labels = (
        columns.column(name).combine_chunks().flatten().to_numpy()
        for name in ("input_ids", "labels")
    )
    took = loading + trainer.preparing
    report = make_report(took, len(trainer.train_dataset), ids, labels != -100)
    return replace(report, digest=None) if packing else report


ARMS = {
    "ours": ours,
    "ours-packed": ours_packed,
    "ours-epoch": ours_epoch,
    "trl": trl,
    "trl-all-cores": partial(trl, processes=CORES),
    "trl-packing-all-cores": partial(trl, processes=CORES, packing=True),
}
COMPARED = [name for name in ARMS if name != "ours-epoch"]  # that one reads what ours wrote


def run_arm(name: str, rows: Path, work: Path, watch_memory: bool) -> ArmReport:
    """Run an arm in a process of its own. Exits where it fails."""
    work.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **ARM_VARIABLES, "HF_DATASETS_CACHE": str(work / "datasets")}
    command = [sys.executable, __file__, "--arm", name, "--work", str(work), str(rows)]
    load_before = os.getloadavg()[0]
    peak: Counter[str] = Counter()
    began = time.perf_counter()
    with (work / "log").open("w") as log:
        arm = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        while watch_memory and arm.poll() is None:
            peak |= memory_now(psutil.Process(arm.pid))  # the larger of each
            time.sleep(SAMPLE_SECONDS)
        if arm.wait():
            sys.exit(f"{name} ended with {arm.returncode}:\n{(work / 'log').read_text()[-3000:]}")
    return replace(
        read_as(ArmReport, work / "report.json"),
        process_seconds=time.perf_counter() - began,
        load_before=load_before,
        peak=dict(peak) or None,
    )


def compare(
    names: list[str], rows: Path, work: Path, repeats: int, watch_memory: bool
) -> dict[str, list[ArmReport]]:
    """Run the arms in turns, with empty caches; ours-epoch reads what ours wrote in its turn."""
    reports: dict[str, list[ArmReport]] = {name: [] for name in names}
    for turn in range(1, repeats + 1):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            for name in names:
                own = Path(folder) / ("ours" if name == "ours-epoch" else name)
                reports[name].append(run_arm(name, rows, own, watch_memory))
                took = reports[name][-1].seconds
                print(f"{turn}/{repeats} {name} {took:.1f} s", file=sys.stderr, flush=True)
    return reports


def table(reports: dict[str, list[ArmReport]]) -> str:
    """Return the medians of each arm, and whether the samples of the arms are equal."""

    def median(name: str, field: str) -> float:
        return statistics.median(getattr(report, field) for report in reports[name])

    rows = []
    counted = ("samples", "tokens", "trained_tokens")
    for name, each in reports.items():
        times = median(name, "seconds") / median("ours", "seconds") if "ours" in reports else None
        peak: Counter[str] = Counter()
        for report in each:
            peak |= Counter(report.peak or {})
        rows.append([
            name,
            *(f"{median(name, f'{kind}seconds'):.1f}" for kind in ("", "cpu_", "process_")),
            number(times, ".2f"),
            *(number(getattr(each[-1], field)) for field in counted),
            each[-1].digest or "-",
            ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in peak.items()),
        ])  # fmt: skip
    head = ["arm", "seconds", "CPU", "process", "times ours", "samples", "tokens", "trained"]
    equal = "equal in every arm"
    if not have_equal_samples(reports):
        equal = "NOT EQUAL: the seconds do not count"
    text = grid([*head, "ids and masks", "peak GiB"], rows, ("arm", "ids and masks", "peak GiB"))
    return f"{text}ids, masks and counts: {equal}"


def have_equal_samples(reports: dict[str, list[ArmReport]]) -> bool:
    """Return whether all arms made the same ids and masks, as far as they tell."""
    every = [report for each in reports.values() for report in each]
    digests = {report.digest for report in every} - {None}
    counts = {(report.tokens, report.trained_tokens) for report in every} - {(None, None)}
    return len(digests) <= 1 and len(counts) <= 1


def main() -> None:
    """Run one arm in this process, or all of them and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="arm", help=f"of {', '.join(ARMS)}; all but ours-epoch")
    add("--rows", type=int, default=52_002, help="as many as Alpaca has")
    add("--repeats", type=int, default=3)
    add("--memory", action="store_true", help="sample the memory of every arm, in one turn")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    add("--work", type=Path, default=ROOT / "outputs" / "benchmarks", help="of rows and samples")
    add("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        report = ARMS[args.arm](Path(args.names[0]), args.work)
        write_as(args.work / "report.json", report)
        return
    names = args.names or COMPARED
    unknown = set(names) - set(ARMS)
    if unknown:
        parser.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if "ours-epoch" in names and "ours" not in names[: names.index("ours-epoch")]:
        parser.error("ours-epoch opens what ours made: name ours before it")
    rows = args.work / f"messages-{args.rows}.jsonl"
    if not rows.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        alpaca_rows(args.work / "alpaca.jsonl", rows, args.rows)
    reports = compare(names, rows, args.work, 1 if args.memory else args.repeats, args.memory)
    kind = "memory" if args.memory else "seconds"
    found = {"rows": args.rows, "cores": CORES}
    found["arms"] = {name: [asdict(report) for report in each] for name, each in reports.items()}
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    (args.out / f"preparation-{kind}-{args.rows}.json").write_text(text)
    print(table(reports))


if __name__ == "__main__":
    main()
