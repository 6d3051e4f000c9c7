"""Count and trace the well-known models again: the two files that the planner ships.

python -m tools.known_models structures    # sft_play/plan/known_models.json
python -m tools.known_models traces        # sft_play/plan/known_traces.json
"""

import json
import sys
from typing import Any

from sft_play.config.schema import Config
from sft_play.models.fake_model import load_architecture
from sft_play.models.structure import count_structure
from sft_play.models.trace import answer
from sft_play.plan.config_json import KNOWN, is_composite
from sft_play.plan.counting import KNOWN_SETTINGS, KNOWN_TRACES, known_setting, traced_settings
from sft_play.plan.model_shape import LLAMA_LIKE
from sft_play.plan.structure import structure_as_json, structure_from_json
from sft_play.runs.files import write_text


def write_structures() -> None:
    """Count the well-known models that are not like Llama, and write their file again."""
    models = json.loads(KNOWN.read_text(encoding="utf-8"))
    lines = []
    for name, facts in models.items():
        if facts["model_type"] not in LLAMA_LIKE or is_composite(facts):
            config = Config.model_validate({"model": {"name": name}})
            facts["structure"] = structure_as_json(count_structure(load_architecture(config)))
        lines.append(f"  {json.dumps(name)}: {json.dumps(facts)}")
    write_text(KNOWN, "{\n" + ",\n".join(lines) + "\n}\n")


def known_trace(name: str, word: str) -> dict[str, Any] | None:
    """Return the trace of a well-known model with some of KNOWN_SETTINGS, as it ships.

    None if the code of the model cannot be traced.
    """
    settings = traced_settings(known_setting(name, word), is_half=True)
    found = answer({"settings": settings, "device": "cuda", "zero_stage": 0})
    return json.loads(json.dumps(found.get("answer")))


def write_traces() -> None:
    """Trace the well-known models that the closed form does not fit, and write their file again.

    Those with recurrent layers are left out: which kernels compute them depends on the machine.
    """
    lines = []
    for name, facts in json.loads(KNOWN.read_text(encoding="utf-8")).items():
        if "structure" not in facts or facts["model_type"] in LLAMA_LIKE:
            continue
        structure = structure_from_json(facts["structure"])
        if structure.recurrent_layers:
            continue
        words = [word for word in KNOWN_SETTINGS if structure.experts or "-" not in word]
        traces = {word: trace for word in words if (trace := known_trace(name, word))}
        if traces:
            lines.append(f"  {json.dumps(name)}: {json.dumps(traces)}")
    write_text(KNOWN_TRACES, "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    {"structures": write_structures, "traces": write_traces}[sys.argv[1]]()
