"""Families of models: for each `model_type` of a config.json, the layers, matrices and cache that it means."""
