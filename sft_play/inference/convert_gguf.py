"""Run llama.cpp's converter of Hugging Face folders, with a given pre-tokenizer.

A script: `gguf_tools` starts it by its path in a separate process, so that nothing of this
project is imported there. The converter identifies a tokenizer by a hash over its vocabulary. It
therefore knows no tokenizer with additional tokens, however common its rules are.
    python -P convert_gguf.py <llama.cpp> <pre-tokenizer or -> <words of the converter>...
"""

import sys
from collections.abc import Callable
from typing import Any


def convert_main() -> None:
    """Convert."""
    folder, pre_tokenizer, *words = sys.argv[1:]
    sys.path[:0] = [folder, f"{folder}/gguf-py"]
    import convert_hf_to_gguf

    if pre_tokenizer != "-":
        for kind in kinds_that_know_tokenizers(convert_hf_to_gguf):
            kind.get_vocab_base_pre = named(kind.get_vocab_base_pre, pre_tokenizer)
    sys.argv = [f"{folder}/convert_hf_to_gguf.py", *words]
    convert_hf_to_gguf.main()


def kinds_that_know_tokenizers(converter: Any) -> list[type]:
    """Return the converter's classes with the list of hashes: one file, or a package."""
    modules = [converter]
    if "conversion" in sys.modules:
        import conversion.base

        modules.append(conversion.base)
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and "get_vocab_base_pre" in vars(value)
    }
    return list(found)


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
