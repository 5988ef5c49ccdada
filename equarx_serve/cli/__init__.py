"""The command line: a thin face over the library, one module a command.

app           commands, options and their help
environment   what must be settled before jax is imported
prefill       the prefill command: what it runs and the record it makes
show          tables and progress
"""

from equarx_serve.cli.app import main

__all__ = ["main"]
