"""`python -m equarx_serve.cli`: the same as `equarx-serve`."""

from equarx_serve.cli.app import main

main()
