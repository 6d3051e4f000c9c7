"""Fused functions with the results of PEFT's and transformers' modules, in less memory and time.

Each part of a model has a package: `attention`, `experts`, `linears`, `loss`, `mixers` and `norms`.
An `install_` function in each finds the modules of its part and sets their fused forward methods.
The package's other modules contain the formula first, then a reference in torch, then the kernel if
there is one.
All packages use the modules next to them:

    install      installs one part after the other on a loaded model: start reading here
    setup        the model, and how it will be trained
    recognize    what a module computes, found from its structure
    capture      real inputs of the modules
    proof        compares the fused module with the original on those inputs; in a trace only shapes
    record       proofs of an earlier start, in the cache: then only outputs are compared
    documents    where the documents of a packed batch begin; runs a module on each of them
"""
