"""The tasks of lm-eval that eval scores: the variables TASKS, LIMIT, FEWSHOT and TEMPLATE. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from sft_play.config.invocation import Words
from sft_play.config.messages import refuse

OF_TASKS = ("LIMIT", "FEWSHOT", "TEMPLATE")  # what says something of TASKS, and of nothing else
VARIABLES = frozenset({"TASKS", *OF_TASKS})


@dataclass(frozen=True)
class TasksAsked:
    """Tasks of lm-eval by name, or YAML files of own ones, and how they are asked."""

    names: tuple[str, ...]
    limit: int | None = None  # of the questions of each task; None: all
    fewshot: int | None = None  # solved examples before a question; None: as the task says
    has_template: bool = False  # questions are written with the chat template


def read_tasks(environ: Mapping[str, str]) -> TasksAsked | None:
    """Return what the variables ask for, None where they name no task.

    Raises: ConfigError that lists every wrong one.
    """
    words = Words(environ)
    names = (words.text("TASKS") or "").replace(",", " ").split()
    asked = TasksAsked(
        names=tuple(dict.fromkeys(names)),
        limit=words.whole_number("LIMIT", 1),
        fewshot=words.whole_number("FEWSHOT", 0),
        has_template=words.choice("TEMPLATE", ("0", "1")) == "1",
    )
    if not names:
        for name in filter(words.text, OF_TASKS):
            words.problems.append(
                f"{name}: is for tasks of lm-eval; name them with TASKS=hellaswag"
            )
    elif words.text("DATA_TEST_PATH"):
        words.problems.append("TASKS and DATA_TEST_PATH: score them in two calls")
    refuse(words.problems)
    return asked if names else None
