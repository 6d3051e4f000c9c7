"""`make export FORMAT=fp8`, int4, nvfp4 or awq: files of compressed-tensors, as vLLM serves them.

The linear layers of the decoder are quantised, shard by shard, for awq by llm-compressor;
embeddings, head, norms and routers stay as they are. The folder is opened by transformers and
compressed-tensors alone and scored on test rows: what keeps too little of the run's gain is not
published.

Legend: O outputs of a linear layer, I its inputs, G numbers that share a scale.
"""

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from sft_play.config.sections.train import Delivered
from sft_play.data.render import IGNORE_INDEX
from sft_play.data.store import Sample, Split
from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation.reopened import Folder, Reference, Reopened, as_tensors, ask, reopen
from sft_play.inference.calibrate import calibrate, require_llm_compressor
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.exported import (
    Exported,
    complete,
    link_files,
    reopened_model,
    staged,
    write_plain_model,
)
from sft_play.inference.gguf_score import LEAST_NATS, RowScore, chosen_rows, losses_of
from sft_play.inference.merge import stranger_of
from sft_play.models.architecture import empty_model
from sft_play.models.compressed import KINDS, quantised_linears, scales_of, scheme_of
from sft_play.models.experts import ExpertWeight, expert_weights
from sft_play.runs.exports import ExportAsked
from sft_play.runs.files import read_json, write_json

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, in a name
EXPERT = re.compile(r"\.experts\.\d+\.\w+$")
SHOWN_LAYERS = 3  # that lose most
DRAWS = 1000  # of rows, for the interval of the gain


def export_compressed(run: Exported, target: Path, asked: ExportAsked) -> list[str]:
    """Write a folder of quantised weights; return the lines to print.

    Raises: ConfigError for a model that is not quantised here; CheckpointError where the files do
    not keep enough of the run's gain; EnvironmentFault without llm-compressor, or where it fails.
    """
    if asked.format == "awq":
        require_llm_compressor()
    data = prepared_data(run.folder, run.config, AutoTokenizer.from_pretrained(run.weights))
    with (
        staged(target) as staging,
        tempfile.TemporaryDirectory(prefix=".from-", dir=target.parent) as temporary,
    ):
        plain = Path(temporary) / "model"
        lines = write_plain_model(run, plain, asked.dtype)
        lines.append(reopened_model(run, plain).line("from"))
        if asked.format == "awq":
            calibrate(run, data.train, plain, staging)
            errors: dict[str, float] = {}
        else:
            trusted = run.config.model.trust_remote_code
            errors = compress_folder(plain, staging, asked.format, trusted)
        found = score(run, staging, data.test)
        lines.append(found.line(asked.format))
        faults = found.faults(asked.least_gain)
        if faults:
            worst = sorted(errors, key=lambda name: -errors[name])[:SHOWN_LAYERS]
            named = ", ".join(f"{name} ({errors[name]:.3f})" for name in worst)
            if named:
                named = f"The weights with the largest errors are {named}; "
            remedy = f"FORMAT={'safetensors' if asked.format == 'fp8' else 'fp8'} keeps more"
            if asked.format in get_args(Delivered) and run.config.train.deliver_as is None:
                remedy += f", a run with TRAIN_DELIVER_AS={asked.format} is trained for it"
            if (least := found.publishing_gain) is not None:
                remedy += f", and EXPORT_MIN_GAIN={least:.2f} publishes it as it is"
            raise CheckpointError(
                f"{run.folder.path}: as {asked.format} it is not the model that was evaluated: "
                f"{'; '.join(faults)}; nothing was published. {named}{remedy}"
            )
        complete(run, staging, target, asked.format, [found.line(asked.format)])
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    return [*lines, f"exported {target} ({size / 1e6:,.1f} MB; vllm serve {target})"]


def compress_folder(
    source: Path, target: Path, kind: str, trust_remote_code: bool = False
) -> dict[str, float]:
    """Write a folder of plain weights as a quantised one; return the error of each layer.

    That is the norm of what rounding changes over that of the weights. One shard is in memory. What
    stays of a folder in float32 is written in bfloat16, in which servers compute.
    Raises: ConfigError for files that lack layers of the class, or have experts in one tensor.
    """
    described = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = empty_model(described, torch.bfloat16, trust_remote_code)
    linears, others = quantised_linears(model)
    shapes = _shapes(source)
    chosen = _names_in_files(list(linears), shapes, source)
    if experts := expert_weights(model):
        chosen |= _experts_in_files(experts, shapes, kind, source)
    scheme = scheme_of(kind, (shapes[name][1] for name in chosen), source.name)
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    # servers find a layer by its name in the files, and routers are no nn.Linear
    kept = sorted({*others, *(matrices - chosen)})
    link_files(source, target)
    saved = read_json(target / "config.json")
    is_wide = saved.get("dtype") == "float32"
    errors: dict[str, float] = {}
    places: dict[str, str] = {}
    total = 0
    for shard in sorted(target.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, tensor in _tensors(shard):
            if is_wide and tensor.dtype == torch.float32:
                tensor = tensor.bfloat16()
            module = name.removesuffix(".weight")
            if module not in chosen:
                tensors[name] = tensor
                continue
            parts, errors[module] = compress(tensor, scheme, KINDS[kind].format)
            tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        shard.unlink()  # a hard link to the run's own file
        save_file(tensors, shard, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, shard.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = target / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        write_json(index, {"metadata": {"total_size": total}, "weight_map": places})
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=KINDS[kind].format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=kept,
    )
    saved["dtype"] = "bfloat16" if is_wide else saved["dtype"]
    quantised = {**config.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    write_json(target / "config.json", {**saved, "quantization_config": quantised})
    return errors


def compress(
    weight: Tensor, scheme: QuantizationScheme, kind: str
) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of a quantised weight (O, I) by their names, and its relative error."""
    scale, zero, whole = scales_of(weight, scheme)
    tensors = {"weight": weight.float(), "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        tensors["weight_global_scale"] = whole
    compressor = BaseCompressor.get_value_from_registry(kind)
    parts = compressor.compress(tensors, scheme)
    rounded = compressor.decompress(parts, scheme)["weight"].float()
    error = (rounded - weight.float()).norm() / weight.float().norm()
    return {name: value.contiguous() for name, value in parts.items()}, error.item()


def _shapes(source: Path) -> dict[str, list[int]]:
    """Return the shape of each weight in the files, by the name of its module."""
    shapes = {}
    for shard in source.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name.removesuffix(".weight")] = file.get_slice(name).get_shape()
    return shapes


def _names_in_files(
    linears: Sequence[str], stored: Mapping[str, list[int]], source: Path
) -> set[str]:
    """Return what the files call the linear layers, which may begin otherwise than in the class.

    Raises: ConfigError where they have not all of them under one beginning.
    """
    numbered = NUMBER.search(linears[0])
    begin = linears[0][: numbered.start()] if numbered else ""
    ends = [name.removeprefix(begin) for name in linears]
    for name in sorted(stored):
        own = name.removesuffix(ends[0])
        if name.endswith(ends[0]) and all(f"{own}{end}" in stored for end in ends):
            return {f"{own}{end}" for end in ends}
    raise ConfigError(
        f"the files of {source.name} have no {linears[0]}.weight, or not all layers beside it; "
        "FORMAT=safetensors exports it"
    )


def _experts_in_files(
    experts: Sequence[ExpertWeight], stored: Mapping[str, list[int]], kind: str, source: Path
) -> set[str]:
    """Return what the files call the matrices of experts, which they have one by one.

    Raises: ConfigError where they have them in one tensor, or for a format without experts.
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


def _tensors(shard: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(shard, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


@dataclass(frozen=True)
class CompressedScores:
    """What quantised files say of test rows, beside the run's own scores of them."""

    rows: tuple[RowScore, ...]
    nats: tuple[float, ...]  # of each row, by the files
    reopened: Reopened  # on the rows of the run's reference

    @property
    def gain_kept(self) -> float:
        """The share of the run's gain over its base that is left; NaN where it gained nothing."""
        return float(self._gains(np.arange(len(self.rows))[None])[0])

    @property
    def interval(self) -> tuple[float, float]:
        """The middle 95 % of the share over draws of as many rows, with replacement."""
        draw = np.random.default_rng(0)
        drawn = draw.integers(len(self.rows), size=(DRAWS, len(self.rows)))
        low, high = np.nanquantile(self._gains(drawn), [0.025, 0.975])
        return float(low), float(high)

    def _gains(self, chosen: np.ndarray) -> np.ndarray:
        """Return the shares (D,) of gains of rows that are chosen, (D, rows)."""
        pairs = zip(self.rows, self.nats, strict=True)
        table = np.array([(row.before, row.after, row.labels, now) for row, now in pairs])
        before, after, labels, now = table[chosen].sum(1).T
        gain = before - after
        shares = np.full(len(gain), math.nan)
        return np.divide(before - now, gain, out=shares, where=gain > LEAST_NATS * labels)

    @property
    def loss(self) -> float:
        """The files' loss, nats a token."""
        return sum(self.nats) / sum(row.labels for row in self.rows)

    @property
    def run_loss(self) -> float:
        """The run's loss after training on the same rows."""
        return sum(row.after for row in self.rows) / sum(row.labels for row in self.rows)

    def line(self, name: str) -> str:
        """Return the line that is printed."""
        low, high = self.interval
        said = self.reopened
        return (
            f"{name} eval_loss={self.loss:.4f} (run {self.run_loss:.4f}, {len(self.rows)} rows) "
            f"gain kept={self.gain_kept:.3f} [{low:.3f}, {high:.3f}] "
            f"KL={said.kl:.1e} top-1={said.agreement:.3f} stops={said.stops}/{said.all_stops}"
        )

    @property
    def publishing_gain(self) -> float | None:
        """The least gain to ask for that publishes the files as they are; None: no gain does."""
        least = max(0.0, self.gain_kept // 0.01 / 100)
        return None if self.faults(least) else least

    def faults(self, least_gain: float) -> list[str]:
        """Return what is not as in the run."""
        found = []
        if math.isnan(self.gain_kept):
            lost = self.loss - self.run_loss
            if not lost <= LEAST_NATS:
                found.append(f"eval_loss is {lost:.4f} above the run's")
        elif not self.gain_kept >= least_gain:
            found.append(f"it keeps {self.gain_kept:.3f} of the gain, less than {least_gain:g}")
        known = self.reopened.differences()
        return [*found, *(fault for fault in self.reopened.faults() if fault not in known)]


def score(run: Exported, staging: Path, split: Split) -> CompressedScores:
    """Return what a quantised folder says, opened in processes of its own.

    Raises: CheckpointError where the run's own scores are gone.
    """
    found = losses_of(run.folder, split)
    if found is None:
        raise CheckpointError(
            f"{run.folder.path}: the scores before and after training are gone, which an export "
            "is held to; FORMAT=safetensors needs none"
        )
    scored, written = found
    chosen = chosen_rows(scored)
    with tempfile.TemporaryDirectory() as offload_folder:
        opened = stranger_of(staging, run.config, Path(offload_folder))
        nats = nats_of_rows(opened, [scored[index] for index in chosen])
        said = reopen(opened, run.reference)
        return CompressedScores(tuple(written[index] for index in chosen), tuple(nats), said)


def nats_of_rows(folder: Folder, samples: Sequence[Sample]) -> list[float]:
    """Return the nats of all labels of each sample, by a folder in a fresh process.

    Raises: CheckpointError where the folder cannot be opened.
    """
    labels = [np.flatnonzero(sample.labels != IGNORE_INDEX).tolist() for sample in samples]
    rows = as_tensors(samples, labels)
    tokens = torch.zeros(len(rows["positions"]), 1, dtype=torch.int64)
    asked = Reference(rows, {"tokens": tokens}, [], [], "", "")
    with tempfile.TemporaryDirectory() as temporary:
        tensors, _ = ask(folder, asked, Path(temporary))
    of_rows = tensors["nats"].tensor_split(rows["position_ends"][:-1])
    return [row.sum().item() for row in of_rows]
