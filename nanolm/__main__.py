"""`python -m nanolm` runs the same program as `nanolm`."""

from nanolm.cli.main import main

main()
