"""Data preparation side by side with TRL's: from a file of rows to samples with loss masks, nothing in a cache.

python benchmarks/preparation.py                            seconds, in turns, and whether the
samples are equal python benchmarks/preparation.py --memory --rows 1000000 ours ours-epoch     peak
memory of all processes

Every arm is a process of its own. TRL comes from requirements-bench.txt; `python
benchmarks/preparation.py ours` needs none.
"""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TINY = ROOT / "data" / "tiny_llama"
MAX_SEQ_LEN = (
    1024  # the tokens of the longest row are fewer: nothing is cut, so that samples can be compared
)
EFFECTIVE_BATCH = 128
SAMPLED_SECONDS = 0.25
CORES = len(os.sched_getaffinity(0))
GIB = 2**30


def ours(rows: Path, work: Path) -> dict[str, Any]:
    """Prepare rows as the front end does: read, check, hash, tokenise into a store, split, look for overlap and duplicates."""
    from sft_play.config.schema import Config
    from sft_play.data import prepare
    from sft_play.models.tokenizer import load_tokenizer

    config = Config(
        model={"name": str(TINY), "max_seq_len": MAX_SEQ_LEN},
        data={"train_path": str(rows), "cache_dir": str(work / "cache")},
    )
    tokenizer = load_tokenizer(config)
    began = spent()
    data = prepare.prepare(config, tokenizer)
    took = since(began)
    (work / "data.json").write_text(
        json.dumps(
            {"config": config.model_dump(mode="json"), "sources": prepare.as_json(data.sources)}
        )
    )
    (store,) = data.train.stores
    return {**took, "samples": len(store), **_described(store.ids, store.trained)}


def ours_packed(rows: Path, work: Path) -> dict[str, Any]:
    """Prepare rows and pack every step of the first epoch."""
    report = ours(rows, work)
    packed = ours_epoch(rows, work)
    took = {key: report[key] + packed[key] for key in ("seconds", "cpu_seconds")}
    return {**report, **took, "samples": packed["samples"], "digest": None}


def ours_epoch(rows: Path, work: Path) -> dict[str, Any]:
    """Open what `ours` made, as every rank does, and pack every step of the first epoch."""
    from sft_play.config.schema import Config
    from sft_play.data import prepare
    from sft_play.data.assemble import assemble
    from sft_play.data.order import Layout, StepSampler, fullest_step

    facts = json.loads((work / "data.json").read_text())
    libraries = memory(psutil.Process())
    began = spent()
    data = assemble(Config(**facts["config"]), prepare.from_json(facts["sources"]))
    layout = Layout(MAX_SEQ_LEN, batch_size=4, effective_batch=EFFECTIVE_BATCH)
    packed = layout.packed(fullest_step(data.train.lengths, layout, seed=0, epochs=1))
    sequences = sum(len(micro_batch) for micro_batch in StepSampler(data.train.lengths, packed, 0))
    return {**since(began), "samples": sequences, "libraries": libraries}


def trl(
    rows: Path,
    work: Path,
    processes: int | None = None,
    packing: bool = False,
    completions: bool = False,
) -> dict[str, Any]:
    """Prepare rows as SFTTrainer does when it is made: loss on the answer alone, by the template's marks or by the completion's place."""
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
            began = spent()
            made = super()._prepare_dataset(*args, **kwargs)
            self.took = since(began)
            return made

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
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
    began = spent()
    dataset = load_dataset("json", data_files=str(rows), split="train")
    loading = since(began)
    trainer = TimedTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer)
    made = trainer.train_dataset
    ids, labels = (
        made.data.column(name).combine_chunks().flatten().to_numpy()
        for name in ("input_ids", "labels")
    )
    described = _described(ids, labels != -100)
    took = {key: loading[key] + trainer.took[key] for key in loading}
    return {**took, "samples": len(made), **described, **({"digest": None} if packing else {})}


def spent() -> tuple[float, float]:
    """Return (seconds on the clock, CPU seconds of this process and those that it waited for)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def since(began: tuple[float, float]) -> dict[str, float]:
    """Return what went by since `spent`."""
    clock, cpu = spent()
    return {"seconds": clock - began[0], "cpu_seconds": cpu - began[1]}


def _described(ids: np.ndarray, trained: np.ndarray) -> dict[str, Any]:
    """Return counts of tokens, and a digest of the ids and masks of all samples in their order."""
    digest = hashlib.sha256(np.ascontiguousarray(ids, "<i4"))
    digest.update(np.packbits(trained))
    return {
        "tokens": len(ids),
        "trained_tokens": int(np.count_nonzero(trained)),
        "digest": digest.hexdigest()[:16],
    }


ARMS: dict[
    str, tuple[Callable[[Path, Path], dict[str, Any]], str]
] = {  # name: (what it does, the rows it reads)
    "ours": (ours, "messages"),
    "ours-alpaca": (ours, "alpaca"),
    "ours-packed": (ours_packed, "messages"),
    "ours-epoch": (ours_epoch, "messages"),
    "trl": (trl, "messages"),
    "trl-all-cores": (lambda rows, work: trl(rows, work, CORES), "messages"),
    "trl-completion": (lambda rows, work: trl(rows, work, completions=True), "completion"),
    "trl-completion-all-cores": (
        lambda rows, work: trl(rows, work, CORES, completions=True),
        "completion",
    ),
    "trl-packing-all-cores": (lambda rows, work: trl(rows, work, CORES, packing=True), "messages"),
}
COMPARED = [name for name in ARMS if name != "ours-epoch"]  # that one opens what another arm made


def memory(process: psutil.Process) -> dict[str, int]:
    """Return bytes of a process and all that it started: rss; pss, which counts a shared page once; anonymous, that of it which no file backs."""
    total = dict.fromkeys(("rss", "pss", "anonymous"), 0)
    for one in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()[1:]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        kib = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
        }
        for name, field in (("rss", "Rss"), ("pss", "Pss"), ("anonymous", "Pss_Anon")):
            total[name] += kib[field] * 1024
    return total


def run_arm(name: str, rows: Path, work: Path, watched: bool) -> dict[str, Any]:
    """Run an arm in a process of its own; return its report, with the seconds of the process and, if watched, its peak memory."""
    work.mkdir(parents=True, exist_ok=True)
    variables = {
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    began, peak, load = (
        time.perf_counter(),
        dict.fromkeys(("rss", "pss", "anonymous"), 0),
        os.getloadavg()[0],
    )
    with (work / "report.json").open("w") as out, (work / "log").open("w") as log:
        arm = subprocess.Popen(
            [sys.executable, __file__, "--arm", name, "--work", str(work), str(rows)],
            stdout=out,
            stderr=log,
            env={**os.environ, **variables},
        )
        while watched and arm.poll() is None:
            now = memory(psutil.Process(arm.pid))
            peak = {kind: max(value, now[kind]) for kind, value in peak.items()}
            time.sleep(SAMPLED_SECONDS)
        if arm.wait():
            sys.exit(f"{name} ended with {arm.returncode}:\n{(work / 'log').read_text()[-3000:]}")
    report = json.loads((work / "report.json").read_text().splitlines()[-1])
    return {
        **report,
        "process_seconds": time.perf_counter() - began,
        "load_before": load,
        **({"peak": peak} if watched else {}),
    }


def compare(
    names: list[str], inputs: dict[str, Path], work: Path, repeats: int, watched: bool
) -> dict[str, list[dict[str, Any]]]:
    """Run the arms in turns, each with nothing in its caches; arms that look at another's work find the one of the same turn."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(repeats):
        with tempfile.TemporaryDirectory(dir=work) as folder:
            for name in names:
                own = "ours" if name == "ours-epoch" else name
                reports[name].append(
                    run_arm(name, inputs[ARMS[name][1]], Path(folder) / own, watched)
                )
                print(
                    f"{turn + 1}/{repeats} {line(name, reports[name][-1:])}",
                    file=sys.stderr,
                    flush=True,
                )
    return reports


def line(name: str, reports: list[dict[str, Any]], reference: float | None = None) -> str:
    """Return an arm's row of the table: medians, and how many times as long as `reference` it takes."""
    seconds, cpu, process = (
        statistics.median(report[key] for report in reports)
        for key in ("seconds", "cpu_seconds", "process_seconds")
    )
    last = reports[-1]
    counts = f"{last['samples']:>8} {last.get('tokens', 0):>10} {last.get('trained_tokens', 0):>10}  {last.get('digest') or '-':<16}"
    peaks = "".join(
        f"  {kind} {max(r['peak'][kind] for r in reports) / GIB:.2f} GiB"
        for kind in last.get("peak", ())
    )
    ratio = f"{seconds / reference:>6.2f}" if reference else f"{'':>6}"
    return f"{name:<25} {seconds:>7.1f} {ratio} {cpu:>7.1f} {process:>8.1f}  {counts}{peaks}"


def table(reports: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of the table, and whether the samples of the arms are equal."""
    reference = (
        statistics.median(report["seconds"] for report in reports["ours"])
        if "ours" in reports
        else None
    )
    head = f"{'arm':<25} {'seconds':>7} {'/ours':>6} {'cpu':>7} {'process':>8}  {'samples':>8} {'tokens':>10} {'trained':>10}  ids and masks"
    found = {report["digest"] for arm in reports.values() for report in arm if report.get("digest")}
    counted = {
        (report["tokens"], report["trained_tokens"])
        for arm in reports.values()
        for report in arm
        if "tokens" in report
    }
    equal = (
        "equal in every arm"
        if len(found) <= 1 and len(counted) <= 1
        else "NOT EQUAL: the seconds do not count"
    )
    return [
        head,
        *(line(name, arm, reference) for name, arm in reports.items()),
        f"ids, masks and counts: {equal}",
    ]


def made_inputs(folder: Path, rows: int) -> dict[str, Path]:
    """Return the files of rows, made unless they are there."""
    from inputs import alpaca_rows

    files = {name: folder / f"{name}-{rows}.jsonl" for name in ("alpaca", "messages", "completion")}
    if not all(path.exists() for path in files.values()):
        folder.mkdir(parents=True, exist_ok=True)
        alpaca_rows(files["alpaca"], files["messages"], rows)
        with (
            files["messages"].open(encoding="utf-8") as messages,
            files["completion"].open("w", encoding="utf-8") as completion,
        ):
            for turns in (json.loads(text)["messages"] for text in messages):
                completion.write(
                    json.dumps({"prompt": turns[:1], "completion": turns[1:]}, ensure_ascii=False)
                    + "\n"
                )
    return files


def main() -> None:
    """Run one arm in this process, or all of them and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="arm",
        help=f"of {', '.join(ARMS)}; with none, all but ours-epoch",
    )
    parser.add_argument("--rows", type=int, default=52_002, help="as many as Alpaca has")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--memory",
        action="store_true",
        help="sample the memory of every arm, once, which slows it a little",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "outputs" / "benchmarks",
        help="folder of rows, caches and samples",
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print("\n" + json.dumps(ARMS[args.arm][0](Path(args.names[0]), args.work)))
        return
    names = args.names or COMPARED
    if unknown := set(names) - set(ARMS):
        parser.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if "ours-epoch" in names and "ours" not in names[: names.index("ours-epoch")]:
        parser.error("ours-epoch opens what ours made: name ours before it")
    reports = compare(
        names,
        made_inputs(args.work, args.rows),
        args.work,
        1 if args.memory else args.repeats,
        args.memory,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {"rows": args.rows, "cores": CORES, "arms": reports}
    (
        args.out / f"preparation-{'memory' if args.memory else 'seconds'}-{args.rows}.json"
    ).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    print("\n".join(table(reports)))


if __name__ == "__main__":
    main()
