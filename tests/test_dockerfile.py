"""The image is built and answers, where there is Docker: `make test-long`."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAME = "sft-play-test"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("docker") is None, reason="the image was not built: no Docker")
def test_the_image_is_built_and_trains() -> None:
    build = ["docker", "build", "-t", NAME, "--build-arg", "TORCH=cpu", str(ROOT)]
    subprocess.run(build, check=True, timeout=3600)
    train = ["docker", "run", "--rm", NAME, "train", "TRAIN_MAX_STEPS=2"]
    done = subprocess.run(train, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0 and "done steps=2" in done.stdout, done.stderr[-3000:]
