"""The section `data`: where the rows are, and what happens to them on the way to training."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sft_play.config.sections.base import Fraction, PositiveFloat, Section


class SourceSection(Section):
    """One of several sources of rows, for what a path alone cannot say."""

    path: str = Field(
        min_length=1, description="A data file, a folder of them, or a hub data set id."
    )
    weight: PositiveFloat | None = Field(
        None, description="Share of this source in an epoch, relative to the others' weights."
    )
    split: str = Field("train", min_length=1, description="Split of a hub data set.")
    subset: str | None = Field(None, description="Subset (configuration) of a hub data set.")
    columns: dict[str, str] = Field({}, description="As data.columns, for this source alone.")


def _source_list(value: Any) -> Any:
    """Return the list of sources that a mapping of paths to weights stands for."""
    if not isinstance(value, dict):
        return value
    return [{"path": path, "weight": weight} for path, weight in value.items()]


Sources = Annotated[str | list[str | SourceSection], BeforeValidator(_source_list)]
WRITE_SOURCES = {
    "structured": True,  # the value may be a mapping, or a list of them
    "write": "a path, a list such as [a.jsonl, b.parquet], weights such as {a.jsonl: 3, b.jsonl: 1}"
    ", or a list of {path, weight, split, subset, columns}",
}


class DataSection(Section):
    """The rows of a run."""

    train_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Training rows: a JSONL, JSON, CSV, Parquet, Excel or text file, a folder of "
        "them, a hub data set id, or several; with weights small ones repeat and none is cut. null "
        "is the shipped data set.",
    )
    val_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Rows to evaluate on while training; null holds out data.val_size of the "
        "training rows.",
    )
    test_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Rows for the scores before and after training; null is the validation rows.",
    )
    columns: dict[str, str] = Field(
        {},
        json_schema_extra={
            "structured": True,
            "write": "a mapping of fields to the file's columns, such as {question: problem, "
            "answer: solution}",
        },
        description="Which column holds which field of a row, for files with column names of their "
        "own, or a path into a column, such as answers.text.0; {} recognises the row format by its "
        "keys.",
    )
    on_bad_row: Literal["fail", "quarantine"] = Field(
        "fail",
        description="What happens to rows that cannot be read or whose answer cannot be found: "
        "fail stops the run, quarantine writes them to a file in the run folder and goes on.",
    )
    on_overlap: Literal["fail", "drop", "allow"] = Field(
        "fail",
        description="What happens to training rows that are also evaluation rows: fail stops the "
        "run, drop trains without them, allow trains on them.",
    )
    train_on: Literal["all", "last"] = Field(
        "all",
        description="Which answers of a conversation carry loss: all of them, or only the last.",
    )
    reasoning: Literal["keep", "drop", "empty"] = Field(
        "keep",
        description="An answer's reasoning: keep trains it as the chat template writes it, else as "
        "<think>, drop leaves it out, empty trains an empty block where a row has none and the "
        "template opens one.",
    )
    special_tokens_in_text: Literal["fail", "as_text", "allow"] = Field(
        "as_text",
        description="The tokenizer's special tokens inside a message: as_text reads plain text, "
        "which ends no turn, fail refuses the row, allow reads the tokens, as rows of plain text "
        "always do.",
    )
    val_size: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.05,
        description="Fraction of the training rows that is held out where there is no val_path, at "
        "most 500 rows.",
    )
    too_long: Literal["drop", "truncate_left", "split"] = Field(
        "drop",
        description="What happens to rows over model.max_seq_len tokens: drop leaves them out, "
        "truncate_left keeps their end, split cuts them into several.",
    )
    max_lost: Fraction = Field(
        0.05,
        description="Largest fraction of trained tokens that data.too_long may lose; more stops "
        "the run with exit class 11.",
    )
    system_prompt: str | None = Field(
        None, description="System message put before conversations; null adds none."
    )
    system_prompt_mode: Literal["add", "replace"] = Field(
        "add",
        description="Which conversations get data.system_prompt: add those without a system "
        "message, replace all of them.",
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of the tokenized rows and of what train.probe measured; null is .data "
        "in train.output_dir.",
    )
