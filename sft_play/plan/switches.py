"""Variables of other programs that slow a run, or do nothing to it. Pure: no torch, no I/O.

They are passed on as they are; these sentences say what to expect.
"""

from collections.abc import Iterator, Mapping

from sft_play.config.invocation import FORCE_SINGLE, Words
from sft_play.config.schema import Config
from sft_play.plan.ranks import Ranks

# Switches that are on, and what they cost on a GPU
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel, which makes training several times "
    "slower; it is for finding the kernel that fails",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated anew, which makes training "
    "several times slower",
    "NCCL_P2P_DISABLE": "GPUs reach each other through the host's memory, which makes collectives "
    "several times slower",
    "NCCL_IB_DISABLE": "machines talk over TCP and not over InfiniBand",
}
OF_NCCL = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", *(name for name in SLOW if "NCCL" in name))


def warnings(config: Config, ranks: Ranks, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that slows this run, or that it does not read."""
    found = list(slow(environ)) if ranks.device == "cuda" else []
    for name in sorted(environ):
        reason = _unread_because(name, config, ranks) if environ[name].strip() else None
        if reason:
            found.append(f"{name}={environ[name]} has no effect: {reason}")
    return found


def slow(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that slows training on GPUs."""
    words = Words(environ)
    for name, effect in SLOW.items():
        if words.is_on(name):
            yield f"{name}={environ[name]}: {effect}"
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked by another one"


def _unread_because(name: str, config: Config, ranks: Ranks) -> str | None:
    """Return why a run does not read a variable, None where it may."""
    backend = config.tuning.backend
    if name.startswith("UNSLOTH_") and name != FORCE_SINGLE and backend != "unsloth":
        return f"tuning.backend={backend}, and TUNING_BACKEND=unsloth reads it"
    if name == "DEEPSPEED_CONFIG" and ranks.strategy != "deepspeed":
        return "this run does without DeepSpeed; make train-deepspeed reads it"
    if name == "NCCL_TIMEOUT" and config.train.ddp_timeout is not None:
        return "train.ddp_timeout is set; no library reads this name"
    if name in OF_NCCL and ranks.device == "cpu" and ranks.strategy != "single":
        return "processes on a CPU talk over gloo, which reads GLOO_SOCKET_IFNAME"
    return None
