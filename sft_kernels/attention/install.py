"""Find the attention modules of a decoder, and install attention without masks on them.

Documents may be packed into one long row if no module counts the preceding tokens of a row.
"""

import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from sft_kernels.attention.forward import (
    attention_forward,
    implementations,
    remove_mask,
    use_interface,
)
from sft_kernels.capture import LENGTHS, PACKED, PLAIN, ForwardCall, preserving_state
from sft_kernels.linears.lora import LinearGroup
from sft_kernels.needs import MIN_CAPABILITY, has_liger
from sft_kernels.packed import UNMASKED, watch_documents
from sft_kernels.proof import prove
from sft_kernels.recognize import AttentionKind, attention_kind_of, calls_attention_interface
from sft_kernels.training_setup import TrainingSetup, Unsupported, fuse
from sft_kernels.trial import own_code

UNREAD = "the mask is for attention alone"  # name in the record of proofs


def install_attention(setup: TrainingSetup) -> int:
    """Install attention without masks; return the number of modules.

    Modules like Llama's are fused with rotary embeddings and projections. Others keep their
    original implementation except for the attention function. A module that needs a mask would not
    get one, so either all modules are fused or none.
    """
    before = implementations(setup.decoder)
    try:
        return _install(setup)
    except Unsupported:
        # unless its attention is named sdpa, DeepSeek V3.2 leaves token selection to the kernel
        for config, own in before:
            config._attn_implementation = own
        raise


def _install(setup: TrainingSetup) -> int:
    """Install attention and return the number of modules, or raise Unsupported."""
    _check_attention_kernels(setup)
    modules = [module for module in setup.decoder.modules() if calls_attention_interface(module)]
    if not modules:
        raise Unsupported("no module calls an attention function of transformers")
    for module in modules:
        _check_attention(module)
    whole = _whole_attentions(setup, modules)
    others = [module for module in modules if module not in whole]
    if others:
        _use_interface(setup, others)
    fuse(whole, attention_forward)
    hook = setup.decoder.register_forward_pre_hook(
        remove_mask,
        prepend=True,
        with_kwargs=True,  # prepended: it runs before masks are created
    )
    reason = _why_mask_is_read(setup)
    if reason is not None:
        hook.remove()
        for module in whole:
            del module.forward
        raise Unsupported(reason)
    return len(modules)


def _why_mask_is_read(setup: TrainingSetup) -> str | None:
    """Return how a decoder uses a mask outside of attention; None if it does not.

    OPT computes the positions of padded rows from the mask, but UNMASKED contains no tokens.
    """
    if not setup.has_values or UNREAD in setup.proved:
        return None
    decoder = setup.decoder
    inputs = setup.proof_inputs
    call = inputs.samples[inputs.kinds[decoder]].calls[PLAIN]
    # for a long window, the activations of all layers of a 27B model needed 77 GiB
    ids = call.kwargs["input_ids"][:, : LENGTHS[-1]]
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    watch_documents(setup.base, decoder).batch = None
    with (
        preserving_state(decoder, setup.process.device),
        setup.process.autocast(),
        torch.enable_grad(),
    ):
        decoder.train()
        try:
            decoder(*call.args, **{**call.kwargs, **padded})
        except torch.OutOfMemoryError:  # a RuntimeError that has nothing to do with masks
            raise
        except (RuntimeError, ValueError, IndexError):
            return f"{type(decoder).__name__} reads the mask itself"
    setup.newly_proved[UNREAD] = 0.0
    return None


def _whole_attentions(setup: TrainingSetup, modules: list[nn.Module]) -> set[nn.Module]:
    """Return the modules that `attention_forward` computes completely."""
    kinds = {module: attention_kind_of(module) for module in modules}
    alike = {module: kind for module, kind in kinds.items() if kind is not None}
    for module, kind in alike.items():
        bind_attention(module, kind)
    try:
        return set(prove(list(alike), attention_forward, setup, unmasked_call(alike, setup)))
    except Unsupported:
        return set()
    finally:
        setup.left_out.clear()  # the others are proved next


def bind_attention(module: nn.Module, kind: AttentionKind) -> None:
    """Set the attributes that `attention_forward` reads from an attention module."""
    module.attention_kind = kind
    is_joint = hasattr(module, "qkv_proj")  # Phi 3
    names = ("qkv_proj",) if is_joint else ("q_proj", "k_proj", "v_proj")
    module.input_linears = LinearGroup(*(getattr(module, name) for name in names))
    module.output_linear = LinearGroup(module.o_proj)


def _use_interface(setup: TrainingSetup, modules: list[nn.Module]) -> None:
    """Make modules call SFT-Play's attention function instead of transformers'.

    Raises: Unsupported unless each module then computes the same without its mask.
    """
    if setup.has_packed_parts:
        name = type(modules[0]).__name__
        raise Unsupported(f"{name} is not like Llama's, and ZeRO-3 partitions what would prove it")
    try:
        use_interface(setup.decoder)
    except ValueError as reason:
        raise Unsupported(str(reason)) from None
    agreed = prove(modules, own_code, setup, unmasked_call(modules, setup))
    if len(agreed) < len(modules):
        raise Unsupported(setup.left_out.pop())


def _check_attention(module: nn.Module) -> None:
    """Raise Unsupported if no fused attention computes what a module needs."""
    dropouts = [child.p for child in module.children() if isinstance(child, nn.Dropout)]
    own = getattr(module, "attention_dropout", 0.0)  # a module in Persimmon, like its children
    dropout = max(0.0 if isinstance(own, nn.Module) else own, *dropouts, 0.0)
    if dropout:
        raise Unsupported(f"the model's attention has a dropout of {dropout}")
    if not getattr(module, "is_causal", True):
        raise Unsupported("the model's attention looks ahead")


def unmasked_call(
    modules: Iterable[nn.Module], setup: TrainingSetup
) -> Callable[[ForwardCall, str], ForwardCall]:
    """Make attention modules read the batch's documents, which the original gets as a mask.

    Return the function that prepares the call of their fused code in a proof.
    """
    packed = watch_documents(setup.base, setup.decoder)
    for module in modules:
        module.packed_documents = packed

    def fused_call(call: ForwardCall, batch: str) -> ForwardCall:
        is_packed = batch == PACKED
        packed.batch = setup.proof_inputs.documents if is_packed else None
        return ForwardCall(call.args, {**call.kwargs, "attention_mask": UNMASKED})

    return fused_call


def _check_attention_kernels(setup: TrainingSetup) -> None:
    """Raise Unsupported unless the attention kernels can run on this rank's device."""
    implementation = setup.attention
    if implementation not in ("auto", "sdpa"):
        raise Unsupported(f"attn_implementation={implementation}")
    if not setup.on_gpu:
        return
    if setup.process.compute_dtype.itemsize != 2:
        raise Unsupported("its kernels compute in 16 bits")
    if torch.cuda.get_device_capability(setup.process.device) < MIN_CAPABILITY:
        raise Unsupported("its kernels need a GPU of capability 8.0")
    if not has_liger():
        raise Unsupported("liger-kernel is not installed")


COUNTING = {"arange", "cumsum"}  # functions that number the tokens of a row


def reads_rows(decoder: nn.Module) -> bool:
    """Return whether an attention module may count tokens from the start of a row.

    Llama 4 scales queries by that count, from 8,192 tokens on.
    """
    modules = (module for module in decoder.modules() if calls_attention_interface(module))
    return any(counts_tokens(module) for module in modules)


def scales_by_place(module: nn.Module, longest_row: int | None) -> bool:
    """Return whether an attention module scales queries by position in rows of this length."""
    if not getattr(module, "attn_temperature_tuning", False) or not counts_tokens(module):
        return False
    return longest_row is None or longest_row > module.floor_scale


def counts_tokens(module: nn.Module) -> bool:
    """Return whether the code of a module's class numbers the tokens of a row.

    Its code includes base classes and the functions that it calls.
    """
    classes = [one for one in type(module).__mro__ if one not in nn.Module.__mro__]
    members = [member for one in classes for member in vars(one).values()]
    methods = [getattr(member, "__func__", member) for member in members]  # also of static methods
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
    """Return the names that code reads, including those in nested functions."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))
