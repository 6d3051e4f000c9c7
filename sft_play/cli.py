"""The command line: `python -m sft_play <command>`. No logic: every command calls another module.

Make passes its variables (CONFIG, RUN, NUM_GPUS, TRAIN_BATCH_SIZE, ...) in the environment, so that
no shell interprets their values.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from sft_play import cli_use
from sft_play.commands import each_gpu
from sft_play.commands import launched as launching
from sft_play.commands import plan as planning
from sft_play.commands import rows as reading
from sft_play.commands import train as training
from sft_play.commands.call import as_text, load_config, plan_run, read_call, without_meeting
from sft_play.commands.launched import Launched
from sft_play.commands.options import (
    BackendOption,
    Commands,
    ConfigOption,
    DeepspeedOption,
    DistributedOption,
    JsonOption,
    SetOption,
    echo_lines,
)
from sft_play.config import loader, targets
from sft_play.errors import ExitClass, SftPlayError, disk_errors_in_words, memory_errors_in_words
from sft_play.masking import mask_secrets
from sft_play.progress import drop_unwritten_output, guard_output, log_to_stderr, visible

MAX_SHOWN = 10_000  # characters of an error, which may name what a file has
app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(targets.shown or str)(
        "Supervised fine-tuning, from a YAML file to a checked adapter. Settings are words after "
        "a command, such as MODEL_NAME=Qwen/Qwen2.5-0.5B DATA_TRAIN_PATH=rows.jsonl, or variables "
        "of the environment; `make config` lists them."
    ),
)


@app.callback()
def before(context: typer.Context) -> None:
    environ = loader.environment()
    targets.refuse_unread_variables(environ)
    command = context.invoked_subcommand or ""
    unread = targets.unread_settings(command, environ)
    if unread:
        names = ", ".join(unread)
        typer.echo(f"warning: {command} does not read {names} of the environment", err=True)


@app.command("check-variables", hidden=True)
def check_variables() -> None:
    """Check the variables of a make call, as every command does, and that its targets exist."""
    targets.refuse_unknown_targets(loader.environment())


@app.command()
def config(config: ConfigOption = None, set_: SetOption = None, json: JsonOption = False) -> None:
    """Show the merged settings, each with its origin."""
    from sft_play.config import present

    loaded = load_config(read_call(config, set_))
    if json:
        typer.echo(as_text(present.settings_json(loaded)))
    else:
        echo_lines(present.as_lines(loaded))


@app.command()
def schema() -> None:
    """Print the JSON schema of a config file."""
    from sft_play.config import present

    typer.echo(as_text(present.json_schema()))


@app.command()
def plan(
    config: ConfigOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Plan for other hardware, such as 2xH200 or 4x4090."),
    ] = None,
    distributed: DistributedOption = False,
    deepspeed: DeepspeedOption = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Plan by a trace of the real model without its weights: exact bytes."
        ),
    ] = False,
) -> None:
    """Show what a run would do here or on the hardware named: memory, batch, speed, command."""
    called = without_meeting(read_call(config, set_, gpus, exact=exact))
    planned = planning.plan_for_display(called, distributed, deepspeed)
    typer.echo(planning.plan_text(called, planned, json))
    if not planned.plan.fits and not planned.plan.is_batch_explicit:
        raise typer.Exit(int(ExitClass.OUT_OF_MEMORY))


@app.command()
def slurm(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Write the batch script of a run for Slurm; it is submitted with sbatch."""
    from sft_play.commands import slurm as scripts

    typer.echo(scripts.slurm(read_call(config, set_)))


@app.command()
def train(
    context: typer.Context,
    config: ConfigOption = None,
    set_: SetOption = None,
    distributed: DistributedOption = False,
    deepspeed: DeepspeedOption = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Start TensorBoard with the run.")
    ] = False,
    backend: BackendOption = None,
) -> None:
    """Fine-tune: evaluate, train, evaluate, save and check."""
    launched: Launched | None = context.obj
    called = read_call(config, set_, environ=launched.environ if launched else None)
    training.train(called, distributed, deepspeed, tensorboard, backend, launched)


@app.command("data-check")
def data_check(
    config: ConfigOption = None, set_: SetOption = None, json: JsonOption = False
) -> None:
    """Read and render all rows as a run would, and account for each."""
    called = read_call(config, set_)
    planned = plan_run(called, load_config(called))
    reading.data_check(planned, json)


@app.command()
def init(set_: SetOption = None) -> None:
    """Write a commented config for a model, rows and this machine, with a reason for each line."""
    from sft_play.commands import init as initial

    echo_lines(initial.init(read_call(None, set_)))


@app.command("convert-notebook")
def convert_notebook() -> None:
    """Convert an Unsloth notebook (NB) for several GPUs: to OUT=x.ipynb, train.py or x.yaml."""
    from sft_play.commands import notebook

    echo_lines(notebook.convert_notebook(read_call()))


@app.command("check-notebook")
def check_notebook() -> None:
    """Score a notebook (NB) by the five points of one for several GPUs."""
    from sft_play.commands import notebook

    lines, is_converted = notebook.check_notebook(read_call())
    echo_lines(lines)
    raise typer.Exit(0 if is_converted else int(ExitClass.CONFIG))


@app.command()
def preview(
    config: ConfigOption = None,
    set_: SetOption = None,
    rows: Annotated[
        int,
        typer.Option(
            "--rows", min=0, help="How many of the first samples; the instructive ones come on top."
        ),
    ] = 3,
    page: Annotated[
        str | None,
        typer.Option(
            "--page", help="Where the page goes; default preview.html in train.output_dir."
        ),
    ] = None,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Mark what is trained with ⟦ ⟧ instead of a color.")
    ] = False,
) -> None:
    """Show training samples token by token, trained ones marked: here, and as a page."""
    called = read_call(config, set_)
    loaded = load_config(called)
    planned = plan_run(called, loaded)
    typer.echo(reading.preview(planned, loaded.source, rows, page, no_color, called.overwrites))


@app.command("setup-accelerate")
def setup_accelerate(config: ConfigOption = None) -> None:
    """Write the accelerate file that train-distributed uses; asks nothing."""
    echo_lines(training.setup_accelerate(read_call(config)))


@app.command("gpu-info")
def gpu_info(json: JsonOption = False) -> None:
    """Show GPUs, memory, links, and what runs on this host."""
    from sft_play.monitor import gpus

    environ = read_call().environ
    if json:
        typer.echo(as_text(gpus.gpu_facts(environ)))
    else:
        echo_lines(gpus.gpu_info_lines(environ))


@app.command("memory-check")
def memory_check() -> None:
    """Show memory and load of each GPU now, and who holds it."""
    from sft_play.monitor.memory import memory_check_lines

    called = read_call()
    echo_lines(memory_check_lines(called.environ, called.output_dir))


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Check versions, GPUs, compilers and disk; print the command that fixes what is missing."""
    from sft_play.monitor import doctor as checks
    from sft_play.monitor import packages

    called = read_call()
    num_gpus = called.invocation.num_gpus
    findings = checks.examine(loader.PROJECT_ROOT, called.output_dir, called.environ, num_gpus)
    if json:
        typer.echo(as_text([asdict(finding) for finding in findings]))
    else:
        echo_lines(packages.report_lines(findings))
    raise typer.Exit(int(packages.exit_class(findings)))


@app.command()
def tensorboard() -> None:
    """Show all runs in TensorBoard."""
    called = read_call()
    typer.echo(training.start_tensorboard(called, called.output_dir))


@app.command("tb-stop")
def tb_stop() -> None:
    """Stop the TensorBoard that this project started."""
    from sft_play.monitor import tensorboard as board

    call = read_call()
    typer.echo(board.stop(call.pid_file, port=call.words.whole_number("TB_PORT", 1, 65535)))


@app.command()
def runs(json: JsonOption = False) -> None:
    """List the runs with status and scores."""
    from sft_play.monitor import watch

    output_dir = read_call().output_dir
    if json:
        typer.echo(as_text(watch.runs_json(output_dir)))
    else:
        echo_lines(watch.run_table(output_dir))


@app.command()
def watch() -> None:
    """Follow a run (RUN, default the latest) until it ends: progress, loss, speed, GPUs."""
    from sft_play.commands import runs as watching

    watching.watch(read_call())


@app.command()
def compare(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Names of runs; default RUNS=a,b.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Where the page goes; default compare-….html next to the runs."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Put runs side by side: scores, settings that differ, speed, memory, and a page."""
    from sft_play.commands import runs as comparing

    typer.echo(comparing.compare(read_call(), runs or (), out, json))


@app.command()
def report() -> None:
    """Write report.html of a run (RUN, default the latest) again, also of one that was killed."""
    from sft_play.commands import runs as comparing

    typer.echo(comparing.write_report_again(read_call()))


app.add_typer(cli_use.app)


def main(words: Sequence[str] | None = None, launched: Launched | None = None) -> None:
    """Run the command line; an error of ours is one message and its exit class."""
    guard_output(targets.shown)
    log_to_stderr()
    with _errors_as_messages():
        name = "sft-play" if targets.shown else "python -m sft_play"
        app(words, prog_name=name, obj=launched)


def main_of_process() -> None:
    """Run the command line of this process; one of several that train is a rank."""
    each_gpu.end_with_command(loader.environment())
    if sys.argv[1:2] == ["train"] and launching.is_placed(loader.environment()):
        main_of_rank(sys.argv[2:])
    else:
        main()


def main_of_rank(words: Sequence[str]) -> None:
    """Train in the process of a launcher that the user started himself, or of none.

    The first process of each machine runs `train` with these words, the others wait for it.
    """
    guard_output(targets.shown)
    own_words, named = launching.named_json(launching.own_words(words))
    words = ["train", *own_words]
    with _errors_as_messages():
        launched = launching.read_launch({**loader.environment(), **named})
        if launched.is_surplus:
            return
        if launched.place is not None and launched.place.local_rank > 0:
            launching.follow(launched)
        for warning in launched.warnings:
            typer.echo(f"warning: {warning}")
        if launched.place is None:
            return main(words, launched)
        meeting = launching.Meeting(launched.place)
    with meeting, _errors_as_messages():
        main(words, launching.lead(launched, meeting))


@contextlib.contextmanager
def _errors_as_messages() -> Iterator[None]:
    try:
        with disk_errors_in_words(), memory_errors_in_words(), _written_output():
            yield
    except SftPlayError as error:
        code = int(error.exit_class)
        text = visible(
            mask_secrets(
                f"{str(error)[:MAX_SHOWN]}\nexit class {code} ({error.exit_class.name.lower()})"
            )
        )
        launching.tell_launcher(text)
        with contextlib.suppress(OSError):  # the exit code says it, too
            sys.stderr.write(f"{text}\n")
        drop_unwritten_output()
        sys.exit(code)


@contextlib.contextmanager
def _written_output() -> Iterator[None]:
    """Write what was printed while an error still has a class; a reader that left needs no more."""
    try:
        yield
    except SystemExit:
        _write_output()
        raise
    _write_output()


def _write_output() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_unwritten_output()
