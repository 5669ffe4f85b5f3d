"""The points of `sweep.py`: which model, rows, adapter and weights are trained."""

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

SHORT = 4096  # tokens of an update up to which more steps are timed: they are fast, and vary more


@dataclass(frozen=True)
class Point:
    """One training run.

    Args:
        shape: a key of `shapes.PUBLISHED`.
        rows: packed rows an update.
        row_tokens: of a row.
        rank, dropout: of LoRA on all projections.
        base: the frozen weights, "bf16" or "4-bit".
        checkpointing: whether layers are computed again in the backward pass.
    """

    shape: str
    rows: int
    row_tokens: int
    rank: int = 16
    dropout: float = 0.0
    base: str = "bf16"
    checkpointing: bool = False

    @property
    def name(self) -> str:
        parts = [self.shape, f"{self.rows}x{self.row_tokens}", f"r{self.rank}"]
        parts += [f"drop{self.dropout}"] if self.dropout else []
        parts += ["4bit"] if self.base == "4-bit" else []
        return "-".join(parts + (["gc"] if self.checkpointing else []))

    def job(self) -> dict[str, Any]:
        """The point as peers get it and the results file holds it, with its numbers of steps."""
        is_short = self.rows * self.row_tokens <= SHORT
        warm, timed = (12, 16) if is_short else (6, 8)
        return {"point": self.name} | asdict(self) | {"warm": warm, "timed": timed}


# Points of one shape follow each other: its model is built once, and removed after them.
POINTS = (
    Point("qwen2.5-0.5b", 1, 1024, rank=8),
    Point("qwen2.5-0.5b", 1, 2048),
    Point("qwen2.5-0.5b", 4, 2048, rank=32, dropout=0.1),
    Point("qwen2.5-0.5b", 1, 16384),
    Point("qwen2.5-0.5b", 1, 32768, rank=64, checkpointing=True),
    Point("gemma3-1b", 1, 4096),
    Point("gemma3-1b", 4, 2048, rank=64, dropout=0.05),
    Point("gemma3-1b", 1, 16384, checkpointing=True),
    Point("llama3.2-1b", 1, 1024, rank=8),
    Point("llama3.2-1b", 2, 4096),
    Point("llama3.2-1b", 1, 8192, rank=128),
    Point("llama3.2-1b", 1, 32768, checkpointing=True),
    Point("qwen3-1.7b", 2, 4096),
    Point("qwen3-1.7b", 1, 8192, rank=32, dropout=0.1),
    Point("qwen3-1.7b", 8, 1024, base="4-bit"),
    Point("gemma2-2b", 1, 4096),
    Point("gemma2-2b", 1, 8192, rank=32, checkpointing=True),
    Point("llama3.2-3b", 1, 8192),
    Point("llama3.2-3b", 1, 4096, rank=32, dropout=0.1, checkpointing=True),
    Point("llama3.2-3b", 1, 2048, rank=8, base="4-bit"),
    Point("phi3-mini", 1, 4096),
    Point("phi3-mini", 4, 2048, rank=64, checkpointing=True),
    Point("qwen3-4b", 1, 8192),
    Point("qwen3-4b", 1, 2048, rank=64, dropout=0.05),
    Point("qwen3-4b", 1, 16384, base="4-bit", checkpointing=True),
    Point("mistral-7b", 1, 4096, rank=64, dropout=0.1),
    Point("mistral-7b", 2, 4096, base="4-bit", checkpointing=True),
    Point("llama3.1-8b", 1, 1024, rank=8),
    Point("llama3.1-8b", 1, 8192),
    Point("llama3.1-8b", 4, 2048, rank=128, checkpointing=True),
    Point("llama3.1-8b", 1, 16384, rank=32, base="4-bit", checkpointing=True),
    Point("llama3.1-8b", 1, 32768, checkpointing=True),
)
TRIALS = (  # for a machine without a GPU
    Point("tiny", 1, 256, rank=8),
    Point("tiny", 2, 128, rank=8, dropout=0.1),
)


def choose(patterns: str | None) -> list[Point]:
    """The points that match a list of patterns such as `qwen*,*-gc`; all of `POINTS` for None.

    Raises:
        ValueError: a pattern matches no point.
    """
    if patterns is None:
        return [*POINTS]
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    every = [*POINTS, *TRIALS]
    for pattern in wanted:
        if not any(fnmatchcase(point.name, pattern) for point in every):
            raise ValueError(f"--points: {pattern!r} matches no point; --list shows them")
    return [point for point in every if any(fnmatchcase(point.name, pattern) for pattern in wanted)]
