"""The section `data`: where the rows are, and what happens to them on the way to training."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from sft_play.config.sections.base import Fraction, PositiveFloat, PositiveInt, Section


class SourceSection(Section):
    """One of several sources of rows, for what a path does not express."""

    path: str = Field(
        min_length=1, description="A data file, a folder of them, or a hub data set id."
    )
    weight: PositiveFloat | None = Field(
        None, description="Share of this source in an epoch, relative to the others' weights."
    )
    rows: PositiveInt | None = Field(
        None, description="How many of its rows, drawn by train.data_seed; null is all of them."
    )
    split: str = Field("train", min_length=1, description="Split of a hub data set.")
    part: str | None = Field(
        None,
        pattern=r"^\[(-?\d+%?)?:(-?\d+%?)?\]$",
        description="Slice of its rows, such as [:10%]; a split may end in it: train[:10%].",
    )
    subset: str | None = Field(None, description="Subset (configuration) of a hub data set.")
    columns: dict[str, str] = Field({}, description="As data.columns, only for this source.")
    name: str | None = Field(
        None, min_length=1, description="Its name in the scores; null is taken from its path."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_part(cls, values: Any) -> Any:
        """Take train[:10%] apart, as the datasets library writes a part of a split."""
        split = values.get("split") if isinstance(values, dict) else None
        if not isinstance(split, str) or not set("[%") & set(split) or "part" in values:
            return values
        name, bracket, rest = split.partition("[")
        return {**values, "split": name or "train", "part": bracket + rest}

    @property
    def choice(self) -> str:
        """Which of its rows are taken, as text; empty for all of them."""
        words = [f"rows={self.rows}" if self.rows else "", self.part or ""]
        return " of ".join(filter(None, words))


def _source_list(value: Any, info: ValidationInfo) -> Any:
    """Return the list of sources that a mapping of paths to weights or options stands for.

    Of evaluation rows, keys may also be names, of a path or a list of them. Of training rows they
    may not: {train: a.jsonl, test: b.jsonl} would train on the test rows.
    """
    if not isinstance(value, dict) or "path" in value:
        return [value] if isinstance(value, dict) else value
    sources = []
    for key, given in value.items():
        for part in given if isinstance(given, list) else [given]:
            if isinstance(part, str) and info.field_name != "train_path":
                part = {"path": part}
            elif not isinstance(part, dict):
                part = {"weight": part}
            sources.append({"name" if "path" in part else "path": key, **part})
    return sources


def _write_sources(mapping: str) -> dict[str, Any]:
    return {
        "structured": True,  # the value may be a mapping, or a list of them
        "write": f"a path, a list such as [a.jsonl, b.parquet], {mapping}, or a list of {{path, "
        "weight, rows, split, subset, columns}, of which rows: 5000 takes so many, and split: "
        '"train[:10%]" a part',
    }


Sources = Annotated[str | list[str | SourceSection], BeforeValidator(_source_list)]
WRITE_SOURCES = _write_sources("weights such as {a.jsonl: 3, b.jsonl: 1}")
WRITE_NAMED_SOURCES = _write_sources("names such as {maths: a.jsonl, code: b.jsonl}")


class DataSection(Section):
    """The rows of a run."""

    train_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_SOURCES,
        description="Training rows: a JSONL, JSON, CSV, Parquet, Excel or text file, a folder of "
        "them, a hub data set id, or several; with weights, small ones repeat and none is cut. "
        "null is the included set.",
    )
    val_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_NAMED_SOURCES,
        description="Rows to evaluate on during training, also several sources by name; null "
        "sets aside data.val_size of the training rows.",
    )
    test_path: Sources | None = Field(
        None,
        json_schema_extra=WRITE_NAMED_SOURCES,
        description="Rows for the scores before and after training, also several sources by name; "
        "null is the validation rows.",
    )
    format: Literal["auto", "text"] = Field(
        "auto",
        description="How files of a folder are read: auto by their file endings, without .md "
        "files; text also reads .md files, as plain texts like .txt.",
    )
    columns: dict[str, str] = Field(
        {},
        json_schema_extra={
            "structured": True,
            "write": "a mapping of fields to the file's columns, such as {question: problem, "
            "answer: solution}",
        },
        description="Which column contains which field of a row, for files with other column "
        "names, or a path into a column, such as answers.text.0; {} recognizes the row format by "
        "its keys.",
    )
    on_bad_row: Literal["fail", "quarantine"] = Field(
        "fail",
        description="Rows that cannot be read or whose answer cannot be found: fail stops the "
        "run, quarantine writes them to a file in the run folder and continues.",
    )
    on_overlap: Literal["fail", "drop", "drop_questions", "allow"] = Field(
        "fail",
        description="Training rows that are also evaluation rows: fail stops the run, drop trains "
        "without them, drop_questions also without those that only ask the same, allow trains on "
        "them.",
    )
    order: Literal["shuffled", "as_given"] = Field(
        "shuffled",
        description="Order of the training rows in each epoch: shuffled by train.data_seed, or "
        "as_given in the files, for a curriculum.",
    )
    train_on: Literal["all", "last"] = Field(
        "all",
        description="Which answers of a conversation carry loss: all of them, or only the last.",
    )
    reasoning: Literal["keep", "drop", "empty"] = Field(
        "keep",
        description="An answer's reasoning: keep trains it as the chat template writes it, else "
        "as <think>; drop leaves it out; empty trains an empty block if a row has none and the "
        "template opens one.",
    )
    special_tokens_in_text: Literal["fail", "as_text", "allow"] = Field(
        "as_text",
        description="The tokenizer's special tokens inside a message: as_text reads plain text, "
        "which ends no turn; fail refuses the row; allow reads the tokens, as rows of plain text "
        "always do.",
    )
    image_min_pixels: PositiveInt | None = Field(
        None,
        description="Smallest number of pixels of an image after the model's processor has "
        "resized it; null is the processor's limit.",
    )
    image_max_pixels: PositiveInt | None = Field(
        None,
        description="Largest number of pixels of an image: fewer pixels are fewer tokens. null is "
        "the processor's limit.",
    )
    val_size: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.05,
        description="Fraction of the training rows that is set aside if there is no val_path, at "
        "most 500 rows.",
    )
    split_by: str = Field(
        "prompt",
        min_length=1,
        json_schema_extra={"write": "prompt, row, or the name of a column, such as id"},
        description="Which rows are set aside together if there is no val_path: prompt, those that "
        "ask the same before their last answer; row, only equal ones; a column, those with the "
        "same value.",
    )
    too_long: Literal["auto", "drop", "truncate_left", "split"] = Field(
        "auto",
        description="Rows over model.max_seq_len tokens: drop leaves them out, truncate_left "
        "keeps their end, split cuts them into several. auto splits plain texts and drops other "
        "rows.",
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
    image_folder: str | None = Field(
        None,
        min_length=1,
        description="Folder to which relative paths of images refer; null is the data file's.",
    )
    image_urls: Literal["refuse", "fetch"] = Field(
        "refuse",
        description="Rows whose images are URLs: refuse fetches nothing, fetch stores each image "
        "in the folder of data.cache_dir, once.",
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder of the tokenized rows, of the measurements of train.probe and of the "
        "verified kernels; null is .data in train.output_dir.",
    )

    def split_column(self, split: str) -> str | None:
        """Return the column that names which rows are set aside together, if there is one."""
        is_divided = split == "train" and self.val_path is None
        return self.split_by if is_divided and self.split_by not in ("prompt", "row") else None
