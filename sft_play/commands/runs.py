"""`make watch`, `make compare` and `make report`: show runs during and after training.

Loads no torch, and does not change the runs.
"""

import re
import signal
import sys
import time
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sft_play.commands.call import Call, as_text, write_out
from sft_play.config.messages import refuse
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.monitor.watch import frame, heading, pipe_line
from sft_play.progress import drawing
from sft_play.reporting.run_facts import RunFacts
from sft_play.runs import folder as run_folders
from sft_play.runs.folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

MOST_RUNS = 6  # more curves cannot be distinguished
NAMES_SHOWN = 8
LONGEST_NAME = 100  # characters of the page's file name

LOOK_SECONDS = 1.0  # between two checks of the files
OTHER_NODE = re.compile(r"-node[1-9][0-9]*$")  # the folder of a machine without the main rank


def compare(call: Call, names: Iterable[str], out: str | None, as_json: bool) -> str:
    """Compare runs: write the page, and return what is printed.

    `names` of the command line take precedence over RUNS, and `out` over OUT.
    Raises: ConfigError for runs that do not exist; EnvironmentFault when the page cannot be
    written.
    """
    from sft_play.reporting import compare as comparing

    folders = named_runs(call, list(names))
    comparison = comparing.compare_runs(folders)
    joined = "-".join(folder.name for folder in folders)
    default = call.output_dir / f"compare-{joined[:LONGEST_NAME]}.html"
    named = out or call.environ.get("OUT")
    path = Path(named or default)
    write_out(path, comparing.comparison_page(comparison), call.overwrites or not named)
    if as_json:
        return as_text({**comparing.comparison_json(comparison), "page": str(path)})
    lines = comparing.comparison_lines(comparison)
    return "\n".join([*lines, "", f"page {path}"])


def write_report_again(call: Call) -> str:
    """Write the report of RUN again, or of the latest run; return the path of the page."""
    from sft_play.reporting.page import write_report

    return str(write_report(run_folders.find(call.output_dir, call.invocation.run)))


def named_runs(call: Call, names: list[str]) -> list[RunFolder]:
    """Return the runs to compare, in the order in which they were named.

    Raises: ConfigError that lists every name without a run and the nearest real ones.
    """
    given = names or call.environ.get("RUNS", "").replace(",", " ").split()
    wanted = list(dict.fromkeys(name for name in given if name))
    if not 2 <= len(wanted) <= MOST_RUNS:
        known = [folder.name for folder in run_folders.list_runs(call.output_dir)]
        latest = ", ".join(reversed(known[-NAMES_SHOWN:])) or "none; `make train` makes one"
        raise ConfigError(
            f"RUNS={','.join(wanted)}: name 2 to {MOST_RUNS} runs with commas between them, such "
            f"as RUNS=a,b. The latest runs of {call.output_dir}: {latest}"
        )
    problems = []
    folders = []
    for name in wanted:
        try:
            folders.append(run_folders.find(call.output_dir, name, "RUNS"))
        except EnvironmentFault as error:
            problems.append(str(error))
    refuse(problems)
    return folders


def watch(call: Call, output: TextIO = sys.stdout) -> None:
    """Show RUN, by default the latest run, until it ends, and then its result.

    Ctrl-C ends the display, not the run. Raises: EnvironmentFault if there is no run.
    """
    if isinstance(output, TextIOWrapper):
        output.reconfigure(errors="replace")  # a terminal without UTF-8 cannot draw curves
    run = RunFacts.read(chosen_run(call))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it also restores the terminal
    try:
        if run.goes_on:
            run = follow(run, output)
        else:
            print("\n".join(frame(run)), file=output)
    except KeyboardInterrupt:
        print(f"not watched any more; the run continues: make watch RUN={run.folder.path}")
        return
    print("\n".join(["", *verdict_lines(run)]), file=output)


def chosen_run(call: Call) -> RunFolder:
    """Return the run to watch; for a run of several machines, the folder of the first one."""
    folder = run_folders.find(call.output_dir, call.invocation.run)
    first = run_folders.named_run(folder.path.parent, OTHER_NODE.sub("", folder.name))
    return first or folder


def follow(run: RunFacts, output: TextIO) -> RunFacts:
    """Show a run until it has ended; return the final content of its folder."""
    from rich.console import Console

    console = Console(file=output, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return follow_on_terminal(run, console)
    return follow_in_pipe(run, output)


def follow_on_terminal(run: RunFacts, console: "Console") -> RunFacts:
    """Draw one frame per second on the terminal's other screen, and leave the last one visible."""
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text("\n".join(frame(run)), no_wrap=True, overflow="ellipsis")

    live = Live(drawn(), console=console, screen=True, auto_refresh=False)
    with drawing():
        try:  # no `with`: Ctrl-C while the first frame is drawn would not end it
            live.start(refresh=True)
            while run.goes_on:
                time.sleep(LOOK_SECONDS)
                run = run.read_again()
                live.update(drawn(), refresh=True)
        finally:
            live.stop()
        console.print(drawn())
    return run


def follow_in_pipe(run: RunFacts, output: TextIO) -> RunFacts:
    """Print a line for each new log, after the existing ones."""
    print(heading(run), file=output)
    while True:
        for line in run.new_lines:
            text = pipe_line(run, line)
            if text is not None:
                print(text, file=output)
        output.flush()
        if not run.goes_on:
            return run
        time.sleep(LOOK_SECONDS)
        run = run.read_again()


def verdict_lines(run: RunFacts) -> list[str]:
    """Return the result of a run, and what to type next."""
    verdict = run.verdict
    following = [f"next: {verdict.next}"] if verdict.next else []
    return [verdict.headline, *verdict.reasons, *following, f"run {run.folder.path}"]
