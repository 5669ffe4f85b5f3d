"""`unsloth-pack teach`: pack a data set with what a teacher predicts, to train a smaller model on it."""

from collections.abc import Sequence

from unsloth_pack.cli.pack import LOADING, pack_parser, write
from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, Positive
from unsloth_pack.errors import InputError
from unsloth_pack.packing.model_columns import BYTES, PackedReference, PackedTeacher

_TOP_K = 64


def run(arguments: Sequence[str]) -> int:
    """Write packs to `--out` with a teacher's most likely next tokens, or a reference's log-probabilities."""
    flags = build_parser().parse(arguments)
    name, objective = flags.get("model_name", "demo"), flags.get("objective", "sft")
    if objective in ("orpo", "rollouts"):
        raise InputError(f"objective is {objective!r}, which has no reference; use `unsloth-pack pack`")
    if objective not in ("dpo", "kto"):
        teacher = PackedTeacher(name, flags.get("top_k", _TOP_K), flags.get("temperature", 1.0))
        return write(flags, "teach", teacher)
    for unread in ("top_k", "temperature"):
        if unread in flags:
            raise InputError(f"{unread} is given, and objective {objective!r} has a reference; leave it out")
    return write(flags, "teach", PackedReference(name))


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = pack_parser(
        "teach",
        "Pack a data set with the most likely next tokens of a teacher, to train a student of the same "
        f"vocabulary without the teacher. A token takes {BYTES} bytes for each, "
        f"{BYTES * _TOP_K} with --top_k {_TOP_K}. With --objective dpo or kto, pack preferences with the "
        "log-probabilities of their reference.",
        "the teacher or reference: demo, a folder of a model or an adapter, or a hub name",
    )
    likeliest = f"next tokens that are stored for each token (default: {_TOP_K})"
    parser.add_argument("--top_k", type=Count, metavar="TOKENS", help=likeliest)
    divisor = "divides the teacher's logits; the student trains at the same (default: 1)"
    parser.add_argument("--temperature", type=Positive, help=divisor)
    for name in LOADING:
        parser.add_option(name)
    return parser
