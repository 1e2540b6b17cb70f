"""Ctrl-C once ends a run at a step boundary, and twice at once."""

from __future__ import annotations

import signal

import pytest

from mixle_megatron.training.signals import STOPPING, StopRequest


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_only_asks_and_the_second_ends_the_process(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in STOPPING}
    try:
        stop = StopRequest().install()
        assert not stop
        signal.raise_signal(number)
        assert stop
        assert stop.signal_name == number.name
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
