"""The script that quantizes a folder with llm-compressor, by AWQ (arXiv:2306.00978).

It runs in a separate process, with packages of .venv/quantize, and imports nothing of this
project. Its only argument is a JSON file: model_class, source, target, rows (lists of ids),
group_size, ignore, trust_remote_code.
"""

import json
import sys

import torch
import transformers
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier


def main() -> None:
    """Quantize the requested folder."""
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    dtype = torch.bfloat16
    if not torch.cuda.is_available():
        # llm-compressor pins each batch, which torch supports only with a GPU
        torch.Tensor.pin_memory = lambda self, *_: self
        dtype = torch.float32  # a CPU multiplies slowly in 16 bits
    model = getattr(transformers, asked["model_class"]).from_pretrained(
        asked["source"], dtype=dtype, trust_remote_code=asked["trust_remote_code"]
    )
    rows = asked["rows"]
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = asked["group_size"]
    oneshot(
        model=model,
        dataset=Dataset.from_dict(
            {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        ),
        recipe=[AWQModifier(config_groups={"group_0": scheme}, ignore=asked["ignore"])],
        num_calibration_samples=len(rows),
        max_seq_length=max(map(len, rows)),
        shuffle_calibration_samples=False,
    )
    model.to(torch.bfloat16).save_pretrained(asked["target"], save_compressed=True)


if __name__ == "__main__":
    main()
