"""How much a run trains: counted where its rows were prepared, estimated from the files where they were not."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play import preparation
from sft_play.config import invocation
from sft_play.config.loader import PROJECT_ROOT, load
from sft_play.data import row_counts
from sft_play.plan.devices import parse
from sft_play.plan.resolve import Plan, resolve
from sft_play.plan.speed import LABELLED
from sft_play.plan.workload import Counted, estimated, estimated_tokens, workload

EMPTY = str(Path(__file__).parent / "fixtures" / "empty.yaml")
DESK = Counted(samples=1200, tokens=65_000)


def planned(*settings: str, words: str = "2xH200") -> Plan:
    return resolve(load(EMPTY, {}, settings), invocation.read({}), parse(words), {}, True, False)


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT_ROOT)  # the shipped model's path is relative to it


# Steps and hours


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ((), 38, 1),
        (("train.epochs=4",), 152, 4),
        (("train.epochs=0.5",), 19, 0.5),
        (("train.max_steps=57",), 57, 1.5),
        (("train.epochs=0.01",), 1, 1 / 38),
    ],
)
def test_steps_follow_from_rows_epochs_and_the_effective_batch(
    settings: tuple[str, ...], steps: int, epochs: float
) -> None:
    found = workload(planned(*settings), DESK)  # 1200 rows / 32 = 37.5 steps
    assert (found.steps, found.epochs) == (steps, pytest.approx(epochs))


def test_hours_are_steps_of_these_rows() -> None:
    found = workload(planned("train.epochs=2"), DESK)
    assert found.gpu_hours == pytest.approx(2 * found.seconds / 3600)
    assert found.seconds * found.tokens_per_second == pytest.approx(
        2 * DESK.tokens, rel=0.02
    )  # the last step of an epoch holds fewer rows
    assert json.loads(json.dumps(found.as_json()))["is_estimated"] is False


def test_hours_are_not_known_where_the_speed_is_not() -> None:
    found = workload(planned(words="1x24GiB"), DESK)
    assert (found.steps, found.seconds, found.gpu_hours, found.tokens_per_second) == (
        38,
        None,
        None,
        None,
    )


def test_short_rows_take_less_time_packed() -> None:
    model = "model.name=meta-llama/Llama-3.1-8B"
    packed, padded = (
        workload(planned(model, f"train.packing={packing}", words="1xH200"), DESK).seconds
        for packing in ("true", "false")
    )
    assert packed < 0.5 * padded


def test_rows_that_are_all_full_train_at_the_speed_of_full_rows() -> None:
    plan = planned("model.name=meta-llama/Llama-3.1-8B", "train.packing=false", words="1xH200")
    sequence = plan.config.model.max_seq_len
    found = workload(plan, Counted(samples=3200, tokens=3200 * sequence))
    assert found.tokens_per_second == pytest.approx(plan.speed.tokens_per_second)


# Estimates


def test_estimates_by_hand() -> None:
    assert estimated_tokens([400, 40, 40_000], 1024) == 100 + 10 + 1024
    assert estimated([(100, 50.0, None), (10, 20.0, None)], 0.0) == Counted(
        110, 5200, LABELLED, is_estimated=True
    )
    assert (
        estimated([(100, 50.0, 3.0), (10, 20.0, 1.0)], 0.0).samples == 133
    )  # the second is repeated until one in four is of it
    assert estimated([(1000, 50.0, None)], 0.1) == Counted(900, 45_000, LABELLED, is_estimated=True)


def rows(count: int, characters: int) -> list[str]:
    row = {"question": "why?", "answer": ""}
    return [
        json.dumps({**row, "answer": "a" * (characters - len(json.dumps(row)))})
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv"])
def test_rows_of_a_file_are_counted_and_their_tokens_guessed(name: str, tmp_path: Path) -> None:
    texts = rows(1000, 400)
    if name.endswith("json"):
        text = f"[{','.join(texts)}]"
    elif name.endswith("csv"):
        text = "question,answer\n" + "".join(f"why?,{json.loads(row)['answer']}\n" for row in texts)
    else:
        text = "\n".join(texts)
    data = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    plan = planned(
        f"data.train_path={tmp_path / name}",
        f"data.val_path={tmp_path / name}",
        f"train.output_dir={tmp_path}",
    )
    found = preparation.counted(plan.config)
    assert isinstance(found, Counted) and found.is_estimated
    assert (found.samples, found.tokens) == (1000, pytest.approx(100_000, rel=0.01))


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "SAMPLED_BYTES", 1 << 20)
    (tmp_path / "rows.jsonl").write_text("\n".join(rows(10_000, 400)))
    plan = planned(f"data.train_path={tmp_path / 'rows.jsonl'}", f"train.output_dir={tmp_path}")
    found = preparation.counted(plan.config)
    held_out = min(10_000 * plan.config.data.val_size, 500)
    assert isinstance(found, Counted) and found.samples == pytest.approx(
        10_000 - held_out, rel=0.02
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "the files hold no row"), ("[1, 2", r"rows.jsonl:1: the file begins with a JSON list")],
)
def test_what_cannot_be_counted_says_why(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    found = preparation.counted(
        planned(f"data.train_path={tmp_path / 'rows.jsonl'}", f"train.output_dir={tmp_path}").config
    )
    assert isinstance(found, str) and words in found


def test_rows_of_the_hub_are_not_asked_for(tmp_path: Path) -> None:
    found = preparation.counted(
        planned("data.train_path=org/rows", f"train.output_dir={tmp_path}").config
    )
    assert found == "org/rows is of the hub; make data-check fetches and counts it"


def test_rows_that_were_prepared_are_counted_until_they_change(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"question": f"what is {number}?", "answer": "a number"})
            for number in range(200)
        )
    )
    config = planned(f"data.train_path={path}", f"train.output_dir={tmp_path}").config
    before = preparation.counted(config)
    data = preparation.build_data(config)
    found = preparation.counted(config)
    assert isinstance(before, Counted) and before.is_estimated
    assert found == Counted(
        len(data.train),
        int(data.train.lengths.sum()),
        pytest.approx(data.train.records["trained"].sum() / data.train.lengths.sum()),
    )
    longer = planned(
        f"data.train_path={path}", f"train.output_dir={tmp_path}", "model.max_seq_len=512"
    ).config
    assert isinstance(counted := preparation.counted(longer), Counted) and counted.is_estimated
    path.write_text(path.read_text() + "\n" + json.dumps({"question": "more?", "answer": "yes"}))
    assert isinstance(counted := preparation.counted(config), Counted) and counted.is_estimated


def test_counting_loads_no_heavy_library() -> None:
    code = (
        "import sys; from sft_play import commands, preparation\n"
        "loaded, plan = commands.make_plan(commands.call(None, (), '2xH200'), True, False)\n"
        "counted = preparation.counted(plan.config)\n"
        "assert counted.samples == 1200, counted\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
