"""Tokenize the rows of sources into stores, on all cores.

The parent process reads chunks of raw records and appends arrays to the store; worker processes
parse, render and tokenize. Memory does not grow with the rows. Loads no torch.
"""

import gc
import json
import logging
import multiprocessing
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sft_play import stops
from sft_play.config.schema import Config
from sft_play.data.cache import (
    BAD_ROWS,
    IMAGE_STATES,
    LongRow,
    StoreSummary,
    TokenizedSource,
    TokenizedSplits,
    digest_changed_images,
    digest_tokenizer,
    entry_key,
    get_or_build,
    read_image_paths,
)
from sft_play.data.chunk_tokenizer import ChunkTokenizer, TokenizedChunk
from sft_play.data.files import ROWS_PER_CHUNK, BadRows, read_chunks
from sft_play.data.ledger import DataAccount, Tally
from sft_play.data.processor import digest_settings
from sft_play.data.row_detection import ChunkTask, take_rows
from sft_play.data.row_parsing import SystemPrompt, parse_record_rows
from sft_play.data.rows import MAX_LISTED_ROWS
from sft_play.data.sources import Source, digest_source
from sft_play.data.store import StoreWriter
from sft_play.data.templates import template_text
from sft_play.errors import DataError, OutOfMemory
from sft_play.progress import Pace, Stage
from sft_play.runs.folder import cache_folder

logger = logging.getLogger(__name__)

MIN_PARALLEL_BYTES = 2 << 20  # of files; for less, starting processes takes longer than the work
MAX_PROCESSES = 32
IMAGE_ROWS = 32  # of a chunk: decoding an image takes as long as tokenizing fifty rows
CHUNKS_IN_FLIGHT = 3  # per process
CHECKED_ROWS = 2000  # most mistakes show in these; after them, a bad row ends the reading at once
# Settings of data that change every row. They are part of the cache key.
ROW_SETTINGS = set(
    """
    too_long train_on reasoning special_tokens_in_text system_prompt system_prompt_mode on_bad_row
    image_min_pixels image_max_pixels image_folder image_urls
    """.split()
)


def tokenize_sources(
    config: Config,
    found: Mapping[str, Sequence[Source]],
    tokenizer: Any,
    account: DataAccount | None = None,
) -> TokenizedSplits:
    """Return every source with the folder of its samples; tokenize sources missing in the cache.

    The rows read are recorded in the account. Raises: DataError, OutOfMemory.
    """
    account = account or DataAccount()
    for split, sources in found.items():
        for source in sources:
            account.tallies[split, source.name, len(source.files)] = None
    tokenizer_digest = digest_tokenizer(tokenizer, template_text(tokenizer))
    processor_digest = digest_settings(config.model)
    splits: TokenizedSplits = {}
    for split, sources in found.items():
        group_by = config.data.split_column(split)
        tokenized: list[TokenizedSource] = []
        for source in sources:
            section = source.section
            named = (split, source.name, len(source.files))
            account.tallies[named] = tally = Tally()  # counts rows as they are read
            before = source.states()
            files_digest = digest_source(source)
            key_facts = {
                **config.data.model_dump(include=ROW_SETTINGS),
                "max_seq_len": config.model.max_seq_len,
                "columns": dict(source.columns),
                "group_by": group_by,
                "seed": config.train.order_seed if section.rows else None,
                "suffixes": [path.suffix for path in source.files],
                "processor": processor_digest,
            }
            folder = _get_store(
                source,
                cache_folder(config),
                entry_key(files_digest, tokenizer_digest, key_facts),
                partial(build_store, source, config, tokenizer, tally, group_by),
                partial(source.refuse_change, before),
            )
            done = TokenizedSource(
                source.name,
                tuple(map(str, source.files)),
                section.weight,
                files_digest,
                str(folder),
                sum(size for size, *_ in before),
                section.choice,
                section.name,
            )
            account.tallies[named] = done.read_summary().tally
            tokenized.append(done)
        splits[split] = tuple(tokenized)
    _count_unread([*chain(*splits.values())], [*chain(*found.values())])
    return splits


def _count_unread(tokenized: Sequence[TokenizedSource], found: Sequence[Source]) -> None:
    """Count the files of folders that are neither rows nor images that rows name."""
    if any(source.unread for source in found):
        shown = set(chain(*(read_image_paths(Path(one.folder)) for one in tokenized)))
        for one, source in zip(tokenized, found, strict=True):
            unread = [file for file in source.unread if os.path.abspath(file) not in shown]
            one.unread.update(Counter(file.suffix or "without ending" for file in unread))


def _get_store(
    source: Source, root: Path, key: str, build: Callable[[Path], None], check: Callable[[], None]
) -> Path:
    """Return the folder of a source's samples with the current images.

    Samples of earlier images are kept: another run may train on them.
    """
    folders = image_folders(source)
    while True:
        is_new = not (root / key).is_dir()
        folder = get_or_build(root, key, build, check)
        changed = not is_new and digest_changed_images(folder, folders)
        if not changed:
            return folder
        key = entry_key(key, changed, {})
        if not (root / key).is_dir():
            words = "%s: its images have changed or moved, so its rows are tokenized again"
            logger.warning(words, source.name)


def image_folders(source: Source) -> list[str]:
    """Return the base folders of relative image paths in its files."""
    return sorted({os.path.abspath(path.parent) for path in source.files})


def build_store(
    source: Source, config: Config, tokenizer: Any, tally: Tally, group_by: str | None, folder: Path
) -> None:
    """Fill a store folder with a source's samples; `tally` counts what was read so far.

    Raises: DataError for rows that cannot be used, unless they are quarantined; OutOfMemory when a
    process is killed.
    """
    long_rows: list[LongRow] = []
    bad = BadRows()
    refuses = config.data.on_bad_row == "fail"
    files = tuple(map(str, source.files))
    stage = Stage(
        f"tokenizing {source.name}",
        source.file_bytes,  # known before its rows are
        "bytes",
        measure=lambda: f"{tally.rows_in} rows so far",
    )
    pace = Pace(stage)
    tokenize = ChunkTokenizer(config, tokenizer)
    tasks = source.read()
    if source.section.choice:
        rows, chosen = choose_rows(source, config.train.order_seed)
        tally.rows_in = tally.dropped["not_chosen"] = rows - len(chosen)
        tasks = take_rows(tasks, chosen)
    first = next(tasks)
    # load the processor before the processes start, which share it
    shows_images = find_images(first, config) and tokenize.processor.reads_images
    processes = count_tokenizing_processes(source.file_bytes, shows_images)
    tasks = _prepare_tasks(chain([first], tasks), shows_images, group_by)
    with (
        StoreWriter(folder) as writer,
        (folder / BAD_ROWS).open("w", encoding="utf-8") as bad_rows,
        (folder / IMAGE_STATES).open("w", encoding="utf-8") as states,
    ):
        states.write(json.dumps(image_folders(source)) + "\n")
        for done in tokenize_tasks(tasks, tokenize, processes):
            writer.append(done.samples)
            tally.add(done.tally)
            pace.advance(done.bytes_read)
            states.writelines(json.dumps(pair) + "\n" for pair in done.image_states.items())
            long_rows = sorted([*long_rows, *done.long_rows], key=lambda row: -row.tokens)
            del long_rows[MAX_LISTED_ROWS:]
            for row in done.bad_rows:
                bad.add(row)
                # without the file's name, so that a moved file finds its cache entry
                place = row.origin.removeprefix(files[done.file])
                facts = {"file": done.file, "place": place, "reason": row.reason, "row": row.raw}
                bad_rows.write(json.dumps(facts, ensure_ascii=False) + "\n")
            rows_read = tally.rows_in - tally.dropped["not_chosen"]
            if bad.total and refuses and rows_read >= CHECKED_ROWS:
                break
    if bad.total and refuses:
        bad.refuse(tally.rows_in - tally.dropped["not_chosen"])
    StoreSummary(tally, long_rows).write(folder)


def choose_rows(source: Source, seed: int) -> tuple[int, np.ndarray]:
    """Return a source's number of rows, and the sorted positions of those in its section.

    Raises: DataError if the section has more rows than there are, or none.
    """
    total = sum(len(chunk.records) for path in source.files for chunk in read_chunks(path))
    start, stop = source.bounds(total)
    wanted = source.section.rows or max(1, stop - start)
    if not 0 <= start <= stop <= total or stop - start < wanted:
        there = max(0, min(stop, total) - max(start, 0)) or total
        raise DataError(
            f"{source.name}: {source.section.choice} takes no row, or more than there are; "
            f"write rows of at most {there}, or a part within [:{total}]"
        )
    drawn = np.random.default_rng(seed).permutation(stop - start)[:wanted]
    return total, start + np.sort(drawn)


def find_images(task: ChunkTask, config: Config) -> bool:
    """Return whether the first of many rows name image files, which take long to check."""
    if len(task.chunk.records) < IMAGE_ROWS:
        return False
    prompt = SystemPrompt.from_config(config, decodes=False)
    # this records the images
    list(parse_record_rows(task.chunk.take(range(IMAGE_ROWS)), task.row_format, prompt))
    return bool(prompt.images.states)


def count_tokenizing_processes(file_bytes: int, shows_images: bool = False) -> int:
    """Return how many processes tokenize files of this size."""
    if file_bytes < MIN_PARALLEL_BYTES and not shows_images:
        return 1
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def _prepare_tasks(
    tasks: Iterable[ChunkTask], shows_images: bool, group_by: str | None
) -> Iterator[ChunkTask]:
    """Yield tasks with the number of rows for one process, grouped by a column."""
    most_rows = IMAGE_ROWS if shows_images else ROWS_PER_CHUNK
    for task in tasks:
        rows = len(task.chunk.records)
        row_format = replace(task.row_format, group_by=group_by)
        for start in range(0, rows, most_rows):
            part = task.chunk.take(range(start, min(rows, start + most_rows)))
            bytes_read = task.chunk.bytes_read * len(part.records) // rows
            yield ChunkTask(task.file, replace(part, bytes_read=bytes_read), row_format)


_tokenize_chunk: Callable[[ChunkTask], TokenizedChunk]  # of a worker process


def _begin_worker(chunk_tokenizer: ChunkTokenizer) -> None:
    global _tokenize_chunk
    _tokenize_chunk = chunk_tokenizer
    # the garbage collector neither scans nor copies the parent's objects: a tenth of the time
    gc.freeze()
    stops.leave_to_parent()
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # every core already has a process
    if "torch" in sys.modules:  # imported by the model's image processor
        sys.modules["torch"].set_num_threads(1)


def _run_task(task: ChunkTask) -> TokenizedChunk:
    return _tokenize_chunk(task)


def tokenize_tasks(
    tasks: Iterator[ChunkTask], chunk_tokenizer: ChunkTokenizer, processes: int
) -> Iterator[TokenizedChunk]:
    """Yield the samples of each task, in the order of the tasks.

    Raises: DataError for a row that exceeds the limits of time or memory, OutOfMemory.
    """
    # fork: a process starts with the tokenizer and its libraries loaded, and shares their memory
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _begin_worker, (chunk_tokenizer,)) as pool:
        in_flight: deque[tuple[ChunkTask, Future[TokenizedChunk]]] = deque()
        try:
            for task in tasks:
                with stops.held():  # the first task starts the processes
                    in_flight.append((task, pool.submit(_run_task, task)))
                if len(in_flight) > CHUNKS_IN_FLIGHT * processes:
                    yield in_flight[0][1].result()
                    in_flight.popleft()
            while in_flight:
                yield in_flight[0][1].result()
                in_flight.popleft()
        except (BrokenProcessPool, MemoryError):
            pace = Pace(Stage("looking for the row that exceeds a limit", len(in_flight), "chunks"))
            for task, _ in in_flight:
                chunk_tokenizer.refuse_endless_rows(task, pace.stage.title)
                pace.advance(1)
            raise OutOfMemory(
                "a process that tokenized rows was killed, most likely for memory; "
                "free some, or split the file"
            ) from None
        finally:
            if in_flight:  # a task may take long, and the user should not wait
                for process in multiprocessing.active_children():
                    process.kill()
            pool.shutdown(cancel_futures=True)
