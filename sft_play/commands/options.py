"""Options that several commands of the command line share."""

from typing import Annotated

import typer

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
    str | None, typer.Option("--backend", help="bnb or unsloth, whatever the config says.")
]
