"""Linears with LoRA, and the gated MLPs over them."""
