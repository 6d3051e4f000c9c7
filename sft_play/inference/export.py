"""`make export`: a run's weights as other programs take them, held to what was scored."""

from pathlib import Path

import torch

from sft_play.errors import ConfigError
from sft_play.evaluation.reopened import Folder, reopen
from sft_play.inference.export_gguf import export_gguf
from sft_play.inference.exported import (
    Exported,
    complete,
    link_files,
    refuse_faults,
    reopened_model,
    staged,
    write_plain_model,
)
from sft_play.inference.merge import not_scored, refuse_other_adapter
from sft_play.models import bnb
from sft_play.models.base_files import plain_reading
from sft_play.models.export import complete_tokenizer
from sft_play.models.listed_experts import list_experts
from sft_play.models.load import weight_dtype
from sft_play.models.parameters import dtype_name
from sft_play.plan.ranks import precision
from sft_play.process import DTYPES
from sft_play.reporting.base_facts import CAUSAL, BaseFacts
from sft_play.runs.exports import ADAPTERS, COMPRESSED, ExportAsked
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import RunFolder


def export_run(folder: RunFolder, asked: ExportAsked, device: str) -> list[str]:
    """Export a run as `asked`; return the lines to print.

    Raises: ConfigError, CheckpointError; EnvironmentFault where llama.cpp is not there.
    """
    run = Exported.of(folder, device)
    lines = _written(run, asked.target(folder), asked)
    return [*lines, *not_scored(run.config, asked.format)]


def _written(run: Exported, target: Path, asked: ExportAsked) -> list[str]:
    """Write an export of any format; return the lines to print."""
    if asked.format in ADAPTERS:
        return export_adapter(run, target, asked.format)
    if asked.format == "gguf":
        return export_gguf(run, target, asked)
    if asked.format in COMPRESSED:
        # takes seconds to import
        from sft_play.inference.export_compressed import export_compressed

        return export_compressed(run, target, asked)
    return export_safetensors(run, target, asked.dtype)


def export_safetensors(run: Exported, target: Path, dtype: str | None = None) -> list[str]:
    """Write a folder that vLLM, SGLang, TGI and transformers load; return the lines to print."""
    with staged(target) as staging:
        lines = write_plain_model(run, staging, dtype)
        found = reopened_model(run, staging)
        complete(run, staging, target, "safetensors", [found.line("exported")])
    return [*lines, found.line("exported"), f"exported {target} (vllm serve {target})"]


def export_adapter(run: Exported, target: Path, kind: str) -> list[str]:
    """Write an adapter as vLLM serves it, of ADAPTERS; return the lines to print.

    It is opened again in PEFT's layout, of which the other one is made without rounding.

    Raises: ConfigError for a run without one, or for an adapter that vLLM does not serve.
    """
    if run.config.tuning.mode == "full":
        raise ConfigError(
            f"FORMAT={kind}: {run.folder.path} trained every weight; FORMAT=safetensors exports it"
        )
    refuse_other_adapter(run.weights, run.config)
    problems = what_vllm_does_not_serve(run.weights)
    if problems:
        raise ConfigError(
            f"FORMAT={kind}: vLLM serves no adapter with {', '.join(problems)}; "
            "FORMAT=safetensors exports the merged model"
        )
    with staged(target) as staging:
        link_files(run.weights, staging)
        if run.folder.moved_base is not None:
            settings = staging / "adapter_config.json"
            now = {"base_model_name_or_path": run.folder.moved_base}
            write_json(settings, {**read_json(settings), **now})
        complete_tokenizer(staging)
        found = refuse_faults(run, reopen(stranger_of_adapter(run, staging), run.reference))
        if kind == "vllm-adapter":
            list_experts(run.config, staging)
        complete(run, staging, target, "adapter", [found.line("exported")])
    model_class = BaseFacts.read(run.config.model).model_class
    names = "" if model_class == CAUSAL else f" (named as in {model_class}, which vLLM reads)"
    return [found.line("exported"), f"exported {target}{names}"]


def stranger_of_adapter(run: Exported, staging: Path) -> Folder:
    """Return how an adapter is loaded to be scored: over its base, as training had that."""
    config = run.config
    compute_dtype = DTYPES[precision(config)]
    return Folder(
        staging,
        dtype_name(weight_dtype(config, compute_dtype)),
        {"": "cuda:0" if torch.cuda.is_available() else "cpu"},
        bnb.plain_quantization(config, compute_dtype),
        config.model.revision,
        config.model.trust_remote_code,
        stored=plain_reading(config),
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
