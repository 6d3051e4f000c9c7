"""Faults of what is around a run: the folder of the call, names of files, shared memory, HOME."""

import re
import subprocess
from pathlib import Path

import markdown

from faults.bench import Bench, Fault, Guard, Outcome
from faults.files import nothing
from sft_play.config.schema import Config
from sft_play.errors import ExitClass
from sft_play.reporting.card_facts import CardFacts, ChosenSetting
from sft_play.reporting.model_card import card_text
from sft_play.runs.exports import SavedStops
from sft_play.runs.report import RunReport

ROOT = Path(__file__).resolve().parents[2]


def from_elsewhere(bench: Bench) -> Outcome:
    """`make -f` names the Makefile from another folder."""
    path = ROOT / "Makefile"
    if bench.guard is not None:
        before, _, rest = path.read_text().partition("ifeq ($(wildcard sft_play/cli.py),)")
        path = bench.folder / "Makefile"
        path.write_text(before + rest.partition("endif\n")[2])
    command = ["make", "-f", str(path), "help"]
    done = subprocess.run(command, cwd=bench.folder.parent, capture_output=True, text=True)
    return Outcome(0, done.stderr)


def hostile_names(bench: Bench) -> Outcome:
    """Rows, a base, its licence and a stop whose names hold HTML, Markdown and the end of a cell."""
    name = "<img src=x onerror=alert(1)> ![](http://a.b/c) | ` .jsonl"
    config = {"model": {"name": name, "max_seq_len": 256}, "train": {"learning_rate": 0.1}}
    rows = {"rows_in": 1, "rows_used": 1, "tokens": 1, "trained_tokens": 1}
    report = RunReport(run="a", data={"train": {**rows, "sources": [{"name": name}]}})
    facts = CardFacts([], [ChosenSetting("model.name", name, "x")], None, None, name)
    stops = SavedStops((name,), (7,))
    text = card_text(Config.model_validate(config), report, stops, bench.folder, facts)
    page = markdown.markdown(text, extensions=["tables", "fenced_code"])
    obeyed = re.findall("<img|<a ", page)
    return Outcome(len(obeyed), f"{len(obeyed)} of {page.count('onerror')} names were obeyed")


ROWS = (
    Fault(
        "other-folder",
        "make -f names the Makefile from another folder",
        from_elsewhere,
        ExitClass.DONE,
        ("this is not the folder of the Makefile: type make -C '",),
        Guard("sft_play.config.targets:refuse_unread", nothing),
        10,
        None,
        True,
    ),
    Fault(
        "html-in-names",
        "names of rows, base, licence and stop hold HTML and Markdown; the model card has them",
        hostile_names,
        ExitClass.DONE,
        ("0 of ", " names were obeyed"),
        Guard("sft_play.reporting.model_card:code", str),
        10,
        None,
        True,
    ),
)
