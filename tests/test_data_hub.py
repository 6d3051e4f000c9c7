"""sft_play.data.sources: data sets fetched from a local server that speaks the hub's protocol."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback import Silent, served_by
from record_files import read_rows

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "a" * 40
ASK = """
import json, sys
from sft_play.config.schema import SourceSection
from sft_play.data.sources import find_source
from sft_play.errors import SftPlayError
for entry in json.loads(sys.argv[1]):
    try:
        source = find_source(SourceSection(**entry), "data.train_path")
        print(json.dumps([source.name, *map(str, source.files)]))
    except SftPlayError as error:
        print(json.dumps([error.exit_class.name, str(error)]))
"""


def parquet(*questions: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"question": questions, "answer": ["a"] * len(questions)}), sink)
    return sink.getvalue()


FILES = {
    "owner/rows": {
        "data/train-0.parquet": parquet("q1", "q2", "q3"),
        "data/test-0.parquet": parquet("t1"),
    },
    "owner/subsets": {
        "README.md": b"---\nconfigs:\n- config_name: en\n  data_files: en.parquet\n"
        b"- config_name: de\n  data_files: de.parquet\n---\n",
        "en.parquet": parquet("red"),
        "de.parquet": parquet("rot"),
    },
    "owner/damaged": {"train.parquet": b"PAR1 and no more PAR1"},
    "owner/pictures": {"README.md": b"# Nothing but a description\n"},
}


class Hub(Silent):
    """Serves FILES and a gated data set, owner/gated; it knows no other id."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api").removeprefix("/datasets/")
        name = "/".join(path.split("/")[:2])
        files, rest = FILES.get(name), path.removeprefix(f"{name}/")
        if files is None:
            code, said = (403, "GatedRepo") if name == "owner/gated" else (404, "RepoNotFound")
            self.answer(b"", code, X_Error_Code=said)
        elif not self.path.startswith("/api"):
            held = files.get(rest.removeprefix("resolve/").partition("/")[2])
            if held is None:
                self.answer(b"", 404, X_Error_Code="EntryNotFound")
            else:
                self.answer(held, ETag=f'"{hash(held)}"', X_Repo_Commit=COMMIT)
        elif rest.startswith("tree/"):
            folder = rest.removeprefix(f"tree/{COMMIT}").removeprefix("/")
            listed = [
                {"type": "file", "path": path, "size": len(held), "oid": "0" * 40}
                for path, held in files.items()
                if path.startswith(folder)
            ]
            if listed:
                self.answer(listed)
            else:
                self.answer(b"", 404, X_Error_Code="EntryNotFound")
        else:
            siblings = [{"rfilename": path} for path in files]
            self.answer({"id": name, "sha": COMMIT, "siblings": siblings})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Say of the paths in a form which are files and which are folders."""
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        files = FILES["/".join(self.path.removeprefix("/api/datasets/").split("/")[:2])]
        known = [
            {"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40}
            for path in asked
            if path in files
        ]
        folders = [
            {"type": "directory", "path": path, "oid": "0" * 40}
            for path in asked
            if any(held.startswith(f"{path}/") for held in files)
        ]
        self.answer(known + folders)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with served_by(Hub) as url:
        yield url


def ask(entries: list[dict[str, str]], home: Path, **env: str) -> list[list[str]]:
    """Find entries in a new process: libraries read the hub's address when they are loaded."""
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "HF_HOME": str(home / "hub"),
        "PYTHONPATH": str(ROOT),
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(entries)],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def questions(path: str) -> list[str]:
    return [row.messages[0].content for row in read_rows(Path(path))]


@pytest.mark.long
def test_a_hub_id_is_its_rows_and_without_a_network_the_cache_answers_or_the_machine_is_at_fault(
    hub, tmp_path
):
    entries = [
        {"path": "owner/rows"},
        {"path": "owner/rows", "split": "test"},
        {"path": "owner/subsets", "subset": "de"},
    ]
    answers = ask(entries, tmp_path, HF_ENDPOINT=hub)
    part = ask([{"path": "owner/rows", "split": "train[:2]"}], tmp_path, HF_ENDPOINT=hub)
    assert part == answers[:1], "the rows are taken where the files are read"
    assert [(name, questions(file)) for name, file in answers] == [
        ("owner/rows", ["q1", "q2", "q3"]),
        ("owner/rows", ["t1"]),
        ("owner/subsets (de)", ["rot"]),
    ]
    *again, (exit_class, message) = ask(
        [*entries[:2], {"path": "owner/never-fetched"}], tmp_path, HF_HUB_OFFLINE="1"
    )
    assert again == answers[:2]
    assert exit_class == "ENVIRONMENT"
    assert message.startswith(
        "data.train_path=owner/never-fetched: no such path. "
        "The hub cannot be asked: Couldn't reach 'owner/never-fetched' on the Hub"
    )
    assert "Check the network and HF_HUB_OFFLINE" in message


@pytest.mark.long
def test_what_the_hub_does_not_give_is_named_with_what_to_type(hub, tmp_path):
    (tmp_path / "ownr").mkdir()
    expected = [
        (
            {"path": "owner/rows", "split": "dev"},
            "DATA",
            "Unknown split \"dev\". Should be one of ['train', 'test']. "
            "Name one of its parts as [{path: owner/rows, subset:",
        ),
        (
            {"path": "owner/subsets"},
            "DATA",
            "Please pick one among the available configs: ['en', 'de']",
        ),
        (
            {"path": "owner/subsets", "subset": "fr"},
            "DATA",
            "BuilderConfig 'fr' not found. Available: ['en', 'de'].",
        ),
        (
            {"path": "owner/nothing"},
            "DATA",
            "no such path, and no such data set on the hub; did you mean ownr? "
            "If it is a private one, type `hf auth login`",
        ),
        (
            {"path": "owner/gated"},
            "ENVIRONMENT",
            "a gated data set; ask for access at https://huggingface.co/datasets/owner/gated, "
            "then type `hf auth login`",
        ),
        ({"path": "owner/damaged"}, "DATA", "fetch its files and name their folder"),
        ({"path": "owner/pictures"}, "DATA", "fetch its files and name their folder"),
    ]
    answers = ask([entry for entry, _, _ in expected], tmp_path, HF_ENDPOINT=hub)
    for (entry, exit_class, words), (found_class, message) in zip(expected, answers, strict=True):
        assert message.startswith(f"data.train_path={entry['path']}: ")
        assert (found_class, words in message) == (exit_class, True), message
