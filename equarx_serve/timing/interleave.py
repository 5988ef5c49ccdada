"""Times several variants in turn, round by round, so that drift of the machine hits all alike.

The first run of each is dropped (it pays for first touches); compile time is not in here at all. Medians and quartiles,
because a machine's hiccups are one-sided.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one variant, in the order they were taken; the dropped first run apart."""

    seconds: tuple[float, ...]
    first: float

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "median_s": self.median,
            "quartile_low_s": low,
            "quartile_high_s": high,
            "first_s": self.first,
            "runs": len(self.seconds),
            "seconds": list(self.seconds),
        }


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Timing]:
    """Runs every variant `repeats` times after one dropped run, in turn. A variant returns when its work is done."""
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least one timed run is needed")
    taken: dict[str, list[float]] = {name: [] for name in variants}
    total = (repeats + 1) * len(variants)
    for round_ in range(repeats + 1):
        for i, (name, run) in enumerate(variants.items()):
            progress(round_ * len(variants) + i, total, f"timing {name}")
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    progress(total, total, "timing done")
    return {name: Timing(tuple(times[1:]), times[0]) for name, times in taken.items()}
