#!/usr/bin/env python3
"""Compare the loss curves of two or more training runs.

    scripts/compare_runs.py fp8=runs/a bf16=runs/b                 a folder, its metrics.jsonl, or its main.log
    scripts/compare_runs.py mine=runs/a llm.c=log124M/main.log     llm.c's logs are read, too
    scripts/compare_runs.py fp8=runs/a bf16=runs/b --svg both.svg

Prints both curves as a plot in the terminal, a table of final losses, and every run's gap to the baseline, which is the
last run unless --baseline names another. The gap is loss(run) - loss(baseline) at equal steps: above zero, the run is
worse. Exit status: 0 compared; 1 a run cannot be read or there is nothing to compare; 2 wrong arguments.

Python's standard library only. The parts, in order: reading (Run), comparing (Gap, compare), drawing for the terminal,
drawing SVG, main. Reading and comparing print nothing, so that another report can be built on them.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

TAIL_SHARE = 0.1  # "the end" of a run, for means: its last tenth
SMOOTHED_SHARE = 0.02  # training losses are averaged over this share of the run for drawing


class CompareError(Exception):
    """Something that makes the comparison impossible; the text is one line for the user."""


# ----------------------------------------------------------------------------------------------------------------------
# reading


@dataclass
class Run:
    name: str
    path: str
    train: dict = field(default_factory=dict)  # step -> training loss of that step
    val: dict = field(default_factory=dict)  # step -> validation loss after that many updates
    floor: float = None  # best reachable loss, when the run knows it
    tokens_per_s: dict = field(default_factory=dict)  # step -> smoothed rate
    skipped: list = field(default_factory=list)  # steps whose update was not made
    not_finite: list = field(default_factory=list)  # steps whose loss was NaN or infinite
    bad_lines: list = field(default_factory=list)  # numbers of the lines that make no sense
    repeated: list = field(default_factory=list)  # steps that occur more than once: the last time counts
    notes: list = field(default_factory=list)  # what the user should know about this file

    def last_step(self):
        return max(list(self.train) + list(self.val))


def add_loss(run, curve, step, value):
    """Put a loss into `curve`; None (JSON null), NaN and infinities are remembered, but are no points."""
    if step in curve:
        run.repeated.append(step)
    if value is None or not math.isfinite(value):
        run.not_finite.append(step)
        curve.pop(step, None)
    else:
        curve[step] = value


def number_of(record, key, optional=False):
    """A number of a JSON record; None for null, or for a missing key if that is allowed. Anything else is an error."""
    value = record.get(key) if optional else record[key]
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(key)
    return value


def step_of(record):
    step = record["step"]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError("step")
    return step


def read_json_line(run, line):
    """One line of metrics.jsonl (written by lib/logger.h)."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("no object")
    kind = record["type"]
    if kind == "config":
        settings = record["config"]  # one flat object; floor_loss 0 means unknown
        floor = number_of(settings, "floor_loss", optional=True)
        if floor is not None and math.isfinite(floor) and floor > 0:
            run.floor = float(floor)
    elif kind == "step":
        step = step_of(record)
        rate = number_of(record, "tokens_per_s", optional=True)
        add_loss(run, run.train, step, number_of(record, "loss"))
        if rate is not None and math.isfinite(rate):
            run.tokens_per_s[step] = rate
        if record.get("skipped"):
            run.skipped.append(step)
    elif kind == "val":
        add_loss(run, run.val, step_of(record), number_of(record, "loss"))
    # other types ("eval", what later versions add) are no losses


MAIN_LOG_LINE = re.compile(r"s:(\d+) (?:(trl|tel):(\S+)|eval:\S+)(?: .*)?$")


def read_log_line(run, line):
    """One line of llm.c's main.log: `s:STEP trl:LOSS lr:.. norm:..`, `s:STEP tel:LOSS` or `s:STEP eval:..`."""
    match = MAIN_LOG_LINE.match(line)
    if not match:
        raise ValueError("no log line")
    step, kind, text = int(match[1]), match[2], match[3]
    if kind is not None:
        add_loss(run, run.train if kind == "trl" else run.val, step, float(text))


def find_log(path):
    """The log file that `path` means: itself, or metrics.jsonl, or main.log in that folder."""
    if os.path.isdir(path):
        for name in ("metrics.jsonl", "main.log"):
            inside = os.path.join(path, name)
            if os.path.isfile(inside):
                return inside
        raise CompareError(f"no metrics.jsonl or main.log in folder '{path}'")
    return path


def describe_lines(numbers):
    shown = ", ".join(str(number) for number in numbers[:5])
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > 5 else ''}"


def read_run(name, path):
    """Read a run's log. Lines that make no sense (a torn last line, binary rubbish) are left out and noted."""
    path = find_log(path)
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise CompareError(f"cannot read '{path}': {error.strerror}") from error
    run = Run(name=name, path=path)
    first = next((line for line in lines if line.strip()), b"")
    read_line = read_json_line if first.lstrip().startswith(b"{") else read_log_line
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read_line(run, line.decode("utf-8").strip())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            run.bad_lines.append(number)
    if run.repeated:
        run.notes.append(f"steps occur twice, first step {run.repeated[0]} (a resumed run?): the last line counts")
    if run.bad_lines:
        run.notes.append(
            f"{len(run.bad_lines)} of {len(lines)} lines left out, not understood: {describe_lines(run.bad_lines)}"
        )
    if not run.train and not run.val:
        raise CompareError(f"no losses in '{path}': want metrics.jsonl, or main.log with lines like s:0 trl:10.99")
    if run.not_finite:
        run.notes.append(
            f"loss not finite at {len(run.not_finite)} steps, first at step {min(run.not_finite)}: no points there"
        )
    if run.skipped:
        run.notes.append(f"{len(run.skipped)} updates were skipped, first at step {min(run.skipped)}")
    return run


# ----------------------------------------------------------------------------------------------------------------------
# comparing


@dataclass
class Gap:
    """loss(run) - loss(baseline) at equal steps, for one kind of loss."""

    kind: str  # "validation" or "training"
    steps: list  # common steps, ascending
    differences: list  # at those steps
    end: float  # at the last common step
    tail_mean: float  # mean over the last tenth of the common range of steps
    tail_error: float  # standard error of that mean, from the scatter of the differences; None of fewer than 3
    tail_count: int


def compare(run, baseline, kind):
    """The Gap of `run` to `baseline` in "validation" or "training" loss; None when they have no step in common."""
    ours, theirs = (run.val, baseline.val) if kind == "validation" else (run.train, baseline.train)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        return None
    differences = [ours[step] - theirs[step] for step in steps]
    first_of_tail = steps[-1] - TAIL_SHARE * (steps[-1] - steps[0])
    tail = [d for step, d in zip(steps, differences) if step >= first_of_tail]
    mean = sum(tail) / len(tail)
    error = None
    if len(tail) >= 3:
        variance = sum((d - mean) ** 2 for d in tail) / (len(tail) - 1)
        error = math.sqrt(variance / len(tail))
    return Gap(kind, steps, differences, differences[-1], mean, error, len(tail))


def mean_at_end(curve):
    """Mean of a curve over the last tenth of its steps."""
    if not curve:
        return None
    first, last = min(curve), max(curve)
    tail = [loss for step, loss in curve.items() if step >= last - TAIL_SHARE * (last - first)]
    return sum(tail) / len(tail)


def smoothed(curve, width):
    """[(step, mean of the points up to width/2 to either side)], ascending. Near the ends the window is one-sided."""
    points = sorted(curve.items())
    sums = [0.0]
    for _, loss in points:
        sums.append(sums[-1] + loss)
    half = width // 2
    result = []
    for i, (step, _) in enumerate(points):
        low, high = max(0, i - half), min(len(points), i + half + 1)
        result.append((step, (sums[high] - sums[low]) / (high - low)))
    return result


def smoothing_width(runs):
    """How many points are averaged for drawing: the same for every run, odd."""
    longest = max(len(run.train) for run in runs)
    return max(1, int(longest * SMOOTHED_SHARE)) | 1


def thinned(points, limit):
    """At most about `limit` of the points, first and last included: more than a picture can show costs only bytes."""
    if len(points) <= limit:
        return points
    stride = len(points) / limit
    kept = [points[int(i * stride)] for i in range(limit)]
    return kept if kept[-1] == points[-1] else kept + [points[-1]]


# ----------------------------------------------------------------------------------------------------------------------
# scales, shared by both drawings


def loss_range(curves, floor):
    """(low, high) of the loss axis: all of the curves but the start, where an untrained model dwarfs the rest."""
    losses = sorted(loss for points in curves for _, loss in points)
    low, high = losses[0], losses[-1]
    if len(losses) >= 20:
        high = losses[int(0.97 * (len(losses) - 1))]
    if floor is not None:
        low = min(low, floor)
    pad = 0.04 * (high - low) or 0.5
    return low - pad, high + pad


def nice_ticks(low, high, about):
    """Round numbers (1, 2 or 5 times a power of ten apart) within low..high, around `about` of them."""
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    spacing = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    count = math.floor(high / spacing) - math.ceil(low / spacing) + 1
    return [(math.ceil(low / spacing) + i) * spacing for i in range(count)]


def tick_text(value, spacing):
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and float(text) == 0 else text


# ----------------------------------------------------------------------------------------------------------------------
# the terminal


@dataclass
class Style:
    markers: list
    several: str  # where points of different runs fall on one cell
    floor: str
    corner: str
    vertical: str
    horizontal: str


UNICODE = Style(["●", "○", "▲", "△", "■", "□", "◆", "◇"], "◉", "╌", "└", "│", "─")
ASCII = Style(["o", "x", "+", "a", "b", "c", "d", "e"], "*", "-", "+", "|", "-")


def terminal_plot(title, curves, style, width, height, floor=None, y_range=None):
    """Lines of text: the curves [(name, [(x, y)])], one marker each, a dashed line at `floor`, axes with numbers."""
    low, high = y_range or loss_range([points for _, points in curves], floor)
    first = min(x for _, points in curves for x, _ in points)
    last = max(x for _, points in curves for x, _ in points)
    columns = width - 10
    cells = {}

    def row_of(y):
        return round((high - y) / (high - low) * (height - 1))

    if floor is not None and low <= floor <= high:
        for column in range(columns):
            cells[row_of(floor), column] = style.floor
    owner = {}
    for index, (_, points) in enumerate(curves):
        for x, y in points:
            if not low <= y <= high:
                continue  # off the picture: the first steps of an untrained model
            column = round((x - first) / (last - first) * (columns - 1)) if last > first else 0
            cell = row_of(y), column
            cells[cell] = style.several if owner.get(cell, index) != index else style.markers[index % 8]
            owner[cell] = index if owner.get(cell, index) == index else -1
    spacing_rows = max(1, (height - 1) // 5)
    span = high - low
    digits = max(2, 2 - math.floor(math.log10(span))) if span < 1 else 2
    lines = [title]
    for row in range(height):
        label = f"{high - row * span / (height - 1):8.{digits}f}" if row % spacing_rows == 0 else " " * 8
        lines.append(
            f"{label} {style.vertical}" + "".join(cells.get((row, column), " ") for column in range(columns)).rstrip()
        )
    lines.append(" " * 9 + style.corner + style.horizontal * columns)
    middle = f"{(first + last) / 2:.0f}"
    left, right = str(first), f"step {last}"
    gap_left = max(1, columns // 2 - len(left) - len(middle) // 2)
    gap_right = max(1, columns - len(left) - gap_left - len(middle) - len(right))
    lines.append(" " * 10 + left + " " * gap_left + middle + " " * gap_right + right)
    keys = [f"{style.markers[i % 8]} {name}" for i, (name, _) in enumerate(curves)]
    if len(curves) > 1:
        keys.append(f"{style.several} several")
    if floor is not None:
        keys.append(f"{style.floor} floor {floor:.4f}")
    lines.append(" " * 10 + "   ".join(keys))
    return lines


def drawn_curves(runs):
    """(what is drawn, [(name, points)]): validation losses if every run has some, else smoothed training losses."""
    if all(len(run.val) >= 4 for run in runs):
        return "validation loss", [(run.name, sorted(run.val.items())) for run in runs]
    with_train = [run for run in runs if run.train]
    if len(with_train) < len(runs):
        return "validation loss", [(run.name, sorted(run.val.items())) for run in runs if run.val]
    width = smoothing_width(runs)
    return f"training loss (mean of {width} steps)", [(run.name, smoothed(run.train, width)) for run in runs]


def filled(points, columns):
    """The points of a curve with straight lines between them, about one point a column, so that curves look closed."""
    if len(points) < 2:
        return points
    points = sorted(points)
    first, last = points[0][0], points[-1][0]
    result, i = [], 0
    for k in range(columns):
        x = first + (last - first) * k / max(1, columns - 1)
        while i + 2 < len(points) and points[i + 1][0] < x:
            i += 1
        (x0, y0), (x1, y1) = points[i], points[i + 1]
        result.append((x, y0 + (y1 - y0) * (x - x0) / (x1 - x0)))
    return [(round(x), y) for x, y in result]


def table(rows):
    """Lines of text: rows of cells as columns, the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows]


def format_loss(loss):
    return f"{loss:.4f}" if loss is not None else "-"


def losses_table(runs):
    rows = [["run", "steps", "last val", "best val", "last train", "train, last 10%", "tokens/s"]]
    for run in runs:
        rate = run.tokens_per_s[max(run.tokens_per_s)] if run.tokens_per_s else None
        rows.append(
            [
                run.name,
                str(run.last_step() + (1 if run.train and run.last_step() in run.train else 0)),
                format_loss(run.val[max(run.val)] if run.val else None),
                format_loss(min(run.val.values()) if run.val else None),
                format_loss(run.train[max(run.train)] if run.train else None),
                format_loss(mean_at_end(run.train)),
                f"{rate:,.0f}" if rate is not None else "-",
            ]
        )
    return table(rows)


def gap_line(run, baseline, gap):
    error = f" +- {gap.tail_error:.4f}" if gap.tail_error is not None else ""
    count = f"{gap.tail_count} points" if gap.tail_count != 1 else "1 point"
    return (
        f"gap {run.name} - {baseline.name}, {gap.kind} loss: {gap.end:+.4f} at step {gap.steps[-1]}, "
        f"{gap.tail_mean:+.4f}{error} over the last 10% ({count})"
    )


# ----------------------------------------------------------------------------------------------------------------------
# SVG

COLOURS = ["#d1495b", "#1b5e8c", "#3c8d4f", "#8f5aa8", "#c77d0a", "#4a4a4a"]


class Panel:
    """One pair of axes in an SVG: turns values into coordinates and collects elements. Pixels, y downwards."""

    def __init__(self, left, top, width, height, x_range, y_range):
        self.left, self.top, self.width, self.height = left, top, width, height
        self.x_range, self.y_range = x_range, y_range
        self.elements = []

    def x(self, value):
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1) * self.width

    def y(self, value):
        low, high = self.y_range
        return self.top + (high - value) / ((high - low) or 1) * self.height

    def add(self, element):
        self.elements.append(element)

    def text(self, x, y, text, anchor="start", extra=""):
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>')

    def axes(self, y_label, x_label=None):
        right, bottom = self.left + self.width, self.top + self.height
        for ticks, is_x in ((nice_ticks(*self.x_range, 8), True), (nice_ticks(*self.y_range, self.height / 50), False)):
            spacing = ticks[1] - ticks[0] if len(ticks) > 1 else 1
            for tick in ticks:
                if is_x:
                    x = self.x(tick)
                    self.add(f'<line class="grid" x1="{x:.1f}" y1="{self.top}" x2="{x:.1f}" y2="{bottom}"/>')
                    self.text(x, bottom + 16, tick_text(tick, spacing), "middle")
                else:
                    y = self.y(tick)
                    self.add(f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
                    self.text(self.left - 7, y + 4, tick_text(tick, spacing), "end")
        self.add(f'<rect class="frame" x="{self.left}" y="{self.top}" width="{self.width}" height="{self.height}"/>')
        self.text(self.left, self.top - 8, y_label)
        if x_label:
            self.text(right, bottom + 34, x_label, "end")

    def line(self, points, colour, width, opacity=1.0, dashes=None, clip="clip"):
        if not points:
            return
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.add(
            f'<polyline clip-path="url(#{clip})" points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{width}" stroke-opacity="{opacity}"{dash} stroke-linejoin="round"/>'
        )

    def dots(self, points, colour, radius):
        for x, y in points:
            if self.y_range[0] <= y <= self.y_range[1]:
                self.add(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}" fill="{colour}"/>')


def svg_document(runs, baseline, gaps, floor, title):
    """The picture as text: curves above, differences to the baseline below. `gaps`: [(run, Gap)]."""
    smoothing = smoothing_width(runs)
    train = [(run, thinned(smoothed(run.train, smoothing), 1200)) for run in runs]
    val = [(run, sorted(run.val.items())) for run in runs]
    colour = {run.name: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}
    width, curve_height, gap_height = 960, 400, 170 if gaps else 0
    height = 96 + curve_height + (gap_height + 66 if gaps else 0) + 40
    x_range = (0, max(1, max(run.last_step() for run in runs)))
    everything = [points for _, points in train + val if points]
    curves = Panel(70, 84, width - 100, curve_height, x_range, loss_range(everything, floor))
    curves.axes("loss, nats per token: bold = validation, thin = training" +
                (f" (mean of {smoothing} steps)" if smoothing > 1 else ""), None if gaps else "step")
    for run, points in train:
        curves.line(points, colour[run.name], 1.2, 0.5)
    for index, (run, points) in enumerate(val):
        # the last run is dashed, so that one of two equal curves does not hide the other
        dashes = "7 5" if index == len(val) - 1 and len(val) > 1 else None
        curves.line(points, colour[run.name], 2.4, 1.0, dashes)
        curves.dots(points if len(points) <= 100 else [], colour[run.name], 2.6)
    if floor is not None:
        curves.line([(x_range[0], floor), (x_range[1], floor)], "#777", 1.4, 1.0, "3 4")
        curves.text(curves.left + 6, curves.y(floor) - 5, f"floor: {floor:.4f}, what a perfect model would reach")
    legend_x = curves.left + 4
    for run in runs:
        last = f" {run.val[max(run.val)]:.4f}" if run.val else ""
        label = f"{run.name}{last}"
        curves.add(f'<rect x="{legend_x}" y="44" width="16" height="4" fill="{colour[run.name]}"/>')
        curves.text(legend_x + 22, 50, label)
        legend_x += 50 + 7.2 * len(label)
    panels = [curves]
    if gaps:
        below = differences_panel(gaps, baseline, colour, smoothing, x_range, 84 + curve_height + 66, gap_height, width)
        panels.append(below)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text { font: 13px sans-serif; fill: #222; } .title { font-size: 17px; font-weight: bold; } "
        ".grid { stroke: #e6e6e6; } .frame { fill: none; stroke: #999; }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text class="title" x="70" y="26">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        name = "clip" if index == 0 else "clip2"
        parts.append(
            f'<clipPath id="{name}"><rect x="{panel.left}" y="{panel.top}" width="{panel.width}" '
            f'height="{panel.height}"/></clipPath>'
        )
        parts += panel.elements
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def differences_panel(gaps, baseline, colour, smoothing, x_range, top, height, width):
    """The lower panel of the SVG: loss(run) - loss(baseline) over steps."""
    lines = []
    for run, gap in gaps:
        points = list(zip(gap.steps, gap.differences))
        if gap.kind == "training":
            points = thinned(smoothed(dict(points), smoothing), 1200)
        lines.append((run, gap.kind, points))
    # the first steps differ by chance and would squash the rest: the range is that of the later nine tenths
    later = [abs(d) for _, _, points in lines for step, d in points if step >= 0.1 * x_range[1]]
    reach = 1.1 * max(later + [1e-4])
    panel = Panel(70, top, width - 100, height, x_range, (-reach, reach))
    panel.axes(f"difference to {baseline.name} at the same step (above 0 = worse)", "step")
    panel.line([(x_range[0], 0), (x_range[1], 0)], "#777", 1, 1.0, None, "clip2")
    for run, kind, points in lines:
        panel.line(points, colour[run.name], 1.2 if kind == "training" else 2.4, 0.5 if kind == "training" else 1.0,
                   None, "clip2")
        if kind == "validation" and len(points) <= 100:
            panel.dots(points, colour[run.name], 2.6)
    return panel


# ----------------------------------------------------------------------------------------------------------------------
# main


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="Compare the loss curves of training runs.",
        epilog="RUN is PATH or NAME=PATH; PATH is a run's folder, its metrics.jsonl, or a main.log (llm.c's, too).",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="two or more runs to compare, or one to look at")
    parser.add_argument("--baseline", metavar="NAME", help="the run that the others are compared with (default: the last)")
    parser.add_argument("--svg", metavar="FILE", help="also write the curves as an SVG picture")
    parser.add_argument("--title", default="Loss curves", help="title of the picture")
    parser.add_argument("--floor", type=float, metavar="F", help="best reachable loss; default: what the runs' logs say")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--width", type=int, metavar="N", help="columns of the terminal plot")
    parser.add_argument("--no-plot", action="store_true", help="no plot in the terminal")
    arguments = parser.parse_args(argv)
    if arguments.width is not None and not 40 <= arguments.width <= 500:
        parser.error(f"--width {arguments.width}, want 40 to 500")
    if arguments.floor is not None and not (math.isfinite(arguments.floor) and arguments.floor > 0):
        parser.error(f"--floor {arguments.floor}, want a number above 0")
    return arguments


def read_runs(arguments):
    """All runs, names made unique; CompareError for the first that cannot be read."""
    runs = []
    for text in arguments.runs:
        name, separator, path = text.partition("=")
        if not separator or "/" in name:
            name, path = "", text
        if not path:
            raise CompareError(f"'{text}' names no file, want NAME=PATH")
        runs.append(read_run(name or os.path.basename(os.path.normpath(path)) or path, path))
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = run.path
    if len({run.name for run in runs}) < len(runs):
        raise CompareError("the same run is given twice, want different runs or different names (NAME=PATH)")
    return runs


def can_print(text):
    try:
        text.encode(sys.stdout.encoding or "ascii")
        return True
    except UnicodeEncodeError:
        return False


def write_svg(path, text):
    """Write to a temporary name and rename, so that a picture is whole or not there."""
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".tmp", path)
    except OSError as error:
        raise CompareError(f"cannot write '{path}': {error.strerror}") from error


def report(arguments):
    runs = read_runs(arguments)
    baseline = runs[-1]
    if arguments.baseline is not None:
        named = [run for run in runs if run.name == arguments.baseline]
        if not named:
            raise CompareError(f"no run is named '{arguments.baseline}', there are: {', '.join(r.name for r in runs)}")
        baseline = named[0]
    floors = sorted({run.floor for run in runs if run.floor is not None})
    floor = arguments.floor if arguments.floor is not None else (floors[0] if len(floors) == 1 else None)
    gaps, notes = [], [f"note: {run.name}: {note}" for run in runs for note in run.notes]
    if arguments.floor is None and len(floors) > 1:
        notes.append(f"note: the runs name different floors ({', '.join(map(str, floors))}): none is drawn")
    for run in runs:
        if run is baseline:
            continue
        found = [gap for gap in (compare(run, baseline, "validation"), compare(run, baseline, "training")) if gap]
        if not found:
            raise CompareError(f"{run.name} and {baseline.name} have no step in common: nothing to compare")
        if run.last_step() != baseline.last_step():
            notes.append(
                f"note: {run.name} ends at step {run.last_step()}, {baseline.name} at {baseline.last_step()}: "
                f"compared up to step {min(run.last_step(), baseline.last_step())}"
            )
        gaps += [(run, gap) for gap in found]

    if not arguments.no_plot:
        style = ASCII if arguments.ascii or not can_print("".join(UNICODE.markers) + "◉╌└│─") else UNICODE
        columns = arguments.width or max(60, min(110, shutil.get_terminal_size((90, 24)).columns - 1))
        title, curves = drawn_curves(runs)
        filled_curves = [(name, filled(points, columns - 10)) for name, points in curves]
        print("\n".join(terminal_plot(title, filled_curves, style, columns, 18, floor)))
        print()
    print("\n".join(losses_table(runs)))
    if floor is not None:
        print(f"floor: {floor:.4f} nats per token, what a perfect model would reach")
    for run, gap in gaps:
        print(gap_line(run, baseline, gap))
    for note in notes:
        print(note)
    if arguments.svg:
        write_svg(arguments.svg, svg_document(runs, baseline, gaps, floor, arguments.title))
        print(f"picture: {arguments.svg}")


def main(argv):
    arguments = parse_arguments(argv)
    try:
        report(arguments)
    except CompareError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has left
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
