"""`python -m kamui`."""

from kamui.cli import main

main()
