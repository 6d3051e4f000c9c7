"""Triton kernels as Triton's interpreter runs them, on a host without a GPU."""

import importlib.util
import sys
from types import ModuleType

import triton
from triton.runtime.jit import JITFunction


def interpreted(module: ModuleType) -> ModuleType:
    """Return a copy of a module whose kernels are interpreted, with those that they call."""
    spec = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(copy)
    for name, value in list(vars(copy).items()):
        if isinstance(value, JITFunction):  # of another module
            setattr(copy, name, getattr(interpreted(sys.modules[value.__module__]), name))
    return copy
