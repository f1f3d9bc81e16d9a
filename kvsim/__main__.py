"""`python -m kvsim` is the program `kvsim`."""

from kvsim.cli import main

main()
