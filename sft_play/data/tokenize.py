"""Tokenizes the rows of sources into stores, on all cores.

The parent process reads chunks of raw records and appends arrays to the store; worker processes
parse, render and tokenize. Memory does not grow with the rows. Loads no torch.
"""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play import stops
from sft_play.config.schema import Config
from sft_play.data import cache
from sft_play.data.chunk_tokenizer import (
    ChunkTask,
    ChunkTokenizer,
    TokenizedChunk,
    TokenizePolicy,
    longest_first,
)
from sft_play.data.files import BadRows, read_chunks
from sft_play.data.ledger import DataAccount, Tally
from sft_play.data.render import template_of
from sft_play.data.row_detection import detect_format
from sft_play.data.sources import Source, digest_source
from sft_play.data.store import (
    BAD_ROWS,
    LongRow,
    StoreSummary,
    StoreWriter,
    TokenizedSource,
    TokenizedSplits,
)
from sft_play.errors import DataError, OutOfMemory
from sft_play.progress import Pace, Stage
from sft_play.runs.cache import cache_folder

MIN_PARALLEL_BYTES = 2 << 20  # of files; below it, starting processes takes longer than the work
MAX_PROCESSES = 32
ROWS_PER_CHUNK = 500  # 32 processes share 50,000 rows evenly; more is no faster
CHUNKS_IN_FLIGHT = 3  # for each process


class RowsRefused(DataError):
    """Rows that cannot be used stop the run; `tally` counts all that were read."""

    def __init__(self, message: str, tally: Tally):
        super().__init__(message)
        self.tally = tally


def tokenize_sources(
    config: Config,
    found: Mapping[str, Sequence[Source]],
    tokenizer: Any,
    account: DataAccount | None = None,
) -> TokenizedSplits:
    """Return every source with the folder of its samples; tokenizes what the cache lacks.

    What was read is entered in the account. Raises: DataError, OutOfMemory.
    """
    account = account or DataAccount()
    tokenizer_digest = cache.digest_tokenizer(tokenizer, template_of(tokenizer))
    splits: TokenizedSplits = {}
    for split, sources in found.items():
        tokenized: list[TokenizedSource] = []
        for source in sources:
            files = len(source.files)
            try:
                done = _tokenize_source(config, source, tokenizer, tokenizer_digest)
            except RowsRefused as error:
                account.read(split, source.name, files, error.tally)
                raise
            account.read(split, source.name, files, done.read_summary().tally)
            tokenized.append(done)
        splits[split] = tuple(tokenized)
    return splits


def build_store(folder: Path, source: Source, policy: TokenizePolicy, tokenizer: Any) -> None:
    """Fill a store folder with a source's samples.

    Raises: DataError for rows that cannot be used, unless they are quarantined; OutOfMemory when a
    process is killed.
    """
    tally = Tally()
    long_rows: list[LongRow] = []
    bad = BadRows()
    files = tuple(map(str, source.files))
    processes = count_processes(source.file_bytes)
    tasks = _iterate_tasks(source)
    pace = Pace(_stage(source, tally))
    with (
        StoreWriter(folder) as writer,
        (folder / BAD_ROWS).open("w", encoding="utf-8") as bad_rows,
    ):
        for done in _tokenize_tasks(tasks, ChunkTokenizer(policy, tokenizer), processes):
            writer.append(done.samples)
            tally.add(done.tally)
            pace.advance(done.bytes_read)
            long_rows = longest_first([*long_rows, *done.long_rows])
            bad.add(row.named(files) for row in done.bad_rows)
            bad_rows.writelines(row.as_line() for row in done.bad_rows)
    if bad.total and policy.on_bad_row == "fail":
        bad.rows_read = tally.rows_in
        try:
            bad.refuse()
        except DataError as error:
            raise RowsRefused(str(error), tally) from None
    StoreSummary(tally, tuple(long_rows)).write(folder)


def count_processes(file_bytes: int) -> int:
    """Return how many processes tokenize files of this size; 1 means this process alone."""
    if file_bytes < MIN_PARALLEL_BYTES:
        return 1
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def _tokenize_source(
    config: Config, source: Source, tokenizer: Any, tokenizer_digest: str
) -> TokenizedSource:
    policy = TokenizePolicy.of(config)
    files_digest = digest_source(source)
    key_facts = {
        **asdict(policy),
        "columns": dict(source.columns),
        "suffixes": [path.suffix for path in source.files],
    }
    key = cache.entry_key(files_digest, tokenizer_digest, key_facts)
    folder = cache.get_or_build(
        cache_folder(config),
        key,
        lambda unfinished: build_store(unfinished, source, policy, tokenizer),
    )
    files = tuple(map(str, source.files))
    return TokenizedSource(
        source.name, files, source.weight, files_digest, str(folder), source.file_bytes
    )


def _stage(source: Source, tally: Tally) -> Stage:
    """Return the stage of tokenising a source: its bytes are known before its rows are."""
    return Stage(
        f"tokenising {source.name}",
        source.file_bytes,
        "bytes",
        measure=lambda: f"{tally.rows_in} rows so far",
    )


def _iterate_tasks(source: Source) -> Iterator[ChunkTask]:
    for number, path in enumerate(source.files):
        row_format = detect_format(path, source.columns)
        for chunk in read_chunks(path, ROWS_PER_CHUNK):
            yield ChunkTask(number, chunk, row_format)


_tokenize_chunk: Callable[[ChunkTask], TokenizedChunk]  # of a worker process


def _begin_worker(chunk_tokenizer: ChunkTokenizer) -> None:
    global _tokenize_chunk
    _tokenize_chunk = chunk_tokenizer
    # the garbage collector neither scans nor copies what the parent had loaded: a tenth of the time
    gc.freeze()
    stops.ignore()  # the parent ends its processes
    stops.end_with_parent()
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # every core has a process already


def _run_task(task: ChunkTask) -> TokenizedChunk:
    return _tokenize_chunk(task)


def _tokenize_tasks(
    tasks: Iterator[ChunkTask], chunk_tokenizer: ChunkTokenizer, processes: int
) -> Iterator[TokenizedChunk]:
    """Yield the samples of each task, in the order of the tasks."""
    if processes == 1:
        yield from map(chunk_tokenizer, tasks)
        return
    # by fork: a process starts with the tokenizer and its libraries loaded, and shares their memory
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _begin_worker, (chunk_tokenizer,)) as pool:
        in_flight: deque[Future[TokenizedChunk]] = deque()
        try:
            for task in tasks:
                with stops.held():  # the first one starts the processes
                    in_flight.append(pool.submit(_run_task, task))
                if len(in_flight) > CHUNKS_IN_FLIGHT * processes:
                    yield in_flight.popleft().result()
            while in_flight:
                yield in_flight.popleft().result()
        except BrokenProcessPool:
            raise OutOfMemory(
                "a process that tokenised rows was killed, most likely for memory; "
                "free some, or split the file"
            ) from None
        except BaseException:  # a task may take long, and the user does not wait for it
            for process in multiprocessing.active_children():
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
