"""One GPU, in four lines. Compare train_multi_gpu.py, which has two more.

python examples/train_single_gpu.py --config small
"""

from example_setup import read_setup
from transformers import AutoModelForCausalLM, Trainer

setup = read_setup(__doc__, "single_gpu_output")
model_name, args, dataset = setup.model_name, setup.training_arguments(), setup.dataset()

model = AutoModelForCausalLM.from_pretrained(model_name)
trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.train()
