"""Fused functions with the results of PEFT's and transformers' modules, in less memory and time.

Each module has the formula first, then a reference in torch, then the kernel if there is one.
"""
