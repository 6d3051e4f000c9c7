"""The scores of generated answers by name, and which of them cannot be computed here. Loads little.

ROUGE-L is always among the scores of answers; `train.metrics` names others.
"""

import ast
import difflib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sft_play import reading

OF_TEXT = "rouge1 rouge2 rougeL exact_match json_valid".split()
OF_SACREBLEU = ("bleu", "chrf")
SCHEMA = "json_schema:"  # and a file
FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
WRITE = "rouge1, rouge2, exact_match, bleu, chrf, json_valid, json_schema:FILE or FILE.py:FUNCTION"
ALWAYS = "rougeL"
LOSS = "loss"


def list_names(value: Any) -> Any:
    """Return a list: of names with commas between them, or of none."""
    if value in (None, False, "none", "no", "off", ["none"]):
        return []
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def score_name(metric: str) -> str:
    """Return the name of a metric's score: `json_schema`, or that of the function."""
    if metric.startswith(SCHEMA):
        return "json_schema"
    function = FUNCTION.fullmatch(metric)
    return function["name"] if function else metric


def find_metric_problems(metrics: Sequence[str]) -> list[str]:
    """Return why metrics cannot be computed, and what to type; [] if all can."""
    problems = [problem for metric in metrics if (problem := _problem(metric))]
    keys = Counter(map(score_name, metrics))
    twice = sorted(key for key, times in keys.items() if times > 1)
    return [*problems, *(f"{key} is there twice; its scores have one name" for key in twice)]


def produced(metrics: Sequence[str], generates: bool) -> list[str]:
    """Return the names of the scores of an evaluation during training."""
    found = [LOSS]
    if generates:
        found += dict.fromkeys((ALWAYS, *map(score_name, metrics)))
    return [f"eval_{name}" for name in found]


def is_higher_better(score: str) -> bool:
    """Return whether more of a score is better: of all but losses."""
    return score.removeprefix("eval_") != LOSS and not score.endswith(f"_{LOSS}")


def _problem(metric: str) -> str | None:
    if metric in OF_TEXT:
        return None
    if metric in OF_SACREBLEU:
        if importlib.util.find_spec("sacrebleu") is None:
            return f"{metric} needs sacrebleu, which is not installed: pip install sacrebleu"
        return None
    if metric.startswith(SCHEMA):
        return _problem_with_schema(Path(metric.removeprefix(SCHEMA)))
    function = FUNCTION.fullmatch(metric)
    if function and function["name"].endswith("_loss"):
        return f"{metric}: names of the losses of sources end in _loss; rename the function"
    if function:
        return _problem_with_function(Path(function["file"]), function["name"])
    near = difflib.get_close_matches(metric, (*OF_TEXT, *OF_SACREBLEU), n=1)
    meant = f"did you mean {near[0]}? Metrics" if near else "metrics"
    return f"{metric} is no metric; {meant} are {WRITE}"


def _problem_with_schema(path: Path) -> str | None:
    if importlib.util.find_spec("jsonschema") is None:
        return "json_schema needs jsonschema, which is not installed: pip install jsonschema"
    try:
        schema = json.loads(reading.read_bytes(path))
    except OSError as error:
        return f"{path}: the schema cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{path}: the schema is no JSON ({error})"
    return None if isinstance(schema, dict | bool) else f"{path}: a schema is a JSON object"


def _problem_with_function(path: Path, name: str) -> str | None:
    try:
        tree = ast.parse(reading.read_bytes(path))
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{path}: is no Python: {error}"
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name in functions:
        return None
    return f"{path} has no function {name}; it has {', '.join(functions) or 'none'}"
