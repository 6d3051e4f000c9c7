"""FlashAttention 4: when it is chosen, and what happens where it is missing or broken.

Packages of the test stand in for it: the real one needs a Hopper GPU (test_gpu_flash4.py).
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sft_play.models.fast.attention import flash4, kernels
from sft_play.models.fast.attention.scoring import Scoring
from sft_play.models.fast.documents import Documents

RIGHT = """
import torch
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           softmax_scale, causal, window_size, deterministic):
    assert causal and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    from sft_play.models.fast.attention.kernels import attend_lengths
    from sft_play.models.fast.attention.scoring import Scoring
    lengths = [length for length in cu_seqlens_q.diff().tolist() if length]
    window = None if window_size[0] is None else window_size[0] + 1
    return attend_lengths(q, k, v, Scoring(softmax_scale, window), lengths), None
"""
WRONG = RIGHT.replace("Scoring(softmax_scale, window)", "Scoring(2 * softmax_scale, window)")
WIDE = RIGHT.replace("window_size[0] + 1", "window_size[0] + 9")
FAILING = "def flash_attn_varlen_func(*_, **__):\n    raise AssertionError('no such tile')\n"
BROKEN = "raise OSError('libcute.so: cannot open shared object file')\n"
PLAIN, WINDOWED = Scoring(0.25), Scoring(0.25, window=5)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return what puts a package of this source in the place of flash-attn-4."""

    def write(source: str) -> None:
        package = tmp_path / "site" / "flash_attn" / "cute"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        metadata = tmp_path / "site" / "flash_attn_4-4.0.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0.0\n")
        monkeypatch.syspath_prepend(tmp_path / "site")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (flash4.CACHE_SWITCH, flash4.CACHE_FOLDER):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    flash4.choose((8, 0))


def call(features: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((12, 4, features), (12, 2, features), (12, 2, features))
    return tuple(torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes)


def takes(scoring: Scoring = PLAIN, **of: int) -> bool:
    documents = Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    return flash4.takes(*call(**of), scoring, documents)


def test_it_takes_16_bits_and_heads_it_has_kernels_for_with_or_without_a_window(install) -> None:
    install(RIGHT)
    flash4.choose(flash4.HOPPER)
    half = torch.bfloat16
    assert flash4.suits(64, 64, half, PLAIN)
    assert flash4.suits(80, 80, torch.float16, WINDOWED)
    assert flash4.suits(256, 256, half, PLAIN)
    assert not flash4.suits(264, 264, half, PLAIN)
    assert not flash4.suits(100, 100, half, PLAIN)
    assert not flash4.suits(192, 128, half, PLAIN)
    assert not flash4.suits(64, 64, torch.float32, PLAIN)
    assert not flash4.suits(64, 64, half, Scoring(0.1, softcap=30.0))
    assert not flash4.suits(64, 64, half, Scoring(0.1, sinks=torch.zeros(4)))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_gpus_other_than_hopper_keep_torchs_kernels_without_a_word(
    install, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    install(BROKEN)
    with caplog.at_level(logging.INFO):
        flash4.choose(capability)
    assert not flash4.suits(64, 64, torch.bfloat16, PLAIN)
    assert (flash4.kernel_in_force(), caplog.text) == ("torch", "")


def test_a_run_that_asks_for_sdpa_keeps_torchs_kernels(install, caplog) -> None:
    install(BROKEN)
    with caplog.at_level(logging.INFO):
        flash4.choose(flash4.HOPPER, is_allowed=False)
    assert (takes(), flash4.kernel_in_force(), caplog.text) == (False, "torch", "")


def test_a_hopper_without_it_is_told_how_to_install_it(install, caplog) -> None:
    with caplog.at_level(logging.INFO):
        flash4.choose(flash4.HOPPER)
    assert "attention: torch; FlashAttention 4 is not installed" in caplog.text
    assert "python -m tools.install add requirements-hopper.txt" in caplog.text
    assert not takes()


def test_what_agrees_with_the_definition_is_used_and_said_once(install, caplog) -> None:
    install(RIGHT)
    flash4.choose(flash4.HOPPER)
    assert flash4.kernel_in_force() == "torch", "nothing has run yet"
    with caplog.at_level(logging.INFO):
        assert takes() and takes(WINDOWED) and takes()
        assert takes(dtype=torch.float16)
    assert caplog.messages == ["attention: FlashAttention 4 (flash-attn-4 4.0.0)"]
    documents = Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    of = call()
    found = flash4.attend(*of, WINDOWED, documents)
    expected = flash4._definition(*(tensor.float() for tensor in of), WINDOWED, (5, 7))
    assert torch.allclose(found.float(), expected, atol=2e-2)


@pytest.mark.parametrize("source", [RIGHT, BROKEN], ids=["there", "broken"])
def test_packed_documents_go_through_it_or_through_torchs_kernel(
    install, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Values narrower than keys, and heads of no known size, are padded for both."""
    install(source)
    flash4.choose(flash4.HOPPER)
    used: list[str] = []

    def torchs(*of) -> torch.Tensor:
        used.append("torch")
        return flash4._definition(*of[:4], (5, 7))

    monkeypatch.setattr(kernels, "attend_torch_varlen", torchs)
    query, key, value = call(features=12)
    documents = Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    out = kernels._attend_varlen(query, key, value[..., :6], PLAIN, documents)
    assert out.shape == (12, 4, 6)
    expected = flash4._definition(query, key, value[..., :6], PLAIN, (5, 7))
    assert torch.allclose(out, expected, atol=2e-2)
    assert used == ([] if source == RIGHT else ["torch"])


def test_the_compilers_warning_about_known_arguments_is_not_shown(install) -> None:
    install(RIGHT)
    flash4.choose(flash4.HOPPER)
    with warnings.catch_warnings(record=True) as caught:
        for argument in ("aux_data", "other"):
            text = f"Argument {argument} (position 17) cannot be converted to a JitArgument for f"
            warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(one.message).split()[1] for one in caught] == ["other"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (BROKEN, "cannot be imported (OSError: libcute.so: cannot open shared object file)"),
        ("", "cannot be imported (AttributeError: module 'flash_attn.cute' has no attribute"),
        (FAILING, "does not run for heads of 16 features (AssertionError: no such tile)"),
        (WRONG, "computes something else for heads of 16 features (output by"),
    ],
    ids=["import fails", "another version", "call fails", "wrong scale"],
)
def test_a_broken_one_leaves_attention_to_torch_with_one_line_that_says_why(
    install, caplog, source: str, reason: str
) -> None:
    install(source)
    flash4.choose(flash4.HOPPER)
    assert not takes()
    assert not takes(), "for the rest of the run"
    (line,) = caplog.messages
    assert line.startswith(f"attention: torch; FlashAttention 4 {reason}")
    assert line == f"attention: {flash4.kernel_in_force()}"


def test_a_wrong_window_ends_the_use_for_whole_documents_too(install, caplog) -> None:
    install(WIDE)
    flash4.choose(flash4.HOPPER)
    assert takes()
    assert not takes(WINDOWED)
    assert not takes()
    assert "computes something else" in caplog.text


def test_compiled_kernels_stay_in_a_folder_that_no_other_user_writes(install, tmp_path) -> None:
    install(RIGHT)
    flash4.choose(flash4.HOPPER)
    folder = tmp_path / "cache" / "sft-play" / "flash-attn-4"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ[flash4.CACHE_FOLDER] == str(folder)
    assert os.environ[flash4.CACHE_SWITCH] == "1"


def test_what_the_user_says_of_that_cache_stays(install, monkeypatch, tmp_path) -> None:
    install(RIGHT)
    monkeypatch.setenv(flash4.CACHE_SWITCH, "0")
    flash4.choose(flash4.HOPPER)
    assert os.environ[flash4.CACHE_SWITCH] == "0"
    assert flash4.CACHE_FOLDER not in os.environ
    monkeypatch.delenv(flash4.CACHE_SWITCH)
    monkeypatch.setenv(flash4.CACHE_FOLDER, str(tmp_path / "own"))
    flash4.choose(flash4.HOPPER)
    assert os.environ[flash4.CACHE_FOLDER] == str(tmp_path / "own")


def test_without_a_folder_to_write_kernels_are_compiled_in_each_run(
    install, monkeypatch, tmp_path, caplog
) -> None:
    install(RIGHT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        flash4.choose(flash4.HOPPER)
    assert "kernels are compiled anew in each run" in caplog.text
    assert flash4.CACHE_SWITCH not in os.environ
    assert takes()
