"""What this machine will do with a config: every `auto` becomes a number, every process a command. Loads no torch."""

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.config import deepspeed
from sft_play.config.invocation import Invocation
from sft_play.config.loader import PROJECT_ROOT, LoadedConfig
from sft_play.config.schema import Config
from sft_play.errors import ConfigError, EnvironmentFault, OutOfMemory
from sft_play.plan import advice, batch, cards, memory, sources, speed
from sft_play.plan.devices import Hardware
from sft_play.plan.launch import Ranks, visible_entries
from sft_play.plan.model_shape import ModelShape, load_shape
from sft_play.plan.packing import resolve_packing
from sft_play.plan.sizing import Setup, Sized, size

GIB = 2**30
RESERVE = 0.08  # of free memory: fragmentation, and what the closed form does not see
ENGINES = tuple(
    PROJECT_ROOT / "configs" / f"deepspeed_zero{stage}.json" for stage in (2, 3)
)  # that train-deepspeed tries where none is named
NCCL_SECONDS = 1800
OFFLOADED_OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
)  # accelerate puts DeepSpeed's CPU Adam in the place of any other too, without a word


@dataclass(frozen=True)
class Plan:
    """A run as it will be started: the resolved config, its ranks, and what the memory estimate says."""

    config: Config
    setup: Setup  # the config before its autos were numbers, and what else the choice was made from
    ranks: Ranks
    chosen: batch.Chosen
    packing: bool
    unpacked_because: str | None  # where train.packing=auto is off
    memory: memory.StepBytes
    budget_bytes: int
    gpu: str | None  # the name of the first one, None on a CPU
    used_before_bytes: tuple[
        int, ...
    ]  # of each local rank's GPU, what others held when this was planned; 0 on a CPU
    deepspeed: dict[str, Any] | None
    deepspeed_source: str | None
    shortage: str | None  # why it does not fit
    changes: tuple[advice.Change, ...]  # that would make it fit; () where it does
    warnings: tuple[str, ...]

    @property
    def shape(self) -> ModelShape:
        return self.setup.shape

    @property
    def step(self) -> memory.StepShape:
        """The step as chosen."""
        return self.setup.step_of(self.chosen)

    @property
    def micro_batches(self) -> int:
        """How many each rank trains in a step; where rows are packed known once they are counted, and until then grad_accum."""
        return batch.micro_batches(self.setup.wanted, self.chosen.batch_size)

    @property
    def sequences(self) -> int:
        """How many a micro-batch has at most; of packed ones fewer than its batch size where no step fills that."""
        return batch.sequences(self.setup.wanted, self.chosen.batch_size)

    @property
    def card(self) -> cards.Card | None:
        return self.setup.card

    @property
    def speed(self) -> speed.Speed | None:
        """What is predicted where all rows are full; None where nothing is known of the device."""
        return self.setup.speed_of(self.chosen)

    @property
    def fits(self) -> bool:
        return self.shortage is None

    @property
    def is_batch_explicit(self) -> bool:
        """Whether the micro-batch is the user's number, which stands also where it is not expected to fit."""
        return self.setup.wanted.batch_size != "auto"

    @property
    def zero_stage(self) -> int:
        return self.deepspeed["zero_optimization"]["stage"] if self.deepspeed else 0

    def as_json(self) -> dict[str, Any]:
        """Return what plan.json and `plan --json` hold, less the launch command."""
        return {
            "strategy": self.ranks.strategy,
            "device": self.ranks.device,
            "world_size": self.ranks.world_size,
            "per_device_batch_size": self.chosen.batch_size,
            "grad_accum": self.chosen.grad_accum,
            "effective_batch": self.chosen.effective_batch,
            "packing": self.packing,
            "micro_batches": self.micro_batches,
            "sequences": self.sequences,
            "checkpointing": self.chosen.checkpointing,
            "checkpointed_layers": self.chosen.checkpointed_layers,
            "gradient_checkpointing": self.chosen.checkpointed_layers > 0,
            "zero_stage": self.zero_stage,
            "deepspeed": self.deepspeed,
            "deepspeed_source": self.deepspeed_source,
            "backend_of_collectives": "gloo" if self.ranks.device == "cpu" else "nccl",
            "memory": self.memory.as_json(),
            "phases": self.memory.phases_json(),
            "budget_bytes": self.budget_bytes,
            "choice": self.setup.choice.as_json(),
            "fits": self.fits,
            "changes": [asdict(change) for change in self.changes],
            "speed": self.speed.as_json() if self.speed else None,
            "gpu": self.gpu,
            "used_before_bytes": list(self.used_before_bytes),
            "warnings": list(self.warnings),
        }

    def line(self) -> str:
        """Return the plan as one line of facts."""
        c, r = self.chosen, self.ranks
        return (
            f"plan device={r.device} world={r.world_size} strategy={r.strategy}{f' zero={self.zero_stage}' if self.deepspeed else ''} "
            f"batch={c.batch_size} x {r.world_size} x accum={c.grad_accum} = {c.effective_batch} packing={str(self.packing).lower()} "
            f"checkpointing={c.checkpointing}{f':{c.checkpointed_layers}/{c.layers}' if c.checkpointing == 'selective' else ''} "
            f"compute={precision(self.config)} predicted_peak={self.memory.predicted_peak / GIB:.2f}GiB of {self.budget_bytes / GIB:.2f}GiB"
        )


def with_counted_rows(plan: Plan, fullest_step: int) -> Plan:
    """Return the plan of a packed run whose rows are known: fewer and smaller micro-batches make the same step, in less memory."""
    setup, chosen, engine = (
        replace(plan.setup, fullest_step=fullest_step),
        plan.chosen,
        plan.deepspeed,
    )
    plan = replace(
        plan,
        setup=setup,
        memory=setup.choice.bytes_of(chosen.batch_size, chosen.checkpointed_layers),
    )
    if engine is None:
        return plan
    whole = (
        chosen.batch_size * plan.micro_batches * plan.ranks.world_size
    )  # the product must hold; in samples it would be effective_batch
    return replace(
        plan,
        deepspeed={
            **engine,
            "gradient_accumulation_steps": plan.micro_batches,
            "train_batch_size": whole,
        },
    )


def resolve(
    loaded: LoadedConfig,
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    distributed: bool,
    use_deepspeed: bool,
) -> Plan:
    """Return the plan of a run, which need not fit.

    `distributed` asks for all GPUs where NUM_GPUS says nothing; `use_deepspeed` for ZeRO, where no JSON is named of the first stage
    that fits. Raises: EnvironmentFault for more processes than GPUs, a missing backend or model; ConfigError for numbers that
    contradict; DataError for a missing data file.
    """
    ranks = plan_ranks(invocation, hardware, environ, distributed, use_deepspeed)
    _require_backend(loaded.config, hardware)
    sources.require(loaded)
    paths = (
        [None]
        if not use_deepspeed
        else [Path(invocation.deepspeed_config)]
        if invocation.deepspeed_config
        else ENGINES
    )
    tried = (_resolve(loaded, hardware, environ, ranks, path) for path in paths)
    plan = next(tried)
    return plan if plan.fits else next((other for other in tried if other.fits), plan)


def _resolve(
    loaded: LoadedConfig,
    hardware: Hardware,
    environ: Mapping[str, str],
    ranks: Ranks,
    engine_path: Path | None,
) -> Plan:
    """Return the plan under one strategy: DDP or a single process without `engine_path`, else the DeepSpeed JSON there."""
    config = loaded.config
    raw = deepspeed.read(engine_path) if engine_path else None
    shape = load_shape(config.model.name, config.model.revision, environ)
    bf16, fp16, notes = choose_precision(
        loaded, hardware, deepspeed.precision(raw) if raw else None
    )
    stage = deepspeed.zero_stage(raw) if raw else 0
    offload, offload_weights = deepspeed.offloads(raw) if raw else (False, False)
    _refuse_combinations(loaded, stage, offload, ranks)
    is_effective_set = loaded.is_set("train.effective_batch_size")
    gpu_names = tuple(gpu.name for gpu in hardware.gpus[: ranks.per_node])
    setup = Setup(
        config,
        is_effective_set,
        shape,
        ranks,
        bf16 or fp16,
        stage,
        offload,
        _budget(hardware, ranks),
        offload_weights,
        gpu_names,
    )
    sized = size(setup)
    chosen = sized.chosen
    notes += _batch_notes(loaded, sized, ranks)
    packing, unpacked_because = resolve_packing(config, shape.model_type)
    eval_rows = memory.evaluation_rows(shape, setup.step_of(chosen))
    engine = None
    if raw is not None:
        engine = deepspeed.resolve(
            raw,
            deepspeed.PlannedRun(
                micro_batch=chosen.batch_size,
                grad_accum=chosen.grad_accum,
                world_size=ranks.world_size,
                bf16=bf16,
                fp16=fp16,
                max_grad_norm=config.train.max_grad_norm,
                hidden_size=shape.hidden,
            ),
            source=str(engine_path),
        )
    return Plan(
        config=_resolved(config, chosen, eval_rows, packing, bf16, fp16, ranks, environ),
        setup=setup,
        ranks=ranks,
        chosen=chosen,
        packing=packing,
        unpacked_because=unpacked_because,
        memory=sized.memory,
        budget_bytes=setup.budget_bytes,
        gpu=hardware.gpus[0].name if hardware.gpus else None,
        used_before_bytes=_used_before(hardware, ranks),
        deepspeed=engine,
        deepspeed_source=str(engine_path) if engine_path else None,
        shortage=sized.shortage,
        changes=() if sized.fits else advice.changes(setup, hardware.count),
        warnings=tuple(notes),
    )


def fastest(
    loaded: LoadedConfig, invocation: Invocation, hardware: Hardware, environ: Mapping[str, str]
) -> Plan:
    """Return the plan of the strategy that is fastest on all GPUs of `hardware`, of those that fit: one process or DDP, or ZeRO.

    Where nobody knows how fast a card is, whole weights on every GPU come first. Raises as `resolve`.
    """
    plan = resolve(loaded, invocation, hardware, environ, distributed=True, use_deepspeed=False)
    if (
        plan.ranks.world_size == 1
        or plan.ranks.device == "cpu"
        or plan.config.tuning.backend == "unsloth"
    ):
        return plan
    sharded = resolve(loaded, invocation, hardware, environ, distributed=True, use_deepspeed=True)
    return max(
        plan, sharded, key=lambda one: (one.fits, one.speed.tokens_per_second if one.speed else 0.0)
    )


def short_of_memory(plan: Plan) -> OutOfMemory:
    """Return the error of a plan that does not fit: what lacks, and the words that help most."""
    ways = "; or ".join(change.words for change in plan.changes[:3])
    return OutOfMemory(
        f"{plan.shortage}; try {ways or 'a smaller model, or a GPU with more memory'}{'; make plan lists more' if len(plan.changes) > 3 else ''}"
    )


def _batch_notes(loaded: LoadedConfig, sized: Sized, ranks: Ranks) -> list[str]:
    """Say where the step is not the effective batch of the config."""
    train, chosen, notes = loaded.config.train, sized.chosen, []
    if chosen.effective_batch != train.effective_batch_size and "auto" in (
        train.batch_size,
        train.grad_accum,
    ):
        notes.append(
            f"{loaded.described('train.effective_batch_size')} becomes {chosen.effective_batch}: train.batch_size={chosen.batch_size} x "
            f"world={ranks.world_size} x train.grad_accum={chosen.grad_accum}; TRAIN_EFFECTIVE_BATCH_SIZE={chosen.effective_batch} says so"
        )
    return notes


def plan_ranks(
    invocation: Invocation,
    hardware: Hardware,
    environ: Mapping[str, str],
    distributed: bool,
    use_deepspeed: bool,
) -> Ranks:
    """Return how many processes run where.

    Raises: EnvironmentFault when NUM_GPUS is more than there are, or a cluster counts on more processes than are asked for; ConfigError
    for several machines without an address to meet at.
    """
    if invocation.nnodes > 1 and not environ.get("MASTER_ADDR", "").strip():
        raise ConfigError(
            f"NNODES={invocation.nnodes} without MASTER_ADDR: every machine would wait for the others at its own {invocation.master_addr}; "
            "set MASTER_ADDR to the address of machine 0 (127.0.0.1 where all NNODES are this host)"
        )
    is_cuda = hardware.kind == "cuda"
    per_node = invocation.num_gpus or (hardware.count if is_cuda and distributed else 1)
    if is_cuda and per_node > hardware.count:
        raise EnvironmentFault(
            f"NUM_GPUS={per_node}: this host has {hardware.count} usable GPUs; set NUM_GPUS={hardware.count}, or see make gpu-info"
        )
    world = per_node * invocation.nnodes
    strategy = "deepspeed" if use_deepspeed else "ddp" if world > 1 else "single"
    if strategy == "single" and environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
        # each of a cluster's machines would train by itself
        raise EnvironmentFault(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, by a cluster or a launcher, and this run is one process; "
            "set NNODES, NODE_RANK and MASTER_ADDR for several machines, or unset WORLD_SIZE"
        )
    return Ranks(
        strategy=strategy,
        device=hardware.kind,
        per_node=per_node,
        nodes=invocation.nnodes,
        node_rank=invocation.node_rank,
        master_addr=invocation.master_addr,
        master_port=invocation.master_port,
        visible=visible_entries(environ.get("CUDA_VISIBLE_DEVICES"), per_node) if is_cuda else (),
        cpu_count=hardware.cpu_count,
    )


def choose_precision(
    loaded: LoadedConfig, hardware: Hardware, asked: str | None
) -> tuple[bool, bool, list[str]]:
    """Return (bf16, fp16, warnings): never both, bfloat16 where every GPU has it, float32 on a CPU unless asked.

    `asked` is what a DeepSpeed JSON says; it decides where the config leaves both to auto.
    """
    train, notes = loaded.config.train, []
    has_gpu = hardware.kind == "cuda"
    if asked and train.bf16 == train.fp16 == "auto":
        bf16, fp16 = asked == "bf16", asked == "fp16"
    else:
        bf16 = train.bf16 is True or (
            train.bf16 == "auto" and hardware.supports_bf16 and train.fp16 is not True
        )
        fp16 = train.fp16 is True or (
            train.fp16 == "auto" and has_gpu and not hardware.supports_bf16 and not bf16
        )
    if bf16 and has_gpu and not hardware.supports_bf16:
        bf16, fp16 = False, train.fp16 is not False
        name, says = (
            ("float16", "TRAIN_FP16=true TRAIN_BF16=false")
            if fp16
            else ("float32", "TRAIN_BF16=false")
        )
        notes.append(
            f"train.bf16=true, but a GPU here has no bfloat16 (capability under 8.0): computing in {name}; {says} says so"
        )
    if bf16 and fp16:
        notes.append(
            "train.bf16 and train.fp16 are both true: computing in bfloat16; TRAIN_FP16=false says so"
        )
        fp16 = False
    if fp16 and not has_gpu:
        raise ConfigError(
            f"{loaded.described('train.fp16')}: float16 needs a GPU; set TRAIN_FP16=auto"
        )
    return bf16, fp16, notes


def precision(config: Config) -> str:
    """Return the name of a resolved config's compute type, as accelerate spells it, or float32."""
    return (
        "bf16" if config.train.bf16 is True else "fp16" if config.train.fp16 is True else "float32"
    )


def _require_backend(config: Config, hardware: Hardware) -> None:
    if config.tuning.backend != "unsloth":
        return
    if hardware.kind != "cuda":
        raise EnvironmentFault(
            "tuning.backend=unsloth: Unsloth needs an NVIDIA GPU and none is usable here; set TUNING_BACKEND=bnb, or see make gpu-info"
        )
    if importlib.util.find_spec("unsloth") is None:
        raise EnvironmentFault(
            "tuning.backend=unsloth: unsloth is not installed; run make install-unsloth, or set TUNING_BACKEND=bnb"
        )


def _refuse_combinations(loaded: LoadedConfig, stage: int, offload: bool, ranks: Ranks) -> None:
    config = loaded.config
    if offload and config.train.optim not in OFFLOADED_OPTIMIZERS:
        raise ConfigError(
            f"{loaded.described('train.optim')}: with offload_optimizer DeepSpeed computes AdamW on the CPU; set TRAIN_OPTIM=adamw_torch, "
            "or delete offload_optimizer from the DeepSpeed JSON"
        )
    if stage == 3 and config.tuning.mode == "qlora" and ranks.device == "cpu":
        raise ConfigError(
            "ZeRO-3 with tuning.mode=qlora aborts on a CPU; set TUNING_MODE=lora, or DEEPSPEED_CONFIG=configs/deepspeed_zero2.json"
        )
    if stage and config.tuning.backend == "unsloth":
        raise ConfigError(
            "tuning.backend=unsloth does not run under DeepSpeed; use make train-distributed, or set TUNING_BACKEND=bnb"
        )


def _budget(hardware: Hardware, ranks: Ranks) -> int:
    """Bytes that one rank may take: the least free of its GPUs, or its share of the host's memory."""
    free = (
        min(gpu.free_bytes for gpu in hardware.gpus[: ranks.per_node])
        if hardware.kind == "cuda"
        else hardware.ram_available_bytes // ranks.per_node
    )
    return int(free * (1 - RESERVE))


def _used_before(hardware: Hardware, ranks: Ranks) -> tuple[int, ...]:
    used = (
        [gpu.total_bytes - gpu.free_bytes for gpu in hardware.gpus]
        if ranks.device == "cuda"
        else [0] * ranks.per_node
    )
    return tuple(used[: ranks.per_node])


def _resolved(
    config: Config,
    chosen: batch.Chosen,
    eval_rows: int,
    packing: bool,
    bf16: bool,
    fp16: bool,
    ranks: Ranks,
    environ: Mapping[str, str],
) -> Config:
    """Return the config with no auto left and every path absolute, so that the run folder explains itself anywhere."""
    model = config.model
    if Path(model.name).is_dir():
        model = model.model_copy(update={"name": str(Path(model.name).resolve())})
    if model.chat_template not in (None, "default"):
        model = model.model_copy(update={"chat_template": str(Path(model.chat_template).resolve())})
    train = config.train.model_copy(
        update={
            "batch_size": chosen.batch_size,
            "grad_accum": chosen.grad_accum,
            "effective_batch_size": chosen.effective_batch,
            "packing": packing,
            "gradient_checkpointing": chosen.checkpointed_layers > 0,
            "bf16": bf16,
            "fp16": fp16,
            "eval_batch_size": eval_rows
            if config.train.eval_batch_size == "auto"
            else config.train.eval_batch_size,
            "dataloader_pin_memory": ranks.device == "cuda"
            if config.train.dataloader_pin_memory == "auto"
            else config.train.dataloader_pin_memory,
            "probe": (ranks.device == "cuda" and config.tuning.backend == "bnb")
            if config.train.probe == "auto"
            else config.train.probe,
            "ddp_timeout": config.train.ddp_timeout or _nccl_timeout(environ),
            "resume_from": str(Path(config.train.resume_from).resolve())
            if config.train.resume_from
            else None,
        }
    )
    return config.model_copy(
        update={"model": model, "train": train, "data": sources.resolved(config.data)}
    )


def _nccl_timeout(environ: Mapping[str, str]) -> int:
    """NCCL_TIMEOUT in seconds: a name that people set and no library reads."""
    text = environ.get("NCCL_TIMEOUT") or str(NCCL_SECONDS)
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"NCCL_TIMEOUT={text}: write whole seconds, such as NCCL_TIMEOUT={NCCL_SECONDS}"
        )
    return int(text)
