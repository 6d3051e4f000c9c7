"""The group of all commands, and the options that several of them share."""

import difflib
import itertools
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sft_play.config import loader, targets
from sft_play.errors import ConfigError

ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="Config file, or a name in configs/; default CONFIG, else the embedded default.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting, such as train.batch_size=4; may be repeated, wins over everything.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DistributedOption = Annotated[
    bool, typer.Option("--distributed", help="Use every GPU that is there, or NUM_GPUS.")
]
DeepspeedOption = Annotated[
    bool, typer.Option("--deepspeed", help="Use DeepSpeed ZeRO, configured by DEEPSPEED_CONFIG.")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="bnb or unsloth; overrides the config.")
]
# Options of train, by the parts of a target's name
OF_TARGET = {
    "tb": "--tensorboard",
    "bnb": "--backend bnb",
    "unsloth": "--backend unsloth",
    "distributed": "--distributed",
    "deepspeed": "--distributed --deepspeed",
}


def echo_lines(lines: Iterable[str]) -> None:
    """Print lines at once."""
    typer.echo("\n".join(lines))


class Commands(TyperGroup):
    """The commands. They also accept make's targets and variables: `train-tb RUN=a`.

    Unknown commands and options are refused with the most likely intended one.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command's name, the command and its words. Raises: ConfigError."""
        target, *words = args
        name = target
        if target in targets.READS and target.startswith("train-"):
            name, *modes = target.split("-")
            for mode in modes:
                words += OF_TARGET[mode].split()
        known = targets.OURS | targets.SYNONYMS.keys()
        parts = [word.partition("=") for word in words]
        variables = {part: value for part, equals, value in parts if equals and part in known}
        if variables:
            call = {targets.GIVEN: " ".join(variables), targets.GOALS: target}
            loader.set_variables(variables | call)
            words = [word for word in words if word.partition("=")[0] not in variables]
        if name not in self.commands:
            raise ConfigError(targets.no_such_target(name))
        params = self.commands[name].params
        options = ["--help", *(option for param in params for option in param.opts)]
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            # typer itself suggests an option with a similar spelling
            near = difflib.get_close_matches(option, options, cutoff=0.8)
            if option.startswith("--") and not near:
                raise ConfigError(targets.no_such_option(option, name))
        return super().resolve_command(ctx, [name, *words])
