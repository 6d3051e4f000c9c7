"""Fused kernels for transformers' models, proven on each model before it trains."""
