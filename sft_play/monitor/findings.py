"""What `make doctor` reports: one finding for each thing that it looked at. Pure."""

from dataclasses import dataclass
from typing import Literal

from sft_play.errors import ExitClass

Level = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` is what to type, empty where nothing needs fixing."""

    level: Level
    subject: str
    found: str
    fix: str = ""


def exit_class(findings: list[Finding]) -> ExitClass:
    """Return ENVIRONMENT when something is missing, else DONE; a warning does not fail."""
    is_missing = any(finding.level == "missing" for finding in findings)
    return ExitClass.ENVIRONMENT if is_missing else ExitClass.DONE


def report_lines(findings: list[Finding]) -> list[str]:
    """Return the findings as aligned lines, each fix below its finding."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.subject:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<7}  {'':<{width}}  fix: {finding.fix}")
    return lines
