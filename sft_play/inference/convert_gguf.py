"""Run llama.cpp's converter of Hugging Face folders, with a given pre-tokenizer and all stops.

A script: `gguf_tools` starts it by its path in a separate process, so that nothing of this
project is imported there. The converter identifies a tokenizer by a hash over its vocabulary. It
therefore knows no tokenizer with additional tokens, however common its rules are.
    python -P convert_gguf.py <llama.cpp> <pre-tokenizer or -> <stops> <words of the converter>...
"""

import json
import sys
from collections.abc import Callable
from typing import Any

# Names of stops in a file; llama.cpp also stops at tokens that it knows, such as <|endoftext|>
STOPS = ("eos", "eot", "eom")


def convert_main() -> None:
    """Convert."""
    folder, pre_tokenizer, stops, *words = sys.argv[1:]
    sys.path[:0] = [folder, f"{folder}/gguf-py"]
    import convert_hf_to_gguf
    from gguf import SpecialVocab

    add = SpecialVocab.add_to_gguf

    def add_with_stops(vocab: Any, writer: Any) -> None:
        # the converter names eos, and others for some model types
        vocab.special_token_ids.update(zip(STOPS, json.loads(stops), strict=False))
        add(vocab, writer)

    SpecialVocab.add_to_gguf = add_with_stops
    if pre_tokenizer != "-":
        for kind in kinds_that_know_tokenizers(convert_hf_to_gguf):
            kind.get_vocab_base_pre = named(kind.get_vocab_base_pre, pre_tokenizer)
    sys.argv = [f"{folder}/convert_hf_to_gguf.py", *words]
    convert_hf_to_gguf.main()


def kinds_that_know_tokenizers(converter: Any) -> set[type]:
    """Return the converter's classes with the list of hashes: one file, or a package."""
    modules = converter, sys.modules.get("conversion.base", converter)
    return {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and "get_vocab_base_pre" in vars(value)
    }


def named(known: Callable[..., str], pre_tokenizer: str) -> Callable[..., str]:
    """Return a lookup that answers `pre_tokenizer` if the converter's lookup finds none."""

    def find(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return pre_tokenizer

    return find


if __name__ == "__main__":
    convert_main()
