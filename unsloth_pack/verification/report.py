"""What a verification found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One verdict.

    Args:
        name: what was looked at.
        value: what was measured, 0 where all is exact.
        allowed: the most that `value` may be: 0, or a rounding error measured on the same model.
        detail: where the value was found, or what it means that there is none.
        passed: whether `value` is at most `allowed`, and the check could have failed.
    """

    name: str
    value: float
    allowed: float
    detail: str
    passed: bool

    @classmethod
    def of(cls, name: str, value: float, allowed: float, detail: str) -> "Check":
        return cls(name, value, allowed, detail, value <= allowed)  # NaN never passes

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}  {self.name}: {self.detail}"


@dataclass(frozen=True)
class VerifyReport:
    """What was verified, and every verdict. `print(report)` shows it as lines.

    Args:
        model_type: of the text model.
        attn_backend: of the patch, else transformers' attention implementation.
        dtype: of the weights.
        checkpointing: whether layers are computed again in the backward pass.
        lengths: tokens of the documents in the row.
    """

    model_type: str
    attn_backend: str
    dtype: str
    checkpointing: bool
    lengths: tuple[int, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        checkpointing = "on" if self.checkpointing else "off"
        head = (
            f"{self.model_type}, attention {self.attn_backend}, {self.dtype}, checkpointing {checkpointing}"
        )
        head += f"; documents of {', '.join(map(str, self.lengths))} tokens"
        return "\n".join([head, *map(str, self.checks)])
