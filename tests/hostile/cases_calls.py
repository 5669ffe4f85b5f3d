"""The Python API: arguments that cannot be, and model calls whose lengths lie."""

from collections.abc import Callable
from functools import cache
from typing import Any

import datasets
import torch
from cases_models import adapter
from model_folder import byte_tokenizer
from refusals import Case

from unsloth_pack import FastLanguageModel, packing
from unsloth_pack.data import check_token_ids
from unsloth_pack.packed_row.row import PackedRow

T = 12  # tokens of the row in every model call
INF, NAN = float("inf"), float("nan")


def load(name: Any = "model", **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(name, **{"max_seq_length": 64, **options})


@cache
def _loaded() -> Any:
    return load()[0]


def call(title: str, says: str, function: Callable[..., Any], /, *args: Any, **options: Any) -> Case:
    return Case(title, says, lambda: function(*args, **options))


def loading(says: str, **options: Any) -> Case:
    return call(f"from_pretrained({_shown(options)})", says, load, **options)


def adapting(says: str, **options: Any) -> Case:
    return Case(
        f"get_peft_model({_shown(options)})",
        says,
        lambda: FastLanguageModel.get_peft_model(load()[0], **options),
    )


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={repr(value)[:40]}" for name, value in options.items())


LOADING = [
    *(loading("max_seq_length is", max_seq_length=value) for value in (0, "64", None, 10**30)),
    *(loading("dtype is", dtype=value) for value in ("int8", torch.int8, 32)),
    *(loading("random_state is", random_state=value) for value in (-1, 2**32)),
    *(loading("model_name is", name=value) for value in (None, " ")),
    *(
        loading("attn_backend is|no attention backend|'fast'|unknown", attn_backend=value)
        for value in ("fast", "", 5)
    ),
    *(loading("device_map|cannot load", device_map=value) for value in ("frob",)),
    loading("choose one", load_in_4bit=True, load_in_8bit=True),
    loading("cannot train quantised", load_in_4bit=True, full_finetuning=True),
    loading("cannot load", max_position_embeddings="many"),
]
ADAPTING = [
    *(adapting("r is", r=value) for value in (0, 1.5, "8", 10**12)),
    *(adapting("lora_dropout is", lora_dropout=value) for value in (1.0, NAN)),
    *(adapting("lora_alpha is", lora_alpha=value) for value in (0, INF)),
    *(adapting("random_state is", random_state=value) for value in (-1,)),
    *(
        adapting("target_modules", target_modules=value)
        for value in ([], ["q_proj", "w"], "frob(", "frob", 5)
    ),
    *(adapting("bias", bias=value) for value in ("some",)),
    *(adapting("layers_to_transform", layers_to_transform=value) for value in (-1, [0, 99])),
    *(adapting("modules_to_save", modules_to_save=value) for value in (["frob"], "lm_head")),
    *(adapting("use_gradient_checkpointing is", use_gradient_checkpointing=value) for value in ("often", 7)),
    adapting("loftq_config", loftq_config={"frob": 1}),
    adapting("loftq_config", loftq_config={"loftq_bits": 99}),
    adapting("r is 1000000; give a whole number from 1 to", r=10**6),
]


def forward(name: str, says: str, **description: Any) -> Case:
    def run() -> Any:
        return _loaded()(**{"input_ids": torch.arange(T)[None]} | description)

    return Case(f"model call: {name}", says, run)


SUM = "of 12 tokens; give the length of each document"
# Every refusal of a description has its case in tests/test_describe.py
CALLS = [
    forward("lengths beyond the row", SUM, packed_seq_lengths=[5, 8]),
    forward("a keyword cut short", "do you mean packed_seq_lengths", packed_seq_length=[5, 7]),
    forward(
        "a mask of document ids alone",
        "which alone do not separate documents",
        attention_mask=torch.tensor([[1] * 5 + [2] * 7]),
    ),
    forward(
        "labels beyond the head, in a packed row",
        "labels reach from 99999 to 99999",
        packed_seq_lengths=[5, 7],
        labels=torch.full((1, T), 99_999),
    ),
    forward(
        "a packed row of other tokens",
        r"packed_row describes \[1, 9\] tokens",
        packed_row=PackedRow.of_lengths((4, 5), torch.device("cpu")),
    ),
    forward("q and k that disagree", "disagree", cu_seq_lens_q=[0, 5, 12], cu_seq_lens_k=[0, 6, 12]),
]

PACKING = [
    call("a plan of a length beyond", "5", packing.plan_packs, [5], 4),
    call("a plan of another strategy", "no packing strategy", packing.plan_packs, [1], 4, "best"),
    call("sequences beyond", "5", packing.pack_sequences, [[1] * 5], 4, 0),
    call("a stream without a buffer", "buffer_size is 0", packing.PackingStream, 4, 0),
    call("a sampler of a rank beyond", "rank", packing.PackedSampler, [[1]], 2, 2),
    call(
        "a data set of short labels",
        "column 'labels' does not hold one number per token",
        packing.pack_dataset,
        datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2]]}),
        4,
    ),
    call("accumulation over nothing", "is 0", packing.plan_accumulation, 0, 1, 1, 1),
    *(
        call(f"token ids: {name}", says, check_token_ids, datasets.Dataset.from_dict({"input_ids": ids}), 10)
        for name, ids, says in (
            ("one too large", [[1], [2, 10]], "row 1, column 'input_ids': token id 10 is outside"),
            ("beyond 32 bits", [[2**40]], "token id 1099511627776"),
            ("null", [[1, None]], "token id None"),
        )
    ),
]


SAVING = [
    Case("save by another method", "save_method is 'gguf'", lambda: _saver("new", save_method="gguf")),
    Case("save an adapter that is not there", "has no adapter", lambda: _saver("new", save_method="lora")),
    Case("save into a file", "is a file", lambda: _saver("few.jsonl")),
    *(
        Case(f"save to {name[:9]!r}", says, lambda name=name: _saver(name))
        for name, says in {
            "": "save_directory is ''",
            "x" * 300: "could not be written",
        }.items()
    ),
    Case("save in the kernel's", "could not be written", lambda: _saver("/proc/self/new")),
    Case(
        "adapt twice",
        "has an adapter already",
        lambda: FastLanguageModel.get_peft_model(load("own")[0]),
        adapter(),
    ),
    Case(
        "adapt what trains",
        "trains every weight",
        lambda: FastLanguageModel.get_peft_model(load(full_finetuning=True)[0]),
    ),
]


def _saver(target: str, **options: Any) -> None:
    _loaded().save_pretrained_merged(target, byte_tokenizer(), **options)


CASES = [*LOADING, *ADAPTING, *CALLS, *PACKING, *SAVING]
