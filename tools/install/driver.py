"""The CUDA that this machine's NVIDIA driver runs, and the build of torch that fits it."""

from __future__ import annotations

import ctypes

DEFAULT_CUDA = 13  # major version of the CUDA that PyPI's torch 2.13 for Linux is built for


def tell_size(cuda: int | None) -> None:
    """Say what PyPI's torch takes, and which build fits this machine better."""
    print("PyPI's torch for Linux contains CUDA 13: 2.7 GB to download, 5 GB on disk", flush=True)
    if cuda is None:
        print("no NVIDIA driver is seen here: make install TORCH=cpu takes 0.2 GB", flush=True)
    elif cuda < DEFAULT_CUDA:
        print(f"this driver runs CUDA {cuda}: type make install TORCH=cu126, or update it")


def driver_cuda() -> int | None:
    """Return the major version of CUDA that the NVIDIA driver runs, None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        version = ctypes.c_int()
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):  # no such library, or a driver from before 2018
        return None
    return version.value // 1000
