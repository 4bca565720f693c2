"""`python -m embrace`: the command line."""

from embrace.cli.main import main

main()
