"""A fit as a picture and as a table for notebooks, drawn from its history alone."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Keys of a history entry that are neither losses nor metrics.
NOT_METRICS = frozenset(
    {"epoch", "rows", "steps", "lr", "seconds", "data", "compute", "communication", "rows_per_s"}
)
_PARTS = ("data", "compute", "communication")

# Okabe and Ito's palette: told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
_COLOURS = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#E69F00", "#56B4E9")
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
}


def names_of(history: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(losses, metrics) of a history, without those of the validation."""
    names = [n for n, v in history[0].items() if isinstance(v, float) and n not in NOT_METRICS]
    own = [n for n in names if not n.startswith("val_")]
    losses = [n for n in own if n == "loss" or n.endswith("_loss")]
    return losses, [n for n in own if n not in losses]


def draw(history: Sequence[dict[str, Any]], best_epoch: int | None = None) -> Figure:
    """Losses, metrics (where there are any), speed and where the time went, by epoch; a matplotlib Figure.

    history: a dict for each epoch, as in `FitResult.history`. Needs matplotlib; raises ValueError when there
    is no epoch. The figure belongs to no window and no notebook: show it, or `figure.savefig(path)`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not history:
        raise ValueError("nothing to draw: the history has no epoch")
    losses, metrics = names_of(history)
    with rc_context(_STYLE):
        count = 4 if metrics else 3
        figure = Figure(figsize=(4.2 * count, 3.6), dpi=120, layout="constrained")
        panels = iter(figure.subplots(1, count))
        _curves(next(panels), history, losses, "Loss", best_epoch)
        if metrics:
            _curves(next(panels), history, metrics, "Metrics", best_epoch)
        _speed(next(panels), history)
        _where(next(panels), history)
    return figure


def _epochs(axes: Axes, history: Sequence[dict[str, Any]]) -> list[int]:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="epoch", xlim=(0.4, len(history) + 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return [int(entry["epoch"]) + 1 for entry in history]


def _curves(
    axes: Axes, history: Sequence[dict[str, Any]], names: Sequence[str], title: str, best: int | None
) -> None:
    """A solid line for each name, a dashed one of its colour for the validation."""
    epochs = _epochs(axes, history)
    for name, colour in zip(names, _COLOURS * (1 + len(names) // len(_COLOURS)), strict=False):
        for key, line in ((name, "o-"), (f"val_{name}", "s--")):
            values = [entry.get(key, math.nan) for entry in history]
            if not all(map(math.isnan, values)):
                axes.plot(epochs, values, line, color=colour, lw=1.8, ms=4, label=key)
    if best is not None and len(history) > 1:
        axes.axvline(best + 1, color=_GREY, lw=1, ls=":", label="best epoch")
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _speed(axes: Axes, history: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import EngFormatter

    rates = [entry["rows"] / max(entry["seconds"], 1e-9) for entry in history]
    axes.plot(_epochs(axes, history), rates, "o-", color=_BLUE, lw=1.8, ms=4)
    axes.set(title="Training rows per second, all ranks", ylim=(0, 1.1 * max(rates)))
    axes.yaxis.set_major_formatter(EngFormatter())


def _where(axes: Axes, history: Sequence[dict[str, Any]]) -> None:
    epochs = _epochs(axes, history)
    below = [0.0] * len(history)
    for part, colour in zip(_PARTS, (_GREEN, _BLUE, _ORANGE), strict=True):
        seconds = [float(entry.get(part, 0.0)) for entry in history]
        axes.bar(epochs, seconds, bottom=below, color=colour, width=0.7, label=part)
        below = [a + b for a, b in zip(below, seconds, strict=True)]
    axes.set(title="Seconds of a rank", ylim=(0, 1.3 * max([*below, 1e-9])))
    axes.legend(ncols=3, loc="upper center", fontsize=9, columnspacing=1.0, handlelength=1.2)


def as_html(history: Sequence[dict[str, Any]], summary: str, best_epoch: int | None = None) -> str:
    """What a notebook shows: the summary, a row for each epoch, and the picture where matplotlib is there.

    Long histories are cut in the middle of the table.
    """
    parts = [f"<pre>{html.escape(summary)}</pre>"]
    if history:
        parts += [_table(history, best_epoch), _image(history, best_epoch)]
    return "<div>" + "".join(parts) + "</div>"


def _table(history: Sequence[dict[str, Any]], best: int | None, room: int = 20) -> str:
    losses, metrics = names_of(history)
    names = [key for n in (*losses, *metrics) for key in (n, f"val_{n}") if key in history[0]]
    columns = ["epoch", *names, "rows/s", "seconds"]
    shown = list(history) if len(history) <= room else [*history[: room // 2], None, *history[-room // 2 :]]
    lines = ["<table><thead><tr>", *(f"<th>{html.escape(c)}</th>" for c in columns), "</tr></thead><tbody>"]
    for entry in shown:
        if entry is None:
            lines.append(f'<tr><td colspan="{len(columns)}">… {len(history) - room} more …</td></tr>')
            continue
        cells = [
            str(int(entry["epoch"]) + 1) + (" (best)" if entry["epoch"] == best else ""),
            *(f"{entry[name]:.6g}" if name in entry else "" for name in names),
            f"{entry['rows'] / max(entry['seconds'], 1e-9):,.0f}",
            f"{entry['seconds']:.2f}",
        ]
        lines += ["<tr>", *(f"<td>{html.escape(cell)}</td>" for cell in cells), "</tr>"]
    return "".join([*lines, "</tbody></table>"])


def _image(history: Sequence[dict[str, Any]], best: int | None) -> str:
    try:
        figure = draw(history, best)
    except ImportError:
        return ""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    data = base64.b64encode(file.getvalue()).decode()
    alt = "losses, speed and time by epoch"
    return f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{data}">'
