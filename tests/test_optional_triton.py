"""Without Triton, as on a system whose torch has none, fused modules can be imported."""

import sys
from pathlib import Path

from rank_processes import start_rank, wait_for


def import_kernels() -> None:
    """Be a process without Triton: import the modules with kernels anew."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" or name.startswith("sft_play.models"):
            del sys.modules[name]
    sys.modules["triton"] = None  # as if it were not installed
    from sft_kernels.linears import adapter_gradients, four_bit, glu

    assert callable(glu.launch_forward) and glu.BLOCK == 1024
    assert four_bit._CODES_A_WORD == four_bit.CODES_A_WORD
    assert callable(adapter_gradients.launch_adapter_gradients)


def test_modules_with_kernels_are_imported_without_triton(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    rank = start_rank(import_kernels, (), 0, 0, output, world_size=1)
    assert wait_for(rank) == 0, output.read_text()[-2000:]
