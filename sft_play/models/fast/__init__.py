"""Fused functions with the results of PEFT's and transformers' modules, in less memory and time.

Each part of a model has a room: `attention`, `experts`, `linears`, `loss`, `mixers` and `norms`.
An `install_` function of each finds the modules of its part and gives them their fused forward
methods. Its other modules have the formula first, then a reference in torch, then the kernel if
there is one.
All rooms use what is next to them:

    install      installs one part after the other on a loaded model: begin here
    setup        the model, and how it will be trained
    recognize    what a module computes, found from its structure
    capture      real inputs of the modules
    proof        the fused module against its own code on those inputs; in a trace its shapes alone
    record       what an earlier start has proved, in the cache: then outputs alone are compared
    documents    where the documents of a packed batch begin, and a module run on each of them
"""
