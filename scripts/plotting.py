"""How the benchmarks' pictures look. Needs matplotlib, the extra `plot`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, BLUE, LIGHT_BLUE, GREY = "#1d2733", "#1f5fa8", "#a9cbea", "#e6eaee"
ORANGE, LIGHT_ORANGE, RED, GREEN = "#d98c3f", "#f1d3b3", "#b3312c", "#4d8b57"
_STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.08,
}


@contextmanager
def picture(path: str, width_inches: float, height_inches: float) -> Iterator[Any]:
    """Give an empty figure, and write it to `path` (the ending says what kind of file) when the block is done."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(width_inches, height_inches), layout="constrained")
        yield figure
        figure.savefig(path, dpi=150)
        plt.close(figure)
