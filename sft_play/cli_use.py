"""The commands that use a run: eval, infer, chat, merge, export, serve, push.

No logic, and no torch until one runs.
"""

import sys
from typing import Annotated

import typer

from sft_play.commands import each_gpu, exports, use
from sft_play.commands.call import read_call
from sft_play.commands.options import SetOption, echo_lines
from sft_play.config.invocation import read_sampling
from sft_play.progress import drawing

app = typer.Typer()


@app.command("eval")
def evaluate(set_: SetOption = None) -> None:
    """Score RUN (a run, a model folder, an adapter) on its test rows or DATA_TEST_PATH."""
    call = read_call(None, set_)
    run = use.chosen_weights(call)
    tasks = call.words.text("TASKS")
    for line in use.lm_eval_lines(run, tasks) if tasks else each_gpu.score_run(call, run):
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
    call = read_call(None, set_)
    run = use.chosen_weights(call)
    asked = each_gpu.FileCall.read(call, run, prompt)
    if asked is not None:
        for line in each_gpu.answer_file(asked):
            typer.echo(line)
        return
    config = use.settings_with_given(call, run, "infer").config
    request = read_sampling(call.environ)
    from sft_play.inference.chat import answer_all

    device, questions = call.machine.kind, use.prompts(call, prompt)
    for answer in answer_all(run, device, questions, config, request, use.images(call)):
        with drawing():  # an answer is written as it is
            typer.echo(answer)  # flushes: a program that reads line by line need not wait


@app.command()
def chat(set_: SetOption = None) -> None:
    """Talk to the weights of a run; /help lists the commands, /exit leaves."""
    call = read_call(None, set_)
    run = use.chosen_weights(call)
    config = use.settings_with_given(call, run, "chat").config
    request = read_sampling(call.environ)
    from sft_play.inference.chat import chat_with

    device = call.machine.kind
    chat_with(run, device, config, sys.stdin.isatty(), request, use.compares(call, run))


@app.command()
def merge(set_: SetOption = None) -> None:
    """Merge a run's adapter into its base, in MODEL_DTYPE: a model folder that needs no PEFT."""
    call = read_call(None, set_)
    run = use.chosen_run(call, ("adapter",))
    dtype = use.asked_dtype(call, run)
    from sft_play.inference.merge import merge_run, not_scored

    with use.used_alone(run, "merge"):
        lines = merge_run(run, dtype)
    echo_lines([*lines, *not_scored(run.read_config())])


@app.command()
def export(set_: SetOption = None) -> None:
    """Write a run's weights as other programs take them (FORMAT), held to what was scored."""
    call = read_call(None, set_)
    run = use.chosen_run(call)
    asked = exports.read_export(call, run)
    from sft_play.inference.export import export_run

    with use.used_alone(run, "export"):
        lines = export_run(run, asked, call.machine.kind)
    echo_lines(lines)


@app.command()
def serve() -> None:
    """Serve a run's export, only on this machine, with vLLM or by SFT-Play itself."""
    exports.serve(read_call())


@app.command("check-server")
def check_server() -> None:
    """Hold a server (URL) to an export's parity.jsonl: prompt tokens, stops and answers."""
    from sft_play.commands import check_server as checking

    call = read_call()
    server = checking.RemoteServer.asked(call)
    echo_lines(checking.check_server(server, exports.read_parity_rows(call)))


@app.command()
def push() -> None:
    """Upload a run's export to the hub (REPO), private unless PUBLIC=1."""
    from sft_play.commands.push import push as push_export

    echo_lines(push_export(read_call()))
