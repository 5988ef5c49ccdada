"""How often a collective fell back to psum, by reason. The one piece of mutable state in this package.

Counted when a program is traced (once a compile, not once a call), under a lock, in this process only. Nothing reads
it to decide anything.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

_LOCK: Final = threading.Lock()
_COUNTS: Final[Counter[str]] = Counter()


def count_fallback(reason: str) -> None:
    """One more fallback with this reason."""
    with _LOCK:
        _COUNTS[reason] += 1


def fallback_counts() -> Mapping[str, int]:
    """Reason -> number of traced collectives that fell back for it, since the start or the last reset. A copy."""
    with _LOCK:
        return dict(_COUNTS)


def reset_fallback_counts() -> None:
    """Forget all counts (for tests and for a report's beginning)."""
    with _LOCK:
        _COUNTS.clear()
