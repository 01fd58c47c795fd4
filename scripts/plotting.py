"""How the benchmarks' pictures look. Needs matplotlib, the extra `plot`."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

INK, BLUE, LIGHT_BLUE, GREY = "#1d2733", "#1f5fa8", "#a9cbea", "#e6eaee"
ORANGE, LIGHT_ORANGE, RED, GREEN = "#d98c3f", "#f1d3b3", "#b3312c", "#4d8b57"
SLATE = "#5b6773"  # of what is said in small letters
COLOURS = BLUE, ORANGE, GREEN, LIGHT_BLUE, RED, LIGHT_ORANGE, SLATE  # of things that have none of their own
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
def picture(path: str, width_inches: float, height_inches: float, title: str = "", subtitle: str = "") -> Iterator[Any]:
    """Give a figure that is empty below its title and, in smaller letters, its subtitle; write it to `path` (the ending
    says what kind of file) when the block is done."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(width_inches, height_inches), layout="constrained")
        _add_heads(figure, title, subtitle)
        yield figure
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _add_heads(figure: Any, title: str, subtitle: str) -> None:
    from matplotlib.text import Annotation

    head = figure.suptitle(f"{title}\n " if subtitle else title, fontsize=14, x=0.015, ha="left")
    # A text has one size, so the subtitle goes over the title's second line, which is kept free for it.
    figure.add_artist(Annotation(subtitle, (0, 0), xycoords=head, va="bottom", color=SLATE))


def legend_above(axes: Any, colours: Mapping[str, str]) -> None:
    """Say which colour means what, to the right of the title, where it hides nothing."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
    style = {"frameon": False, "borderaxespad": 0, "handlelength": 1.2, "columnspacing": 1.4}
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1.025), ncols=len(handles), **style)


def label_bars(bars: Any, values: Iterable[float], unit: str = "") -> None:
    """Write a number at the end of each of a container's bars."""
    labels = [short(value) + unit for value in values]
    bars[0].axes.bar_label(bars, labels, padding=4)


def without_ticks(axis: Any) -> None:
    """For an axis of names: they need no marks."""
    axis.set_tick_params(length=0)


def short(value: float) -> str:
    """For example 0.01, 1.23, 12.3, 123, 1,235."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
