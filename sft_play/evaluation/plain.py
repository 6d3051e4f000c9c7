"""Score saved weights with only transformers and PEFT, as a user of the folder would.

A script, run by its path in a separate process, so that nothing of this project is imported
there: `reopened` starts it, or `opener` has done so before. It reads a request and rows, and writes
the model's outputs for these rows.
Legend: N labeled positions, V vocabulary, K tokens of a position.
"""

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKENS = 64  # K: most likely ones, whose probabilities are kept; the others count as one
POSITIONS = 64  # whose probabilities over the full vocabulary are in memory at a time
FREE_TOKENS = 4  # generated if the first one is no stop
IMAGES = "images."  # the row's number and the name of an argument follow
SHOWN_TOKENS = 40  # of a prompt before a forced stop


@dataclass(frozen=True)
class Folder:
    """A folder of saved weights, how a stranger loads it, and what is asked of it."""

    path: Path
    dtype: str  # of base weights, or "auto"
    device_map: Mapping[str, str]
    quantization: Mapping[str, Any] | None = None  # of the base of an adapter
    revision: str | None = None
    trust_remote_code: bool = False
    offload_folder: Path | None = None
    stored: Mapping[str, Any] | None = None  # how the base's quantized weights are read as plain
    rows: Sequence[Path] = ()  # files of rows to be scored, each by itself
    stops: Sequence[tuple[list[int], int]] = ()  # ids of a prompt, and the stop that may follow
    prompts: Sequence[list[dict[str, Any]]] = ()  # messages, for the folder's chat template


class Outputs(NamedTuple):
    """What a model computes for N labels: on the CPU, in float64."""

    nats: Tensor  # (N,): of the labels
    best: Tensor  # (N,): the most likely tokens
    tokens: Tensor  # (N, K)
    log_probs: Tensor  # (N, K): of these tokens
    rest: Tensor  # (N,): log probability of all other tokens


@dataclass(frozen=True)
class Facts:
    """What the folder of a request does with its stops and prompts, in their order."""

    stops: list[bool]  # whether generation ends there
    prompts: list[list[int]]  # their ids


def outputs_of(logits: Tensor, labels: Tensor, tokens: Tensor | None = None) -> Outputs:
    """Return the outputs for logits (N, V) and labels (N,); `tokens` may be given."""
    parts: list[Outputs] = []
    for start in range(0, len(labels), POSITIONS):
        here = slice(start, start + POSITIONS)
        log_probs = logits[here].double().log_softmax(-1)
        wanted = labels[here].to(logits.device)
        if tokens is None:
            kept = log_probs.topk(min(TOKENS, logits.shape[-1] - 1)).indices
        else:
            kept = tokens[here].to(logits.device)
        parts.append(
            Outputs(
                nats=-log_probs.gather(1, wanted[:, None])[:, 0],
                best=log_probs.argmax(-1),
                tokens=kept,
                log_probs=log_probs.gather(1, kept),
                rest=log_probs.scatter(1, kept, -torch.inf).logsumexp(-1),
            )
        )
    return joined_outputs(parts)


def joined_outputs(parts: list[Outputs]) -> Outputs:
    """Return the outputs for several parts of the labels as one, on the CPU."""
    return Outputs._make(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True))


def end_with_asker(parent: int) -> None:
    """End this process once the run that asks is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def answer_request(asked: str, answered: str) -> None:
    """Answer the request in the file `asked`, in the file `answered`."""
    from safetensors.torch import load_file, save_file

    with open(asked, encoding="utf-8") as file:
        folder = Folder(**json.load(file))
    model, tokenizer = load_folder(folder)
    found: dict[str, Tensor] = {}
    for number, path in enumerate(folder.rows):
        for name, tensor in scored(model, load_file(path))._asdict().items():
            found[f"{number}.{name}"] = tensor
    stops = [ends_at(model, tokenizer, prompt, stop) for prompt, stop in folder.stops]
    prompts = [prompt_ids(tokenizer, messages) for messages in folder.prompts]
    facts = Facts(stops, prompts)
    save_file(found, answered, metadata={"facts": json.dumps(vars(facts))})


def load_folder(folder: Folder) -> tuple[Any, Any]:
    """Return the model of a folder, with an adapter over its base, and the folder's tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, GenerationConfig

    path = Path(folder.path)
    remote = {"trust_remote_code": folder.trust_remote_code}
    options = {**remote, "dtype": folder.dtype, "device_map": folder.device_map}
    if folder.offload_folder:
        options["offload_folder"] = folder.offload_folder
    tokenizer = AutoTokenizer.from_pretrained(path, **remote)
    if not (path / "adapter_config.json").is_file():
        model = open_model(path, **options)
        return with_soft_caps(model).eval(), tokenizer
    from peft import PeftConfig, PeftModel

    if folder.quantization:
        options["quantization_config"] = BitsAndBytesConfig(**folder.quantization)
    if (path / "config.json").is_file():  # a stretched rope
        options["config"] = AutoConfig.from_pretrained(path, **remote)
    options["generation_config"] = GenerationConfig.from_pretrained(path)
    base = PeftConfig.from_pretrained(path).base_model_name_or_path
    with reading(folder.stored):
        model = open_model(base, revision=folder.revision, **options)
    for module in model.modules():
        if folder.quantization and hasattr(module, "compute_dtype"):
            # a base in 4 bits names its type
            module.compute_dtype = options["quantization_config"].bnb_4bit_compute_dtype
        # On some CPUs a 4-bit layer would round its scales to bfloat16 when it is evaluated. What
        # is in the files is looked at here, not a kernel.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # tokens that a run added
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    adapted = PeftModel.from_pretrained(with_soft_caps(model), path)
    refuse_unread_tensors(adapted, path)
    return adapted.eval(), tokenizer


def reading(stored: Mapping[str, Any] | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which weights are read as a run read them.

    Of this project it is the one file that says which numbers quantized weights are.
    """
    if stored is None:
        return contextlib.nullcontext()
    spec = importlib.util.spec_from_file_location("stored_weights", stored["module"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reading_as_plain(stored["block"])


def open_model(
    name: str | Path, trust_remote_code: bool, revision: str | None = None, **options: Any
) -> Any:
    """Return a model, of the class that its config.json declares."""
    import transformers

    source = {"trust_remote_code": trust_remote_code, "revision": revision}
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(name, **source)
    model_class = transformers.AutoModelForCausalLM
    if not getattr(config, "auto_map", None):
        model_class = getattr(transformers, (config.architectures or [""])[0], model_class)
    return model_class.from_pretrained(name, config=config, **source, **options)


def refuse_unread_tensors(adapted: Any, folder: Path) -> None:
    """Raise ValueError unless the adapters of a model are what the adapter's file has.

    PEFT leaves out, with a warning or without, what it finds no layer for.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    saved = load_file(os.path.join(folder, "adapter_model.safetensors"))
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    unread = saved.keys() ^ loaded.keys()
    for name in saved.keys() & loaded.keys():
        if not torch.equal(saved[name].to(loaded[name]), loaded[name]):  # its type and device
            unread.add(name)
    if unread:
        raise ValueError(
            f"PEFT does not load {len(unread)} adapter tensors, {min(unread)} first, into "
            f"{type(adapted.get_base_model()).__name__}; leave such layers out of "
            "tuning.lora.target_modules"
        )


def with_soft_caps(model: Any) -> Any:
    """Return a model that computes the soft cap of its attention scores, if it has one.

    transformers' sdpa silently leaves it out; the model's eager attention does not.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def scored(model: Any, rows: Mapping[str, Tensor], device: torch.device | None = None) -> Outputs:
    """Return a model's outputs for the labeled positions of rows, which are moved to `device`.

    None is the device of the model's embedding. Rows may name the `tokens` of each position.
    """
    device = device or model.get_input_embeddings().weight.device
    if device.type == "meta":  # read from the disk, at each forward pass
        if not any(name.startswith(IMAGES) for name in rows):
            return scored_together(model, rows)
        device = torch.device("cpu")
    parts: list[Outputs] = []
    for number, (ids, positions, here) in enumerate(each_row(rows)):
        inputs = {"input_ids": ids[None], **pictures(rows, number)}
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        logits = model(**inputs, use_cache=False).logits[0]
        labels = ids[positions]
        tokens = rows["tokens"][here] if "tokens" in rows else None
        parts.append(outputs_of(logits[positions.to(logits.device) - 1], labels, tokens))
    return joined_outputs(parts)


def scored_together(model: Any, rows: Mapping[str, Tensor]) -> Outputs:
    """Return the same of a model whose weights are read from the disk at each forward pass.

    All rows are one batch, and the head computes only the labeled positions.
    """
    each = list(each_row(rows))
    padded = torch.nn.utils.rnn.pad_sequence([ids for ids, _, _ in each], batch_first=True)
    lengths = torch.tensor([len(ids) for ids, _, _ in each])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    row_of = torch.repeat_interleave(
        torch.arange(len(each)), torch.tensor([len(positions) for _, positions, _ in each])
    )

    def keep_labelled(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (args[0][row_of, rows["positions"] - 1][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(keep_labelled)
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False).logits[0]
    hook.remove()
    labels = torch.cat([ids[positions] for ids, positions, _ in each])
    return outputs_of(logits, labels, rows["tokens"])


def pictures(rows: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the inputs of a row's images, {} of a row of text."""
    prefix = f"{IMAGES}{number}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in rows.items()
        if name.startswith(prefix)
    }


def each_row(rows: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield ids (T,) and labeled positions of each row, and where those stand among all N."""
    start = position = 0
    for end, last in zip(rows["ends"].tolist(), rows["position_ends"].tolist(), strict=True):
        here = slice(position, last)
        yield rows["ids"][start:end], rows["positions"][here], here
        start, position = end, last


@torch.no_grad()
def ends_at(model: Any, tokenizer: Any, prompt: list[int], stop: int) -> bool:
    """Return whether plain generation ends once the model has chosen the token `stop`.

    It is made to choose that token first, and another one after it.
    """
    from transformers import LogitsProcessor, LogitsProcessorList

    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([prompt[-SHOWN_TOKENS:]])
    if device.type != "meta":  # else read from the disk
        ids = ids.to(device)

    class Chosen(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            is_first = input_ids.shape[1] == ids.shape[1]
            chosen = stop if is_first else int(ids[0, -1])
            return torch.full_like(scores, -torch.inf).index_fill(
                1, torch.tensor([chosen], device=scores.device), 0
            )

    generated = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=FREE_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([Chosen()]),
    )
    return generated.shape[1] == ids.shape[1] + 1


def prompt_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Return the ids of a prompt by the folder's chat template."""
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


if __name__ == "__main__":
    threading.Thread(target=end_with_asker, args=(os.getppid(),), daemon=True).start()
    answer_request(*sys.argv[1:])
