"""What the files of a base model say for model cards and for programs that load it. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sft_play.config.loader import environment
from sft_play.config.schema import ModelSection
from sft_play.plan.config_json import find_file, is_composite
from sft_play.runs.files import read_json

LICENCE_LINE = re.compile(r"^licen[sc]e(?:_name)?:\s*(\S.*?)\s*$", re.MULTILINE)
LICENCE_FILES = "LICENSE LICENSE.txt LICENSE.md LICENCE COPYING".split()
CAUSAL = "AutoModelForCausalLM"
# else PEFT would put adapters over products in 8 bits
DEQUANTIZED_BY = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


@dataclass(frozen=True)
class BaseFacts:
    """A base model, by what its files state."""

    model: ModelSection
    config: Mapping[str, Any]  # config.json in its folder or the hub's cache; {} if there is none

    @classmethod
    def read(cls, model: ModelSection) -> Self:
        """Return the facts of a base."""
        path = find_file(model.name, "config.json", model.revision, environment())
        return cls(model, {} if path is None else read_json(path))

    @property
    def has_soft_caps(self) -> bool:
        """Whether attention scores are capped, which transformers' sdpa leaves out."""
        text = self.config.get("text_config") or self.config
        return text.get("attn_logit_softcapping") is not None

    @property
    def model_class(self) -> str:
        """The class of transformers that opens the base, and what was trained on it."""
        declared = self.config.get("architectures")
        return declared[0] if declared and is_composite(self.config) else CAUSAL

    @property
    def dequantized_by(self) -> str | None:
        """The config of transformers that reads the base as training did, None if it needs none."""
        return DEQUANTIZED_BY.get(
            (self.config.get("quantization_config") or {}).get("quant_method")
        )

    @property
    def licence(self) -> str | None:
        """What the base's folder says of its licence, None if it says nothing."""
        folder = Path(self.model.name)
        readme = folder / "README.md"
        if readme.is_file():
            _, _, rest = readme.read_text(encoding="utf-8", errors="replace").partition("---\n")
            found = LICENCE_LINE.search(rest.partition("\n---")[0])
            if found is not None:
                return f"{found[1]} (README.md of the base)"
        for name in LICENCE_FILES:
            if (folder / name).is_file():
                return f"{name} in the base's folder"
        return None
