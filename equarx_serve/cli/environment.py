"""What has to be settled before jax is imported, and never is by the library: platform, virtual devices, caches.

Without a TPU, a libtpu that is installed asks the cloud's metadata server who it is and start-up hangs; so, when no
TPU device is in sight and the user has not chosen, the platform is set to CPU (or left to jax where a GPU is).
"""

import os
from pathlib import Path

from equarx_serve.errors import UserError

MAX_VIRTUAL_DEVICES = 64


def tpu_in_sight(devices: Path = Path("/dev")) -> bool:
    """Whether this machine shows a TPU: /dev/accel* or /dev/vfio/<number>."""
    return any(devices.glob("accel*")) or any(devices.glob("vfio/[0-9]*"))


def gpu_in_sight(devices: Path = Path("/dev")) -> bool:
    """Whether this machine shows an NVIDIA or AMD GPU."""
    return any(devices.glob("nvidia[0-9]*")) or (devices / "kfd").exists()


def settle_platform() -> None:
    """Chooses the CPU where there is no accelerator and no choice by the user. Before jax is imported."""
    if tpu_in_sight():
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not gpu_in_sight():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def start_jax(tp: int, cache_dir: Path) -> None:
    """Imports jax with `tp` virtual CPU devices (they count only on the CPU platform) and a compilation cache."""
    settle_platform()
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(1, min(tp, MAX_VIRTUAL_DEVICES)))
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an absent platform gives either
        asked = os.environ.get("JAX_PLATFORMS", "")
        chosen = f" with JAX_PLATFORMS={asked}" if asked else ""
        detail = f": {str(error).splitlines()[0]}" if str(error) else ""
        raise UserError(f"jax finds no device{chosen}{detail}") from error
