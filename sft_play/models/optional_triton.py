"""Import Triton if it is installed: torch for CPUs does not include it.

Without Triton, modules with kernels can be imported, but no kernel can be launched.
"""

from typing import Any, Self

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:

    class Missing:
        """Stands in for any name of Triton. As a decorator it returns the function unchanged."""

        def __getattr__(self, name: str) -> Self:
            return self

        def __call__(self, *args: Any, **_: Any) -> Any:
            return args[0] if args else self

    triton = tl = libdevice = Missing()

__all__ = ["libdevice", "tl", "triton"]
