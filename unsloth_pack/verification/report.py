"""The report of a verification."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One verdict.

    Args:
        name: of the check.
        value: the measured error; 0 if exact.
        allowed: the limit of `value`: 0, or a rounding error measured on the same model.
        detail: where the value occurred, or the meaning of 0.
        passed: True if `value` is at most `allowed`, and the check could have failed.
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
    """All verdicts on one model. `print(report)` shows them as lines.

    Args:
        model_type: of the text model.
        attn_backend: of the patch, else transformers' attention implementation.
        dtype: of the weights.
        checkpointing: True if layers are recomputed in the backward pass.
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
        model = f"{self.model_type}, attention {self.attn_backend}, {self.dtype}"
        checkpointing = "on" if self.checkpointing else "off"
        lengths = ", ".join(map(str, self.lengths))
        head = f"{model}, checkpointing {checkpointing}; documents of {lengths} tokens"
        return "\n".join([head, *map(str, self.checks)])
