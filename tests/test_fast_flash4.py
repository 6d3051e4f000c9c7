"""FlashAttention 4: when it is used, and what happens where it is missing or broken.

Packages of the test stand in for it: the real one needs a Hopper GPU (test_gpu_flash4.py).
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_fast_install import CPU, plain_model, settings
from torch import Tensor

from sft_play.config.schema import Config
from sft_play.models.fake_model import build_on_meta
from sft_play.models.fast.attention import flash4, kernels
from sft_play.models.fast.attention.scoring import Scoring
from sft_play.models.fast.documents import Documents
from sft_play.models.fast.install import _explain_attention, install_fused_kernels
from sft_play.models.fast.setup import TrainingSetup
from sft_play.models.load import loading_options
from sft_play.plan.fast import FastSetup, is_fast, plan_kernels
from sft_play.process import Process

RIGHT = """
import torch
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           softmax_scale, causal, window_size, deterministic):
    assert causal and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    from sft_play.models.fast.attention.reference import attend_lengths
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


def definition(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, lengths: tuple[int, ...]
) -> Tensor:
    """Return attention (N, H, D) by its definition."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    place = torch.arange(len(query))
    distance = place[:, None] - place
    sees = (document[:, None] == document) & (distance >= 0)
    if scoring.window is not None:
        sees &= distance < scoring.window
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


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

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    flash4.choose(False)


def call(features: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((12, 4, features), (12, 2, features), (12, 2, features))
    return tuple(torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes)


def takes(scoring: Scoring = PLAIN, **of: int) -> bool:
    documents = Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    return flash4.takes(*call(**of), scoring, documents)


def test_it_takes_16_bits_and_heads_of_64_and_128_features_with_or_without_a_window(
    install,
) -> None:
    install(RIGHT)
    flash4.choose(True)
    half = torch.bfloat16
    assert flash4.suits(64, 64, half, PLAIN)
    assert flash4.suits(128, 128, torch.float16, WINDOWED)
    for features in (32, 80, 96, 192, 256):
        assert not flash4.suits(features, features, half, PLAIN)
    assert not flash4.suits(128, 64, half, PLAIN)
    assert not flash4.suits(64, 64, torch.float32, PLAIN)
    assert not flash4.suits(64, 64, half, Scoring(0.1, softcap=30.0))
    assert not flash4.suits(64, 64, half, Scoring(0.1, sinks=torch.zeros(4)))


def test_a_run_that_does_not_ask_for_it_keeps_torchs_kernels_without_a_word(
    install, caplog: pytest.LogCaptureFixture
) -> None:
    install(BROKEN)
    with caplog.at_level(logging.INFO):
        flash4.choose(False)
    assert (takes(), flash4.kernel_in_force(), caplog.text) == (False, "torch", "")


def test_what_agrees_with_the_definition_is_used_and_said_once(install, caplog) -> None:
    install(RIGHT)
    flash4.choose(True)
    assert flash4.kernel_in_force() == "torch", "nothing has run yet"
    with caplog.at_level(logging.INFO):
        assert takes() and takes(WINDOWED) and takes()
        assert takes(dtype=torch.float16)
    assert caplog.messages == ["attention: FlashAttention 4 (flash-attn-4 4.0.0)"]
    documents = Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    of = call()
    found = flash4.attend(*of, WINDOWED, documents)
    expected = definition(*(tensor.float() for tensor in of), WINDOWED, (5, 7))
    assert torch.allclose(found.float(), expected, atol=2e-2)


@pytest.mark.parametrize("source", [RIGHT, BROKEN], ids=["there", "broken"])
def test_packed_documents_go_through_it_or_through_torchs_kernel(
    install, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Values narrower than keys, and heads of 60 features, are padded for both."""
    install(source)
    flash4.choose(True)
    used: list[str] = []

    def torchs(*of) -> torch.Tensor:
        used.append("torch")
        return definition(*of[:4], (5, 7))

    monkeypatch.setattr(kernels, "attend_torch_varlen", torchs)
    query, key, value = call(features=60)
    documents = Documents(torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    out = kernels._attend_varlen(query, key, value[..., :40], PLAIN, documents)
    assert out.shape == (12, 4, 40)
    expected = definition(query, key, value[..., :40], PLAIN, (5, 7))
    assert torch.allclose(out, expected, atol=2e-2)
    assert used == ([] if source == RIGHT else ["torch"])


def test_the_compilers_warning_about_known_arguments_is_not_shown(install) -> None:
    install(RIGHT)
    flash4.choose(True)
    with warnings.catch_warnings(record=True) as caught:
        for argument in ("aux_data", "other"):
            text = f"Argument {argument} (position 17) cannot be converted to a JitArgument for f"
            warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(one.message).split()[1] for one in caught] == ["other"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "cannot be imported (PackageNotFoundError: No package metadata was found for flash"),
        (BROKEN, "cannot be imported (OSError: libcute.so: cannot open shared object file)"),
        ("", "cannot be imported (AttributeError: module 'flash_attn.cute' has no attribute"),
        (FAILING, "does not run for heads of 64 features (AssertionError: no such tile)"),
        (WRONG, "computes something else for heads of 64 features (output by"),
    ],
    ids=["not installed", "import fails", "another version", "call fails", "wrong scale"],
)
def test_a_broken_one_leaves_attention_to_torch_with_one_line_that_says_why(
    install, caplog, source: str | None, reason: str
) -> None:
    if source is not None:
        install(source)
    flash4.choose(True)
    assert not takes()
    assert not takes(), "for the rest of the run"
    (line,) = caplog.messages
    assert line.startswith(f"attention: torch; FlashAttention 4 {reason}")
    silence = "MODEL_ATTN_IMPLEMENTATION=auto asks for torch's kernels"
    assert line == f"attention: {flash4.kernel_in_force()}; {silence}"


def test_a_wrong_window_ends_the_use_for_whole_documents_too(install, caplog) -> None:
    install(WIDE)
    flash4.choose(True)
    assert takes()
    assert not takes(WINDOWED)
    assert not takes()
    assert "computes something else" in caplog.text


def asking(**train: object) -> Config:
    config = settings(**train)
    model = config.model.model_copy(update={"attn_implementation": "flash_attention_4"})
    return config.model_copy(update={"model": model})


def test_transformers_loads_under_it_what_it_loads_under_auto() -> None:
    config = asking()
    assert loading_options(config, None) == {}
    assert build_on_meta(config, torch.bfloat16).config._attn_implementation == "sdpa"
    setup = FastSetup(config, "llama", is_gpu=True, is_half=True, zero_stage=0)
    assert plan_kernels(setup) == plan_kernels(replace(setup, config=settings()))
    assert is_fast(setup)


def test_a_model_on_a_cpu_is_fused_and_says_that_torch_computes_its_attention(caplog) -> None:
    kernels_of = install_fused_kernels(plain_model("llama"), asking(), Process.alone(CPU))
    assert kernels_of.on["attention"] == 2
    warned = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warned == [
        "attention: torch; FlashAttention 4 needs a Hopper GPU; "
        "MODEL_ATTN_IMPLEMENTATION=auto asks for torch's kernels"
    ]
    flash4.choose(False)


@pytest.mark.parametrize(
    ("on", "off", "said"),
    [
        ({}, {"attention": "no liger"}, "one of the fused kernels, and attention is not fused: no"),
        ({"attention": 2}, {}, "is used for heads of 64 and 128 features, without sinks and soft"),
    ],
)
def test_a_model_that_it_computes_nothing_of_says_why_once(install, caplog, on, off, said) -> None:
    install(RIGHT)
    gpu = Process.alone(torch.device("cuda", 0), torch.bfloat16)
    setup = TrainingSetup(plain_model("llama"), asking(), gpu, zero_stage=0)
    flash4.choose(True)
    for _ in range(2):
        _explain_attention(setup, on, off)
    (line,) = caplog.messages
    assert said in line


def test_a_model_that_it_computes_says_nothing_more(install, caplog) -> None:
    install(RIGHT)
    gpu = Process.alone(torch.device("cuda", 0), torch.bfloat16)
    setup = TrainingSetup(plain_model("llama"), asking(), gpu, zero_stage=0)
    flash4.choose(True)
    assert takes()
    _explain_attention(setup, {"attention": 2}, {})
    assert (caplog.messages, takes()) == ([], True)
