"""Rows of a source to a store of samples, on all cores, in memory that does not grow with the rows. Loads no torch.

The parent reads chunks of raw records and appends arrays to the store; processes parse, render and tokenise in between.
"""

import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from sft_play.config.schema import Config
from sft_play.data.files import Chunk, read_chunks
from sft_play.data.ledger import Tally
from sft_play.data.length import fit
from sft_play.data.render import Rendered, Renderer, RenderError
from sft_play.data.rows import SHOWN, BadRow, Row, refuse
from sft_play.data.shapes import Shape, recognise, rows_of
from sft_play.data.sources import Source
from sft_play.data.store import Origin, StoreWriter, as_arrays
from sft_play.errors import OutOfMemory

META, BAD_ROWS = "meta.json", "bad_rows.jsonl"
SMALL_BYTES = 2 << 20  # of files: under it starting processes takes longer than the work
MOST_PROCESSES = 32
FIRST_ROWS = 2000
CHUNK_ROWS = 500  # few enough that 32 processes share 50,000 rows evenly; more are no faster
AHEAD = 3  # chunks in flight for each process


@dataclass(frozen=True)
class Policy:
    """What is done with every row; a part of the cache's key."""

    max_seq_len: int
    too_long: Literal["drop", "truncate_left", "split"]
    train_on: Literal["all", "last"]
    system_prompt: str | None
    replaces_system: bool
    on_bad_row: Literal["fail", "quarantine"]

    @classmethod
    def of(cls, config: Config) -> "Policy":
        """Return what the settings say."""
        data = config.data
        return cls(
            config.model.max_seq_len,
            data.too_long,
            data.train_on,
            data.system_prompt,
            data.system_prompt_mode == "replace",
            data.on_bad_row,
        )


@dataclass(frozen=True)
class Task:
    """A chunk of the source's file number `file`, whose rows have one shape."""

    file: int
    chunk: Chunk
    shape: Shape


@dataclass
class Tokenised:
    """What became of a chunk: samples as arrays, and an account of its rows."""

    ids: np.ndarray
    trained: np.ndarray
    records: np.ndarray
    tally: Tally
    bad: list[dict[str, Any]] = field(
        default_factory=list
    )  # rows that were set aside: file, place, reason, row
    long: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # (file, number, tokens) of the longest rows over the limit


class Tokeniser:
    """Chunks to arrays. Holds all that a process needs, and nothing that changes."""

    def __init__(self, policy: Policy, tokenizer: Any):
        self.policy, self.renderer = policy, Renderer(tokenizer, policy.train_on)
        self.bos_id = tokenizer.bos_token_id

    def __call__(self, task: Task) -> Tokenised:
        """Return what becomes of a chunk's rows."""
        tally, rows, bad = Tally(rows_in=len(task.chunk.records)), [], []
        for number, row in zip(task.chunk.numbers, self._parsed(task), strict=True):
            if isinstance(row, BadRow):
                tally.dropped["bad_row"] += 1
                bad.append(row)
            else:
                rows.append((number, row))
        samples: list[tuple[Rendered, Origin, int]] = []
        long: list[tuple[int, int, int]] = []
        for (number, row), rendered in zip(
            rows, self.renderer.render([row for _, row in rows]), strict=True
        ):
            if isinstance(rendered, RenderError):
                tally.dropped["unproven"] += 1
                bad.append(
                    BadRow(
                        row.origin,
                        str(rendered).removeprefix(f"{row.origin}: "),
                        json.dumps(asdict(row), ensure_ascii=False),
                    )
                )
                continue
            longest = max(len(sample.ids) for sample in rendered)
            if longest > self.policy.max_seq_len:
                long.append((task.file, number, longest))
            origin = Origin(task.file, number, *hashes(row))
            samples += [(sample, origin, cut) for sample, cut in self._fitted(rendered, tally)]
        ids, trained, records = as_arrays(samples)
        tally.samples, tally.tokens, tally.trained_tokens = (
            len(records),
            len(ids),
            int(trained.sum()),
        )
        tally.check()
        path = str(task.chunk.path)
        aside = [
            {
                "file": task.file,
                "place": row.origin.removeprefix(path),
                "reason": row.reason,
                "row": row.raw,
            }
            for row in bad
        ]
        return Tokenised(
            ids, trained, records, tally, aside, sorted(long, key=lambda row: -row[2])[:SHOWN]
        )

    def _parsed(self, task: Task) -> Iterator[Row | BadRow]:
        return rows_of(
            task.chunk, task.shape, self.policy.system_prompt, self.policy.replaces_system
        )

    def _fitted(
        self, rendered: tuple[Rendered, ...], tally: Tally
    ) -> Iterator[tuple[Rendered, int]]:
        """Yield a row's samples within the limit, each with the tokens cut off its left, and account for the row."""
        kept, reasons = 0, []
        for sample in rendered:
            fitted = fit(sample, self.policy.max_seq_len, self.policy.too_long, self.bos_id)
            tally.lost_trained_tokens += fitted.lost_trained_tokens
            reasons += [fitted.reason] if fitted.reason else []
            for part in fitted.samples:
                if (
                    part.trained_tokens
                ):  # a row of which nothing is learned never reaches the trainer
                    kept += 1
                    yield part, fitted.cut
        if kept:
            tally.rows_used += 1
            tally.shortened.update(set(reasons))
        else:
            tally.dropped[reasons[0] if reasons else "nothing_to_train"] += 1


def hashes(row: Row) -> tuple[int, int]:
    """Return 64-bit hashes of a row: of all its text, and of what is said without case, punctuation and spacing; system messages aside."""
    if row.text is not None:
        whole = said = row.text
    else:
        whole = repr(
            [
                (m.role, m.content, m.reasoning, m.tool_calls, m.name, m.tool_call_id)
                for m in row.messages
            ]
        )
        said = "\n".join(message.content for message in row.messages if message.role != "system")
    words = " ".join(re.findall(r"\w+", said.casefold()))
    return _hash(whole), _hash(words or said)  # texts without a word are compared as they are


def _hash(text: str) -> int:
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def look(source: Source, policy: Policy) -> None:
    """Read the first rows of every file: most mistakes show there, before a tokenizer is loaded. Raises DataError."""
    bad: list[BadRow] = []
    for path in source.files:
        shape = recognise(path, source.columns)
        for chunk in itertools.islice(read_chunks(path, FIRST_ROWS), 1):
            found = rows_of(chunk, shape, policy.system_prompt, policy.replaces_system)
            bad += [row for row in found if isinstance(row, BadRow)]
    if bad and policy.on_bad_row == "fail":
        refuse(bad, len(bad))


def build(folder: Path, source: Source, policy: Policy, tokenizer: Any) -> None:
    """Fill a store folder with a source's samples.

    Raises: DataError for rows that cannot be used, unless they are to be quarantined; OutOfMemory when a process is killed.
    """
    tally = Tally()
    long: list[tuple[int, int, int]] = []
    bad: list[dict[str, Any]] = []
    total = sum(path.stat().st_size for path in source.files)
    bar = tqdm(
        total=total,
        desc=f"tokenising {source.name}",
        unit="B",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
        leave=False,
        dynamic_ncols=True,
    )
    with (
        bar,
        StoreWriter(folder) as writer,
        (folder / BAD_ROWS).open("w", encoding="utf-8") as aside,
    ):
        for done, bytes_read in _tokenised(
            _tasks(source), Tokeniser(policy, tokenizer), processes_for(total)
        ):
            bar.update(bytes_read)
            writer.append(done.ids, done.trained, done.records)
            tally.add(done.tally)
            long = sorted([*long, *done.long], key=lambda row: -row[2])[:SHOWN]
            bad += done.bad[: SHOWN - len(bad)] if len(bad) < SHOWN else []
            aside.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in done.bad)
    unusable = tally.dropped["bad_row"] + tally.dropped["unproven"]
    if unusable and policy.on_bad_row == "fail":
        refuse(
            [
                BadRow(f"{source.files[row['file']]}{row['place']}", row["reason"], row["row"])
                for row in bad
            ],
            unusable,
        )
    (folder / META).write_text(
        json.dumps({"tally": tally.as_json(), "long": long}), encoding="utf-8"
    )


def processes_for(total_bytes: int) -> int:
    """Return how many processes tokenise files of this size; 1 is this one alone."""
    return 1 if total_bytes < SMALL_BYTES else min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _tasks(source: Source) -> Iterator[Task]:
    for number, path in enumerate(source.files):
        shape = recognise(path, source.columns)
        for chunk in read_chunks(path, CHUNK_ROWS):
            yield Task(number, chunk, shape)


_tokeniser: Callable[[Task], Tokenised]  # of a worker process


def _begin(tokeniser: Tokeniser) -> None:
    global _tokeniser
    _tokeniser = tokeniser
    gc.freeze()  # what the parent had loaded is not looked through for garbage, nor copied for it: a tenth of the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # every core has a process already


def _work(task: Task) -> Tokenised:
    return _tokeniser(task)


def _tokenised(
    tasks: Iterator[Task], tokeniser: Tokeniser, processes: int
) -> Iterator[tuple[Tokenised, int]]:
    """Yield what became of each task, and the bytes it came from, in the order of the tasks."""
    if processes == 1:
        yield from ((tokeniser(task), task.chunk.bytes_read) for task in tasks)
        return
    # by fork: a process starts with the tokenizer and its libraries loaded, and shares their memory
    with ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), _begin, (tokeniser,)
    ) as pool:
        waiting: deque[tuple[Future[Tokenised], int]] = deque()
        try:
            for task in tasks:
                waiting.append((pool.submit(_work, task), task.chunk.bytes_read))
                if len(waiting) > AHEAD * processes:
                    future, size = waiting.popleft()
                    yield future.result(), size
            while waiting:
                future, size = waiting.popleft()
                yield future.result(), size
        except BrokenProcessPool:
            raise OutOfMemory(
                "a process that tokenised rows was killed, most likely for memory; free some, or split the file"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
