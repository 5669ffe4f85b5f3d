"""Models and adapters: cut, of another shape, of another base, not finite, pickled."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from model_folder import save_model
from refusals import Case, train
from safetensors.torch import load_file, save_file

from unsloth_pack import FastLanguageModel

Damage = Callable[[Path], object]
CUT = "model.safetensors: not whole safetensors .*; download or save it again"
EMBEDDING = "model.embed_tokens.weight"
PROJECTION = "model.layers.0.self_attn.q_proj.weight"


def load(name: str = "own", **options: Any) -> Any:
    return FastLanguageModel.from_pretrained(name, **{"max_seq_length": 64, **options})


@cache
def _model() -> Path:
    return save_model(Path(mkdtemp()) / "model")


@cache
def _adapter() -> Path:
    model, _ = load(str(_model()))
    folder = _model().parent / "adapter"
    FastLanguageModel.get_peft_model(model, r=4).save_pretrained(folder)
    return folder


def own(*damages: Damage) -> Damage:
    """A copy of the tiny model in the folder `own`, damaged."""

    def prepare(folder: Path) -> None:
        shutil.copytree(_model(), folder / "own")
        for damage in damages:
            damage(folder / "own")

    return prepare


def adapter(*damages: Damage) -> Damage:
    """An adapter of `model` in the folder `own`, damaged."""

    def prepare(folder: Path) -> None:
        shutil.copytree(_adapter(), folder / "own")
        edited("adapter_config.json", base_model_name_or_path=str(folder / "model"))(folder / "own")
        for damage in damages:
            damage(folder / "own")

    return prepare


def edited(file: str, **values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def written(file: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(data)


def cut(file: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(len(data) * share)])

    return damage


def removed(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors") -> Damage:
    def damage(folder: Path) -> None:
        weights = load_file(folder / file)
        change(weights)
        save_file(weights, folder / file, metadata={"format": "pt"})

    return damage


def poisoned(name: str, value: float) -> Damage:
    return tensors(lambda weights: weights[name].view(-1)[7:8].fill_(value))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled_adapter(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def sharded(**index: Any) -> Damage:
    """The weights under the name of a shard, with an index that says something else."""

    def damage(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        whole = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(whole | index))

    return damage


def base(name: str, says: str, *damages: Damage) -> Case:
    """A base model that cannot be trained: through the command line."""
    return Case(f"model: {name}", says, train(model_name="own"), own(*damages))


def of_adapter(name: str, says: str, *damages: Damage) -> Case:
    return Case(f"adapter: {name}", says, ["generate", "--model_name=own", "--prompt=a"], adapter(*damages))


def reshaped(name: str, *shape: int) -> Damage:
    return tensors(lambda weights: weights.update({name: torch.zeros(shape)}))


WEIGHTS = {
    "weights missing": ("holds no safetensors; download or save", removed("model.safetensors")),
    "weights cut at 99%": (CUT, cut("model.safetensors", 0.99)),
    "weights that are a pointer": (
        CUT,
        written("model.safetensors", "version https://git-lfs"),
    ),
    "an embedding of another size": (f"{EMBEDDING}.*is \\[99, ", reshaped(EMBEDDING, 99, 64)),
    "a projection missing": (f"lack.*{PROJECTION}", tensors(lambda weights: weights.pop(PROJECTION))),
    "NaN in the embedding": (f"{EMBEDDING} .*not finite", poisoned(EMBEDDING, float("nan"))),
    "infinity in a norm": ("norm.weight .*not finite", poisoned("model.norm.weight", float("inf"))),
    "pickled": ("only pickled weights.*use_safetensors=False", pickled),
    "a shard cut": (
        "model-00001-of-00001.safetensors: not whole",
        lambda folder: (sharded()(folder), cut("model-00001-of-00001.safetensors", 0.5)(folder)),
    ),
}

MISTRAL, NAN = {"model_type": "mistral"}, float("nan")
CONFIGS = {
    "config cut": ("cannot load own", cut("config.json", 0.5)),
    "config missing": ("holds neither config.json nor adapter_config.json", removed("config.json")),
    "an unknown model_type": ("cannot load own", edited("config.json", model_type="frobnicate")),
    "a model_type of ours, not patched": ("'gpt2' has no patch", edited("config.json", model_type="gpt2")),
    "hidden_size of another model": ("is \\[|cannot load own", edited("config.json", hidden_size=32)),
    "more layers than weights": ("lack", edited("config.json", num_hidden_layers=9)),
}
TOKENIZERS = {
    "tokenizer missing": (
        "cannot load own",
        lambda folder: (removed("tokenizer.json")(folder), removed("tokenizer_config.json")(folder)),
    ),
    "tokenizer cut": ("cannot load own", cut("tokenizer.json", 0.5)),
    "a tokenizer without an end": (
        "the tokenizer of own has neither pad_token nor eos_token; name",
        removed("tokenizer_config.json"),
    ),
    "token ids beyond the embedding": (
        "outside the vocabulary, 0 to 99",
        lambda folder: (
            shutil.rmtree(folder),
            save_model(folder, vocab_size=100, eos_token_id=2, pad_token_id=0),
        ),
    ),
}


ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = [
    of_adapter("an unknown kind", "cannot be read", edited(ADAPTER_CONFIG, peft_type="FROB")),
    of_adapter(
        "of another kind", "only LORA can be loaded", edited(ADAPTER_CONFIG, peft_type="PROMPT_TUNING")
    ),
    of_adapter("no base", "does not name its base", edited(ADAPTER_CONFIG, base_model_name_or_path=None)),
    of_adapter(
        "a base that is gone",
        "cannot load gone/away.*check the name",
        edited(ADAPTER_CONFIG, base_model_name_or_path="gone/away"),
    ),
    of_adapter(
        "on an adapter",
        "second",
        lambda folder: (
            shutil.copytree(folder, folder.parent / "second"),
            edited(ADAPTER_CONFIG, base_model_name_or_path="second")(folder),
        ),
    ),
    of_adapter(
        "weights missing", "holds no safetensors; download or save", removed("adapter_model.safetensors")
    ),
    of_adapter("weights cut at 99%", CUT, cut("adapter_model.safetensors", 0.99)),
    of_adapter("pickled", "pickled", pickled_adapter),
    of_adapter("rank of another", "cannot load the adapter.*size mismatch", edited(ADAPTER_CONFIG, r=8)),
    of_adapter(
        "a matrix missing",
        "cannot load the adapter",
        tensors(lambda weights: weights.pop(min(weights)), "adapter_model.safetensors"),
    ),
    of_adapter(
        "NaN",
        "not finite",
        tensors(lambda weights: weights[min(weights)].fill_(float("nan")), "adapter_model.safetensors"),
    ),
]

CASES = [
    *(base(name, *of) for name, of in WEIGHTS.items()),
    *(base(name, *of) for name, of in CONFIGS.items()),
    *(base(name, *of) for name, of in TOKENIZERS.items()),
    Case("model, API: pickled", "only pickled weights", load, own(pickled)),
    *ADAPTERS,
    Case(
        "model: a file",
        "own is a file; name the folder",
        train(model_name="own"),
        lambda folder: (folder / "own").write_text("x"),
    ),
    Case(
        "model: a missing folder",
        "cannot load ./gone: no such folder; check the path",
        train(model_name="./gone"),
    ),
    Case("model: a missing name", "cannot load no/such-model", train(model_name="no/such-model")),
]
