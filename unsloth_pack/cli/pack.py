"""`unsloth-pack pack`: tokenise and pack a data set once, to train on it from disk."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from unsloth_pack.config import Parser
from unsloth_pack.config.options import TrainingOptions
from unsloth_pack.config.values import Count, FilePath, OneOf, Seed
from unsloth_pack.errors import InputError
from unsloth_pack.packing.planner import STRATEGIES
from unsloth_pack.run.data_flags import (
    add_data_flags,
    add_image_flags,
    check_sources,
    data_options,
    image_options,
)
from unsloth_pack.run.machine import check_new_folder


def run(arguments: Sequence[str]) -> int:
    """Write the packs of a data set to `--out`, and print what is in them; with `--json` as JSON.

    Raises:
        InputError: a bad argument, a folder that holds something or cannot be written to, rows longer than
            the model has positions, data that cannot be read, or a tokenizer that cannot be loaded. Nothing
            has been written then.
    """
    given = _parser().parse(arguments)
    if "out" not in given:
        raise InputError("--out is missing; see `unsloth-pack pack --help`")
    out = Path(given["out"])
    check_new_folder("out", out)
    check_sources(given)

    from unsloth_pack.checkpoints.loading import load_config, resolve
    from unsloth_pack.checkpoints.weight_checks import check_positions
    from unsloth_pack.cli.quiet import quieten
    from unsloth_pack.data import tokenizer_hash
    from unsloth_pack.packing import write_packs
    from unsloth_pack.report.terminal import LastingConsole, print_packs
    from unsloth_pack.run.documents import load_tokenizer, load_training_data, mixed_documents
    from unsloth_pack.run.images import prepared_images
    from unsloth_pack.run.prepare import refuse_unused_folder

    as_json = given.get("json", False)
    quieten(show_bars=not as_json)
    model_name, capacity = given.get("model_name", "demo"), given.get("max_seq_length", 2048)
    check_positions(capacity, model_name, load_config(resolve(model_name)[0]).get_text_config())
    only_responses = given.get("train_on_responses_only", False)
    data = data_options(given)
    rows = load_training_data(data)
    tokenizer = load_tokenizer(model_name)
    settings = image_options(given)
    images = prepared_images(
        model_name,
        tokenizer,
        settings,
        [each.rows for each in rows],
        keep_bytes=not given.get("image_paths", False),
    )
    if images is None and given.get("image_paths"):
        raise InputError("image_paths is true, and the data has no images; leave out --image_paths")
    seed = given.get("seed", TrainingOptions().seed)
    how: dict[str, Any] = {"how": data.mixture, "seed": seed, "most": data.sample_limit}
    how["images"] = images
    mixture = mixed_documents(rows, tokenizer, capacity, only_responses, data.num_proc, **how)
    documents = mixture.train
    has_paths = bool(given.get("image_paths")) and documents.has_files
    if images is not None:
        refuse_unused_folder(settings, documents.has_files)
    if given.get("image_paths") and not has_paths:
        raise InputError("image_paths is true, and no image of the data is a file; leave out --image_paths")
    optional: dict[str, Any] = {
        name: given[name] for name in ("strategy", "seed", "rows_per_shard") if name in given
    }
    manifest = write_packs(
        documents.rows,
        out,
        capacity,
        tokenizer_hash=tokenizer_hash(tokenizer),
        ledger=documents.ledger,
        train_on_responses_only=only_responses,
        model_name=model_name,
        images=None if images is None else images.packed(documents.ledger),
        **optional,
    )
    if as_json:
        LastingConsole().show_json({**manifest.values(), "data_sets": [*map(asdict, mixture.parts)]})
    else:
        folder = settings.image_folder if has_paths else None
        is_adapter = resolve(model_name)[1] is not None
        print_packs(LastingConsole(), manifest, str(out), mixture.parts, folder, is_adapter)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="unsloth-pack pack",
        description="Tokenise and pack a data set once; train on it with --dataset DIR.",
    )
    add = parser.add_argument
    add_data_flags(parser)
    add(
        "--model_name",
        type=FilePath,
        help="whose tokenizer is used: demo, a folder, or a hub name (default: demo)",
    )
    add("--max_seq_length", type=Count, metavar="TOKENS", help="length of a packed row (default: 2048)")
    parser.add_option("num_proc", "processes that read and tokenise the data (default: one for each core)")
    add("--out", type=FilePath, metavar="DIR", help="to write the packs to; new, or empty; has to be given")
    add(
        "--strategy",
        type=Annotated[str, OneOf((*STRATEGIES,))],
        metavar="|".join(STRATEGIES),
        help="which documents share a row (default: bfd)",
    )
    parser.add_option("train_on_responses_only")
    add(
        "--seed",
        type=Seed,
        help="plan over the documents in a random order of this seed (default: in their own order), and mix "
        "data sets by it (default: by 3407, as for training)",
    )
    add(
        "--rows_per_shard",
        type=Count,
        metavar="ROWS",
        help="rows of a file (default: as many as make 256 MiB)",
    )
    add_image_flags(parser)
    parser.add_switch(
        "--image_paths", "refer to files of images by their paths, instead of holding what they hold"
    )
    parser.add_switch("--json", "print the manifest and the data sets as JSON")
    return parser
