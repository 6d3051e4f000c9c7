"""Mixtures of experts with their adapters."""
