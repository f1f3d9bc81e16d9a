"""Controls beside a picture where a live notebook has them, the picture alone everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsim.errors import KvsimError


def explore(draw: Callable[..., Any], choices: Mapping[str, Sequence[Any]]) -> Any:
    """Call `draw` with one choice of each control, and again whenever the reader changes one.

    Args:
        draw: a function of one argument for each name in `choices`; it draws and may return a table to show.
        choices: for each argument its values, the one to start with first.

    Returns ipywidgets' container, or what `draw` returned where ipywidgets or a notebook is missing: the same picture
    for the first choices, without controls.
    """
    if not choices or not all(choices.values()):
        raise KvsimError("explore needs at least one control, each with at least one value")
    first = {name: values[0] for name, values in choices.items()}
    try:
        import ipywidgets
        from IPython.core.getipython import get_ipython
    except ImportError:
        return draw(**first)
    if getattr(get_ipython(), "kernel", None) is None:
        return draw(**first)
    return _with_controls(ipywidgets, draw, choices)


def _with_controls(ipywidgets: Any, draw: Callable[..., Any], choices: Mapping[str, Sequence[Any]]) -> Any:
    controls = {}
    for name, values in choices.items():
        words = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
        options = [(f"{v:,}" if isinstance(v, int) else str(v), v) for v in values]
        controls[name] = ipywidgets.Dropdown(options=options, value=values[0], **words)

    def show(**chosen: Any) -> None:
        import matplotlib.pyplot as plt
        from IPython.display import display

        table = draw(**chosen)
        plt.show()
        if table is not None:
            display(table)  # type: ignore[no-untyped-call]

    picture = ipywidgets.interactive_output(show, controls)
    return ipywidgets.VBox([ipywidgets.HBox(list(controls.values())), picture])
