"""The engine of a run: a model wrapped for its strategy, its optimizer, and its schedule.

accelerate wraps the model in DDP or in DeepSpeed's engine. Models that FSDP shards, or whose
experts are shared among ranks, are wrapped here.
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DummyScheduler,
    GradientAccumulationPlugin,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import deepspeed_init

from sft_kernels.expert_modules import ranks_of_experts
from sft_kernels.loss.head import read_loss_last
from sft_kernels.process import Process
from sft_kernels.sharded import is_sharded
from sft_play.config.schedules import count_steps, options_of
from sft_play.config.schema import Config
from sft_play.models import expert_parallel
from sft_play.models.adapter_state import part_of
from sft_play.models.images import trained_encoder_weights
from sft_play.models.optimizers import Muon, hidden_matrices
from sft_play.models.sharding import trains_sharded
from sft_play.plan.workload import schedule_warning
from sft_play.training.memory import innermost

logger = logging.getLogger(__name__)

# Parameters with LoRA+'s higher rate, as in peft.optimizers.create_loraplus_optimizer
FASTER = ("lora_B", "lora_embedding_B", "lora_magnitude_vector")


class Engine:
    """A model and, after `prepare`, everything that trains it.

    `wrapped` is the object that a training step calls: the model, DDP, or DeepSpeed's engine.
    transformers' `deepspeed_init` reads model, args, accelerator, optimizer and lr_scheduler, and
    calls `create_optimizer` and `create_scheduler`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        process: Process,
        config: Config,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.model = model
        self.args = args
        self.process = process
        self.tokenizer = tokenizer
        self.config = config
        self.settings = config.train
        self.accelerator = create_accelerator(args)
        self.wrapped: Any = model
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.text_config = model.config.get_text_config()
        self.base_use_cache = getattr(self.text_config, "use_cache", None)  # saved with the weights
        model.config.use_cache = self.text_config.use_cache = False
        self.is_deepspeed = self.accelerator.state.deepspeed_plugin is not None
        self.trains_divided = trains_sharded(model)
        self.shares_experts = ranks_of_experts(model) > 1
        self._parameters: list[nn.Parameter] | None = None

    def prepare(self, steps: int) -> None:
        """Wrap the model, and create the optimizer and a schedule of `steps` steps."""
        self.args.lr_scheduler_kwargs = options_of(self.settings, steps)  # trackers show them
        if self.is_deepspeed:
            self.optimizer, self.lr_scheduler = deepspeed_init(self, num_training_steps=steps)
        self.create_optimizer()
        accelerator = self.accelerator
        if self.shares_experts:
            expert_parallel.average_own_gradients(self.model, self.process)
        if is_sharded(self.model) or self.shares_experts:
            self.wrapped = self._wrap_divided()
            self.optimizer = accelerator.prepare(self.optimizer)
        elif isinstance(self.lr_scheduler, DummyScheduler):
            self.wrapped, self.optimizer, self.lr_scheduler = accelerator.prepare(
                self.model, self.optimizer, self.lr_scheduler
            )
        else:
            self.wrapped, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        read_loss_last(self.model)
        self.create_scheduler(steps)
        if self.settings.lr_scheduler_type != "constant":
            start_warm_up(self.lr_scheduler, count_steps(self.settings.warmup_steps, steps))
        warning = schedule_warning(self.settings, steps)
        if warning is not None:
            logger.warning("warning: %s", warning)

    def create_optimizer(self) -> Any:
        """Return the optimizer, which is created at the first call."""
        if self.optimizer is None:
            self.optimizer = create_optimizer(self.model, self.args, self.config)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule, which is created at the first call."""
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.settings.lr_scheduler_type,
                optimizer=optimizer or self.optimizer,
                num_warmup_steps=count_steps(self.settings.warmup_steps, num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        return self.lr_scheduler

    @property
    def torch_optimizer(self) -> Any:
        """torch's optimizer, in the wrappers of accelerate and DeepSpeed."""
        return innermost(self.optimizer)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group of parameters, which is the one that is logged."""
        return float(self.optimizer.param_groups[0]["lr"])

    def start_epoch(self) -> None:
        """Put the model into training mode, and list its parameters once for all steps."""
        self.wrapped.train()  # a model that was just loaded is partly in evaluation mode
        # if FSDP shards the trained weights, their parameters are replaced around each pass
        self._parameters = None if self.trains_divided else list(self.wrapped.parameters())

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss that is already a share of its step's loss."""
        if self.is_deepspeed:
            self.accelerator.backward(loss, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    def clip_gradients(self) -> Tensor | float:
        """Clip the gradients to train.max_grad_norm; return their norm before that."""
        most = self.settings.max_grad_norm or math.inf
        if self.shares_experts:
            return expert_parallel.clip_gradients(self._trained(), most)
        norm = self.accelerator.clip_grad_norm_(self._trained(), most)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.is_deepspeed and isinstance(norm, Tensor):
            norm = norm.item()
        return norm

    def end_step(self) -> None:
        """Step the schedule, also for a step that a guard skipped, and drop the gradients.

        A step that the loss scaler of fp16 skips does not count.
        """
        if not (self.settings.fp16 and self.accelerator.optimizer_step_was_skipped):
            self.lr_scheduler.step()
        for parameter in self._trained():
            parameter.grad = None

    def _trained(self) -> Iterable[nn.Parameter]:
        return self._parameters or self.wrapped.parameters()

    def _wrap_divided(self) -> nn.Module:
        """Return a sharded model with autocast; DDP wraps the adapters that all ranks have.

        accelerate refuses DDP around a model with sharded weights (models.sharding). But DDP need
        not know of them, nor of experts that are on other ranks (models.expert_parallel).
        """
        model, accelerator = self.model, self.accelerator
        # autocast only: offloaded tensors stay in host memory
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        if self.trains_divided:
            return model
        parameters = dict(model.named_parameters())
        left_alone = [
            name
            for name, tensor in parameters.items()
            if not tensor.requires_grad or part_of(tensor) is not None
        ]
        if len(left_alone) == len(parameters):
            return model
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_alone)
        on_gpu = accelerator.device.type == "cuda"
        return DistributedDataParallel(
            model,
            device_ids=[accelerator.local_process_index] if on_gpu else None,
            **accelerator.ddp_handler.to_kwargs(),
        )


def create_optimizer(model: PreTrainedModel, args: TrainingArguments, config: Config) -> Optimizer:
    """Return the optimizer; LoRA+'s B and vision encoders have groups if they have rates."""
    with_decay, without = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (with_decay if decays(model, name) else without).append(parameter)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if config.train.optim == "muon":  # which transformers lacks; these are AdamW's settings
        kind, settings = Muon, {**settings, "matrices": hidden_matrices(model)}
    groups = [
        {"params": with_decay, "weight_decay": args.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **settings)
    if settings.get("optim_bits") == 8:
        keep_embedding_moments_exact(model)
    if config.tuning.lora.loraplus_lr_ratio is not None:
        raise_learning_rate_of_b(optimizer, model, config.tuning.lora.loraplus_lr_ratio)
    if config.tuning.encoders_learning_rate is not None:
        factor = config.tuning.encoders_learning_rate / args.learning_rate
        set_group_rate(optimizer, set(map(id, trained_encoder_weights(model))), factor)
    return optimizer


def decays(model: nn.Module, name: str) -> bool:
    """Return whether weight decay applies to a parameter: biases and norms are exempt."""
    module, _, word = name.rpartition(".")
    is_norm = "norm" in type(model.get_submodule(module)).__name__.lower()
    return not is_norm and "bias" not in word


def keep_embedding_moments_exact(model: nn.Module) -> None:
    """Make bitsandbytes' 8-bit optimizers keep the moments of embeddings in 32 bits."""
    import bitsandbytes  # takes seconds, so only for these optimizers

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def raise_learning_rate_of_b(optimizer: Optimizer, model: nn.Module, ratio: float) -> None:
    """Move the B parameters to other groups, with `ratio` times the learning rate.

    LoRA+ (Hayou et al., arXiv 2402.12354), for the optimizer of train.optim. Modules that are
    trained in full keep their rate. Call it before the first step and before a schedule is made.
    The first group keeps its rate, which is the logged one.
    """
    faster_ids: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(word in name for word in FASTER):
            faster_ids.add(id(parameter))
    assert faster_ids, "no adapter has a B matrix"
    set_group_rate(optimizer, faster_ids, ratio)


def set_group_rate(optimizer: Optimizer, chosen: set[int], factor: float) -> None:
    """Move the parameters with the given `id`s to other groups, with `factor` times the rate."""
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if not own:
            continue
        group["params"] = [part for part in group["params"] if id(part) not in chosen]
        options = {name: value for name, value in group.items() if name != "params"}
        optimizer.add_param_group({**options, "params": own, "lr": factor * group["lr"]})


def create_accelerator(args: TrainingArguments) -> Accelerator:
    """Return accelerate's object for the process group that was joined."""
    # a view saves one copy of the gradients
    ddp = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        find_unused_parameters=bool(args.ddp_find_unused_parameters),
        bucket_cap_mb=args.ddp_bucket_cap_mb,
        broadcast_buffers=bool(args.ddp_broadcast_buffers),
    )
    return Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        # steps are cut into micro-batches here, and losses are shares of a step's
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dataloader_config=DataLoaderConfiguration(
            non_blocking=args.accelerator_config.non_blocking
        ),
        kwargs_handlers=[ddp],
    )


def start_warm_up(schedule: Any, warmup: int) -> None:
    """Make the warm-up of a schedule, which may be wrapped, start at 1/W of the rate.

    transformers' warm-up starts at 0: a run of one step would train nothing. Each warm-up step
    therefore has the rate of transformers' next step, and the last one has the peak rate.
    """

    def with_warm_up(factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: 1.0 if step + 1 == warmup else factor(step + (step < warmup))

    schedule = getattr(schedule, "scheduler", schedule)
    schedule.lr_lambdas = list(map(with_warm_up, schedule.lr_lambdas))
    apply_schedule(schedule)


def apply_schedule(schedule: LambdaLR) -> None:
    """Set the optimizer's learning rates to those of the schedule for the next step."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * factor(schedule.last_epoch) for base, factor in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates  # the logged rates
