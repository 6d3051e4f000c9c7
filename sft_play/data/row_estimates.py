"""How many training rows there are, and how long in tokens, before a run is planned.

Recorded when the same rows were tokenized, or estimated from the beginning of each source, which
takes a second or two for files of any size. Their tokens are counted without transformers, whose
import takes seconds: what a run trains on comes from `render.Renderer`, which also checks it. Loads
no torch, unless a tokenizer must be fetched.
"""

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sft_play.config.schema import Config, SourceSection
from sft_play.data.files import Chunk, read_chunks
from sft_play.data.limits import encode, load_limited
from sft_play.data.row_detection import detect_format
from sft_play.data.row_formats import RowFormat
from sft_play.data.row_parsing import SystemPrompt, parse_record_rows
from sft_play.data.rows import MAX_HELD_OUT_ROWS, BadRow, Columns, InvalidRowError, Row
from sft_play.data.sources import SETTINGS, Source, find_source, source_sections
from sft_play.data.template_sources import Template, find_template, read_text
from sft_play.data.templates import (
    DEFAULT_TEMPLATE,
    Render,
    TemplateText,
    compile_template,
    template_messages,
    write_images,
)
from sft_play.errors import DataError, EnvironmentFault
from sft_play.plan import sources
from sft_play.plan.model_shape import find_file
from sft_play.plan.recipe import RowFacts
from sft_play.plan.workload import CHARACTERS_PER_TOKEN, Counted, estimated, estimated_tokens
from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import cache_folder
from sft_play.runs.model_folder import read_object

if TYPE_CHECKING:
    import tokenizers

    from sft_play.data.assemble import RunData
    from sft_play.data.processor import Processor

ADDITIONAL_TEMPLATES = "additional_chat_templates/*.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
READ_BYTES = 16 << 20  # of each source
SAMPLED_ROWS = 2000  # of all sources together
COUNTED_CHARACTERS = 2 << 20  # a tokenizer takes about a second
FEWEST_COUNTED_ROWS = 50


@dataclass(frozen=True)
class TokenCounter:
    """A tokenizer and the chat template that it renders rows with."""

    tokenizer: "tokenizers.Tokenizer"
    template: str
    special_tokens: Mapping[str, str]  # by the names that templates use

    @classmethod
    def find(cls, config: Config, environ: Mapping[str, str]) -> Self | None:
        """Return the counter of a local model or one in the hub's cache.

        None if it is in neither, or in a format that needs conversion.
        Raises: EnvironmentFault for a damaged file; ConfigError for model.chat_template.
        """
        model = config.model

        def find(file: str) -> Path | None:
            return find_file(model.name, file, model.revision, environ)

        path = find("tokenizer.json")
        settings_path = find("tokenizer_config.json")
        if path is None or settings_path is None:
            return None
        special_tokens = _special_tokens(read_object(settings_path))
        files = {file.stem: file for file in settings_path.parent.glob(ADDITIONAL_TEMPLATES)}
        template_path = find("chat_template.jinja")
        if template_path is not None:
            files["default"] = template_path
        named = {name: read_text(file) for name, file in files.items()}
        template = find_template(named, find, model, special_tokens)
        tokenizer = _load(path)
        tokenizer.add_tokens(model.add_tokens or [])
        return cls(tokenizer, _choose_default(template), special_tokens)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Self:
        """Return the counter of a tokenizer of transformers."""
        template = _choose_default(tokenizer.chat_template)
        return cls(tokenizer.backend_tokenizer, template, tokenizer.special_tokens_map)

    def count(self, rows: Sequence[Row]) -> dict[int, int]:
        """Return the tokens of each row by its index, without rows that the template refuses."""
        texts = {
            index: text for index, text in enumerate(map(self._text, rows)) if text is not None
        }
        encodings = encode(self.tokenizer, list(texts.values()))
        return {index: len(encoding.ids) for index, encoding in zip(texts, encodings, strict=True)}

    def _text(self, row: Row) -> str | None:
        if row.text is not None or row.segments:
            begin = self.special_tokens.get("bos_token", "")
            return f"{begin}{row.plain_text}{self.special_tokens.get('eos_token', '')}"
        messages = template_messages(row.messages)
        text = self._render(messages, row.tools)
        return None if text is None else write_images(TemplateText(text, None), messages).text

    @cached_property
    def _render(self) -> Render:
        return compile_template(self.template, self.special_tokens)


def _load(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        return load_limited(lambda: tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # noqa: BLE001 - the library raises no other class
        raise EnvironmentFault(f"{path}: no tokenizer: {error}; get the model again") from None


def _choose_default(template: Template | None) -> str:
    return template["default"] if isinstance(template, dict) else template or DEFAULT_TEMPLATE


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json, which has texts or objects."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


@dataclass(frozen=True)
class Beginning:
    """The first READ_BYTES of a source, or all of a smaller one."""

    source: Source
    chunks: list[Chunk]
    rows: int  # that were read
    all_rows: float  # of the source; estimated by the size of its files if more is left


def read_beginning(section: SourceSection, columns: Columns) -> Beginning:
    """Return the beginning of a source's files, in their order. Raises DataError."""
    source = find_source(section, "data.train_path", columns)
    chunks = []
    bytes_read = 0
    for chunk in chain.from_iterable(map(read_chunks, source.files)):
        chunks.append(chunk)
        bytes_read += chunk.bytes_read
        if bytes_read >= READ_BYTES:
            break
    rows = sum(len(chunk.records) for chunk in chunks)
    share = max(1.0, source.file_bytes / bytes_read) if bytes_read >= READ_BYTES else 1.0
    all_rows = rows * share
    if section.choice:
        start, stop = source.bounds(round(all_rows))
        all_rows = min(section.rows or all_rows, max(0, stop - start), all_rows)
    return Beginning(source, chunks, rows, all_rows)


def estimate_epoch(
    beginnings: Sequence[Beginning], tokens_per_row: Sequence[float], config: Config
) -> Counted:
    """Return about how many samples and tokens an epoch has, without held-out rows."""
    rows = sum(beginning.all_rows for beginning in beginnings)
    held_out = 0.0
    if not config.data.val_path:
        held_out = min(config.data.val_size, MAX_HELD_OUT_ROWS / max(1.0, rows))
    facts = zip(beginnings, tokens_per_row, strict=True)
    return estimated(
        [(one.all_rows, tokens, one.source.section.weight) for one, tokens in facts], held_out
    )


def look_at_rows(config: Config, environ: Mapping[str, str], may_fetch: bool) -> RowFacts | str:
    """Return what a config's training rows are like, or why nobody can say.

    With `may_fetch`, rows and a tokenizer that are not on this machine are fetched.
    Raises: EnvironmentFault when they cannot be fetched.
    """
    config = config.model_copy(update={"data": sources.resolved(config.data)})
    beginnings: list[Beginning] = []
    chunks: list[tuple[Chunk, RowFormat]] = []
    try:
        for section in source_sections(config.data.train_path):
            if not may_fetch and not Path(section.path).exists():
                raise DataError(f"{section.path} is not on this machine yet")
            beginning = read_beginning(section, config.data.columns)
            if not beginning.rows:
                raise DataError(f"{section.path}: no rows")
            paths = dict.fromkeys(chunk.path for chunk in beginning.chunks)
            formats = {path: detect_format(path, beginning.source.columns) for path in paths}
            chunks += [(chunk, formats[chunk.path]) for chunk in beginning.chunks]
            beginnings.append(beginning)
    except DataError as error:  # the run itself names every bad row and stops
        return str(error).splitlines()[0]
    rows = _sample_rows(chunks, config)
    if not rows:
        return "none of the first rows can be used"
    counter = TokenCounter.find(config, environ)
    has_images = any(message.images for row in rows for message in row.messages)
    is_here = counter is not None
    if (may_fetch or is_here) and (has_images or not is_here):
        from sft_play.data.processor import Processor  # transformers: seconds
        from sft_play.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config)
        counter = TokenCounter.from_tokenizer(tokenizer)
        rows = list(_written(rows, Processor(config, tokenizer)))
    lengths, uncounted_because = _count_tokens(rows, counter, config.model.name)
    mean_tokens = sum(lengths) / len(lengths)
    return RowFacts(
        rows=estimate_epoch(beginnings, [mean_tokens] * len(beginnings), config).samples,
        lengths=tuple(sorted(lengths)),
        is_estimated=any(beginning.all_rows > beginning.rows for beginning in beginnings),
        uncounted_because=uncounted_because,
        are_texts=all(row.text is not None for row in rows),
    )


def _written(rows: Sequence[Row], processor: "Processor") -> Iterator[Row]:
    """Yield the rows whose images the model's processor takes, with what it writes for them."""
    for row in rows:
        with contextlib.suppress(InvalidRowError):  # the run itself names the row
            yield processor.write(row)


def _sample_rows(chunks: Sequence[tuple[Chunk, RowFormat]], config: Config) -> list[Row]:
    """Return SAMPLED_ROWS of the chunks' rows; those that cannot be used are left out.

    They are drawn at random, the same ones each time: rows at equal distances may be all alike.
    """
    positions = range(sum(len(chunk.records) for chunk, _ in chunks))
    if len(positions) > SAMPLED_ROWS:
        positions = sorted(random.Random(0).sample(positions, SAMPLED_ROWS))
    rows: list[Row] = []
    prompt = SystemPrompt.from_config(config, decodes=False)
    start = 0  # of a chunk, among all rows
    for chunk, row_format in chunks:
        end = start + len(chunk.records)
        chosen = [position - start for position in positions if start <= position < end]
        if chosen:
            drawn = chunk.take(chosen)
            for parsed in parse_record_rows(drawn, row_format, prompt):
                rows += [] if isinstance(parsed, BadRow) else parsed
        start = end
    return rows


def _count_tokens(
    rows: Sequence[Row], counter: TokenCounter | None, model: str
) -> tuple[list[int], str | None]:
    """Return the tokens of rows, and why no tokenizer counted them, None if one did.

    If they have much text, some rows are counted, and the others have as many tokens for each
    character.
    """
    characters = [
        len(row.plain_text) + sum(len(message.content) for message in row.messages) for row in rows
    ]
    counted: dict[int, int] = {}
    step = math.ceil(sum(characters) / COUNTED_CHARACTERS)
    step = max(1, min(step, len(rows) // FEWEST_COUNTED_ROWS))
    reason: str | None = f"the tokenizer of {model} is not on this machine"
    if counter is not None:
        reason = f"the chat template of {model} takes none of them"
        counted = {at * step: tokens for at, tokens in counter.count(rows[::step]).items()}
    ratio = 1 / CHARACTERS_PER_TOKEN
    if counted:
        reason = None
        if step == 1:
            return list(counted.values()), None
        ratio = sum(counted.values()) / max(1, sum(characters[position] for position in counted))
    return [math.ceil(count * ratio) for count in characters], reason


def record_counts(config: Config, data: "RunData") -> None:
    """Record how many samples and tokens a resolved config trains on."""
    tokens = int(data.train.lengths.sum())
    trained_tokens = int(data.train.records["trained"].sum())
    counted = Counted(len(data.train), tokens, trained_tokens / tokens)
    write_json(_record_path(config), asdict(counted))


def count_rows_or_reason(config: Config) -> Counted | str:
    """Return how many samples and tokens a resolved config trains on, or why nobody can say.

    The numbers were recorded when the same rows were tokenized, or are estimates.
    """
    path = _record_path(config)
    if path.is_file():
        return Counted(**read_json(path))
    sections = source_sections(config.data.train_path)
    for section in sections:
        if not Path(section.path).exists():
            return f"{section.path} is of the hub; make data-check fetches and counts it"
    try:
        beginnings = [read_beginning(section, config.data.columns) for section in sections]
    except DataError as error:
        return str(error).splitlines()[0]
    if not any(beginning.rows for beginning in beginnings):
        return "the files hold no row"
    lengths = [_tokens_per_row(beginning, config.model.max_seq_len) for beginning in beginnings]
    return estimate_epoch(beginnings, lengths, config)


def _tokens_per_row(beginning: Beginning, max_seq_len: int) -> float:
    tokens = 0.0
    for chunk in beginning.chunks:
        characters = (len(chunk.raw(position)) for position in range(len(chunk.records)))
        tokens += estimated_tokens(characters, max_seq_len)
    return tokens / max(1, beginning.rows)


def _record_path(config: Config) -> Path:
    """Return where the counts of a config are recorded.

    The name digests its settings, and the path, size and time of every local file.
    """
    model = ("name", "revision", "max_seq_len", "add_tokens", "chat_template", "template_kwargs")
    facts = {
        "data": config.data.model_dump(),
        "model": config.model.model_dump(include={*model, "template_date"}),
        "seed": config.train.order_seed,
        "files": [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns)
            for file in _local_files(config)
        ],
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(config) / "counts" / f"{key}.json"


def _local_files(config: Config) -> Iterator[Path]:
    for setting in SETTINGS.values():
        for section in source_sections(getattr(config.data, setting)):
            path = Path(section.path)
            candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
            yield from (file for file in candidates if file.is_file())
