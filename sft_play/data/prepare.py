"""From data settings to the rows of a run: train, validation and test, rendered, with a ledger of what was dropped. Loads no torch."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.data.render import Rendered, RenderError, render
from sft_play.data.rows import SHOWN, Row, read_rows
from sft_play.errors import DataError

MOST_HELD_OUT = 500  # rows; more does not sharpen a loss, and every evaluation pays for it


@dataclass(frozen=True)
class Split:
    """Rows that are used, and the same rows rendered, in the same order."""

    rows: list[Row]
    rendered: list[Rendered]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Ledger:
    """Where every row went: rows_in = rows_used + the sum of dropped."""

    rows_in: int = 0
    rows_used: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lost_trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def lost_fraction(self) -> float:
        """Trained tokens of dropped rows / trained tokens of all rows."""
        return self.lost_trained_tokens / max(1, self.lost_trained_tokens + self.trained_tokens)

    def as_json(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "dropped"}, "dropped": dict(self.dropped)}


@dataclass(frozen=True)
class PreparedData:
    """What a run trains on and is judged by; `test` is `validation` where there is no test file."""

    train: Split
    validation: Split
    test: Split
    ledger: dict[str, Ledger]
    files: tuple[Path, ...]


def prepare(config: Config, tokenizer: Any) -> PreparedData:
    """Read, split and render the rows of a run. Raises DataError: bad rows, nothing left, or too much lost."""
    data = config.data
    assert data.train_path, "the plan names the files"
    train_rows = read_rows(Path(data.train_path), data.system_prompt)
    seed = config.train.seed if config.train.data_seed is None else config.train.data_seed
    if data.val_path:
        validation_rows = read_rows(Path(data.val_path), data.system_prompt)
    else:
        train_rows, validation_rows = hold_out(train_rows, data.val_size, seed, data.train_path)
    ledger = {"train": Ledger(), "validation": Ledger()}
    train = _render_all(train_rows, data.train_path, config, tokenizer, ledger["train"])
    validation = test = _render_all(validation_rows, data.val_path or data.train_path, config, tokenizer, ledger["validation"])
    if data.test_path:
        ledger["test"] = Ledger()
        test_rows = read_rows(Path(data.test_path), data.system_prompt)
        test = _render_all(test_rows, data.test_path, config, tokenizer, ledger["test"])
    files = tuple(Path(path) for path in (data.train_path, data.val_path, data.test_path) if path)
    return PreparedData(train, validation, test, ledger, files)


def hold_out(rows: list[Row], fraction: float, seed: int, path: str) -> tuple[list[Row], list[Row]]:
    """Return (train, held out) in file order, split by seed. Raises DataError when either would be empty."""
    if len(rows) < 2:
        raise DataError(f"{path}: one row cannot be split into training and validation; set DATA_VAL_PATH")
    count = min(max(1, round(len(rows) * fraction)), MOST_HELD_OUT)
    chosen = set(random.Random(seed).sample(range(len(rows)), count))
    return [row for i, row in enumerate(rows) if i not in chosen], [rows[i] for i in sorted(chosen)]


def _render_all(rows: list[Row], path: str, config: Config, tokenizer: Any, ledger: Ledger) -> Split:
    """Render rows and account for each; a row that cannot be proven stops the run by name."""
    limit = config.model.max_seq_len
    kept, rendered, unproven = [], [], []
    long: dict[str, int] = {}  # tokens of a row by its origin
    for row in rows:
        ledger.rows_in += 1
        try:
            result = render(row, tokenizer)
        except RenderError as error:
            unproven.append(str(error))
            continue
        if len(result.ids) > limit:
            ledger.dropped["too_long"] += 1
            ledger.lost_trained_tokens += result.trained_tokens
            long[row.origin] = len(result.ids)
        elif result.trained_tokens == 0:
            ledger.dropped["nothing_to_train"] += 1
        else:
            kept.append(row)
            rendered.append(result)
            ledger.tokens += len(result.ids)
            ledger.trained_tokens += result.trained_tokens
    ledger.rows_used = len(kept)
    _refuse(path, unproven, long, ledger, config)
    return Split(kept, rendered)


def _refuse(path: str, unproven: list[str], long: dict[str, int], ledger: Ledger, config: Config) -> None:
    if unproven:
        raise DataError("\n".join(unproven[:SHOWN]) + f"\n{len(unproven)} rows cannot be rendered so that their answers are known")
    named = [f"{origin}: {tokens} tokens, model.max_seq_len is {config.model.max_seq_len}" for origin, tokens in list(long.items())[:SHOWN]]
    longest = max(long.values(), default=0)
    if long and config.data.too_long == "error":
        raise DataError("\n".join([*named, f"data.too_long=error; set MODEL_MAX_SEQ_LEN={longest}, or DATA_TOO_LONG=drop"]))
    if ledger.lost_fraction > config.data.max_lost:
        held = f"{len(long)} of {ledger.rows_in} rows are too long and hold {ledger.lost_fraction:.1%} of the trained tokens"
        advice = f"data.max_lost={config.data.max_lost}; set MODEL_MAX_SEQ_LEN={longest}, or raise DATA_MAX_LOST to go on without them"
        raise DataError("\n".join([*named, f"{held}; {advice}"]))
    if ledger.rows_used == 0:
        raise DataError(f"{path}: the chat template leaves nothing to train on in any of {ledger.rows_in} rows; see tokenizer.chat_template of the model")
