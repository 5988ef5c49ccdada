"""Order, counting and statistics of interleaved timing."""

import time

import pytest

from equarx_serve.timing.interleave import Timing, interleaved


def test_variants_take_turns_and_the_first_round_is_dropped():
    order = []
    told = []
    timings = interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, lambda *report: told.append(report)
    )
    assert order == ["a", "b"] * 4
    assert {name: len(t.seconds) for name, t in timings.items()} == {"a": 3, "b": 3}
    assert told[0][:2] == (0, 8)
    assert told[-1][:2] == (8, 8)


def test_slow_first_runs_do_not_count():
    calls = []

    def slow_at_first():
        calls.append(1)
        time.sleep(0.05 if len(calls) == 1 else 0.001)

    timing = interleaved({"a": slow_at_first}, 5)["a"]
    assert timing.first > 0.05
    assert timing.median < 0.04


def test_statistics():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 100.0), 7.0)
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert timing.as_dict()["runs"] == 5


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="repeats=0"):
        interleaved({}, 0)
