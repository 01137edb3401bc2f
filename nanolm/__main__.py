"""`python -m nanolm` is the same program as `nanolm`."""

from nanolm.cli.main import main

main()
