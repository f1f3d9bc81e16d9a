"""Bases: one file a part; the list is what lies here."""
