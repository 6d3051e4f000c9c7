"""What the exports of all formats share: a run's weights as plain files, opened again and sealed.

Each export is staged, and published whole or not at all. parity.jsonl has test prompts and the
evaluated model's greedy answers. Legend: B prompts, V vocabulary.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessor, PreTrainedTokenizerBase

from sft_play.config.schema import Config
from sft_play.data.render import RenderError, render_prompt, stop_ids
from sft_play.data.rows import Message
from sft_play.data.splits import question_indices
from sft_play.data.store import Split
from sft_play.data.templates import ChatTemplate, template_messages
from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation.reopened import Reference, Reopened, checked_prompts, reopen
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.load import (
    TrainedModel,
    checked_weights,
    load_run,
    updated,
    without_rounding,
)
from sft_play.inference.merge import merge_run, publish, reference_of, stranger_of
from sft_play.models.export import read_stops, saved_stops, write_for_older_readers
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import exports, seal, stamp
from sft_play.runs.exports import MOST_TOKENS, ParityRow
from sft_play.runs.files import read_json, share, write_text
from sft_play.runs.folder import RunFolder

OF_A_RUN = (stamp.NAME, seal.NAME, "README.md")  # files of weights that an export has no use for

MOST_ROWS = 8  # of the test rows; those of `checked_prompts` come on top
CONTENT = "⟦content⟧"  # stands for a question in a template
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Exported:
    """A run that is being exported: its settings, its weights, and what they said."""

    folder: RunFolder
    config: Config
    weights: Path  # adapter/ or model/
    reference: Reference
    device: str

    @classmethod
    def of(cls, folder: RunFolder, device: str) -> "Exported":
        """Return a finished run. Raises: CheckpointError where its weights are not whole."""
        config = folder.read_config()
        weights = checked_weights(folder, config)
        reference = Reference.read(folder.evaluation) or reference_of(folder, config)
        return cls(folder, config, weights, reference, device)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, which is renamed to it where nothing was raised."""
    staging = target.with_name(f".{target.name}-staging")
    shutil.rmtree(staging, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield staging
        publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_plain_model(run: Exported, staging: Path, dtype: str | None) -> list[str]:
    """Write the whole model as plain files into `staging`; return what merging printed."""
    source = run.weights
    lines: list[str] = []
    if run.config.tuning.mode != "full":
        source = run.folder.path / "merged"
        if not is_current_merge(source, run.weights, dtype):
            lines = merge_run(run.folder, dtype)
    elif dtype is not None:
        raise ConfigError(
            f"MODEL_DTYPE={dtype}: {run.weights} is exported in the type that was trained; "
            "leave it out"
        )
    link_files(source, staging)
    write_for_older_readers(staging, run.config.model.trust_remote_code)
    return lines


def is_current_merge(merged: Path, adapter: Path, dtype: str | None) -> bool:
    """Return whether `merged` is undamaged, made of this adapter, and of the asked type."""
    if not (merged / stamp.NAME).is_file() or seal.find_damage(merged) is not None:
        return False
    if read_json(merged / stamp.NAME) != {**read_json(adapter / stamp.NAME), "merged": True}:
        return False
    return dtype in (None, read_json(merged / "config.json").get("dtype"))


def link_files(source: Path, target: Path) -> None:
    """Put a folder's files into another: tensors as hard links where the disk has them.

    The others are copied, because an export changes them.
    """
    target.mkdir()
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if not path.is_file() or str(name) in OF_A_RUN:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            with contextlib.suppress(OSError):  # a disk without hard links
                os.link(path, target / name)
                continue
        shutil.copyfile(path, target / name)


def reopened_model(run: Exported, staging: Path) -> Reopened:
    """Return what plain transformers says of a whole model. Raises: as `refuse_faults`."""
    with tempfile.TemporaryDirectory() as offload_folder:
        opened = stranger_of(staging, run.config, Path(offload_folder))
        return refuse_faults(run, reopen(opened, run.reference))


def refuse_faults(run: Exported, found: Reopened) -> Reopened:
    """Return what was found. Raises: CheckpointError where it is not the evaluated model."""
    faults = found.faults()
    if faults:
        raise CheckpointError(
            f"{run.folder.path}: the export is not the model that was evaluated: "
            f"{'; '.join(faults)}; nothing was published"
        )
    return found


def complete(
    run: Exported, staging: Path, target: Path, kind: str, reopened: Sequence[str]
) -> None:
    """Write exports.jsonl and README.md, and seal the folder."""
    config = run.config
    if kind != config.train.deliver_as:
        config = without_rounding(config)
    trained = load_run(run.folder, run.device, config)
    split = prepared_data(run.folder, run.config, trained.tokenizer).test
    exports.write_parity(parity_rows(trained, split), staging)
    tokenizer = AutoTokenizer.from_pretrained(run.weights)
    ids = list(read_stops(run.weights)) or sorted(stop_ids(tokenizer))
    stops = saved_stops(ids, tokenizer)
    card = card_text(RunFacts.read(run.folder), run.config, stops, target, kind, reopened)
    write_text(staging / "README.md", card)
    share(staging)
    seal.seal(staging)


def parity_rows(trained: TrainedModel, split: Split) -> list[ParityRow]:
    """Return prompts of a split and some of several turns, with the model's greedy answers.

    Those with images are left out: the file may be published, and has no pictures.
    """
    tokenizer = trained.tokenizer
    prompts_of_split = (split[index].prompt for index in question_indices(split, None))
    questions = (tuple(prompt) for prompt in prompts_of_split if not prompt.images)
    different = dict.fromkeys(questions)
    prompts: list[tuple[list[int], Messages | None]] = [
        (list(ids), messages_of(ids, tokenizer, trained.config.data.system_prompt))
        for ids in islice(different, MOST_ROWS)
    ]
    for messages, ids in checked_prompts(tokenizer, trained.config.data.system_prompt):
        prompts.append((ids, messages))
    return [answered(trained, ids, messages) for ids, messages in prompts]


def messages_of(
    prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> Messages | None:
    """Return the messages of a prompt of one question, None for any other prompt.

    They are read out of its text and held to it: the template must make the same ids of them.
    """
    text = tokenizer.decode(prompt)
    system = [Message("system", system_prompt)] if system_prompt else []
    shape = template_messages([*system, Message("user", CONTENT)])
    try:
        before, _, after = ChatTemplate(tokenizer).render_prompt(shape, ()).partition(CONTENT)
    except RenderError:
        return None
    if not (text.startswith(before) and text.endswith(after)):
        return None
    messages = [*system, Message("user", text[len(before) : len(text) - len(after)])]
    try:
        # a server reads special tokens in a message as the tokens
        ids = render_prompt(messages, tokenizer, tokens_in_text="allow")
        is_same = ids == list(prompt)
    except RenderError:
        return None
    return template_messages(messages) if is_same else None


def answered(trained: TrainedModel, prompt: list[int], messages: Messages | None) -> ParityRow:
    """Return a prompt with the model's greedy answer."""
    tokenizer = trained.tokenizer
    greedy = replace(trained, config=updated(trained.config, "train", generation_num_beams=1))
    generator = greedy.generator(MOST_TOKENS)
    margins = Margins()
    ids = generator.generate(trained.model, [prompt], scored=margins)[0].tolist()
    texts = [
        tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(1, len(ids) + 1)
    ]
    return ParityRow(
        prompt=tokenizer.decode(prompt),
        prompt_ids=prompt,
        answer=texts[-1],
        answer_ids=ids,
        answer_ends=[len(text) for text in texts],
        margins=margins.nats,
        has_ended=ids[-1] in generator.stops,
        messages=messages,
    )


class Margins(LogitsProcessor):
    """Notes how many nats each token of an answer is above the second most likely one.

    It sees the scores by which the token was chosen: a penalty of the base changes them.
    """

    def __init__(self) -> None:
        self.nats: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        best, second = scores[0].float().topk(2).values.tolist()  # (B = 1, V)
        self.nats.append(round(best - second, 4))
        return scores
