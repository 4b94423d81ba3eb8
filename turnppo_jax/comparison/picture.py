"""All curves of a comparison over trajectories, sampled tokens and wall time. Needs matplotlib."""

import io
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from turnppo_jax.comparison.table import Records
from turnppo_jax.training.json_lines import write_atomically

# Okabe and Ito (2008): eight colours that colour-blind readers tell apart; with line and marker a curve is told apart
# three times over, also in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")


def draw(found: Mapping[str, Any], records: Records, path: pathlib.Path) -> None:
    """Writes the picture.

    A line is the mean over seeds after each evaluation, drawn while all of the arm's runs go on; the band reaches from
    the lowest seed to the highest; thin lines are single runs, and a cross ends one that crashed.

    Args:
      found: of `table.compare`.
      records: of every run.
      path: of the PNG.
    """
    # Here, so that nothing but the picture needs matplotlib; a canvas of its own leaves global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(15, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("trajectories", lambda run: run.trajectories(), 1.0),
        ("sampled tokens", lambda run: run.sampled_tokens(), 1.0),
        ("wall time of training [min]", lambda run: run.wall_time(), 1 / 60),
    )
    axes = figure.subplots(1, len(panels), sharey=True)
    metric = found["metric"]
    for axis, (label, of_run, scale) in zip(axes, panels):
        for index, (name, by_seed) in enumerate(records.items()):
            colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
            line = _LINES[(index + index // len(_COLOURS)) % len(_LINES)]
            curves = []
            for run in by_seed.values():
                along, series = of_run(run), run.series(metric)
                if not series:
                    continue
                x, y = np.array([along[step] * scale for step in series]), np.array(list(series.values()))
                curves.append((x, y))
                axis.plot(x, y, color=colour, linestyle=line, linewidth=0.7, alpha=0.45)
                if run.state == "crashed":
                    axis.plot(x[-1:], y[-1:], color=colour, marker="x", markersize=11, markeredgewidth=2.5)
            if not curves:
                continue
            length = min(len(x) for x, _ in curves)
            x = np.mean([x[:length] for x, _ in curves], axis=0)
            y = np.array([y[:length] for _, y in curves])
            if len(curves) > 1:
                axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.13, linewidth=0)
            axis.plot(
                x, y.mean(axis=0), color=colour, linestyle=line, linewidth=2.2, marker=marker, markersize=6,
                markevery=max(1, length // 12), label=f"{name} (n={len(curves)})",
            )  # fmt: skip
        axis.set_xlabel(label, fontsize=12)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=10)
        if scale == 1.0:
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlim(left=0)
    axes[0].set_ylabel(metric, fontsize=12)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside upper center", ncols=min(5, len(labels)), frameon=False, fontsize=12
        )
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    write_atomically(path, drawn.getvalue())
