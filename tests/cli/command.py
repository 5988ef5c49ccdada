"""Runs the command line as a user does: in its own process."""

import os
import subprocess
import sys


def equarx_serve(*args, env=None, timeout=200):
    """The finished process; the environment is the caller's less what pytest's jax set."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", "equarx_serve.cli", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**clean, **(env or {})},
        check=False,
    )
