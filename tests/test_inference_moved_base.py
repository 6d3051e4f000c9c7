"""A run whose base was moved, or that was copied to another machine: MODEL_NAME says where it is."""

import shutil
from pathlib import Path

import pytest

from sft_play.errors import CheckpointError, EnvironmentFault
from sft_play.inference.load import load_run
from sft_play.runs.folder import RunFolder
from sft_play.runs.model_folder import find_model

GONE = "/no/such/base"


@pytest.fixture
def copied(counting_run: RunFolder, taught_base: Path, tmp_path: Path) -> Path:
    """A copy of a run whose config names a base that is not there."""
    folder = tmp_path / "run"
    shutil.copytree(counting_run.path, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(str(taught_base), GONE))
    return folder


def test_the_error_says_what_to_type_and_that_loads_the_run(
    copied: Path, taught_base: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"{GONE} is not there.* Type MODEL_NAME="):
        load_run(RunFolder(copied), "cpu")
    moved = shutil.copytree(taught_base, tmp_path / "moved")
    trained = load_run(RunFolder(copied, moved_base=str(moved)), "cpu")
    assert trained.config.model.name == str(moved)


def test_another_base_is_refused(copied: Path, tiny_base: Path) -> None:
    with pytest.raises(CheckpointError, match="base_digest"):
        load_run(RunFolder(copied, moved_base=str(tiny_base)), "cpu")


def test_an_adapter_says_and_checks_the_same(
    counting_run: RunFolder, taught_base: Path, tiny_base: Path, tmp_path: Path
) -> None:
    adapter = counting_run.path / "adapter"
    moved = shutil.copytree(taught_base, tmp_path / "moved")
    assert find_model(str(adapter), tmp_path, str(moved)).base == str(moved)
    with pytest.raises(EnvironmentFault, match="not there"):
        find_model(str(adapter), tmp_path, GONE)
    with pytest.raises(EnvironmentFault, match=r"digest .* has"):
        find_model(str(adapter), tmp_path, str(tiny_base))
