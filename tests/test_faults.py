"""The fault matrix: each row is injected for real, keeps its contract, and needs its guard."""

import os

import pytest
from faults import page
from faults.bench import EVERY_STEP, Bench, Fault, meet, meet_without_guard
from faults.table import FAULTS


@pytest.fixture(scope="session")
def saved(train_run):
    """A run of three steps with a checkpoint of each."""
    folder = train_run(EVERY_STEP | {"train.max_steps": 3})
    return folder


@pytest.fixture
def bench(saved, plan_run, run_worker, settings_of, uninterrupted, tmp_path, request):
    """What an injection has at hand."""

    def taught():
        return request.getfixturevalue("taught_base")

    settings = settings_of({})
    return Bench(tmp_path, plan_run, run_worker, saved, settings, taught, uninterrupted)


def of_tier(is_quick: bool) -> list:
    return [pytest.param(row, id=row.name) for row in FAULTS if row.is_quick == is_quick]


def check_met(row: Fault, bench: Bench) -> None:
    """Assert that a row keeps its contract."""
    broken, _, seconds = meet(row, bench)
    page.note("rows", row.name, kept=not broken, problems=broken, seconds=seconds)
    assert broken == []


def check_broken(row: Fault, bench: Bench) -> None:
    """Assert that a row breaks its contract where its guard is taken away."""
    broken = meet_without_guard(row, bench)
    page.note("rows", row.name, without=broken)
    assert broken, f"{row.guard.path} is not what makes it pass"


@pytest.mark.parametrize("row", of_tier(is_quick=True))
def test_a_fault_is_met_as_the_table_says(row, bench):
    check_met(row, bench)


@pytest.mark.long
@pytest.mark.parametrize("row", of_tier(is_quick=True))
def test_without_its_guard_a_fault_breaks_its_contract(row, bench):
    check_broken(row, bench)


@pytest.mark.faults
@pytest.mark.parametrize("row", of_tier(is_quick=False))
def test_a_fault_of_a_whole_run_is_met_as_the_table_says(row, bench):
    check_met(row, bench)


@pytest.mark.faults
@pytest.mark.parametrize("row", of_tier(is_quick=False))
def test_without_its_guard_a_whole_run_breaks_its_contract(row, bench):
    check_broken(row, bench)


@pytest.mark.skipif(page.VARIABLE in os.environ, reason="it is written when all have run")
def test_the_page_is_what_was_noted():
    assert page.PAGE.read_text(encoding="utf-8") == page.text()


def test_the_table_has_sixty_rows_of_different_names():
    names = [row.name for row in FAULTS]
    assert len(names) == len(set(names)) >= 60
