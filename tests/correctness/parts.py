"""Parts of the grid, measured in several calls or on several devices, as one result."""

import json
from pathlib import Path

from .cases import values_of

_OF_ALL = ("versions", "python", "document_lengths", "factor")  # what parts must agree in


def joined(paths, n_rows, images=False):
    """The head and the rows of one result; a case that several files hold counts as in the last of them.

    Args:
        n_rows: of the whole grid.
        images: of the grid of models with images.

    Raises:
        ValueError: the parts were judged differently or with different libraries, or are of the other grid.
    """
    known = values_of(images)["arch"]
    parts = [json.loads(Path(path).read_text()) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if differing := [name for name in _OF_ALL if part[name] != parts[0][name]]:
            raise ValueError(
                f"{path} differs from {paths[0]} in {', '.join(differing)}; join parts of one grid"
            )
        if others := sorted({row["arch"] for row in part["rows"]}.difference(known)):
            grid = "without --images" if images else "with --images"
            raise ValueError(f"{path} has rows of {', '.join(others)}; join them {grid}")
    rows = {
        (*(row[name] for name in values_of()), row["captured"]): row for part in parts for row in part["rows"]
    }
    heads = [{name: value for name, value in part.items() if name != "rows"} for part in parts]
    head = {
        **heads[-1],
        "device": ", ".join(dict.fromkeys(part["device"] for part in parts)),
        "only": {},
        "n_rows": n_rows,
        "complete": len(rows) == n_rows,
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "parts": heads,
    }
    return head, list(rows.values())
