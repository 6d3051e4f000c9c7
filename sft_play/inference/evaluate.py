"""Score the weights of a finished run on its test rows or on other rows."""

import contextlib
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sft_play.config.loader import LoadedConfig
from sft_play.config.schema import Config
from sft_play.data.assemble import DataFacts, RunData, assemble, assemble_other_rows
from sft_play.data.cache import TokenizedSource, read_bad_rows
from sft_play.data.pipeline import build_run_data
from sft_play.data.sources import find_sources
from sft_play.data.splits import answer_token_limit
from sft_play.data.store import Split
from sft_play.data.template_sources import templates_in
from sft_play.data.templates import DEFAULT_TEMPLATE
from sft_play.data.tokenize import tokenize_sources
from sft_play.errors import ConfigError, DataError
from sft_play.evaluation.evaluator import Evaluator
from sft_play.evaluation.generate import free_bytes
from sft_play.evaluation.scores import Scores, answers_jsonl
from sft_play.inference.load import TrainedModel, base_of, load_and_join, load_run, tokenizer_of
from sft_play.models.export import read_stops, trained_stops
from sft_play.models.parameters import dtype_name
from sft_play.plan import sources
from sft_play.plan.model_shape import shape_of
from sft_play.runs.answer_file import FanOutPlace
from sft_play.runs.files import read_json, write_json, write_text
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import ModelFolder

SETTINGS = """
predict_with_generate generation_max_new_tokens generation_num_beams generation_max_rows metrics
eval_batch_size
""".split()
OWN_ROWS = "again"  # the name of the scores of the run's own test rows
MOST_ROWS = 8  # rows per batch of an evaluation without a plan
BYTES_OF_SCORE = 12  # the head's logits per token in 16 bits, in float32, and their softmax
TAKEN_NAMES = (OWN_ROWS, "before", "after", "resumed")


@dataclass(frozen=True)
class ScoredRows:
    """The rows to score, notes about them, and the name of their files in eval/."""

    split: Split
    name: str
    path: Any  # the value of data.test_path, in JSON; None for the run's test rows
    lines: tuple[str, ...] = ()


def evaluate_run(
    folder: RunFolder,
    device: str,
    asked: LoadedConfig | None = None,
    place: FanOutPlace | None = None,
    compares: bool = False,
) -> list[str]:
    """Score a run's weights and write eval/<name>.json and eval/<name>.jsonl.

    `asked` are the run's settings with others on top. With data.test_path, the rows of that file
    are scored, rendered as in training; otherwise the run's test rows are. With `compares` the base
    is scored, too, into eval/<name>.base.json. Processes with a `place` share the rows.
    Returns the lines to print.
    """
    config = asked.config if asked else folder.read_config()
    rows = chosen_rows(folder, config, asked)
    config = settle_answer_limit(config, rows.split)
    trained = with_batch_size(load_and_join(load_run(folder, device, config), place), rows.split)
    lines = list(rows.lines)
    answers = folder.evaluation / f"{rows.name}.jsonl"
    if isinstance(folder, ModelFolder):
        lines += said_of_model(folder, trained, rows.split)
    scores = _score(trained, rows, answers)
    lines.append(f"{folder.name} {scores.as_text()} rows={len(rows.split)}")
    if compares:
        base, is_used = base_of(trained)
        with is_used():
            found = _score(base, rows, answers.with_suffix(".base.jsonl"))
        lines.append(f"base {found.as_text()} rows={len(rows.split)}")
    return [*lines, f"answers {answers}"]


def chosen_rows(folder: RunFolder, config: Config, asked: LoadedConfig | None) -> ScoredRows:
    """Return the rows of data.test_path if that is given, else the run's test rows.

    Raises: ConfigError if the columns of no file are named.
    """
    tokenizer = tokenizer_of(folder, config)
    if asked is not None and asked.is_set("data.test_path"):
        return test_rows(folder, config, tokenizer)
    if asked is not None and asked.is_set("data.columns"):
        raise ConfigError(
            f"{asked.described('data.columns')}: names the columns of a file to score; "
            "set DATA_TEST_PATH too"
        )
    if isinstance(folder, ModelFolder):
        raise ConfigError(
            f"RUN={folder.path}: is not a run, so it has no test rows. Write a file of rows, such "
            "as DATA_TEST_PATH=held.jsonl"
        )
    return ScoredRows(prepared_data(folder, config, tokenizer).test, OWN_ROWS, None)


def with_batch_size(trained: TrainedModel, rows: Split) -> TrainedModel:
    """Return the model with a number for train.eval_batch_size if no plan has resolved it.

    Half of every process's free memory is enough for so many rows of the longest row's length.
    """
    train = trained.config.train
    if train.eval_batch_size != "auto":
        return trained
    model_config = trained.model.config.to_dict()
    vocab = shape_of(model_config, trained.config.model.name).vocab
    row_bytes = BYTES_OF_SCORE * vocab * int(max(rows.lengths))
    fitting = trained.process.min(free_bytes(trained.process)) // (2 * row_bytes)
    rows_at_once = max(1, min(MOST_ROWS, fitting))
    config = trained.config.changed({"train.eval_batch_size": rows_at_once})
    return replace(trained, config=config)


def said_of_model(folder: ModelFolder, trained: TrainedModel, rows: Split) -> list[str]:
    """Return what is used from a folder, its base and its tokenizer, if a run knows it."""
    tokenizer, stops = trained.tokenizer, trained.stops
    dtype = dtype_name(trained.model.dtype)
    over = f" over {folder.base}" if folder.base is not None else ""
    named = templates_in(folder.path)
    template = f"of {folder.path}" if named or not folder.base else f"of {folder.base}"
    if tokenizer.chat_template == DEFAULT_TEMPLATE:
        template = f"plain, of SFT-Play: {folder.base or folder.path} has none"
    elif not named and folder.base:
        template += ", because the adapter has none"
    elif folder.base and named != templates_in(Path(folder.base)):
        template += ", with which the adapter was trained; its base has another"
    if read_stops(folder.path):
        place = "generation_config.json"
    elif not stops:
        place = "the tokenizer's"
    else:
        place = "config.json" if folder.base is None else "its base's"
    ends = trained_stops(rows, tokenizer)  # the usual end of these rows' answers first
    words = " ".join(tokenizer.convert_ids_to_tokens(list(stops) or ends))
    lines = [
        f"model {folder.path}{over} in {dtype}",
        f"template {template}",
        f"stops {words} ({place})",
    ]
    if folder.was_packed():
        lines.append(
            f"warning: the adapter was trained over 4-bit weights, and its base is in {dtype} "
            "here; RUN= with its run scores it as it was trained"
        )
    if stops and ends[0] not in stops:
        lines.append(
            f"warning: the rows end answers with {tokenizer.convert_ids_to_tokens(ends[0])}, which "
            f"is no stop of this model ({place}): its answers may run on, as in any program"
        )
    return lines


def _score(trained: TrainedModel, rows: ScoredRows, answers: Path) -> Scores:
    """Score a model and write its outputs; every process of several must call it."""
    evaluator = Evaluator(
        rows.split,
        trained.tokenizer,
        trained.config.train,
        trained.process,
        trained.images if rows.split.has_images else None,
        saved_stops=trained.stops,
    )
    scores = evaluator.score(trained.model)
    if trained.process.is_main:
        write_text(answers, answers_jsonl(evaluator.questions, scores))
        settings = {f"train.{name}": getattr(trained.config.train, name) for name in SETTINGS}
        path = trained.config.data.model_dump(mode="json")["test_path"]
        if rows.path is not None:
            path = rows.path
            settings["data.columns"] = trained.config.data.columns
        facts = {"rows": len(rows.split), "settings": settings, "test_path": path}
        write_json(answers.with_suffix(".json"), {**scores.as_metrics(), **facts})
    return scores


def test_rows(folder: RunFolder, config: Config, tokenizer: PreTrainedTokenizerBase) -> ScoredRows:
    """Return the rows of data.test_path, tokenized as in training.

    Raises: DataError for a row that cannot be used, with its file and line.
    """
    data = sources.resolved(config.data)
    # the other files may be missing
    data = data.changed({"train_path": None, "val_path": None})
    config = config.changed({"data": data})
    found = tokenize_sources(config, find_sources(config), tokenizer)
    trained_on: tuple[TokenizedSource, ...] = ()  # if the files are missing or not known
    if not isinstance(folder, ModelFolder):
        with contextlib.suppress(DataError):
            trained_on = DataFacts.from_json(folder.read_data()).sources["train"]
    rows = assemble_other_rows(config, found["test"], trained_on)
    names = ", ".join(source.name for source in found["test"])
    path = data.model_dump(mode="json")["test_path"]
    name = _free_name(folder, Path(found["test"][0].files[0]).stem, path)
    counts = rows.ledger.tally
    dropped = " ".join(f"{reason}={count}" for reason, count in counts.dropped.items())
    lines = [
        f"test {names} rows={counts.rows_in} used={counts.rows_used} "
        f"{dropped or 'dropped=0'} tokens={counts.tokens} trained={counts.trained_tokens}"
    ]
    if rows.trained_on:
        lines.append(
            f"warning: {rows.trained_on} of these rows were trained on, so the scores are too good"
        )
    for bad in read_bad_rows(found).get("test", []):
        lines.append(f"warning: {bad.origin} cannot be used: {bad.reason}")
    return ScoredRows(rows.split, name, path, tuple(lines))


def prepared_data(folder: RunFolder, config: Config, tokenizer: PreTrainedTokenizerBase) -> RunData:
    """Return a run's data from its tokenized samples, or from the files if those are gone."""
    try:
        facts = DataFacts.from_json(folder.read_data())
        return assemble(config, facts.sources)
    except DataError:
        return build_run_data(config, tokenizer)


def settle_answer_limit(config: Config, rows: Split) -> Config:
    """Return the config with a number for train.generation_max_new_tokens if that is auto."""
    train = config.train
    if train.generation_max_new_tokens != "auto":
        return config
    limit = answer_token_limit([rows], train.generation_max_rows, config.model.max_seq_len)
    return config.changed({"train.generation_max_new_tokens": limit})


def _free_name(folder: RunFolder, stem: str, path: Any) -> str:
    """Return the name of a file's scores: its name, unless something else in eval/ has that."""
    for number in count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        scores = folder.evaluation / f"{name}.json"
        is_free = not scores.with_suffix(".jsonl").exists()  # these may be the rows themselves
        if scores.exists():
            is_free = read_json(scores).get("test_path") == path
        if name not in TAKEN_NAMES and is_free:
            return name
