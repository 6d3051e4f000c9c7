"""Without Triton, as on a system whose torch has none, fused modules can be imported."""

import subprocess
import sys

IMPORT = """
import sys

sys.modules["triton"] = None  # as if it were not installed
from sft_play.models.fast.linears import adapter_gradients, four_bit, glu

assert callable(glu.launch_forward) and glu.BLOCK == 1024
assert four_bit._CODES_A_WORD == four_bit.CODES_A_WORD
"""


def test_modules_with_kernels_are_imported_without_triton():
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
