"""The measured quality of float8 bases: its limit, and the table in the documents."""

import pytest

from benchmarks.float8_quality import MAX_KL_SHARE, table
from benchmarks.results import Results
from sft_play.config.loader import PROJECT_ROOT
from sft_play.plan.workload import FLOAT8_KL

PATHS = sorted((PROJECT_ROOT / "benchmarks" / "results").glob("float8-quality-*.json"))


def kl_share(results: Results) -> float:
    """Return the KL of a float8 base as a share of NF4's."""
    kl = {each.arm: each.figures["kl"] for each in results.results if "kl" in each.figures}
    return kl["float8"] / kl["nf4"]


def test_the_plan_says_the_measured_shares_and_all_are_within_the_limit() -> None:
    shares = sorted(kl_share(Results.read(path)) for path in PATHS)
    assert shares[-1] <= MAX_KL_SHARE
    assert f"{shares[0]:.2f} to {shares[-1]:.2f}" == FLOAT8_KL


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_documented_table_is_that_of_the_results(path) -> None:
    page = (PROJECT_ROOT / "docs" / "evidence" / "float8.md").read_text(encoding="utf-8")
    assert set(table(Results.read(path)).splitlines()) <= set(page.splitlines())
