"""Strictness for every test: shapes checked, no silent promotion, no network, 16 virtual CPU devices.

Set before jax starts a backend. Annotations (jaxtyping) are checked by beartype in tests only; users pay nothing.
"""

import os
import socket

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

install_import_hook("equarx_serve", "beartype.beartype")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that connects to anything but a local socket fails."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: object) -> None:
        if self.family == socket.AF_UNIX:
            return connect(self, address)  # type: ignore[arg-type]
        raise AssertionError(f"a test tried to open a network connection to {address!r}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
