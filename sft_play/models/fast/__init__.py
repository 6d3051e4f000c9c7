"""Fused functions that compute what PEFT's and transformers' modules do, in less memory and time.

Each module has the formula first, then a reference in torch, then the kernel where there is one.
"""
