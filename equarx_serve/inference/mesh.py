"""The mesh that a model lies on: one axis, `tp`, in the order the runtime gives its devices.

Does not start devices: virtual CPU devices must be asked for before jax starts (the error says how).
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from equarx_serve.errors import UserError
from equarx_serve.gemma3 import TP_AXIS


def make_mesh(tp: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `tp` devices. `UserError` when there are fewer, with the way to get virtual ones on CPU."""
    found = list(jax.devices() if devices is None else devices)
    if tp < 1:
        raise UserError(f"tp={tp}: at least one rank is needed")
    if len(found) < tp:
        hint = (
            f'; before the first use of jax call jax.config.update("jax_num_cpu_devices", {tp})'
            if found[0].platform == "cpu"
            else ""
        )
        raise UserError(f"tp={tp} needs {tp} devices, and there are {len(found)} ({found[0].platform}){hint}")
    return Mesh(np.array(found[:tp]), (TP_AXIS,), axis_types=(AxisType.Auto,))
