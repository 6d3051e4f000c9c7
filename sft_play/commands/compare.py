"""`make compare` and `make report`. Loads no torch."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from sft_play.commands.call import Call, as_text
from sft_play.errors import ConfigError, EnvironmentFault
from sft_play.runs import folder as run_folders
from sft_play.runs.files import write_text
from sft_play.runs.folder import RunFolder

MOST_RUNS = 6  # so many curves can be told apart
NAMES_SHOWN = 8
LONGEST_NAME = 100  # characters of the page's file name


def compare(call: Call, names: Iterable[str], out: str | None, as_json: bool) -> str:
    """Compare runs: write the page, and return what is printed.

    `names` of the command line win over RUNS, and `out` over OUT.
    Raises: ConfigError for runs that do not exist; EnvironmentFault when the page cannot be
    written.
    """
    from sft_play.reporting import compare
    from sft_play.reporting.compare import compare as compare_runs

    folders = named_runs(call, list(names))
    comparison = compare_runs(folders)
    path = Path(out or call.environ.get("OUT") or default_page(call, folders))
    try:
        write_text(path, compare.comparison_page(comparison))
    except OSError as error:
        raise EnvironmentFault(
            f"OUT={path}: {error.strerror}; name a file in a folder that can be written"
        ) from None
    if as_json:
        return as_text({**compare.comparison_json(comparison), "page": str(path)})
    lines = compare.comparison_lines(comparison)
    return "\n".join([*lines, "", f"page {path}"])


def write_report_again(call: Call) -> str:
    """Write the report of RUN anew, or of the latest run; return the path of the page."""
    from sft_play.reporting.page import write_report

    return str(write_report(run_folders.find(call.output_dir, call.invocation.run)))


def named_runs(call: Call, names: list[str]) -> list[RunFolder]:
    """Return the runs to compare, in the order in which they were named.

    Raises: ConfigError that lists every name without a run and the nearest real ones.
    """
    given = names or call.environ.get("RUNS", "").replace(",", " ").split()
    wanted = list(dict.fromkeys(name for name in given if name))
    known = [folder.name for folder in run_folders.listing(call.output_dir)]
    if not 2 <= len(wanted) <= MOST_RUNS:
        raise ConfigError(
            f"RUNS={','.join(wanted)}: name 2 to {MOST_RUNS} runs with commas between them, such "
            f"as RUNS=a,b; {_known_runs(call, known)}"
        )
    problems = []
    folders = []
    for name in wanted:
        try:
            folders.append(run_folders.find(call.output_dir, name))
        except EnvironmentFault:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else _known_runs(call, known)
            problems.append(f"RUNS: no run is named {name}; {hint}")
    if problems:
        raise ConfigError("\n".join(problems))
    return folders


def default_page(call: Call, folders: list[RunFolder]) -> Path:
    """Return where the page goes without OUT: beside the runs, with their names."""
    names = "-".join(folder.name for folder in folders)
    return call.output_dir / f"compare-{names[:LONGEST_NAME]}.html"


def _known_runs(call: Call, known: list[str]) -> str:
    if not known:
        return f"{call.output_dir} holds no run yet; `make train` makes one"
    latest = known[-NAMES_SHOWN:][::-1]
    return f"the latest runs of {call.output_dir} are {', '.join(latest)}"
