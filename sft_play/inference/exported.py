"""Shared by all formats of an export: stage, open, compare with the run, describe.

An export is published completely or not at all. parity.jsonl contains test prompts and the
evaluated model's greedy answers. Legend: B prompts, V vocabulary.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from sft_play.config.schema import Config
from sft_play.data.assemble import RunData
from sft_play.data.render import RenderError, render_prompt, stop_ids
from sft_play.data.rows import Message
from sft_play.data.splits import question_indices
from sft_play.data.store import Split
from sft_play.data.templates import ChatTemplate, template_messages
from sft_play.errors import CheckpointError, ConfigError
from sft_play.evaluation.reference import Reference, checked_prompts
from sft_play.evaluation.reopened import Folder, Reopened, reopen
from sft_play.inference.evaluate import prepared_data
from sft_play.inference.improvement import reference_of
from sft_play.inference.load import (
    TrainedModel,
    checked_weights,
    load_run,
    tokenizer_of,
    without_rounding,
)
from sft_play.inference.merge import MERGED, merge_and_score, merged_folder
from sft_play.models.export import saved_stops, write_for_older_readers
from sft_play.reporting.model_card import card_text
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import exports, seal, stamp
from sft_play.runs.exports import ADAPTERS, MOST_TOKENS, ExportAsked, ParityRow
from sft_play.runs.files import Json, read_json, share, write_text
from sft_play.runs.folder import RunFolder

OF_A_RUN = (stamp.NAME, seal.NAME, "README.md")  # files of weights that an export does not need
MOST_ROWS = 8  # of the test rows; those of `checked_prompts` are added
CONTENT = "⟦content⟧"  # represents a question in a template
Messages = list[Json]


@dataclass(frozen=True)
class WrittenExport:
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


def write_plain_model(export: Export, staging: Path) -> tuple[list[str], Reopened]:
    """Write the complete model as plain files; return the merge's output, and its scores.

    Raises: CheckpointError if plain transformers does not open the evaluated model.
    """
    source, dtype = export.weights, export.asked.dtype
    lines: list[str] = []
    scored: Reopened | None = None
    if export.config.tuning.mode != "full":
        source = export.run.path / MERGED
        if not is_current_merge(source, export.weights, dtype):
            lines, scored = merge_and_score(export.run, dtype)
    elif dtype is not None:
        raise ConfigError(
            f"MODEL_DTYPE={dtype}: {source} is exported in the type that was trained; leave it out"
        )
    link_files(source, staging)
    write_for_older_readers(staging, export.config.model.trust_remote_code)
    if scored is not None and export.asked.format != "safetensors":
        return lines, scored  # the merge was just opened, and no file of this folder is published
    with merged_folder(staging, export.config) as opened:
        return lines, export.reopen(opened)


def is_current_merge(merged: Path, adapter: Path, dtype: str | None) -> bool:
    """Return whether `merged` is undamaged, and made from this adapter with the requested dtype."""
    if not (merged / stamp.NAME).is_file() or seal.find_damage(merged) is not None:
        return False
    if stamp.read_stamp(merged) != replace(stamp.read_stamp(adapter), merged=True):
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
    exports.write_parity(make_parity_rows(trained, export.data.test), staging)
    stops = saved_stops(trained.stops or sorted(stop_ids(trained.tokenizer)), trained.tokenizer)
    facts = RunFacts.read(export.run)
    kind = "adapter" if kind in ADAPTERS else kind
    card = card_text(facts, export.config, stops, export.target, kind, scores)
    write_text(staging / "README.md", card)
    share(staging)


def make_parity_rows(trained: TrainedModel, split: Split) -> list[ParityRow]:
    """Return prompts of a split and some of several turns, with the model's greedy answers."""
    prompts = prompts_of(trained.tokenizer, trained.config.data.system_prompt, split, MOST_ROWS)
    return [answered(trained, ids, messages) for messages, ids in prompts]


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, split: Split, most: int
) -> list[tuple[Messages | None, list[int]]]:
    """Return at most `most` different prompts of a split, and some of several turns.

    Each has the messages from which the template makes it, if these are known, and its ids. Prompts
    with images are left out: the export may be published, and contains no images.
    """
    prompts = (split[index].prompt for index in question_indices(split, None))
    different = dict.fromkeys(tuple(ids) for ids in prompts if not ids.images)
    found = [
        (messages_of(ids, tokenizer, system_prompt), list(ids)) for ids in islice(different, most)
    ]
    return [*found, *checked_prompts(tokenizer, system_prompt)]


def messages_of(
    prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> Messages | None:
    """Return the messages of a prompt of one question, None for any other prompt.

    They are parsed from its text and verified: the template must make the same ids from them.
    """
    text = tokenizer.decode(prompt)
    system = [Message("system", system_prompt)] if system_prompt else []
    shape = template_messages([*system, Message("user", CONTENT)])
    try:
        before, _, after = ChatTemplate(tokenizer).render_prompt(shape, ()).partition(CONTENT)
        question = text.removeprefix(before).removesuffix(after)
        messages = [*system, Message("user", question)]
        # a server reads special tokens in a message as tokens
        ids = render_prompt(messages, tokenizer, tokens_in_text="allow")
    except RenderError:
        return None
    return template_messages(messages) if ids == list(prompt) else None


def answered(trained: TrainedModel, prompt: list[int], messages: Messages | None) -> ParityRow:
    """Return a prompt with the model's greedy answer."""
    tokenizer = trained.tokenizer
    greedy = replace(trained, config=trained.config.changed({"train.generation_num_beams": 1}))
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
    """Records the margin in nats of each answer token over the second most likely one.

    It uses the scores by which the token was chosen: a penalty of the base changes them.
    """

    def __init__(self) -> None:
        self.nats: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        best, second = scores[0].float().topk(2).values.tolist()  # (B = 1, V)
        self.nats.append(round(best - second, 4))
        return scores
