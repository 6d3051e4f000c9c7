"""Weights, quantization, adapters and fused kernels."""

import logging

# peft imports bitsandbytes. On every CPU, bitsandbytes then warns about an inference kernel that is
# not used here. This package is imported before peft.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
