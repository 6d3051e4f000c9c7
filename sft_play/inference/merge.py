"""Merge a run's adapter into its base model, and measure it before publishing a plain folder."""

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from sft_kernels.process import DTYPES
from sft_play.config.schema import Config
from sft_play.data.render import stop_ids
from sft_play.data.tokenizer import load_tokenizer
from sft_play.errors import (
    CheckpointError,
    ConfigError,
    SftPlayError,
    disk_errors_in_words,
    memory_errors_in_words,
)
from sft_play.evaluation.reopened import Folder, Reopened, reopen
from sft_play.inference.improvement import Losses, losses_now, reference_of
from sft_play.inference.load import checked_weights, config_of_weights, quiet_libraries
from sft_play.masking import mask_secrets
from sft_play.models.base_files import copy_processors
from sft_play.models.export import read_stops, saved_stops, write_stops
from sft_play.models.load import weight_dtype
from sft_play.models.merging import (
    CannotStream,
    Merge,
    merge_files,
    merge_whole,
    training_quantization,
)
from sft_play.plan.ranks import config_precision
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import stamp
from sft_play.runs.files import read_json, share, write_json, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.publishing import FILES, Target

logger = logging.getLogger(__name__)

MERGED = "merged"  # the folder of a merge, in a run's folder
REPORT = "merge_report.json"
EARLIER_REPORT = "merge_report.earlier.json"  # of merged/, after a later merge was refused
IN_MEMORY_BYTES = 4e9  # a larger merged model is scored from disk if no GPU has enough memory
ROOM = 1.3  # times the weights: memory for scoring


@dataclass(frozen=True)
class Candidate:
    """One way to merge, and its result."""

    base: str  # which base weights, as text
    adapter: Path
    folder: Path
    found: Reopened
    way: str  # how it was merged, as text

    def line(self, best: "Candidate") -> str:
        """Return the line to print if there are several."""
        return (
            f"base {self.base}: KL={self.found.kl:.1e} "
            f"top-1 agreement={self.found.top1_agreement:.3f}{', kept' if self is best else ''}"
        )


@dataclass(frozen=True)
class Refusal:
    """Why merged weights are not published, in the format of merge_report.json."""

    why_not: Sequence[str] = ()  # empty if they are published
    cause: str | None = None
    base_eval_loss: float | None = None
    float32_eval_loss: float | None = None  # of the same merge in float32


def merge_run(folder: RunFolder, dtype: str | None = None) -> list[str]:
    """Merge a run's adapter into its base; return the lines to print. See `merge_and_score`."""
    return merge_and_score(folder, dtype)[0]


def merge_and_score(folder: RunFolder, dtype: str | None) -> tuple[list[str], Reopened]:
    """Merge a run's adapter into its base; return the lines to print, and the scores of the merge.

    The result is merged/ in the run folder, in `dtype` or the base's. Plain transformers opens
    it in a fresh process and scores held-out rows. If it is not the evaluated model, it is not
    published. An adapter over a quantized base is merged into the base as stored and into the base
    as training rounded it to 4 bits or float8, and the better one is kept. merge_report.json has
    the result, also of a merge that is refused.

    Raises: ConfigError for a run that trained every weight; CheckpointError for an adapter that is
    incomplete, changed or from another run, and for a merge beyond the bound.
    """
    candidates: list[Candidate] = []
    target = Target(folder.path / MERGED, MERGED)
    refusal: Refusal | None = None
    target.refuse_other_contents()
    try:
        with disk_errors_in_words(), memory_errors_in_words(), target.staged() as work:
            for candidate in measured_candidates(folder, dtype, work):
                candidates.append(candidate)
            best = min(candidates, key=lambda candidate: candidate.found.kl)
            if best.found.faults():
                refusal = explain_difference(folder, best)
                said = best.found.broken()
                if refusal.cause is not None:
                    said.append(refusal.cause)
                report = folder.path / REPORT
                raise CheckpointError(
                    f"{folder.path} was not merged: {'. '.join(said)}. {report} has the figures"
                )
            stamp.write(best.folder, replace(stamp.read_stamp(best.adapter), merged=True))
            best.folder.rename(work / FILES)
    except SftPlayError as error:
        write_refusal(folder, candidates, refusal or Refusal([mask_secrets(str(error))]))
        raise
    write_merge_report(folder, candidates, best.base, Refusal())
    (folder.path / EARLIER_REPORT).unlink(missing_ok=True)
    lines = [each.line(best) for each in candidates if len(candidates) > 1]
    lines += [best.found.line("merged"), f"merged {target.path} ({best.way})"]
    return lines, best.found


def measured_candidates(folder: RunFolder, dtype: str | None, work: Path) -> Iterator[Candidate]:
    """Merge a run's adapter into `work` in each possible way; yield each one once it is scored.

    Raises: the errors of `merge_run`.
    """
    config = folder.read_config()
    if config.tuning.mode == "full":
        raise ConfigError(
            f"{folder.path} trained every weight: {folder.weights('full')} is a plain model already"
        )
    weights = checked_weights(folder, config)
    refuse_other_adapter(weights, config)
    reference = reference_of(folder, config)
    merges = {"as stored": Merge(config, weights, getattr(torch, dtype) if dtype else None)}
    compute_dtype = DTYPES[config_precision(config)]
    quantization = training_quantization(config, compute_dtype)
    if quantization is not None:
        words, how = quantization
        base_dtype = weight_dtype(config, compute_dtype)
        merges[words] = replace(merges["as stored"], quantization=how, base_dtype=base_dtype)
    for number, (base, merge) in enumerate(merges.items()):
        staging = work / str(number)
        shutil.rmtree(staging, ignore_errors=True)
        refuse_full_disk(config, folder.path)
        started = time.perf_counter()
        with quiet_libraries():
            try:
                model = merge_files(merge, staging)
                way = "tensor by tensor"
            except CannotStream as reason:
                model = merge_whole(merge, staging)
                way = f"whole in memory: {reason}"
        describe(folder, merge, model, staging)
        del model
        way += f", {time.perf_counter() - started:.0f} s"
        with merged_folder(staging, config) as opened:
            found = reopen(opened, reference)
        yield Candidate(base, weights, staging, found, way)


def refuse_other_adapter(weights: Path, config: Config) -> None:
    """Compare adapter_config.json with the run's settings.

    Raises: CheckpointError for another rank, scale or kind of adapter.
    """
    saved = read_json(weights / "adapter_config.json")
    lora = config.tuning.lora
    expected = {
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for name, value in expected.items():
        found = saved.get(name) or type(value)()
        if found != value:
            raise CheckpointError(
                f"{weights / 'adapter_config.json'}: {name}={found}, and the run trained with "
                f"{value}; put back the file that the run saved"
            )


def what_vllm_does_not_serve(weights: Path) -> list[str]:
    """Return the parts of an adapter that vLLM refuses to load."""
    saved = read_json(weights / "adapter_config.json")
    names = ("use_dora", "modules_to_save", "trainable_token_indices")
    problems = [name for name in names if saved.get(name)]
    if saved.get("bias", "none") != "none":
        problems.append(f"bias={saved['bias']}")
    if saved.get("rank_pattern") or saved.get("alpha_pattern"):
        problems.append("several ranks")
    return problems


def explain_difference(folder: RunFolder, best: Candidate) -> Refusal:
    """Return why merged weights differ from the adapter's model, with numbers.

    To find the cause, the adapter and its base are scored on the same rows, and the adapter is
    merged once more, in float32.
    """
    exact = found = best.found
    refusal = Refusal(found.faults())
    if not found.differences():
        return refusal
    dtype = read_json(best.folder / "config.json").get("dtype") or "16 bits"
    try:
        with disk_errors_in_words(), memory_errors_in_words():
            now, before = losses_now(folder, found.rows)
            if dtype != "float32":
                again = measured_candidates(folder, "float32", best.folder.parent)
                exact = min((each.found for each in again), key=lambda each: each.kl)
    except SftPlayError as error:  # the refusal is valid without a cause
        differences = "; ".join(found.differences())
        cause = f"{differences}. The cause could not be measured: {error}"
        return replace(refusal, cause=cause)
    losses = Losses(found.eval_loss, found.run_eval_loss, before, found.rows)
    adapter = f"make eval RUN={folder.name} scores the adapter itself"
    if not what_vllm_does_not_serve(best.adapter):
        adapter = f"make export RUN={folder.name} FORMAT=adapter exports the adapter itself"
    if not exact.differences():
        why = because_of_rounding(dtype, losses, adapter)
    elif abs(now - found.run_eval_loss) <= found.bound.loss:
        why = f". Rounding is not the cause; {adapter}"
    else:
        why = (
            f". The adapter itself has {now:.3f} now, so it or its base has changed since the run. "
            "The run's checkpoints/ contain its weights, too; or train it again"
        )
    compared = f"worse than the {'base' if losses.is_below_base else 'adapter'}: {losses}"
    if losses.lost <= found.bound.loss:
        compared = f"another one than the adapter: {'; '.join(found.differences())}"
    cause = f"the merged {dtype} model is {compared}{why}"
    return Refusal(refusal.why_not, cause, before, exact.eval_loss)


def because_of_rounding(dtype: str, losses: Losses, adapter: str) -> str:
    """Return the cost of rounding and what to type, after a merge in float32 was as good."""
    remedy = "Type MODEL_DTYPE=float32 to merge without this loss"
    if losses.lost < losses.gain:
        share = max(0, losses.lost) / losses.gain
        lost = f"loses {100 * share:.0f} % of the improvement"
        return f", because rounding to {dtype} {lost}. {remedy}"
    return (
        f". Rounding to {dtype} costs {losses.lost:.3f}, and training improved these rows by "
        f"{losses.gain:.3f}. {remedy}; {adapter}; a longer run (TRAIN_EPOCHS) may improve more"
    )


def describe(folder: RunFolder, merge: Merge, model: PreTrainedModel, target: Path) -> None:
    """Write tokenizer, stops, sampling and README.md next to merged weights."""
    tokenizer = load_tokenizer(config_of_weights(merge.config, merge.adapter))
    stops = list(read_stops(merge.adapter)) or sorted(stop_ids(tokenizer))
    if (merge.adapter / GENERATION_CONFIG_NAME).is_file():  # a model built for its names has none
        model.generation_config = GenerationConfig.from_pretrained(merge.adapter)
    write_stops(target, stops, tokenizer, model)
    copy_processors(merge.config, target)
    published = folder.path / MERGED
    facts = RunFacts.read(folder)
    card = card_text(facts, merge.config, saved_stops(stops, tokenizer), published)
    write_text(target / "README.md", card)
    share(target)


@contextlib.contextmanager
def merged_folder(target: Path, config: Config) -> Iterator[Folder]:
    """Yield how to load merged weights for scoring: on a GPU, in memory or from disk."""
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    device = "disk"
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > ROOM * size:
        device = "cuda:0"
    elif size < min(IN_MEMORY_BYTES, psutil.virtual_memory().available / ROOM):
        device = "cpu"
    with tempfile.TemporaryDirectory() as offload_folder:
        yield Folder(
            target,
            "auto",
            {"": device},
            trust_remote_code=config.model.trust_remote_code,
            offload_folder=Path(offload_folder) if device == "disk" else None,
        )


def refuse_full_disk(config: Config, path: Path) -> None:
    """Raise CheckpointError if the disk has too little space for another copy of the base."""
    base = Path(config.model.name)
    needed = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    free = shutil.disk_usage(path).free
    if free < ROOM * needed:
        raise CheckpointError(
            f"{path}: merging writes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of the disk "
            "are free; make room, or set TRAIN_OUTPUT_DIR to another disk"
        )


def write_refusal(folder: RunFolder, candidates: list[Candidate], refusal: Refusal) -> None:
    """Write why a merge is refused; keep the report of the merge in merged/, too."""
    path, earlier = folder.path / REPORT, folder.path / EARLIER_REPORT
    try:
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            if read_json(path)["kept"] is not None:  # of a merge that was published
                path.replace(earlier)
        write_merge_report(folder, candidates, None, refusal)
    except OSError as error:  # it must not hide why the merge is refused
        logger.warning("%s cannot be written: %s", path, error.strerror)
    published = folder.path / MERGED
    if earlier.is_file() and published.is_dir():
        logger.warning(
            "%s is still that of an earlier merge, whose report is %s", published, EARLIER_REPORT
        )


def write_merge_report(
    folder: RunFolder, candidates: list[Candidate], kept: str | None, refusal: Refusal
) -> None:
    """Write merge_report.json: the scores of each way to merge, and the outcome."""
    found = {each.base: {**each.found.as_json(), "merged": each.way} for each in candidates}
    known = {name: value for name, value in asdict(refusal).items() if value is not None}
    report = {"run": folder.name, "candidates": found, "kept": kept, **known}
    write_json(folder.path / REPORT, report)


def not_scored(config: Config, kind: str | None = None) -> list[str]:
    """Return the warning for weights of another kind than the run was trained for, if scored."""
    delivered = config.train.deliver_as
    if delivered in (None, kind):
        return []
    return [
        f"warning: the run was trained and scored as {delivered} (train.deliver_as), and these "
        f"weights were not scored; make export FORMAT={delivered} writes what was scored"
    ]
