"""Triton kernels as Triton's interpreter runs them, on a host without a GPU."""

import importlib.util
from types import ModuleType

import triton


def interpreted(module: ModuleType) -> ModuleType:
    """Return a copy of a module whose kernels are interpreted."""
    spec = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(copy)
    return copy
