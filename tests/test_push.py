"""`make push`: a repository becomes the export, and what its owner wrote stays."""

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from tiny_hub import REPO, TinyHub, tiny_hub

from sft_play.commands import push as pushing
from sft_play.commands.push import RepositoryChange
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.runs import seal

ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "a", "README.md": "adapter"}
MODEL = {"config.json": "{}", "model.safetensors": "whole", "README.md": "model"}
SHARDS = {"config.json": "{}", "model-1.safetensors": "1", "model.safetensors.index.json": "{}"}


@pytest.fixture
def hub() -> Iterator[tuple[type[TinyHub], HfApi]]:
    with tiny_hub() as (repository, api):
        yield repository, api


def pushed(
    api: HfApi, tmp_path: Path, files: dict[str, str], signature: bytes | None = None
) -> RepositoryChange:
    """Push an export of these files."""
    folder = tmp_path / f"export-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    seal.seal(folder, "export of a test")
    change = RepositoryChange.of(api, REPO, folder, signature)
    change.commit(api, REPO)
    return change


@pytest.mark.parametrize(
    ("first", "second"), [(ADAPTER, MODEL), (MODEL, SHARDS), (SHARDS, MODEL), (MODEL, ADAPTER)]
)
def test_a_push_replaces_an_earlier_one_in_one_commit(hub, tmp_path, first, second):
    repository, api = hub
    repository.files.update({".gitattributes": b"lfs", "notes/eval.json": b"{}"})
    pushed(api, tmp_path, first, b"signature")
    change = pushed(api, tmp_path, second)
    kept = {".gitattributes", "notes/eval.json"}
    assert repository.files.keys() == {*second, seal.NAME, *kept}
    assert repository.commits == 2
    assert set(change.removed) == {*(first.keys() - second.keys()), "model.sig"}


def test_a_readme_that_was_edited_on_the_hub_stays_and_no_manifest_names_it(hub, tmp_path):
    repository, api = hub
    pushed(api, tmp_path, ADAPTER)
    repository.files["README.md"] = b"edited "
    for _ in range(2):
        change = pushed(api, tmp_path, MODEL)
        assert repository.files["README.md"] == b"edited "
        assert change.lines()[-1] == "kept as it is on the hub: README.md"
        assert b"README.md" not in repository.files[seal.NAME]
    with pytest.raises(ConfigError, match=r"SIGN: README\.md of REPO=me/desk is not of a push"):
        pushed(api, tmp_path, MODEL, b"signature")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.safetensors", b"of the user"),  # the export has one of this name
        ("pytorch_model.bin", b"older"),  # a program may load it with the export
        ("adapter_config.json", b"{ }"),  # of the first push, and edited since
    ],
)
def test_a_push_is_refused_if_files_of_others_would_be_replaced_or_loaded(
    hub, tmp_path, name, text
):
    repository, api = hub
    pushed(api, tmp_path, ADAPTER)
    repository.files[name] = text
    before = dict(repository.files)
    with pytest.raises(ConfigError, match=rf"has 1 files that no push wrote.*: {name}\. Remove"):
        pushed(api, tmp_path, MODEL)
    assert repository.files == before


def test_a_signature_is_of_all_files_and_of_no_others(tmp_path):
    signing = pytest.importorskip("model_signing", reason="pip install model-signing pyOpenSSL")
    for words in (
        "ecparam -name prime256v1 -genkey -noout -out key",
        "ec -in key -pubout -out public",
    ):
        subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    signature = tmp_path / "model.sig"
    signature.write_bytes(pushing.sign(folder, str(tmp_path / "key")))
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    verifier = signing.verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "public")
    verifier.verify(folder, signature)
    (folder / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(ValueError, match="mismatch"):
        verifier.verify(folder, signature)
    with pytest.raises(ConfigError, match=r"SIGN=.*config: this key cannot sign \("):
        pushing.sign(folder, str(tmp_path / "config"))


def test_a_key_needs_the_package_that_signs(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match=r"SIGN=1 needs model_signing, OpenSSL.*pip install"):
        pushing.sign(tmp_path, "1")
