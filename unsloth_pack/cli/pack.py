"""`unsloth-pack pack`: tokenise and pack a data set once, to train on it from disk."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, FilePath
from unsloth_pack.data.rows import PREFERENCES
from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.packing.model_columns import PackedReference, PackedTeacher
from unsloth_pack.packing.planner import STRATEGIES
from unsloth_pack.report.terminal import LastingConsole, print_packs
from unsloth_pack.run.data_flags import (
    add_data_flags,
    add_image_flags,
    check_sources,
    options_of,
    read_documents,
)
from unsloth_pack.run.machine import check_new_folder

LOADING = ("dtype", "load_in_4bit", "load_in_8bit", "load_in_fp8", "attn_backend")  # flags of a teacher
_NO_IMAGES = "and a teacher reads text alone; take them out, or pack them with `unsloth-pack pack`"


def run(arguments: Sequence[str]) -> int:
    """Write the packs of a data set to `--out`, and print what is in them; with `--json` as JSON."""
    return write(build_parser().parse(arguments), "pack")


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    description = "Tokenise and pack a data set once; train on it with --dataset DIR."
    parser = pack_parser("pack", description, "whose tokenizer is used: demo, a folder, or a hub name")
    add_image_flags(parser)
    paths = "refer to files of images by their paths, instead of holding what they hold"
    parser.add_switch("--image_paths", paths)
    return parser


def write(
    flags: Mapping[str, Any], command: str, packed: PackedTeacher | PackedReference | None = None
) -> int:
    """Write and print the packs that the flags of a command describe."""
    if "out" not in flags:
        raise InputError(f"--out is missing; see `unsloth-pack {command} --help`")
    out = Path(flags["out"])
    check_new_folder("out", out)
    check_sources(flags)

    from unsloth_pack.checkpoints.loading import check_positions, find_model, load_config
    from unsloth_pack.cli import quieten
    from unsloth_pack.data import tokenizer_hash
    from unsloth_pack.packing import write_packs

    as_json, wants_paths = flags.get("json", False), flags.get("image_paths", False)
    quieten(show_bars=not as_json)
    model_name, capacity = flags.get("model_name", "demo"), flags.get("max_seq_length") or 2048
    base, adapter = find_model(model_name)
    config = load_config(base).get_text_config()
    check_positions(capacity, model_name, config)
    if isinstance(packed, PackedTeacher):
        require_whole("top_k", packed.top_k, 1, config.vocab_size)
    objective = flags["objective"] if flags.get("objective") in PREFERENCES else "sft"
    only_responses = flags.get("train_on_responses_only", False)
    mixture, images, tokenizer = read_documents(
        flags,
        model_name,
        capacity,
        only_responses,
        why_no_images=_NO_IMAGES if packed else "",
        keep_bytes=not wants_paths,
    )
    documents = mixture.train
    if wants_paths and not documents.has_files:
        raise InputError("image_paths is true, and no image of the data is a file; leave out --image_paths")
    model = None
    if packed is not None:
        from unsloth_pack.run.teacher import LoadedRowModel

        loading = {name: flags[name] for name in LOADING if name in flags}
        model = LoadedRowModel(packed, loading | {"max_seq_length": capacity})
    manifest = write_packs(
        documents.rows,
        out,
        capacity,
        tokenizer_hash=tokenizer_hash(tokenizer),
        ledger=documents.ledger,
        train_on_responses_only=only_responses,
        model_name=model_name,
        images=None if images is None else images.packed(documents.ledger),
        objective=objective,
        model=model,
        **{name: flags[name] for name in ("strategy", "seed", "rows_per_shard") if name in flags},
    )
    if as_json:
        LastingConsole().show_json({**asdict(manifest), "data_sets": [*map(asdict, mixture.parts)]})
    else:
        folder = options_of(flags).images.image_folder if wants_paths else None
        print_packs(LastingConsole(), manifest, str(out), mixture.parts, folder, adapter is not None)
    return 0


def pack_parser(command: str, description: str, model: str) -> Parser:
    """Return a parser of the flags that `write` reads, less those of images.

    model: what `--model_name` is for.
    """
    parser = Parser(prog=f"unsloth-pack {command}", description=description)
    add, strategy = parser.add_argument, Literal[(*STRATEGIES,)]
    add_data_flags(parser)
    parser.add_option("model_name", f"{model} (default: demo)")
    parser.add_option("max_seq_length", "length of a packed row (default: 2048)")
    parser.add_option("num_proc", "processes that read and tokenise the data (default: one for each core)")
    add("--out", type=FilePath, metavar="DIR", help="to write the packs to; new, or empty; has to be given")
    shared, choices = "which documents share a row (default: bfd)", "|".join(STRATEGIES)
    add("--strategy", type=strategy, metavar=choices, help=shared)
    parser.add_option("train_on_responses_only")
    parser.add_option("objective", "what the rows are for: dpo, kto and orpo take answers (default: sft)")
    order = "plan over the documents in a random order of this seed (default: in their own order), and mix"
    parser.add_option("seed", f"{order} data sets by it (default: by 3407, as for training)")
    rows = "rows of a file (default: as many as make 256 MiB)"
    add("--rows_per_shard", type=Count, metavar="ROWS", help=rows)
    parser.add_switch("--json", "print the manifest and the data sets as JSON")
    return parser
