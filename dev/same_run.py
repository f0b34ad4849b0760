#!/usr/bin/env python3
"""Did two runs do the same? Every line of their logs, every byte of their newest checkpoints.

    same_run.py RUN_A RUN_B

What may differ: the times in metrics.jsonl, its records of settings, checkpoints and resumptions, and the section of
common.bin that holds the settings. Prints one line per difference; exit status 0: none, 1: some, 2: files cannot be read.
"""

import argparse
import json
import os
import re
import struct
import sys

TIMES = ("ms", "tokens_per_s", "roofline_fraction", "comm_ms", "comm_exposed_ms", "comm_gb_per_s")
RECORDS_OF_THE_RUN = ("config", "resume", "checkpoint", "profile")
SECTIONS_OF_THE_RUN = ("config",)
HEADER_BYTES = 4096


def main_log(run):
    """Lines of main.log."""
    with open(os.path.join(run, "main.log")) as file:
        lines = file.read().splitlines()
    for line in lines:
        if not re.fullmatch(r"s:\d+ (trl:\S+ lr:\S+ norm:\S+|tel:\S+|eval:\S+)", line):
            raise ValueError(f"{run}/main.log has the line {line!r}")
    return lines


def metrics(run):
    """Records of metrics.jsonl, without times and without what tells how the run was run."""
    records = []
    with open(os.path.join(run, "metrics.jsonl")) as file:
        for line in file:
            record = json.loads(line)
            if record["type"] not in RECORDS_OF_THE_RUN:
                records.append({key: value for key, value in record.items() if key not in TIMES})
    return records


def newest_checkpoint(run):
    steps = sorted(name for name in os.listdir(run) if re.fullmatch(r"step_\d{8}", name))
    return steps[-1] if steps else None


def read(path):
    with open(path, "rb") as file:
        return file.read()


def sections(path):
    """{name: bytes} of a container file: 4,096 bytes of header with a table, then the sections."""
    data = read(path)
    _, _, count, size = struct.unpack_from("<8sIIQ", data)
    if size != len(data):
        raise ValueError(f"{path} has {len(data)} bytes, its header says {size}")
    found = {}
    for i in range(count):
        name, offset, length, _ = struct.unpack_from("<16sQQQ", data, 24 + 40 * i)
        if not HEADER_BYTES <= offset <= offset + length <= len(data):
            raise ValueError(f"{path}: section {name!r} is outside of the file")
        found[name.rstrip(b"\0").decode()] = data[offset : offset + length]
    return found


def first_difference(a, b):
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return f"{at} of {len(a)} and {len(b)}: {a[at : at + 1]} and {b[at : at + 1]}"


def differences(a, b):
    for name, reader in (("main.log", main_log), ("metrics.jsonl", metrics)):
        in_a, in_b = reader(a), reader(b)
        if in_a != in_b:
            yield f"{name}: line {first_difference(in_a, in_b)}"
        if not in_a:
            yield f"{name}: no line to compare"
    step, other = newest_checkpoint(a), newest_checkpoint(b)
    if step is None or step != other:
        yield f"newest checkpoint {step} and {other}"
        return
    folder_a, folder_b = os.path.join(a, step), os.path.join(b, step)
    files, others = sorted(os.listdir(folder_a)), sorted(os.listdir(folder_b))
    if files != others:
        yield f"{step} holds {files} and {others}"
    for file in sorted(set(files) & set(others)):
        path_a, path_b = os.path.join(folder_a, file), os.path.join(folder_b, file)
        if file == "model.bin":
            if read(path_a) != read(path_b):
                yield f"{step}/{file}: byte {first_difference(read(path_a), read(path_b))}"
            continue
        in_a, in_b = sections(path_a), sections(path_b)
        if list(in_a) != list(in_b):
            yield f"{step}/{file} has the sections {list(in_a)} and {list(in_b)}"
        for name in in_a.keys() & in_b.keys():
            if name not in SECTIONS_OF_THE_RUN and in_a[name] != in_b[name]:
                yield f"{step}/{file}, section {name}: byte {first_difference(in_a[name], in_b[name])}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_a")
    parser.add_argument("run_b")
    arguments = parser.parse_args()
    try:
        found = list(differences(arguments.run_a, arguments.run_b))
    except (OSError, ValueError, KeyError, struct.error) as error:
        print(f"cannot compare: {error}")
        return 2
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
