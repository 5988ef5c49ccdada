"""What every result has to say about where it came from: versions, platform, machine."""

import os
import platform
import resource
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any


def provenance() -> dict[str, Any]:
    """JSON-ready facts on the software and the machine. Starts jax's backend if nothing has."""
    import jax

    device = jax.devices()[0]
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("equarx-serve", "jax", "jaxlib", "flax", "numpy")},
        "python": platform.python_version(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def peak_memory_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
