"""Twins of kvsim/tokens: same file names, found by the part's name."""
