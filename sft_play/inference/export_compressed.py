"""`make export FORMAT=fp8`, int4 or nvfp4: files of compressed-tensors for vLLM.

The linear layers of the decoder are quantized, shard by shard. Embeddings, head, norms and routers
are unchanged. The folder is opened with only transformers and compressed-tensors, and scored on
test rows. Files that lose too much of the run's gain are not published.

Legend: O outputs of a linear layer, I its inputs, G numbers that share a scale.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from torch import Tensor
from transformers import AutoConfig

from sft_play.data.render import IGNORE_INDEX
from sft_play.data.store import Sample
from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation.reference import as_tensors
from sft_play.evaluation.reopened import Reopened, reopen_and_score
from sft_play.inference.exported import Export, WrittenExport, link_files, write_plain_model
from sft_play.inference.improvement import Losses, interval, read_scored_rows
from sft_play.inference.merge import merged_folder
from sft_play.models.architecture import empty_model
from sft_play.models.compressed import KINDS, quantized_linears, scales_of, scheme_of
from sft_play.models.experts import ExpertWeight, expert_weights
from sft_play.models.shards import ShardWriter, files_in, tensors_in
from sft_play.runs.files import read_json, write_json

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, in a name
EXPERT = re.compile(r"\.experts\.\d+\.\w+$")
WEIGHTS = "*.safetensors*"  # including their index
SHOWN_LAYERS = 3  # with the largest loss


def write_compressed(export: Export, staging: Path, plain: Path) -> WrittenExport:
    """Write a folder of quantized weights.

    Raises: ConfigError for a model that cannot be quantized here; CheckpointError if the files
    lose too much of the run's gain.
    """
    kind = export.asked.format
    lines, found = write_plain_model(export, plain)
    errors = compress_folder(plain, staging, kind, export.config.model.trust_remote_code)
    scores = replace(score(export, staging), errors=errors)
    export.refuse(f"as {kind} it", scores.faults(), lambda: remedies(export, plain, scores))
    size = sum(path.stat().st_size for path in staging.glob("*.safetensors"))
    return WrittenExport(
        [*lines, found.line("from")],
        [scores.line(kind)],
        [f" ({size / 1e6:,.1f} MB; vllm serve {export.target})"],
    )


def remedies(export: Export, plain: Path, refused: "CompressedScores") -> str:
    """Return what to type instead of a refused format; fp8 is written and scored for it."""
    config, kind = export.config, export.asked.format
    found = ["FORMAT=safetensors exports it without this loss"]
    if kind != "fp8":
        in_8_bits = plain.with_name("fp8")
        compress_folder(plain, in_8_bits, "fp8", config.model.trust_remote_code)
        scores = score(export, in_8_bits)
        if not scores.faults():
            found = [f"FORMAT=fp8 {scores.losses.kept()}"]
    if config.train.deliver_as is None:
        found.append(f"a run with TRAIN_DELIVER_AS={kind} is trained for it")
    if refused.losses.lost > refused.losses.gain:
        found.append("a longer run (TRAIN_EPOCHS) may improve more than rounding costs")
    if (publishing := refused.publishing_gain) is not None:
        found.append(f"EXPORT_MIN_GAIN={publishing:.2f} publishes it as it is")
    return ", ".join(found)


def compress_folder(
    source: Path, target: Path, kind: str, trust_remote_code: bool = False
) -> dict[str, float]:
    """Write a folder of plain weights as a quantized one; return the error of each layer.

    The error is the norm of rounding differences relative to that of the weights. One shard is in
    memory at a time. Remaining float32 weights are written in bfloat16, in which servers compute.
    Raises: ConfigError for files that lack layers of the class, or have experts in one tensor.
    """
    described = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = empty_model(described, torch.bfloat16, trust_remote_code)
    linears, others = quantized_linears(model)
    tensors = tensors_in(files_in(source))
    shapes = {name.removesuffix(".weight"): tensor.get_shape() for name, tensor in tensors.items()}
    chosen = _names_in_files(list(linears), shapes, source)
    if experts := expert_weights(model):
        chosen |= _experts_in_files(experts, shapes, kind, source)
    scheme = scheme_of(kind, (shapes[name][1] for name in chosen), source.name)
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    # servers find a layer by its name in the files, and routers are not nn.Linear
    kept = sorted({*others, *(matrices - chosen)})
    link_files(source, target, WEIGHTS)
    saved = read_json(target / "config.json")
    is_wide = saved.get("dtype") == "float32"
    errors: dict[str, float] = {}
    writer = ShardWriter(target)
    for name, in_file in tensors.items():
        tensor = in_file[...]
        if is_wide and tensor.dtype == torch.float32:
            tensor = tensor.bfloat16()
        module = name.removesuffix(".weight")
        if module not in chosen:
            writer.add(name, tensor)
            continue
        parts, errors[module] = compress(tensor, scheme, KINDS[kind].format)
        for part, value in parts.items():
            writer.add(f"{module}.{part}", value)
    writer.close()
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=KINDS[kind].format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=kept,
    )
    saved["dtype"] = "bfloat16" if is_wide else saved["dtype"]
    quantized = {**config.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    write_json(target / "config.json", {**saved, "quantization_config": quantized})
    return errors


def compress(
    weight: Tensor, scheme: QuantizationScheme, kind: str
) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of a quantized weight (O, I) by their names, and its relative error."""
    scale, zero, whole = scales_of(weight, scheme)
    tensors = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        tensors["weight_global_scale"] = whole
    compressor = BaseCompressor.get_value_from_registry(kind)
    parts = compressor.compress(tensors, scheme)
    rounded = compressor.decompress(parts, scheme)["weight"].float()
    error = (rounded - weight.float()).norm() / weight.float().norm()
    return parts, error.item()


def _names_in_files(
    linears: Sequence[str], stored: Mapping[str, list[int]], source: Path
) -> set[str]:
    """Return the files' names of the linear layers, whose prefix may differ from the class.

    Raises: ConfigError if not all of them have one prefix.
    """
    numbered = NUMBER.search(linears[0])
    begin = linears[0][: numbered.start()] if numbered else ""
    ends = [name.removeprefix(begin) for name in linears]
    for name in sorted(stored):
        own = name.removesuffix(ends[0])
        if name.endswith(ends[0]) and all(f"{own}{end}" in stored for end in ends):
            return {f"{own}{end}" for end in ends}
    raise ConfigError(
        f"the files of {source.name} have no {linears[0]}.weight, or no layer has all of these "
        "linears under one prefix; type FORMAT=safetensors"
    )


def _experts_in_files(
    experts: Sequence[ExpertWeight], stored: Mapping[str, list[int]], kind: str, source: Path
) -> set[str]:
    """Return the files' names of the experts' matrices, which are stored one by one.

    Raises: ConfigError if they are stored in one tensor, or for a format without experts.
    """
    found = {name for name, shape in stored.items() if EXPERT.search(name) and len(shape) == 2}
    weights = sum(math.prod(each.shape) for each in experts)
    if kind == "nvfp4" or sum(math.prod(stored[name]) for name in found) != weights:
        why = "in one tensor"
        if kind == "nvfp4":
            why = "which transformers does not read in it"
        raise ConfigError(
            f"FORMAT={kind}: {source.name} has experts, {why}; FORMAT=safetensors exports it"
        )
    return found


@dataclass(frozen=True)
class CompressedScores:
    """Scores of quantized files on test rows, and on the rows of the run's reference."""

    table: np.ndarray  # as in `improvement`
    reopened: Reopened
    least_gain: float  # share of the run's gain that must be kept
    errors: Mapping[str, float] = field(default_factory=dict)  # of the rounded weights, if known

    @cached_property
    def losses(self) -> Losses:
        """The losses over all rows."""
        return Losses.of_table(self.table)

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        low, high = interval(self.table)
        found = self.reopened
        return (
            f"{name} {self.losses.line()} [{low:.3f}, {high:.3f}] "
            f"KL={found.kl:.1e} top-1={found.top1_agreement:.3f} "
            f"stops={found.stops}/{found.stops_of}"
        )

    @property
    def publishing_gain(self) -> float | None:
        """The largest minimum gain with which the files are published; None: no gain does."""
        least = max(0.0, self.losses.gain_kept // 0.01 / 100)
        return None if replace(self, least_gain=least).faults() else least

    def faults(self) -> list[str]:
        """Return the differences from the run, and the weights with the largest errors."""
        found = self.losses.faults(self.least_gain) + self.reopened.broken()
        if found and self.errors:
            worst = sorted(self.errors, key=lambda name: -self.errors[name])[:SHOWN_LAYERS]
            named = ", ".join(f"{name} ({self.errors[name]:.3f})" for name in worst)
            found.append(f"the weights with the largest errors are {named}")
        return found


def score(export: Export, files: Path) -> CompressedScores:
    """Return the scores of a quantized folder, opened once, in a fresh process.

    Raises: CheckpointError if the run's scores are missing.
    """
    found = read_scored_rows(export.run, export.data.test)
    if found is None:
        raise CheckpointError(
            f"{export.run.path}: the scores before and after training are gone, and an export "
            "is compared with them; FORMAT=safetensors needs none"
        )
    samples, written = found
    rows = all_labels(samples)
    with merged_folder(files, export.config) as opened:
        found, (outputs,) = reopen_and_score(opened, export.reference, rows)
    nats = outputs.nats.tensor_split(rows["position_ends"][:-1])
    table = np.column_stack([written, [row.sum().item() for row in nats]])
    return CompressedScores(table, found, export.asked.least_gain)


def all_labels(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Return rows for all labels of samples, of which only the nats are asked."""
    labels = [np.flatnonzero(sample.labels != IGNORE_INDEX).tolist() for sample in samples]
    rows = as_tensors(samples, labels)
    return {**rows, "tokens": torch.zeros(len(rows["positions"]), 1, dtype=torch.int64)}
