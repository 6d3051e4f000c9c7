"""The commands that use a run: eval, infer, chat, merge, export, serve, push.

No logic, and no torch until one runs.
"""

import sys
from typing import Annotated

import typer

from sft_play.commands import answering, exports, scoring, use
from sft_play.commands.options import SetOption

app = typer.Typer()


@app.command("eval")
def evaluate(set_: SetOption = None) -> None:
    """Score RUN (a run, a model folder, an adapter) on its test rows or DATA_TEST_PATH."""
    run = use.chosen_weights()
    asked = use.settings_of(run, "eval", set_)
    device = use.inference_device()
    for line in scoring.score_run(run, device, asked, set_ or (), use.compares(run)):
        typer.echo(line)


@app.command()
def infer(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The question; default PROMPT, else one a line of standard input."),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Answer questions with the weights of a run; those of a file with IN and OUT."""
    run = use.chosen_weights()
    asked = use.file_call(run, prompt, set_)
    if asked is not None:
        for line in answering.answer_file(asked, set_ or ()):
            typer.echo(line)
        return
    config = use.settings_of(run, "infer", set_).config
    request = use.sampling()
    from sft_play.inference.chat import answer_all

    for answer in answer_all(run, use.inference_device(), use.prompts(prompt), config, request):
        typer.echo(answer)  # flushes: a program that reads line by line need not wait


@app.command()
def chat(set_: SetOption = None) -> None:
    """Talk to the weights of a run; /help lists the commands, /exit leaves."""
    run = use.chosen_weights()
    config = use.settings_of(run, "chat", set_).config
    request = use.sampling()
    from sft_play.inference.chat import chat_with

    is_terminal = sys.stdin.isatty()
    chat_with(run, use.inference_device(), config, is_terminal, request, use.compares(run))


@app.command()
def merge(set_: SetOption = None) -> None:
    """Merge a run's adapter into its base, in MODEL_DTYPE: a model folder that needs no PEFT."""
    run = use.chosen_run(("adapter",))
    dtype = use.asked_dtype(run, set_)
    from sft_play.inference.merge import merge_run

    typer.echo("\n".join(merge_run(run, dtype)))


@app.command()
def export(set_: SetOption = None) -> None:
    """Write a run's weights as other programs take them (FORMAT), held to what was scored."""
    run = use.chosen_run()
    asked = exports.read_export(run, set_)
    from sft_play.inference.export import export_run

    typer.echo("\n".join(export_run(run, asked, use.inference_device())))


@app.command()
def serve() -> None:
    """Serve a run's export, on this machine alone: vLLM or transformers' own server."""
    from sft_play.commands import serve as serving

    run = use.chosen_run()
    folder = exports.chosen_export(run, serving.SERVED)
    address = serving.read_address()
    launch = serving.server_of(folder, address, use.inference_device())
    typer.echo("\n".join(serving.lines_of(folder, address, launch, run.name)))
    serving.start(launch)


@app.command("check-server")
def check_server() -> None:
    """Hold a server (URL) to an export's parity.jsonl: prompt tokens, stops and answers."""
    from sft_play.commands import check_server as checking

    server = checking.Server.asked()
    typer.echo("\n".join(checking.check_server(server, exports.parity_rows())))


@app.command()
def push() -> None:
    """Upload a run's export to the hub (REPO), private unless PUBLIC=1."""
    from sft_play.commands import push as pushing

    folder = exports.chosen_export(use.chosen_run())
    typer.echo("\n".join(pushing.push(folder)))
