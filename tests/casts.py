"""How often tensors are cast from one number type to another."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Counts casts of tensors of the type `old` to `new`."""

    def __init__(self, old: torch.dtype, new: torch.dtype) -> None:
        super().__init__()
        self.old, self.new = old, new
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].dtype == self.old:
            self.count += kwargs.get("dtype") == self.new
        return func(*args, **kwargs)
