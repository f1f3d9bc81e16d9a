"""Twins of kvsim/bases: same file names, found by the part's name."""
