"""Twins of kvsim/formats: same file names, found by the part's name."""
