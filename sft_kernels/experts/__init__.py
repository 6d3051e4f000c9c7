"""Experts of mixture-of-experts (MoE) models, with their adapters."""
