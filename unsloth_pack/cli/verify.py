"""`unsloth-pack verify`: does this model keep the documents of a packed row apart?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from unsloth_pack.config import Parser
from unsloth_pack.report.terminal import LastingConsole
from unsloth_pack.run.data_flags import add_data_flags, check_sources, read_documents

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_ROOM = 8192  # tokens of a row by default: beyond the usual sliding windows
_MOST_DOCUMENTS = 8  # of a data set
_LOADING = ("dtype", "load_in_4bit", "load_in_8bit", "load_in_fp8")


def run(arguments: Sequence[str]) -> int:
    """Print every verdict with what was measured; with `--json` all of it as JSON.

    Returns:
        0 where every check passed, 1 where one failed.
    """
    flags = build_parser().parse(arguments)
    check_sources(flags)

    from unsloth_pack.checkpoints.loading import find_model, load_config
    from unsloth_pack.cli import quieten
    from unsloth_pack.verification import verify

    quieten(show_bars=False)
    seed = flags.get("seed", 3407)
    config = load_config(find_model(flags.get("model_name", "demo"))[0]).get_text_config()
    room = flags.get("max_seq_length") or min(_ROOM, getattr(config, "max_position_embeddings", _ROOM))
    model = _load_model(flags, room, seed)
    documents = _documents(flags, room) if "dataset" in flags else None
    with Console(stderr=True).status("verifying") as status:
        report = verify(
            model,
            documents=documents,
            max_seq_length=room,
            seed=seed,
            progress=lambda step: status.update(f"verifying: {step}"),
        )
    if flags.get("json"):
        values = {"passed": report.passed, **asdict(report)}
        for check in values["checks"]:
            check["value"] = check["value"] if math.isfinite(check["value"]) else None  # which JSON has
        LastingConsole().show_json(values)
    else:
        LastingConsole().out(report, highlight=False)
    return 0 if report.passed else 1


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(
        prog="unsloth-pack verify",
        description="Check that in this model the documents of a packed row do not see each other, and that "
        "each gives what it gives alone.",
    )
    parser.add_option("model_name", "demo, a folder of a model or an adapter, or a hub name (default: demo)")
    add_data_flags(parser, "data whose documents are packed, as for training (default: random tokens)")
    length = f"length of the row (default: {_ROOM}, or the model's positions if it has fewer)"
    parser.add_option("max_seq_length", length)
    for name in _LOADING:
        parser.add_option(name)
    parser.add_option("attn_backend", "what computes attention, as for training (default: auto)")
    parser.add_option("use_gradient_checkpointing")
    parser.add_option("seed", "seed of the random tokens and of the adapter (default: 3407)")
    parser.add_switch("--json", "print JSON")
    return parser


def _load_model(flags: Mapping[str, Any], room: int, seed: int) -> "PreTrainedModel | PeftModel":
    """Load the model as it would train: with the adapter that it names, else with a random one."""
    import torch
    from peft import PeftModel

    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.memory.checkpointing import enable_checkpointing

    names = ("model_name", "attn_backend", *_LOADING)
    loading = {name: flags[name] for name in names if name in flags}
    model: PreTrainedModel | PeftModel
    model, _ = FastLanguageModel.from_pretrained(**loading, max_seq_length=room, random_state=seed)
    checkpointing = flags.get("use_gradient_checkpointing", False)
    if isinstance(model, PeftModel):
        enable_checkpointing(model, checkpointing)
        return model
    model = FastLanguageModel.get_peft_model(
        model, use_gradient_checkpointing=checkpointing, random_state=seed
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it is 0 in a new adapter, so that A would have no effect
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def _documents(flags: Mapping[str, Any], room: int) -> list[list[int]]:
    """Read the first documents of a data set that fit into the row, each cut to half of it."""
    why = "and those that are checked are random ones; leave out --dataset"
    name, half = flags.get("model_name", "demo"), max(1, room // 2)
    mixture, _, _ = read_documents(flags, name, half, most=_MOST_DOCUMENTS, why_no_images=why)
    documents: list[list[int]] = []
    for ids in mixture.train.rows["input_ids"]:
        if sum(map(len, documents)) + len(ids) <= room:
            documents.append(list(ids))
    return documents
