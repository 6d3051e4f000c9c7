"""Data preparation of SFT-Play and of TRL: from a file of rows to samples with loss masks.

python benchmarks/preparation.py           seconds, and whether the samples are equal
python benchmarks/preparation.py --kind chats   only rows of several turns
python benchmarks/preparation.py --arms ours  without TRL, which requirements-bench.txt installs
python benchmarks/preparation.py --memory --rows 1000000 --arms ours ours-epoch     peak memory

Nothing is cached. Every arm is a process of its own, and the arms take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inputs import TINY, alpaca_rows, chat_rows
from benchmarks.machine import GIB, ROOT, Machine
from benchmarks.report import grid, number
from benchmarks.results import Result, Results

MAX_SEQ_LEN = 1024  # longer than the longest row: nothing is cut, so samples can be compared
EFFECTIVE_BATCH = 128
BATCH_SIZE = 4
CORES = len(os.sched_getaffinity(0))
SAMPLE_SECONDS = 0.25  # between two measurements of the memory
# of a process and its children; Pss counts a shared page once, Pss_Anon what no file backs
MEMORY = {"Rss": "rss", "Pss": "pss", "Pss_Anon": "anonymous"}
ARM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
KINDS = {"alpaca": (alpaca_rows, 52_002), "chats": (chat_rows, 20_000)}  # as many as Alpaca has
SECONDS = ("seconds", "cpu_seconds", "process_seconds")
Turn = dict[str, Any]  # figures of one run of an arm


def now() -> np.ndarray:
    """Return seconds on the clock, and CPU seconds of this process and its children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return np.array([time.perf_counter(), cpu_seconds])


def memory_now(process: psutil.Process) -> Counter[str]:
    """Return the bytes of a process and its children."""
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


def make_turn(took: np.ndarray, samples: int, **more: Any) -> Turn:
    """Return the figures of a run."""
    seconds, cpu_seconds = map(float, took)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "samples": samples, **more}


def compared(ids: np.ndarray, labelled: np.ndarray) -> Turn:
    """Return token counts, and a digest of the ids and masks of all samples in their order."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4"))
    digest.update(np.packbits(labelled))
    counts = {"tokens": len(ids), "trained_tokens": int(np.count_nonzero(labelled))}
    return counts | {"digest": digest.hexdigest()[:16]}


def ours(rows: Path, work: Path) -> Turn:
    """Read, check and tokenize rows, split them, and search for overlap, as the front end does."""
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
    started = now()
    data = build_run_data(config, tokenizer)
    took = now() - started
    facts = DataFacts(data.sources, PaddedTokens(0, 0, 0))
    made = {"config": config.model_dump(mode="json"), "data": facts.to_json()}
    (work / "data.json").write_text(json.dumps(made))
    (store,) = data.train.stores
    return make_turn(took, len(store), **compared(store.ids, store.trained))


def ours_packed(rows: Path, work: Path) -> Turn:
    """Prepare rows and pack every step of the first epoch."""
    prepared, packed = ours(rows, work), ours_epoch(rows, work)
    del prepared["digest"]
    total = {name: prepared[name] + packed[name] for name in ("seconds", "cpu_seconds")}
    return prepared | total | {"samples": packed["samples"]}


def ours_epoch(rows: Path, work: Path) -> Turn:
    """Open what `ours` made, as every rank does, and pack every step of the first epoch."""
    from sft_play.config.schema import Config
    from sft_play.data.assemble import DataFacts, assemble
    from sft_play.data.order import StepSampler, fullest_step
    from sft_play.plan.step import Layout

    made = json.loads((work / "data.json").read_text())
    libraries = memory_now(psutil.Process())
    started = now()
    data = assemble(Config(**made["config"]), DataFacts.from_json(made["data"]).sources)
    grad_accum = EFFECTIVE_BATCH // BATCH_SIZE
    layout = Layout(BATCH_SIZE, grad_accum, world_size=1, max_seq_len=MAX_SEQ_LEN)
    packed = layout.packed(fullest_step(data.train.lengths, layout, seed=0, epochs=1))
    sequences = sum(len(micro_batch) for micro_batch in StepSampler(data.train.lengths, packed, 0))
    return make_turn(now() - started, sequences, libraries=dict(libraries))


def trl(rows: Path, work: Path, processes: int | None = None, packing: bool = False) -> Turn:
    """Prepare rows as SFTTrainer does in its constructor, with loss only on answers."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            started = now()
            prepared = super()._prepare_dataset(*args, **kwargs)
            self.preparing = now() - started
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
    started = now()
    dataset = load_dataset("json", data_files=str(rows), split="train")
    loading = now() - started
    trainer = TimedTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer)
    columns = trainer.train_dataset.data
    ids, labels = (
        columns.column(name).combine_chunks().flatten().to_numpy()
        for name in ("input_ids", "labels")
    )
    found = compared(ids, labels != -100)
    if packing:
        del found["digest"]
    return make_turn(loading + trainer.preparing, len(trainer.train_dataset), **found)


ARMS = {
    "ours": ours,
    "ours-packed": ours_packed,
    "ours-epoch": ours_epoch,
    "trl": trl,
    "trl-all-cores": partial(trl, processes=CORES),
    "trl-packing-all-cores": partial(trl, processes=CORES, packing=True),
}
COMPARED = [name for name in ARMS if name != "ours-epoch"]  # which reads what ours wrote


def run_arm(name: str, rows: Path, work: Path, watch_memory: bool) -> Turn:
    """Run an arm in a process of its own."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ.update(ARM_VARIABLES, HF_DATASETS_CACHE=str(work / "datasets"))
    load_before, peak, started = os.getloadavg()[0], Counter(), time.perf_counter()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        arm = pool.submit(ARMS[name], rows, work)
        while watch_memory and not arm.done():
            (process,) = pool._processes
            peak |= memory_now(psutil.Process(process))  # the larger of each
            time.sleep(SAMPLE_SECONDS)
        turn = arm.result()
    more = {"process_seconds": time.perf_counter() - started, "load_before": load_before}
    return turn | more | ({"peak": dict(peak)} if peak else {})


def compare(
    names: Sequence[str], rows: Path, work: Path, repeats: int, watch_memory: bool
) -> list[Result]:
    """Run the arms in turns, with empty caches. ours-epoch reads what ours wrote in its turn."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            for name in names:
                own = Path(folder) / ("ours" if name == "ours-epoch" else name)
                turns[name].append(run_arm(name, rows, own, watch_memory))
                print(f"{name} {turns[name][-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    settings, kind = {"cores": CORES}, rows.stem
    found = turns.items()
    return [Result(kind, name, settings=settings, figures={"turns": each}) for name, each in found]


def table(results: Results) -> str:
    """Return the medians of each arm, and whether the samples of the arms are equal."""

    by_arm = {result.arm: result.figures["turns"] for result in results.results}
    rows, digests, counts = [], set(), set()
    for name, turns in by_arm.items():
        last, peak = turns[-1], Counter()
        for turn in turns:
            digests |= {turn.get("digest")} - {None}
            counts |= {(turn.get("tokens"), turn.get("trained_tokens"))} - {(None, None)}
            peak |= Counter(turn.get("peak") or {})
        seconds = [median(turn[name] for turn in turns) for name in SECONDS]
        times = seconds[0] / median(turn["seconds"] for turn in by_arm.get("ours", turns))
        rows.append([
            name,
            *(f"{each:.1f}" for each in seconds),
            f"{times:.2f}",
            *(number(last.get(field)) for field in ("samples", "tokens", "trained_tokens")),
            ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in peak.items()),
        ])  # fmt: skip
    head = ["arm", "seconds", "CPU", "process", "times ours", "samples", "tokens", "labelled"]
    are_equal = len(digests) <= 1 and len(counts) <= 1
    equal = "equal in every arm" if are_equal else "NOT EQUAL: the seconds do not count"
    text = grid([*head, "peak GiB"], rows, ("arm", "peak GiB"))
    return f"{text}ids, masks and counts: {equal}"


def main() -> None:
    """Run one arm in this process, or all of them and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=COMPARED, help="ours-epoch needs ours before it")
    add("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    add("--rows", type=int, help="default 52,002 of alpaca, 20,000 of chats")
    add("--repeats", type=int, default=3)
    add("--memory", action="store_true", help="measure the memory of every arm, in one turn")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results")
    add("--work", type=Path, default=ROOT / "outputs" / "benchmarks", help="of rows and samples")
    add("--report", type=Path, metavar="FILE", help="run nothing; print the table of results")
    args = parser.parse_args()
    if args.report:
        print(table(Results.read(args.report)))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    for kind in args.kind:
        write, count = KINDS[kind]
        count = args.rows or count
        rows = args.work / f"{count}-{kind}.jsonl"
        if not rows.exists():
            write(rows, count)
        repeats = 1 if args.memory else args.repeats
        found = compare(args.arms, rows, args.work, repeats, args.memory)
        measured = "memory" if args.memory else "seconds"
        path = args.out / f"preparation-{measured}-{count}-{kind}.json"
        results = Results(machine=Machine.here(on_cpu=True), results=found, path=path)
        results.write()
        print(f"{kind}\n{table(results)}", flush=True)


if __name__ == "__main__":
    main()
