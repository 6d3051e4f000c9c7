"""Several GPUs, in six lines: DDP, a process for each GPU with a whole model and its own batches.

accelerate launch examples/train_multi_gpu.py --config small
torchrun --nproc_per_node=2 examples/train_multi_gpu.py --config small
"""

from accelerate import Accelerator
from example_setup import read_setup
from transformers import AutoModelForCausalLM, Trainer

# The arguments start the process group, so they come before Accelerator()
setup = read_setup(__doc__, "multi_gpu_output")
model_name, args, dataset = setup.model_name, setup.training_arguments(), setup.dataset()

accelerator = Accelerator(mixed_precision=args.mixed_precision)  # as the trainer's
model = AutoModelForCausalLM.from_pretrained(
    model_name,
    device_map={"": accelerator.device},  # on GPUs the same as accelerator.local_process_index
)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train()
