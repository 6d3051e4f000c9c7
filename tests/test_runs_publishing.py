"""What a command may replace, and that two commands do not write one folder."""

import os
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError, ConfigError, EnvironmentFault
from sft_play.runs import seal
from sft_play.runs.publishing import FILES, Target

KIND = "export adapter"


def published(path: Path, text: str = "weights", kind: str = KIND, is_named: bool = True) -> Path:
    with Target(path, kind, is_named).staged() as work:
        (work / FILES / "sub").mkdir(parents=True)
        (work / FILES / "model").write_text(text)
        (work / FILES / "sub" / "more").write_text(text)
    return path


def contents(folder: Path) -> dict[str, str]:
    files = filter(Path.is_file, folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def own_notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_hidden_folder_in_an_export(path: Path) -> None:
    (published(path) / ".git").mkdir()


def an_empty_folder_in_an_export(path: Path) -> None:
    (published(path) / "sub" / "photos").mkdir()


def another_kind(path: Path) -> None:
    published(path, kind="export gguf")


def a_checkpoint(path: Path) -> None:
    own_notes(path)
    seal.seal(path)


def a_broken_manifest(path: Path) -> None:
    (published(path) / seal.NAME).write_text("{}")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (own_notes, "contains notes.txt, which no MANIFEST.json names"),
        (a_file, "is a file"),
        (a_hidden_folder_in_an_export, "contains .git, which its MANIFEST.json does not name"),
        (an_empty_folder_in_an_export, "contains sub/photos, which its"),
        (another_kind, "was written by export gguf, not by this command"),
        (a_checkpoint, "was written by a run or an earlier version"),
        (a_broken_manifest, "cannot be used"),
    ],
)
def test_what_a_command_did_not_write_stays_and_a_free_name_is_offered(tmp_path, make, said):
    path = tmp_path / "out"
    make(path)
    (tmp_path / "out-2").mkdir()
    before = contents(tmp_path)
    with pytest.raises(ConfigError) as refused:
        published(path, "other")
    assert said in str(refused.value) and str(refused.value).endswith(f"OUT={path}-3 is free")
    assert contents(tmp_path) == before


def test_in_a_run_an_export_of_an_earlier_version_is_replaced_and_the_users_files_are_not(tmp_path):
    path = tmp_path / "out"
    a_checkpoint(path)
    assert contents(published(path, is_named=False))["model"] == "weights"
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"type mv {path} {path}-2"):
        published(path, is_named=False)


def test_the_current_folder_and_those_above_it_are_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", "..", str(tmp_path)):
        with pytest.raises(ConfigError, match="is the current folder, or contains it"):
            published(Path(path))


def test_an_earlier_call_is_replaced_also_where_a_link_leads(tmp_path):
    path = published(tmp_path / "out")
    (tmp_path / "link").symlink_to("out")
    assert contents(published(tmp_path / "link", "other"))["model"] == "other"
    assert (tmp_path / "link").is_symlink() and seal.find_damage(path) is None
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


def test_what_was_edited_since_is_kept_under_another_name(tmp_path, caplog):
    path = published(tmp_path / "out")
    (path / "model").write_text("edited")
    published(path, "other")
    assert (path / "model").read_text() == "other"
    assert (tmp_path / "out-2" / "model").read_text() == "edited"
    assert f"it is {path}-2 now" in caplog.text


def test_a_target_is_written_by_one_command_at_a_time(tmp_path):
    path = tmp_path / "out"
    with Target(path, KIND).staged() as work:
        (work / FILES).mkdir()
        with pytest.raises(EnvironmentFault, match="another command writes it now"):
            published(path)
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_killed_command_left_is_removed(tmp_path):
    left = tmp_path / ".out-staging" / FILES
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    assert contents(published(tmp_path / "out")).keys() == {seal.NAME, "model", "sub/more"}
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_lost_a_file_while_it_was_published_is_an_error(tmp_path, monkeypatch):
    def lose(folder: Path, kind: str | None = None) -> None:
        real(folder, kind)
        (folder / "model").unlink()

    real = seal.seal
    monkeypatch.setattr(seal, "seal", lose)
    with pytest.raises(CheckpointError, match="model is missing"):
        published(tmp_path / "out")
