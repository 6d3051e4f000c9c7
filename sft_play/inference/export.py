"""`make export`: write a run's weights for other programs, and compare them with the run.

An export is published completely or not at all: it is staged, opened, compared with the evaluated
model, described and sealed.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from sft_play.config.schema import Config
from sft_play.data.assemble import RunData
from sft_play.data.render import stop_ids
from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation.reference import Reference
from sft_play.evaluation.reopened import Folder, Reopened, folder_of_run, reopen
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.improvement import reference_of
from sft_play.inference.load import checked_weights, load_run, tokenizer_of, without_rounding
from sft_play.inference.merge import (
    FILES,
    merge_run,
    merged_folder,
    not_scored,
    refuse_other_adapter,
    staged,
    what_vllm_does_not_serve,
)
from sft_play.inference.parity import parity_rows
from sft_play.models.export import complete_tokenizer, saved_stops, write_for_older_readers
from sft_play.models.listed_experts import list_experts
from sft_play.plan.ranks import precision
from sft_play.process import DTYPES
from sft_play.reporting.base_facts import CAUSAL, BaseFacts
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import exports, seal, stamp
from sft_play.runs.exports import ADAPTERS, COMPRESSED, ExportAsked
from sft_play.runs.files import read_json, share, write_json, write_text
from sft_play.runs.folder import RunFolder

OF_A_RUN = (stamp.NAME, seal.NAME, "README.md")  # files of weights that an export does not need


@dataclass(frozen=True)
class Written:
    """The result of a format's writer, and the lines to print about it."""

    lines: list[str]  # how it was made
    scores: list[str]  # of the opened files; README.md contains them, too
    published: list[str]  # lines to print after the export's folder


@dataclass(frozen=True)
class Export:
    """An export in progress: its run, and the request."""

    run: RunFolder
    asked: ExportAsked
    config: Config
    weights: Path  # adapter/ or model/
    reference: Reference

    @classmethod
    def of(cls, run: RunFolder, asked: ExportAsked) -> "Export":
        """Return the export of a finished run. Raises: CheckpointError for incomplete weights."""
        config = run.read_config()
        weights = checked_weights(run, config)
        return cls(run, asked, config, weights, reference_of(run, config))

    @property
    def target(self) -> Path:
        return self.asked.target(self.run)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the weights."""
        return tokenizer_of(self.run, self.config)

    @cached_property
    def data(self) -> RunData:
        """The rows of the run."""
        return prepared_data(self.run, self.config, self.tokenizer)

    def reopen(self, opened: Folder) -> Reopened:
        """Return the scores of plain weights that are opened again. Raises: as `refuse`."""
        found = reopen(opened, self.reference)
        self.refuse("the export", found.faults())
        return found

    def refuse(
        self, what: str, faults: Sequence[str], find_remedy: Callable[[], str] | None = None
    ) -> None:
        """Raise CheckpointError, with a remedy, for faults of opened files.

        Every format calls it with what its files have scored, before they are published.
        """
        if faults:
            remedy = f"; {find_remedy()}" if find_remedy else ""
            raise CheckpointError(
                f"{self.run.path}: {what} is not the model that was evaluated: "
                f"{'; '.join(faults)}. Nothing was published{remedy}"
            )


def export_run(folder: RunFolder, asked: ExportAsked, device: str) -> list[str]:
    """Export a run as `asked`; return the lines to print.

    Raises: ConfigError for a run that cannot be exported this way; CheckpointError for files that
    differ from the evaluated model; EnvironmentFault without llama.cpp or llm-compressor.
    """
    export = Export.of(folder, asked)
    with staged(export.target) as work:
        written = write_files(export, work / FILES, work / "model")
        complete(export, work / FILES, device, written.scores)
    lines = written.lines + written.scores
    lines += [f"exported {export.target}{end}" for end in written.published]
    return lines + not_scored(export.config, asked.format)


def write_files(export: Export, staging: Path, plain: Path) -> Written:
    """Write the files of a format into `staging`, with a plain model in `plain` if it needs one.

    Raises: as `export_run`.
    """
    kind = export.asked.format
    if kind in ADAPTERS:
        return write_adapter(export, staging)
    if kind in COMPRESSED:  # takes seconds to import
        from sft_play.inference.export_compressed import write_compressed

        return write_compressed(export, staging, plain)
    if kind == "gguf":
        from sft_play.inference.export_gguf import write_gguf

        return write_gguf(export, staging, plain)
    lines, found = write_plain_model(export, staging)
    return Written(lines, [found.line("exported")], [f" (vllm serve {export.target})"])


def write_adapter(export: Export, staging: Path) -> Written:
    """Write an adapter, in a format of ADAPTERS, for vLLM.

    It is verified in PEFT's layout; the other layout is made from it without rounding.

    Raises: ConfigError for a run without an adapter, or for one that vLLM cannot serve.
    """
    config, kind = export.config, export.asked.format
    if config.tuning.mode == "full":
        raise ConfigError(
            f"FORMAT={kind}: {export.run.path} trained every weight; FORMAT=safetensors exports it"
        )
    refuse_other_adapter(export.weights, config)
    problems = what_vllm_does_not_serve(export.weights)
    if problems:
        raise ConfigError(
            f"FORMAT={kind}: vLLM serves no adapter with {', '.join(problems)}; "
            "FORMAT=safetensors exports the merged model"
        )
    link_files(export.weights, staging)
    if export.run.moved_base is not None:
        settings = staging / "adapter_config.json"
        now = {"base_model_name_or_path": export.run.moved_base}
        write_json(settings, {**read_json(settings), **now})
    complete_tokenizer(staging)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    found = export.reopen(folder_of_run(staging, config, DTYPES[precision(config)], device))
    if kind == "vllm-adapter":
        list_experts(config, staging)
    model_class = BaseFacts.read(config.model).model_class
    names = "" if model_class == CAUSAL else f" (named as in {model_class}, which vLLM reads)"
    return Written([], [found.line("exported")], [names])


def write_plain_model(export: Export, staging: Path) -> tuple[list[str], Reopened]:
    """Write the complete model as plain files; return the merge's output, and its scores.

    Raises: CheckpointError if plain transformers does not open the evaluated model.
    """
    source, dtype = export.weights, export.asked.dtype
    lines: list[str] = []
    if export.config.tuning.mode != "full":
        source = export.run.path / "merged"
        if not is_current_merge(source, export.weights, dtype):
            lines = merge_run(export.run, dtype)
    elif dtype is not None:
        raise ConfigError(
            f"MODEL_DTYPE={dtype}: {source} is exported in the type that was trained; leave it out"
        )
    link_files(source, staging)
    write_for_older_readers(staging, export.config.model.trust_remote_code)
    with merged_folder(staging, export.config) as opened:
        return lines, export.reopen(opened)


def is_current_merge(merged: Path, adapter: Path, dtype: str | None) -> bool:
    """Return whether `merged` is undamaged, and made from this adapter with the requested dtype."""
    if not (merged / stamp.NAME).is_file() or seal.find_damage(merged) is not None:
        return False
    if read_json(merged / stamp.NAME) != {**read_json(adapter / stamp.NAME), "merged": True}:
        return False
    return dtype in (None, read_json(merged / "config.json").get("dtype"))


def link_files(source: Path, target: Path, *left_out: str) -> None:
    """Link a folder's files into another folder, except those that match the patterns.

    Tensors are hard links if the disk supports them; other files are copied, because an export
    changes them.
    """
    chosen = shutil.ignore_patterns(*OF_A_RUN, *left_out)
    shutil.copytree(
        source,
        target,
        ignore=lambda at, names: chosen(at, names) if at == str(source) else (),
        copy_function=_link_or_copy,
    )


def _link_or_copy(path: str, target: str) -> None:
    if path.endswith(".safetensors"):
        with contextlib.suppress(OSError):  # a disk without hard links
            os.link(path, target)
            return
    shutil.copyfile(path, target)


def complete(export: Export, staging: Path, device: str, scores: Sequence[str]) -> None:
    """Write parity.jsonl and README.md."""
    config, kind = export.config, export.asked.format
    if kind != config.train.deliver_as:
        config = without_rounding(config)
    trained = load_run(export.run, device, config)
    exports.write_parity(parity_rows(trained, export.data.test), staging)
    stops = saved_stops(trained.stops or sorted(stop_ids(trained.tokenizer)), trained.tokenizer)
    facts = RunFacts.read(export.run)
    kind = "adapter" if kind in ADAPTERS else kind
    card = card_text(facts, export.config, stops, export.target, kind, scores)
    write_text(staging / "README.md", card)
    share(staging)
