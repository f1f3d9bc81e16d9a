"""Pictures of predictions and measurements: records, plans, sweeps or DataFrames in, matplotlib axes out."""

from __future__ import annotations

from kvsim.plot.context import best_method, context_memory, context_time
from kvsim.plot.frontier import pareto
from kvsim.plot.interactive import explore
from kvsim.plot.measured import predicted_measured, quality_bytes
from kvsim.plot.memory import memory_bars, waterfall
from kvsim.plot.roof import roofline
from kvsim.plot.style import data

__all__ = [
    "best_method",
    "context_memory",
    "context_time",
    "data",
    "explore",
    "memory_bars",
    "pareto",
    "predicted_measured",
    "quality_bytes",
    "roofline",
    "waterfall",
]
