"""Weights, quantization, adapters and fused kernels."""

import logging

# peft imports bitsandbytes, which then warns on every CPU of an inference kernel that is not used
# here. This package is imported before peft.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
