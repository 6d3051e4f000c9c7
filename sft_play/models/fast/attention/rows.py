"""Whether attention cares where in a row a document lies.

Packed documents may lie in one long row where no module counts the tokens before them.
"""

import inspect
from types import CodeType
from typing import Any

from torch import nn

from sft_play.models.fast.recognise import calls_attention_interface

COUNTING = {"arange", "cumsum"}  # what makes the numbers of a row's tokens


def reads_rows(decoder: nn.Module) -> bool:
    """Return whether an attention module may count tokens from the begin of a row.

    Llama 4 scales queries by that count, from 8,192 on.
    """
    modules = (module for module in decoder.modules() if calls_attention_interface(module))
    return any(counts_tokens(module) for module in modules)


def counts_tokens(module: nn.Module) -> bool:
    """Return whether the code of a module's class makes numbers for the tokens of a row.

    Classes that it inherits from, and functions that the code calls, count as its code.
    """
    classes = [one for one in type(module).__mro__ if one not in nn.Module.__mro__]
    members = [member for one in classes for member in vars(one).values()]
    methods = [getattr(member, "__func__", member) for member in members]  # static ones, too
    waiting = [inspect.unwrap(method) for method in methods if inspect.isfunction(method)]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        names = _names_in(function.__code__)
        if COUNTING & names:
            return True
        called = [function.__globals__.get(name) for name in names]
        waiting += [inspect.unwrap(found) for found in called if inspect.isfunction(found)]
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code reads, with those of functions that are written inside it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))
