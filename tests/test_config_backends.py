"""Tests of the table of backends."""

from typing import get_args

import pytest

from sft_play.config import loader
from sft_play.config.backends import BACKENDS, UNSLOTH
from sft_play.config.schema import settings

every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def test_every_backend_that_a_config_can_name_has_a_row():
    assert set(BACKENDS) == set(get_args(settings()["tuning.backend"].annotation))


@every_backend
def test_the_files_that_a_row_names_ship(backend):
    assert (loader.PROJECT_ROOT / backend.requirements).is_file()
    shipped = loader.load_merged(backend.default_config)
    assert shipped.config.tuning.backend == backend.name


@every_backend
def test_a_limit_of_packing_has_a_reason(backend):
    packing = backend.packing
    is_limited = packing.modes != set(get_args(settings()["tuning.mode"].annotation))
    assert is_limited == bool(packing.mode_reason)
    assert (packing.max_seq_len is not None) == bool(packing.length_reason)


def test_the_reason_names_the_longest_packed_sequence():
    assert str(UNSLOTH.packing.max_seq_len) in UNSLOTH.packing.length_reason
