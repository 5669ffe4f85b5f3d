"""Models, tokenizers and adapters from folders or the hub. Each fault is an error of one line."""

import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from textwrap import shorten
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import LoftQConfig, PeftConfig, PeftModel, PeftType, TaskType
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_bitsandbytes_available

from unsloth_pack.checkpoints.mxfp4 import make_packed_class
from unsloth_pack.checkpoints.names import GGUF, MODEL_CONFIG, check_model_there, is_adapter
from unsloth_pack.checkpoints.sharded import make_sharded_class
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError, require_whole
from unsloth_pack.lora.expert_stacks import placeholder_stacks

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EMBEDDING = re.compile(r"\.embed_tokens\.(.*\.)?weight$")
_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder")
_NOT_TAKEN = {  # options of transformers that callers may not give, and what to do instead
    "torch_dtype": "give dtype",
    "attn_implementation": "give attn_backend",
    "quantization_config": "give load_in_4bit, load_in_8bit or load_in_fp8",
    "use_gradient_checkpointing": "give it to get_peft_model",
    "rope_scaling": "give rope_parameters whole, with rope_type and rope_theta",
    "config": "give the attributes that differ",
}
# What transformers and PEFT raise over files that are broken, or that describe a model that cannot be
_UNREADABLE = (
    *(OSError, ValueError, ImportError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(StrictDataclassError, pickle.UnpicklingError),
)


def find_model(model_name: str) -> tuple[str, str | None]:
    """Where the base model's weights are, and the adapter's folder if `model_name` is one."""
    check_model_there(model_name)
    name = str(model_name)
    if name in BUNDLED_MODELS:
        return str(BUNDLED_MODELS[name]), None
    return (_base_of(name), name) if is_adapter(name) else (name, None)


def _base_of(adapter: str) -> str:
    path = os.path.join(adapter, "adapter_config.json")
    try:
        with _without_reports():
            config = PeftConfig.from_pretrained(adapter)
    except _UNREADABLE as error:
        raise InputError(f"{path} cannot be read ({_reason(error)}); save it anew") from None
    base, kind = config.base_model_name_or_path, config.peft_type
    if not isinstance(base, str) or not base:
        raise InputError(f"the adapter {adapter} does not name its base model; add base_model_name_or_path")
    if kind != PeftType.LORA:
        raise InputError(f"the adapter {adapter} is of type {kind.value}; only LORA can be loaded")
    if is_adapter(base):
        raise InputError(f"the adapter {adapter} has another adapter, {base}, as its base; merge that one")
    return find_model(base)[0]


def take_file_options(options: dict[str, object]) -> dict[str, Any]:
    """Take out the options that say where files lie; InputError for one that from_pretrained does not take.

    Configuration, tokenizer and weights all need them.
    """
    for name in options.keys() & _NOT_TAKEN.keys():
        said = f"{name} is {options[name]!r}, which from_pretrained does not take"
        raise InputError(f"{said}; {_NOT_TAKEN[name]}")
    return {name: options.pop(name) for name in _FILE_OPTIONS if name in options}


def load_config(source: str, **options: object) -> PretrainedConfig:
    """The configuration of a model; InputError where it cannot be found or read."""
    return split_config(source, **options)[0]


def split_config(source: str, **options: object) -> tuple[PretrainedConfig, dict[str, Any]]:
    """As `load_config`, with attributes replaced by options of their names, and the other options."""
    config, others = load_with(AutoConfig, source, return_unused_kwargs=True, **options)
    try:
        config.validate()  # as saving does: an option may contradict the file
    except StrictDataclassError as error:
        why = _reason(error.__cause__ or error)
        raise InputError(f"cannot load {source}: {why}; make them agree") from None
    if config.output_attentions:
        raise InputError(f"cannot load {source}: output_attentions is True, which cannot train; leave it out")
    return config, others


def weight_dtype(dtype: torch.dtype | str | None, full_finetuning: bool = False) -> torch.dtype:
    """The type to load weights in; None means the default that `FastLanguageModel.from_pretrained` states."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype is not None:
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    if full_finetuning or not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def own_device() -> dict[str, int | str]:
    """A `device_map` that puts a model on this process's GPU, or on the CPU where there is none."""
    return {"": int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() else "cpu"}


def tokenizer_folder(model_name: str) -> str:
    """Where the tokenizer of a model lies: beside an adapter saved with one, else in its base model."""
    source, adapter = find_model(model_name)
    has_own = adapter is not None and os.path.isfile(os.path.join(adapter, "tokenizer_config.json"))
    return adapter if adapter and has_own else source


def load_tokenizer(source: str, **options: object) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or of a hub name; InputError if saving it would write outside its folder."""
    tokenizer: PreTrainedTokenizerBase = load_with(AutoTokenizer, source, **options)
    if isinstance(tokenizer.chat_template, dict):  # each is saved in a file of its name
        for name in tokenizer.chat_template:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise InputError(f"cannot load {source}: a chat template is named {name!r}; rename it")
    return tokenizer


def load_model(
    source: str,
    *,
    use_safetensors: bool = True,
    is_classifier: bool = False,
    is_packed: bool = False,
    finish_layer: Callable[[nn.Module], object] | None = None,
    **options: Any,
) -> Any:
    """A causal model with all of its weights, each finite and of the shape that its configuration gives.

    InputError where they are not. With `use_safetensors=False` pickled weights are taken too. A classifier
    has a head for documents in place of that for tokens, which its files may lack. With `is_packed` experts
    stay as files hold them, see `make_packed_class`. With `finish_layer` every process keeps its part of the
    layers, see `make_sharded_class`.
    """
    if os.path.isdir(source):
        check_files(source, "model", use_safetensors)
    kind: Any = AutoModelForSequenceClassification if is_classifier else auto_class(options.get("config"))
    loads_specially = is_packed or finish_layer is not None
    if loads_specially:
        whole = kind = kind._model_mapping[type(options["config"])]
    if is_packed:
        kind = make_packed_class(kind)
    if finish_layer is not None:
        kind = make_sharded_class(kind, finish_layer)
    model, found = load_with(
        kind,
        source,
        use_safetensors=use_safetensors,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        **options,
    )
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        shapes = f"is {list(in_file)}, and config.json makes it {list(in_model)}"
        raise InputError(f"cannot load {source}: weight {name} {shapes}; download the model again")
    new = {"score.weight"} if is_classifier else set()
    if missing := sorted(found["missing_keys"] - new):
        lack = f"its files lack {len(missing)} weights, {missing[0]} among them"
        raise InputError(f"cannot load {source}: {lack}; correct config.json, or download the model again")
    if loads_specially:
        model.__class__ = whole
    refuse_not_finite(model, f"cannot load {source}")
    if type(getattr(model, "generation_config", None)) is GenerationConfig:
        model.generation_config.__class__ = _AlwaysSaved
    return model


class _AlwaysSaved(GenerationConfig):
    """Saved with what it was loaded with, such as a temperature without `do_sample`.

    transformers warns of that at loading, and refuses to save it once a trainer has set a token's id.
    """

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        super().validate(user_set_attributes=user_set_attributes)


def read_classes(adapter: str) -> dict[str, Any]:
    """Return what the configuration saved with an adapter of a classifier says of classes and padding."""
    is_classifier = PeftConfig.from_pretrained(adapter).task_type == TaskType.SEQ_CLS
    if not is_classifier or not os.path.isfile(os.path.join(adapter, MODEL_CONFIG)):
        return {}
    config = load_config(adapter)
    return {name: getattr(config, name) for name in ("num_labels", "id2label", "label2id", "pad_token_id")}


def check_classifies(config: PretrainedConfig) -> None:
    """Refuse a configuration for which transformers has no class that answers once per text."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or hasattr(config, "vision_config"):
        raise InputError(f"{config.model_type} has no classifier in transformers; give another model")


def auto_class(config: PretrainedConfig | None) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class that loads a model: one of vision and language has its own where it is no causal model."""
    of_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if of_images and not is_causal else AutoModelForCausalLM


def load_adapter(model: PreTrainedModel, adapter: str, *, use_safetensors: bool = True) -> PeftModel:
    """The model with the adapter in a folder, ready to train; InputError where they do not fit."""
    complaint = f"cannot load the adapter {adapter} onto its base model"
    remedy = "give the base model that it was trained on, or save it anew"
    check_files(adapter, "adapter", use_safetensors)
    try:
        with _without_reports(), placeholder_stacks(model):
            adapted = PeftModel.from_pretrained(model, adapter, is_trainable=True)
            found = adapted.load_adapter(adapter, "default", is_trainable=True)  # only this reports
    except (*_UNREADABLE, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(f"{complaint}: {_reason(error)}; {remedy}") from error
    # With added tokens PEFT saves an embedding or head in `modules_to_save` twice, once under this name:
    without_place = [name for name in found.unexpected_keys if ".modules_to_save." not in name]
    if names := [*found.missing_keys, *without_place]:
        raise InputError(f"{complaint}: it lacks weights, or has others, such as {names[0]}; {remedy}")
    refuse_not_finite(adapted, complaint)
    return adapted


def match_vocabulary(model: PreTrainedModel, adapter: str) -> None:
    """Give the model as many tokens as an adapter has rows for: training may have added some."""
    path = os.path.join(adapter, "adapter_model.safetensors")
    if not os.path.isfile(path):
        return
    check_files(adapter, "adapter", True)
    with safe_open(path, "pt") as file:
        sizes = {file.get_slice(name).get_shape()[0] for name in filter(_EMBEDDING.search, file.keys())}
    embedding: Any = model.get_input_embeddings()
    needed = max(trained_tokens(PeftConfig.from_pretrained(adapter)), default=-1) + 1
    if not sizes and needed > embedding.num_embeddings:
        sizes = {needed}
    if len(sizes) == 1 and sizes != {embedding.num_embeddings}:
        model.resize_token_embeddings(sizes.pop(), mean_resizing=False)  # the adapter holds the new rows


def trained_tokens(config: PeftConfig) -> list[int]:
    """The tokens that an adapter trains by their rows alone."""
    tokens = getattr(config, "trainable_token_indices", None) or []
    return tokens if isinstance(tokens, list) else [token for ids in tokens.values() for token in ids]


def load_with(auto_class: Any, source: str, **options: Any) -> Any:
    """What a class of transformers loads from a folder or the hub; InputError where that fails."""
    try:
        with _without_reports():  # without an answer about code, transformers asks at the terminal
            return auto_class.from_pretrained(source, **{"trust_remote_code": False, **options})
    except (*_UNREADABLE, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # of the device
            raise
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and (name := unknown[1]) in options:
            said = f"from_pretrained does not know {name}={options[name]!r}"
            raise InputError(f"{said}; correct the name, or leave it out") from error
        said, remedy = _reason(error), "correct its files, or download it again"
        if "trust_remote_code=True" in str(error):
            said = "it comes with code of its own, which is not run"
            remedy = "choose another, or if you trust that, pass trust_remote_code=True in Python"
        elif not os.path.isdir(source):
            remedy = GGUF if "gguf" in source.lower() else "check the name and the network, or give a folder"
        raise InputError(f"cannot load {source}: {said}; {remedy}") from error


def _reason(error: BaseException) -> str:
    said = shorten(str(error).strip().rstrip("."), 300, placeholder=" ...")
    tells_enough = isinstance(error, OSError | ValueError | RuntimeError) and said
    return said if tells_enough else f"{type(error).__name__} {said}".strip()


@contextmanager
def _without_reports() -> Iterator[None]:
    """Silence what transformers and PEFT print about files; what matters is raised here."""
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def check_loading(
    max_seq_length: int, in_4bit: bool, in_8bit: bool, in_fp8: bool, full: bool = False
) -> None:
    """Refuse a row length below 1, and forms of weights that contradict each other or cannot run here."""
    require_whole("max_seq_length", max_seq_length, 1)
    flags = {"load_in_4bit": in_4bit, "load_in_8bit": in_8bit, "load_in_fp8": in_fp8}
    forms = [name for name, is_set in flags.items() if is_set]
    if len(forms) > 1:
        raise InputError(f"{' and '.join(forms)} are set together; choose one")
    if full and forms:
        raise InputError(f"full_finetuning=True cannot train quantised weights; drop {forms[0]}")
    if in_fp8 and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        raise InputError("load_in_fp8=True needs a GPU of compute capability 8.9 or more; use bfloat16")
    if (in_4bit or in_8bit) and not is_bitsandbytes_available():
        raise InputError(f"{forms[0]}=True needs bitsandbytes; pip install 'unsloth-pack[cuda]'")


def check_positions(max_seq_length: int, model_name: str, text_config: PretrainedConfig) -> None:
    """Refuse rows that are longer than the model has positions."""
    if max_seq_length > text_config.max_position_embeddings:
        has = f"{model_name} has {text_config.max_position_embeddings} positions"
        remedy = "lower it, or give from_pretrained max_position_embeddings and rope_parameters"
        raise InputError(f"max_seq_length is {max_seq_length}, {has}; {remedy}")


def check_loftq(loftq_config: Mapping[str, object]) -> None:
    """Refuse arguments that are not LoftQ's, and LoftQ where PEFT cannot compute it."""
    known = [each.name for each in fields(LoftQConfig)]
    shown = f"loftq_config is {json.dumps(dict(loftq_config))}"
    if not loftq_config.keys() <= {*known}:
        raise InputError(f"{shown}; LoftQ takes {', '.join(known)}")
    if not torch.cuda.is_available():
        raise InputError(f"{shown}, but PEFT computes LoftQ on CUDA only; leave it out")


def check_files(folder: str, what: str, use_safetensors: bool) -> None:
    """Refuse weights in files that are cut, or that can run code when they are read."""
    if not use_safetensors:
        return
    names = sorted(os.listdir(folder))
    weights = [os.path.join(folder, name) for name in names if name.endswith(".safetensors")]
    for path in weights:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not whole safetensors ({error}); download or save it again") from None
    if not weights and any(name.endswith(".bin") for name in names):
        remedy = f"save the {what} as safetensors, or pass use_safetensors=False if you trust it"
        raise InputError(f"{folder} holds only pickled weights, which can run code when loaded; {remedy}")
    if not weights:
        raise InputError(f"{folder} holds no safetensors; download or save the {what} again")


def refuse_not_finite(model: nn.Module, complaint: str) -> None:
    """Refuse weights that hold an infinity or a NaN; `complaint` begins the error."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.element_size() > 1 and not is_finite(weight):
            said = f"weight {name} is not finite as {weight.dtype}"
            raise InputError(f"{complaint}: {said}; choose another dtype, or download the weights again")


def is_finite(weight: torch.Tensor) -> bool:
    """Whether no number of a weight is infinite or NaN."""
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    if weight.is_meta or not weight.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all())


def refuse_stored_quantised(
    source: str, config: PretrainedConfig, in_4bit: bool, in_8bit: bool, in_fp8: bool
) -> None:
    """Refuse to quantise weights that are stored in another quantised form."""
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    for name, is_set in {"4bit": in_4bit, "8bit": in_8bit, "fp8": in_fp8}.items():
        if is_set and stored and not stored.get(f"load_in_{name}"):
            method = stored.get("quant_method", "few bits")
            said = f"load_in_{name}=True, but {source} is stored in {method} already"
            raise InputError(f"{said}; leave that out, or load weights in 16 bits")


def quantization(
    in_4bit: bool, in_8bit: bool, dtype: torch.dtype, skipped: list[str] | None = None
) -> BitsAndBytesConfig | None:
    """How bitsandbytes quantises the weights: NF4 that computes in `dtype`, int8, or not at all.

    It leaves the modules at the paths of `skipped` alone; None for the head.
    """
    if in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=skipped,
        )
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped) if in_8bit else None
