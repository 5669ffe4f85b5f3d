"""What the command line's runs leave behind."""

import json
import os


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    return {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}


def losses(folder):
    return {line["step"]: line["loss"] for line in read_metrics(folder)["log"] if "loss" in line}


def tree(folder):
    """Every file under a folder, with its size and the time of its last change."""
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return {path: (os.path.getsize(path), os.path.getmtime(path)) for path in paths}
