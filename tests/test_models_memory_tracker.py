"""sft_play.models.step_meter: bytes of tensors while they are alive."""

import torch
from traced_steps import storage_bytes

from sft_play.models.step_meter import MemoryTracker


def test_a_storage_counts_once_and_while_it_is_alive():
    with MemoryTracker() as tracker:
        one = torch.zeros(100)
        view = one[:50].view(5, 10)
        assert (tracker.live_bytes, tracker.peak_bytes) == (400, 400)
        other = one + 1
        del one
        assert (tracker.live_bytes, tracker.peak_bytes) == (800, 800), "the view holds it"
        del view
        assert (tracker.live_bytes, tracker.peak_bytes) == (400, 800)
        assert tracker.reset_peak() == tracker.peak_bytes == 400
        other.add_(1)
        assert tracker.peak_bytes == 400
    assert storage_bytes([other, other[3:], other.view(10, 10)]) == 400
