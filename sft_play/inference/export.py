"""`make export`: write a run's weights for other programs, and compare them with the run."""

from pathlib import Path

import torch

from sft_kernels.process import DTYPES
from sft_play.errors import ConfigError
from sft_play.evaluation.reopened import folder_of_run
from sft_play.inference.export_gguf import write_gguf
from sft_play.inference.exported import (
    Export,
    WrittenExport,
    complete,
    link_files,
    write_plain_model,
)
from sft_play.inference.merge import not_scored, refuse_other_adapter, what_vllm_does_not_serve
from sft_play.models.export import complete_tokenizer
from sft_play.models.listed_experts import list_experts
from sft_play.plan.ranks import config_precision
from sft_play.reporting.base_facts import CAUSAL, BaseFacts
from sft_play.runs.exports import ADAPTERS, COMPRESSED, ExportAsked
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder
from sft_play.runs.publishing import FILES, Target


def export_run(folder: RunFolder, asked: ExportAsked, device: str) -> list[str]:
    """Export a run as `asked`; return the lines to print.

    Raises: ConfigError for a run that cannot be exported this way, and for a target with anything
    but an earlier export of this format; CheckpointError for files that differ from the evaluated
    model; EnvironmentFault without llama.cpp.
    """
    target = Target(asked.target(folder), f"export {asked.format}", asked.out is not None)
    with target.staged() as work:
        export = Export.of(folder, asked)
        written = write_files(export, work / FILES, work / "model")
        complete(export, work / FILES, device, written.scores)
    lines = written.lines + written.scores
    lines += [f"exported {export.target}{end}" for end in written.published]
    return lines + not_scored(export.config, asked.format)


def write_files(export: Export, staging: Path, plain: Path) -> WrittenExport:
    """Write the files of a format into `staging`, with a plain model in `plain` if it needs one.

    Raises: as `export_run`.
    """
    kind = export.asked.format
    if kind in ADAPTERS:
        return write_adapter(export, staging)
    if kind == "gguf":
        return write_gguf(export, staging, plain)
    if kind in COMPRESSED:  # takes seconds to import
        from sft_play.inference.export_compressed import write_compressed

        return write_compressed(export, staging, plain)
    lines, found = write_plain_model(export, staging)
    return WrittenExport(lines, [found.line("exported")], [f" (vllm serve {export.target})"])


def write_adapter(export: Export, staging: Path) -> WrittenExport:
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
    found = export.reopen(folder_of_run(staging, config, DTYPES[config_precision(config)], device))
    if kind == "vllm-adapter":
        list_experts(config, staging)
    model_class = BaseFacts.read(config.model).model_class
    names = "" if model_class == CAUSAL else f" (named as in {model_class}, which vLLM reads)"
    return WrittenExport([], [found.line("exported")], [names])
