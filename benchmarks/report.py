"""The table and the figure at the end of a run, and what changed between two runs."""

import json
import statistics

import numpy as np
import rich.box
import rich.console
import rich.table
from matplotlib.figure import Figure

from benchmarks import harness

FIELDS = ("topic", *harness.Row._fields, "device", "versions", "commit", "command")
SAME = ("topic", "case", "method", "size", "metric", "unit", "better")  # what two runs share
RATIO = "ratio of times"
PANELS = 4  # of the figure in a row
RATIO_DRIFT = 0.25  # from run to run a machine varies more than from round to round of one run


def read(path):
    """Returns the rows of a file of JSON lines; ValueError names the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            if tuple(row) != FIELDS:
                raise ValueError(f"its fields are {', '.join(row)}")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, must be a measurement: {error}.") from None
        rows.append(row)
    return rows


def comparisons(rows):
    """Returns one dict a comparison: what it is of, both names, and the values paired by seed."""
    groups = {}
    for row in rows:
        key = tuple(row[k] for k in ("topic", "case", "size", "metric", "unit", "better", "rival"))
        groups.setdefault(key, {}).setdefault(row["method"], {})[row["seed"]] = row["value"]
    out = []
    for (topic, case, size, metric, unit, better, rival), methods in groups.items():
        theirs = methods.pop(rival)
        sign = 1 if better == "up" else -1
        for method, ours in methods.items():
            pairs = np.array([(ours[seed], theirs[seed]) for seed in ours])
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = pairs[:, 0] / pairs[:, 1]
                quartiles = np.quantile(ratios, [0.25, 0.75])
            out.append(
                {
                    "topic": topic,
                    "case": case,
                    "size": size,
                    "metric": metric,
                    "unit": unit,
                    "better": better,
                    "method": method,
                    "rival": rival,
                    "pairs": pairs,
                    "ratio": float(np.median(ratios)),
                    "quartiles": quartiles,
                    "wins": int(np.sum(sign * pairs[:, 0] > sign * pairs[:, 1])),
                }
            )
    return out


COLUMNS = ("metric", "method", "rival", "ours", "rival's", "ratio", "seeds", "spread")
CAPTION = (
    "Ours (the method's) and rival's: mean and standard error over the seeds; for times the median "
    "over rounds. Ratio: median of ours / rival's within a seed or round. Seeds: in how "
    "many of them ours is better. Spread: quartiles of the ratio."
)
ALONE = "Measured without a rival: of several rounds the lowest, the median and the highest."


def sections(rows):
    """Returns the table as text, ``{title: [cells of a line]}``."""
    out = {}
    for c in comparisons(rows):
        title = f"{c['topic']}: {c['case']} ({c['size']})"
        ours, theirs = c["pairs"].T
        spread = "{:.3g} to {:.3g}".format(*c["quartiles"]) if len(ours) > 1 else ""
        out.setdefault(title, []).append(
            (
                f"{c['metric']}, {c['unit']}",
                c["method"],
                c["rival"],
                _center(ours, c["unit"]),
                _center(theirs, c["unit"]),
                f"{c['ratio']:.3g}",
                f"{c['wins']}/{len(ours)}",
                spread,
            )
        )
    return out


def alone(rows):
    """Returns the tables of what has no rival: ``{title: (columns, [cells of a line])}``."""
    compared = {_of(row) for row in rows if row["method"] != row["rival"]}
    found = {}
    for row in rows:
        if _of(row) not in compared:
            metric = f"{row['metric']}, {row['unit']}"
            methods = found.setdefault(f"{row['topic']}: {row['case']} ({row['size']})", {})
            methods.setdefault(row["method"], {}).setdefault(metric, []).append(row["value"])
    out = {}
    for title, methods in found.items():
        metrics = list(dict.fromkeys(metric for cells in methods.values() for metric in cells))
        lines = [
            (method, *(_range(cells.get(metric, [])) for metric in metrics))
            for method, cells in methods.items()
        ]
        out[title] = ("method", *metrics), lines
    return out


def _of(row):
    return tuple(row[field] for field in ("topic", "case", "size", "metric", "rival"))


def _range(values):
    """Returns the lowest value, the median and the highest as text, or the only one."""
    if len(values) > 1:
        return " / ".join(f"{f(values):.3g}" for f in (min, statistics.median, max))
    return "".join(f"{value:.4g}" for value in values)


def table(rows):
    """Returns the tables for a terminal."""
    compared = [_table(title, COLUMNS, lines) for title, lines in sections(rows).items()]
    others = [_table(title, *parts) for title, parts in alone(rows).items()]
    captions = [text for text, tables in ((CAPTION, compared), (ALONE, others)) if tables]
    return rich.console.Group(*compared, *others, *captions)


def markdown(rows):
    """Returns the table as text, with what it was measured on."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        f"`{first['command']}` on {first['device']}, commit {first['commit']}, {versions}.",
    ]
    compared = {title: (COLUMNS, body) for title, body in sections(rows).items()}
    for caption, tables in ((CAPTION, compared), (ALONE, alone(rows))):
        lines += ["", caption] if tables else []
        for title, (columns, body) in tables.items():
            lines += ["", f"**{title}**", ""]
            for line in (columns, ["---"] * len(columns), *body):
                lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n"


def figure(rows, curves, path):
    """Writes the ratios of all comparisons, and a panel of curves for each case that has some."""
    found = [c for c in comparisons(rows) if c["ratio"] > 0 and np.isfinite(c["ratio"])]
    cases = list(dict.fromkeys(curve.case for curve in curves))
    columns, lines = min(len(cases), PANELS), max(1, -(-len(cases) // PANELS))
    height = max(4.0 * lines, 0.32 * len(found) + 1.5)
    fig = Figure(figsize=(8.5 + 5.5 * columns, height), layout="constrained")
    grid = fig.add_gridspec(lines, 1 + columns, width_ratios=[8.5, *[5.5] * columns])

    ax = fig.add_subplot(grid[:, 0])
    for y, c in enumerate(found):
        low, high = c["quartiles"]
        color = "tab:blue" if 2 * c["wins"] > len(c["pairs"]) else "tab:orange"
        ax.plot([low, high], [y, y], color=color, linewidth=3, alpha=0.4)
        ax.plot(c["ratio"], y, "o", color=color)
        label = f"{c['ratio']:.3g}"
        ax.annotate(label, (c["ratio"], y), (0, 5), textcoords="offset points", ha="center", size=7)
    ax.axvline(1, color="black", linewidth=0.8)
    names = [f"{c['case']}: {c['metric']}\n{c['method']} against {c['rival']}" for c in found]
    ax.set_yticks(range(len(found)), names, fontsize=7)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlabel("ours / rival's (blue: ours is better in most seeds, orange: it is not)")

    for index, case in enumerate(cases):
        ax = fig.add_subplot(grid[index // PANELS, 1 + index % PANELS])
        for curve in (curve for curve in curves if curve.case == case):
            (line,) = ax.plot(curve.x, curve.values.mean(0), label=curve.method)
            low, high = curve.values.min(0), curve.values.max(0)
            ax.fill_between(curve.x, low, high, color=line.get_color(), alpha=0.2)
            ax.set(xlabel=curve.x_label, ylabel=curve.y_label, title=case)
            ax.set(xscale=curve.scale, yscale=curve.scale)
        ax.legend()
    fig.savefig(path, dpi=150)


def changes(old, new):
    """Returns one tuple for each thing that both runs measured.

    It holds the key (the fields of SAME), both means, the standard error of the change, and
    whether the change is real: beyond two standard errors of the differences seed by seed. A
    single value has no spread, so any change of it is real. Of times only the ratios to the rival
    are compared, since the speed of the machine is in both, and only beyond 25 percent.
    """
    before, after = _by_key(old), _by_key(new)
    out = []
    for key in before:
        seeds = [seed for seed in before[key] if seed in after.get(key, ())]
        if not seeds:
            continue
        x, y = (np.array([side[key][seed] for seed in seeds]) for side in (before, after))
        error = float(np.std(y - x, ddof=1) / np.sqrt(len(seeds))) if len(seeds) > 1 else 0.0
        drift = RATIO_DRIFT * np.mean(x) if key[SAME.index("unit")] == RATIO else 0.0
        # Written so that a value that became NaN is a change.
        is_real = not np.array_equal(x, y, equal_nan=True) and not (
            abs(np.mean(y - x)) <= max(2 * error, drift)
        )
        out.append((key, float(np.mean(x)), float(np.mean(y)), error, is_real))
    return out


def compare(old, new):
    """Returns the table of the changes beyond noise, for a terminal."""
    found, lines = changes(old, new), []
    for key, before, after, error, is_real in found:
        topic, case, method, _, metric, unit, better = key
        if is_real:
            is_better = after > before if better == "up" else after < before  # not if NaN
            numbers = (f"{x:.4g}" for x in (before, after, error))
            lines.append(
                (
                    f"{topic}: {case}",
                    f"{metric}, {unit}",
                    method,
                    *numbers,
                    "better" if is_better else "worse",
                )
            )
    missing = len(_by_key(old).keys() ^ _by_key(new).keys())
    sentence = (
        f"{len(lines)} of {len(found)} means changed by more than two standard errors (of the "
        f"differences seed by seed), ratios of times by more than {RATIO_DRIFT:.0%} too; measured "
        f"in one file only: {missing}."
    )
    columns = ("case", "metric", "method", "old", "new", "standard error", "")
    return rich.console.Group(_table(None, columns, lines), sentence)


def _by_key(rows):
    """Returns ``{key: {seed: value}}``; ours is the same in the comparison with each rival."""
    out = {}
    for row in rows:
        if row["unit"] not in harness.BY_CLOCK:
            out.setdefault(tuple(row[field] for field in SAME), {})[row["seed"]] = row["value"]
    for c in comparisons(row for row in rows if row["unit"] in harness.BY_CLOCK):
        methods = f"{c['method']} / {c['rival']}"
        key = (c["topic"], c["case"], methods, c["size"], c["metric"], RATIO, c["better"])
        out[key] = dict(enumerate(c["pairs"][:, 0] / c["pairs"][:, 1]))
    return out


def _center(values, unit):
    """Returns mean and standard error, or for times the median, as text."""
    if unit in harness.BY_CLOCK or len(values) == 1:
        return f"{statistics.median(values):.4g}"
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.4g} ± {error:.2g}"


def _table(title, columns, lines):
    out = rich.table.Table(
        *columns, box=rich.box.SIMPLE, title=title, title_style="bold", title_justify="left"
    )
    for line in lines:
        out.add_row(*line)
    return out
