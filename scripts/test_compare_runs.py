#!/usr/bin/env python3
"""Tests of compare_runs.py: reading of our logs and llm.c's, damaged files, gaps, drawings, exit codes."""

import contextlib
import io
import json
import math
import os
import random
import shutil
import sys
import tempfile
import traceback
import xml.etree.ElementTree as ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import compare_runs  # noqa: E402  (its folder must be on the path first)

LLMC_LOGS = os.path.join(HERE, "..", "..", "shared", "data", "llmc")


class Skipped(Exception):
    """The test cannot run here; the text is the reason."""


def curve(step, shift=0.0):
    return 2.0 + 3.5 * math.exp(-step / 40.0) + shift


def write_metrics(folder, steps=200, shift=0.0, noise=0.0, every=20, floor=1.25):
    """A run's metrics.jsonl as lib/logger.h writes it; returns the folder."""
    os.makedirs(folder, exist_ok=True)
    scatter = random.Random(7)
    with open(os.path.join(folder, "metrics.jsonl"), "w", encoding="utf-8") as file:
        file.write(json.dumps({"type": "config", "config_hash": "00", "config": {"floor_loss": floor, "seed": 42}}) + "\n")
        for step in range(steps + 1):
            if step % every == 0:
                file.write(json.dumps({"type": "val", "step": step, "tokens": 0, "loss": curve(step, shift)}) + "\n")
            if step < steps:
                loss = curve(step, shift) + noise * scatter.uniform(-1, 1)
                record = {"type": "step", "step": step, "loss": loss, "grad_norm": 1.0, "tokens_per_s": 1000.0 + step}
                file.write(json.dumps({**record, "loss_z": None, "skipped": 0, "slots_warming": 0}) + "\n")
    return folder


def write_log(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


def run_main(*arguments):
    """(exit status, stdout, stderr) of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = compare_runs.main([str(a) for a in arguments])
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def refused(text, *arguments):
    status, _, err = run_main(*arguments)
    assert status == 1, f"exit status {status}, want 1"
    assert err.startswith("error: ") and err.count("\n") == 1, f"want one error line, got {err!r}"
    assert text in err, f"want {text!r} in {err!r}"


# ----------------------------------------------------------------------------------------------------------------------


def test_gap_of_known_curves(tmp):
    fp8 = write_metrics(f"{tmp}/a", shift=0.005)
    bf16 = write_metrics(f"{tmp}/b")
    runs = [compare_runs.read_run(name, path) for name, path in (("fp8", fp8), ("bf16", bf16))]
    for kind, count in (("validation", 11), ("training", 200)):
        gap = compare_runs.compare(runs[0], runs[1], kind)
        assert len(gap.steps) == count
        assert abs(gap.end - 0.005) < 1e-9 and abs(gap.tail_mean - 0.005) < 1e-9
    assert compare_runs.compare(runs[0], runs[1], "training").tail_count == 20
    assert compare_runs.compare(runs[0], runs[1], "training").tail_error < 1e-9
    assert runs[0].floor == 1.25 and runs[0].last_step() == 200
    status, out, err = run_main(f"fp8={fp8}", f"bf16={bf16}", "--width", 80)
    assert status == 0 and err == "", err
    assert "gap fp8 - bf16, validation loss: +0.0050 at step 200, +0.0050" in out, out
    assert "gap fp8 - bf16, training loss: +0.0050 at step 199" in out, out
    assert "floor: 1.2500" in out
    assert max(map(len, out.splitlines())) <= 100
    reverse = run_main(f"fp8={fp8}", f"bf16={bf16}", "--baseline", "fp8", "--no-plot")[1]
    assert "gap bf16 - fp8, validation loss: -0.0050" in reverse, reverse


def test_standard_error(tmp):
    a = compare_runs.read_run("a", write_metrics(f"{tmp}/a", steps=2000, noise=0.3))
    b = compare_runs.read_run("b", write_metrics(f"{tmp}/b", steps=2000))
    gap = compare_runs.compare(a, b, "training")
    # uniform noise of half-width 0.3 has a deviation of 0.3 / sqrt(3); the mean of 200 is sqrt(200) times better known
    want = 0.3 / math.sqrt(3) / math.sqrt(gap.tail_count)
    assert gap.tail_count == 200 and 0.85 * want < gap.tail_error < 1.15 * want, (gap.tail_error, want)
    assert abs(gap.tail_mean) < 4 * want


def test_llmc_lines(tmp):
    lines = ["s:0 tel:10.9965", "s:0 trl:10.9997 lr:0.000006 norm:17.01", "s:1 trl:10.6 lr:0.1 norm:2", "s:2 eval:0.2951",
             "s:2 tel:9.5"]
    run = compare_runs.read_run("x", write_log(f"{tmp}/main.log", lines))
    assert run.train == {0: 10.9997, 1: 10.6} and run.val == {0: 10.9965, 2: 9.5}, (run.train, run.val)
    assert run.bad_lines == [] and run.notes == []
    assert compare_runs.find_log(tmp) == os.path.join(tmp, "main.log")
    write_metrics(tmp)  # with both there, the one that has all digits
    assert compare_runs.find_log(tmp) == os.path.join(tmp, "metrics.jsonl")


def test_real_llmc_logs(_tmp):
    if not os.path.isdir(LLMC_LOGS):
        raise Skipped("no ../shared/data/llmc")
    d12 = compare_runs.read_run("d12", f"{LLMC_LOGS}/d12_main.log")
    assert len(d12.train) == 1200 and d12.val[1200] == 4.3854 and d12.notes == [], d12.notes
    status, out, _ = run_main(f"d2={LLMC_LOGS}/d2_main.log", f"d4={LLMC_LOGS}/d4_main.log")
    assert status == 0 and "d2 ends at step 1000, d4 at 2000" in out, out


def test_damaged_lines_are_left_out_and_named(tmp):
    folder = write_metrics(f"{tmp}/a")
    path = os.path.join(folder, "metrics.jsonl")
    with open(path, "ab") as file:
        file.write(b'\xff\xfe\x00rubbish\n{"type": "step", "step": "7", "loss": 1}\n[1, 2]\n{"type": "step", "st')
    run = compare_runs.read_run("a", path)
    assert len(run.bad_lines) == 4 and len(run.train) == 200, (run.bad_lines, len(run.train))
    assert "4 of" in run.notes[0] and str(run.bad_lines[0]) in run.notes[0], run.notes
    torn = write_log(f"{tmp}/torn.log", ["s:0 trl:3.0 lr:0.1 norm:1", "s:1 trl:2.0 lr:0.1 norm:1", "s:1x trl:", "hello", "s:2 tr"])
    assert compare_runs.read_run("t", torn).bad_lines == [3, 4, 5]


def test_losses_that_are_not_finite(tmp):
    path = write_log(f"{tmp}/a.log", ["s:0 trl:3 lr:0 norm:1", "s:1 trl:nan lr:0 norm:nan", "s:2 trl:-inf lr:0 norm:1", "s:3 trl:2 lr:0 norm:1"])
    run = compare_runs.read_run("a", path)
    assert sorted(run.train) == [0, 3] and run.not_finite == [1, 2]
    assert "2 steps, first at step 1" in run.notes[0], run.notes
    null = write_log(f"{tmp}/n.jsonl", ['{"type": "step", "step": 0, "loss": 3.0}', '{"type": "step", "step": 1, "loss": null, "skipped": 1}'])
    run = compare_runs.read_run("n", null)
    assert run.not_finite == [1] and run.skipped == [1] and run.bad_lines == []
    status, out, err = run_main(f"a={path}", f"n={null}")
    assert status == 0 and "not finite" in out and "skipped" in out, (status, out, err)


def test_a_resumed_log_counts_the_last_time(tmp):
    path = write_log(f"{tmp}/a.log", ["s:0 trl:3 lr:0 norm:1", "s:1 trl:2.5 lr:0 norm:1", "s:1 trl:2.4 lr:0 norm:1", "s:2 trl:2.3 lr:0 norm:1"])
    run = compare_runs.read_run("a", path)
    assert run.train == {0: 3.0, 1: 2.4, 2: 2.3} and "step 1" in run.notes[0], run.notes


def test_errors(tmp):
    good = write_metrics(f"{tmp}/good")
    refused("no-such", f"a={tmp}/no-such", good)
    os.makedirs(f"{tmp}/empty")
    refused("no metrics.jsonl or main.log", good, f"{tmp}/empty")
    refused("no losses", good, write_log(f"{tmp}/prose.txt", ["It was a dark night.", "s:one trl:two"]))
    open(f"{tmp}/nothing", "w", encoding="utf-8").close()
    refused("no losses", good, f"{tmp}/nothing")
    late = write_log(f"{tmp}/late.log", [f"s:{s} trl:3.0 lr:0 norm:1" for s in range(1000, 1010)])
    refused("no step in common", f"late={late}", f"good={good}")
    refused("given twice", good, good)
    refused("no run is named 'x'", f"a={good}", f"b={late}", "--baseline", "x")
    refused("names no file", "a=", good)
    refused("cannot write", f"a={good}", "--svg", f"{tmp}/no/such/folder/x.svg")
    for arguments in ([], [good, "--width", "3"], [good, "--floor", "nan"], [good, "--no-such-flag"]):
        status, _, err = run_main(*arguments)
        assert status == 2 and "error" in err, (arguments, status, err)


def test_names(tmp):
    a, b = write_metrics(f"{tmp}/one/run"), write_metrics(f"{tmp}/two/run")
    status, out, _ = run_main(a, b, "--no-plot")
    assert status == 0 and a in out and b in out, out  # equal folder names: paths tell them apart
    status, out, _ = run_main(a, f"{tmp}/two/run/", f"third={a}", "--no-plot")
    assert status == 0 and "third" in out


def test_one_run_alone(tmp):
    status, out, err = run_main(write_metrics(f"{tmp}/a"), "--svg", f"{tmp}/a.svg")
    assert status == 0 and err == "" and "gap" not in out, (out, err)
    ElementTree.parse(f"{tmp}/a.svg")


def test_plot_shows_the_curve(tmp):
    falling = [(step, curve(step)) for step in range(0, 201, 2)]
    lines = compare_runs.terminal_plot("t", [("a", falling)], compare_runs.ASCII, 80, 18, floor=1.25)
    rows = [line[10:] for line in lines[1:19]]
    heights = {}
    for row, text in enumerate(rows):
        for column, mark in enumerate(text):
            if mark == "o":
                heights.setdefault(column, row)
    assert len(heights) >= 66, len(heights)  # the width of the picture, but for the first, off-scale points
    order = [heights[column] for column in sorted(heights)]
    assert order == sorted(order) and order[-1] > order[0] + 8, order
    assert any("-" * 70 == text for text in rows), "no floor line"
    two = compare_runs.terminal_plot("t", [("a", falling), ("b", falling)], compare_runs.ASCII, 80, 18)
    assert any("*" in line for line in two[1:19]) and not any("x" in line for line in two[1:19])


def test_output_for_a_terminal_without_unicode(tmp):
    a, b = write_metrics(f"{tmp}/a"), write_metrics(f"{tmp}/b", shift=0.1)
    status, out, _ = run_main(f"a={a}", f"b={b}", "--ascii")
    assert status == 0 and out.isascii(), out


def test_svg(tmp):
    a, b = write_metrics(f"{tmp}/a", shift=0.01, noise=0.1), write_metrics(f"{tmp}/b", noise=0.1)
    picture = f"{tmp}/x.svg"
    status, _, err = run_main(f"<fp8> & co={a}", f"bf16={b}", "--svg", picture, "--title", 'FP8 <"&"> BF16', "--no-plot")
    assert status == 0, err
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    text = " ".join(element.text or "" for element in root.iter(f"{space}text"))
    assert "<fp8> & co" in text and 'FP8 <"&"> BF16' in text and "floor: 1.2500" in text, text
    lines = list(root.iter(f"{space}polyline"))
    assert len(lines) == 2 + 2 + 1 + 1 + 2, len(lines)  # curves, floor, zero line, differences
    for line in lines:
        for point in line.get("points").split():
            x, y = map(float, point.split(","))
            assert 69 <= x <= 961 and math.isfinite(y), point
    assert not os.path.exists(picture + ".tmp")


def test_odd_shapes(tmp):
    one = write_log(f"{tmp}/one.log", ["s:0 trl:3.0 lr:0 norm:1"])
    flat = write_log(f"{tmp}/flat.log", [f"s:{s} trl:3.0 lr:0 norm:1" for s in range(50)])
    only_val = write_log(f"{tmp}/val.log", [f"s:{s} tel:{4 - s / 100}" for s in range(0, 100, 10)])
    huge = write_log(f"{tmp}/huge.log", [f"s:{s} trl:{1e30 if s == 3 else 2.0} lr:0 norm:1" for s in range(50)])
    for runs in ([one, flat], [flat, one], [only_val], [huge, flat], [f"v={only_val}", f"w={only_val}"]):
        status, out, err = run_main(*runs, "--svg", f"{tmp}/odd.svg")
        assert status == 0 and err == "", (runs, out, err)
        ElementTree.parse(f"{tmp}/odd.svg")
    refused("no step in common", only_val, flat)


def test_helpers(_tmp):
    assert compare_runs.nice_ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert [compare_runs.tick_text(t, 0.05) for t in (0.05, -0.0)] == ["0.05", "0.00"]
    points = [(i, float(i)) for i in range(10000)]
    thin = compare_runs.thinned(points, 100)
    assert len(thin) <= 101 and thin[0] == points[0] and thin[-1] == points[-1]
    smooth = compare_runs.smoothed({0: 0.0, 1: 3.0, 2: 6.0, 3: 0.0}, 3)
    assert smooth == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)], smooth


def main():
    passed = failed = skipped = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        folder = tempfile.mkdtemp()
        try:
            test(folder)
            print(f"ok       {name}")
            passed += 1
        except Skipped as reason:
            print(f"skipped  {name}: {reason}")
            skipped += 1
        except Exception:  # whatever goes wrong in a test is that test's failure
            print(f"FAILED   {name}\n{traceback.format_exc()}")
            failed += 1
        finally:
            shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
