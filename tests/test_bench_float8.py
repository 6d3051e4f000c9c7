"""The measured quality of float8 bases: the bound that is held, and the table that documents show."""

import json

import pytest

from benchmarks.float8_quality import MAX_KL_SHARE, table
from sft_play.config.loader import PROJECT_ROOT
from sft_play.plan.workload import FLOAT8_KL

RESULTS = sorted((PROJECT_ROOT / "benchmarks" / "results").glob("float8-quality-*.json"))


def share(path) -> float:
    """Return the KL of a float8 base as a share of NF4's."""
    divergence = json.loads(path.read_text(encoding="utf-8"))["divergence"]
    return divergence["float8"]["kl"] / divergence["nf4"]["kl"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_kl_of_a_float8_base_is_at_most_a_fifth_of_nf4s(path) -> None:
    assert share(path) <= MAX_KL_SHARE


def test_the_plan_says_the_shares_that_were_measured() -> None:
    shares = sorted(share(path) for path in RESULTS)
    assert f"{shares[0]:.2f} to {shares[-1]:.2f}" == FLOAT8_KL


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_documented_table_is_that_of_the_results(path) -> None:
    page = (PROJECT_ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    for line in table(json.loads(path.read_text(encoding="utf-8"))):
        assert line in page
