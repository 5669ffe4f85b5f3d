"""`unsloth-pack teach`: pack a data set with what a teacher predicts, to train a smaller model on it."""

from collections.abc import Sequence

from unsloth_pack.cli.pack import LOADING, pack_parser, write
from unsloth_pack.config.values import Count, Positive
from unsloth_pack.packing.teacher_columns import BYTES, PackedTeacher

_TOP_K = 64


def run(arguments: Sequence[str]) -> int:
    """Write the packs of a data set to `--out` with a teacher's most likely next tokens."""
    parser = pack_parser(
        "teach",
        "Pack a data set with the most likely next tokens of a teacher, to train a student of the same "
        f"vocabulary without the teacher. A token takes {BYTES} bytes for each, "
        f"{BYTES * _TOP_K} with --top_k {_TOP_K}.",
        "the teacher: demo, a folder of a model or an adapter, or a hub name",
    )
    likeliest = f"next tokens that are stored for each token (default: {_TOP_K})"
    parser.add_argument("--top_k", type=Count, metavar="TOKENS", help=likeliest)
    divisor = "divides the teacher's logits; the student trains at the same (default: 1)"
    parser.add_argument("--temperature", type=Positive, help=divisor)
    for name in LOADING:
        parser.add_option(name)
    flags = parser.parse(arguments)
    teacher = PackedTeacher(
        flags.get("model_name", "demo"), flags.get("top_k", _TOP_K), flags.get("temperature", 1.0)
    )
    return write(flags, "teach", teacher)
