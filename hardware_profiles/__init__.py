"""Devices as data: one TOML file each, every number beside its source; read by `kvsim.hardware`, no code here."""
