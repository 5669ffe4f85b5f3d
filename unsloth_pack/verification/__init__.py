"""Check this very model: does a packed row leak, and does it equal its documents alone?

`verify` is thorough and returns a report; `probe` takes two short steps and raises.
"""

from unsloth_pack.verification.leaks import Check, probe
from unsloth_pack.verification.run import VerifyReport, verify

__all__ = ["Check", "VerifyReport", "probe", "verify"]
