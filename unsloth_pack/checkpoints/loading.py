"""Models, tokenizers and adapters from folders or the hub. Each fault is an error of one line."""

import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import PeftConfig, PeftModel, PeftType
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from unsloth_pack.checkpoints.names import GGUF, check_model_there, is_adapter
from unsloth_pack.checkpoints.weight_checks import check_files, refuse_not_finite
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import InputError
from unsloth_pack.lora.expert_stacks import placeholder_stacks

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EMBEDDING = re.compile(r"\.embed_tokens\.(.*\.)?weight$")
_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder")
_NOT_TAKEN = {  # options of transformers that callers may not give, and what to do instead
    "torch_dtype": "give dtype",
    "attn_implementation": "give attn_backend",
    "quantization_config": "give load_in_4bit, load_in_8bit or load_in_fp8",
    "use_gradient_checkpointing": "give it to get_peft_model, or without an adapter call "
    "model.gradient_checkpointing_enable()",
    "config": "give the attributes that differ",
    "output_loading_info": "leave it out",
    "ignore_mismatched_sizes": "leave it out",
    "return_unused_kwargs": "leave it out",
}
# What transformers and PEFT raise over files that are broken, or that describe a model that cannot be
_UNREADABLE = (
    OSError,
    ValueError,
    ImportError,
    StrictDataclassError,
    pickle.UnpicklingError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


def resolve(model_name: str) -> tuple[str, str | None]:
    """Where the base model's weights are, and the adapter's folder if `model_name` is one.

    Raises:
        InputError: no such folder, one that holds no model, or an adapter that names no base model.
    """
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
    base = config.base_model_name_or_path
    if not isinstance(base, str) or not base:
        raise InputError(f"the adapter {adapter} does not name its base model; add base_model_name_or_path")
    if config.peft_type != PeftType.LORA:
        raise InputError(
            f"the adapter {adapter} is of type {config.peft_type.value}; only LORA can be loaded"
        )
    if is_adapter(base):
        raise InputError(
            f"the adapter {adapter} has another adapter, {base}, as its base; merge that one first, and name "
            "the result in base_model_name_or_path"
        )
    try:
        return resolve(base)[0]
    except InputError as error:
        raise InputError(
            f"the base model of the adapter {adapter}: {error}, or correct base_model_name_or_path in {path}"
        ) from None


def take_file_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take out the options that say where files lie: configuration, tokenizer and weights all need them.

    Args:
        options: of transformers' `from_pretrained`.

    Raises:
        InputError: an option that from_pretrained does not take. Says what to give instead.
    """
    for name in options.keys() & _NOT_TAKEN.keys():
        raise InputError(
            f"{name} is {options[name]!r}, which from_pretrained does not take; {_NOT_TAKEN[name]}"
        )
    if (scaling := options.pop("rope_scaling", None)) is not None:
        raise InputError(
            f"rope_scaling is {scaling!r}, which transformers 5 takes within rope_parameters; give those "
            "whole, with rope_type and rope_theta"
        )
    return {name: options.pop(name) for name in _FILE_OPTIONS if name in options}


def load_config(source: str, **options: Any) -> Any:
    """The configuration of a model.

    Raises:
        InputError: it cannot be found or read.
    """
    return split_config(source, **options)[0]


def split_config(source: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The configuration of a model, and the options that are no attributes of it.

    Args:
        options: those that are attributes of the configuration replace them.

    Raises:
        InputError: as `load_config`.
    """
    config, others = load_with(AutoConfig, source, return_unused_kwargs=True, **options)
    try:
        config.validate()  # as saving does: an option may contradict the file
    except StrictDataclassError as error:
        raise InputError(
            f"cannot load {source}: {_reason(error.__cause__ or error)}; make them agree"
        ) from None
    if config.output_attentions:
        raise InputError(f"cannot load {source}: output_attentions is True, which cannot train; leave it out")
    return config, others


def weight_dtype(dtype: torch.dtype | str | None, full_finetuning: bool = False) -> torch.dtype:
    """The type to load the weights in.

    Args:
        dtype: None for the default that `FastLanguageModel.from_pretrained` states.

    Raises:
        InputError: a type that weights cannot have.
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype is not None:
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise InputError(f"dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    if full_finetuning or not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def own_device() -> dict[str, Any]:
    """A `device_map` that puts a model on this process's GPU, or on the CPU where there is none."""
    return {"": int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() else "cpu"}


def tokenizer_folder(model_name: str) -> str:
    """Where the tokenizer of a model lies: beside an adapter that was saved with one, else in its base model.

    Raises:
        InputError: as `resolve`.
    """
    source, adapter = resolve(model_name)
    has_own = adapter is not None and os.path.isfile(os.path.join(adapter, "tokenizer_config.json"))
    return adapter if adapter and has_own else source


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, or of a hub name.

    Raises:
        InputError: it cannot be found or read, or saving it would write outside its folder.
    """
    tokenizer = load_with(AutoTokenizer, source, **options)
    if isinstance(tokenizer.chat_template, dict):  # each is saved in a file of its name
        for name in tokenizer.chat_template:
            if not re.fullmatch(r"\w[\w.-]*", name):
                raise InputError(f"cannot load {source}: a chat template is named {name!r}; rename it")
    return tokenizer


def load_model(source: str, *, use_safetensors: bool = True, **options: Any) -> Any:
    """A causal model with all of its weights, each finite and of the shape that its configuration gives.

    Args:
        use_safetensors: False also takes pickled weights.

    Raises:
        InputError: it cannot be found or read; weights are missing, not finite or of another shape.
    """
    if os.path.isdir(source):
        check_files(source, "model", use_safetensors)
    model, found = load_with(
        auto_class(options.get("config")),
        source,
        use_safetensors=use_safetensors,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
        **options,
    )
    for name, in_file, in_model in sorted(found["mismatched_keys"]):
        raise InputError(
            f"cannot load {source}: weight {name} is {list(in_file)}, and config.json makes it "
            f"{list(in_model)}; correct one of them, or download the model again"
        )
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"cannot load {source}: its files lack {len(missing)} weights, {', '.join(missing[:3])}"
            f"{', ...' * (len(missing) > 3)}; correct config.json, or download the model again"
        )
    refuse_not_finite(model, f"cannot load {source}")
    if type(model.generation_config) is GenerationConfig:
        model.generation_config.__class__ = _AlwaysSaved
    return model


class _AlwaysSaved(GenerationConfig):
    """Saved with what it was loaded with, such as a temperature without `do_sample`.

    transformers warns of that at loading, and refuses to save it once a trainer has set a token's id.
    """

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        super().validate(user_set_attributes=user_set_attributes)


def auto_class(config: Any) -> Any:
    """The class that loads a model: one of vision and language has its own where it is no causal model."""
    of_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if of_images and not is_causal else AutoModelForCausalLM


def load_adapter(model: PreTrainedModel, adapter: str, *, use_safetensors: bool = True) -> PeftModel:
    """The model with the adapter in a folder, which can be trained further.

    Raises:
        InputError: the adapter is cut, of another base model, not finite, or pickled.
    """
    complaint = f"cannot load the adapter {adapter} onto its base model"
    check_files(adapter, "adapter", use_safetensors)
    try:
        with _without_reports(), placeholder_stacks(model):
            adapted = PeftModel.from_pretrained(model, adapter, is_trainable=True)
            found = adapted.load_adapter(adapter, "default", is_trainable=True)  # only this reports
    except (*_UNREADABLE, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(
            f"{complaint}: {_reason(error)}; give the base model that it was trained on, or save it anew"
        ) from error
    faults = {
        "lacks {} weights": found.missing_keys,
        # With added tokens PEFT saves an embedding or head in `modules_to_save` twice, once under this name:
        "holds {} weights without a place": [
            k for k in found.unexpected_keys if ".modules_to_save." not in k
        ],
    }
    for fault, keys in faults.items():
        if keys:
            raise InputError(
                f"{complaint}: it {fault.format(len(keys))}, the first is {min(keys)}; give the base model "
                "that it was trained on, or save it anew"
            )
    refuse_not_finite(adapted, complaint)
    return adapted


def match_vocabulary(model: PreTrainedModel, adapter: str) -> None:
    """Give the model as many tokens as an adapter has rows for: training may have added some."""
    path = os.path.join(adapter, "adapter_model.safetensors")
    if not os.path.isfile(path):
        return
    try:
        with safe_open(path, "pt") as file:
            names = [*filter(_EMBEDDING.search, file.keys())]
            sizes = {file.get_slice(name).get_shape()[0] for name in names}
    except (SafetensorError, OSError):  # `load_adapter` refuses the file
        return
    embedding: Any = model.get_input_embeddings()
    has = embedding.num_embeddings
    needs = max(trained_tokens(PeftConfig.from_pretrained(adapter)), default=-1) + 1
    if not sizes and needs > has:
        sizes = {needs}
    if len(sizes) == 1 and sizes != {has}:
        model.resize_token_embeddings(sizes.pop(), mean_resizing=False)  # the adapter holds the new rows


def trained_tokens(config: Any) -> list[int]:
    """The tokens that an adapter trains by their rows alone."""
    found = getattr(config, "trainable_token_indices", None) or []
    return found if isinstance(found, list) else [token for ids in found.values() for token in ids]


def load_with(auto_class: Any, source: str, **options: Any) -> Any:
    """What a class of transformers loads from a folder or the hub.

    Raises:
        InputError: it cannot be found or read, or an option is unknown.
    """
    try:
        with _without_reports():  # without an answer about code, transformers asks at the terminal
            return auto_class.from_pretrained(source, **{"trust_remote_code": False, **options})
    except (*_UNREADABLE, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # of the device
            raise
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in options:
            given = f"{unknown[1]}={options[unknown[1]]!r}"
            raise InputError(
                f"from_pretrained does not know {given}; correct the name, or leave it out"
            ) from error
        if "trust_remote_code=True" in str(error):
            remedy = "its architecture is none of transformers', so choose another model"
            if "Tokenizer" in auto_class.__name__ or "Processor" in auto_class.__name__:
                remedy = (
                    "if you trust that, load it in Python with FastLanguageModel.from_pretrained(..., "
                    "trust_remote_code=True)"
                )
            raise InputError(
                f"cannot load {source}: it comes with code of its own, which is not run; {remedy}"
            ) from error
        remedy = "correct its files, or download it again"
        if not os.path.isdir(source):
            remedy = GGUF if "gguf" in source.lower() else "check the name and the network, or give a folder"
        raise InputError(f"cannot load {source}: {_reason(error)}; {remedy}") from error


def _reason(error: BaseException) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    if len(said) > 300:
        said = f"{said[:300].rpartition(' ')[0] or said[:300]} ..."
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


# How bitsandbytes quantises the weights of a model that is loaded.


def refuse_stored_quantised(source: str, config: Any, in_4bit: bool, in_8bit: bool, in_fp8: bool) -> None:
    """Refuse to quantise weights that are stored in another quantised form.

    Raises:
        InputError: names the form and what to do.
    """
    stored = getattr(config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    asked = [name for name, given in (("4bit", in_4bit), ("8bit", in_8bit), ("fp8", in_fp8)) if given]
    held = [name for name in ("4bit", "8bit") if stored.get(f"load_in_{name}")]  # by bitsandbytes
    method = stored.get("quant_method") or "".join(held)
    if not asked or not method or asked == held:
        return
    remedy = "leave that out, or load weights in 16 bits"
    if method == "mxfp4":
        remedy = (
            "leave that out, and its weights are dequantised to 16 bits; to train them in fewer, load what "
            "save_pretrained_merged makes of them"
        )
    raise InputError(f"load_in_{asked[0]}=True, but {source} is stored in {method} already; {remedy}")


def quantization(
    in_4bit: bool, in_8bit: bool, dtype: torch.dtype, kept: list[str] | None = None
) -> BitsAndBytesConfig | None:
    """How bitsandbytes quantises the weights: NF4 that computes in `dtype`, int8, or not at all.

    Args:
        kept: paths of modules that stay as they are; None for the head alone.
    """
    if in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=kept,
        )
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept) if in_8bit else None
