"""`FastLanguageModel`: load a model, adapt it, switch between training and inference."""

import logging
import os
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoftQConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.modeling_layers import GenericForSequenceClassification

from unsloth_pack.checkpoints import loading
from unsloth_pack.checkpoints.mxfp4 import hold_packed, is_in_mxfp4
from unsloth_pack.checkpoints.saving import remember_use_cache, remember_vocabulary, save_adapter
from unsloth_pack.checkpoints.sharded import gather_layers, is_cut, make_whole
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.errors import LAST_SEED, InputError, require_real, require_whole
from unsloth_pack.lora.expert_stacks import placeholder_stacks, quantise_experts
from unsloth_pack.lora.quantised import Fp8Linear, prevent_cpu_packing, quantize_to_fp8
from unsloth_pack.lora.targets import lora_targets, refuse_on_stacks
from unsloth_pack.lora.trained_parts import (
    check_parts,
    check_rows_apart,
    list_unquantised_modules,
    warn_of_longer_names,
)
from unsloth_pack.memory.checkpointing import CheckpointingMode, check_mode, enable_checkpointing
from unsloth_pack.models import arch_spec_for
from unsloth_pack.modules import base_of, require_model
from unsloth_pack.patching.patch import patch_model, patch_of
from unsloth_pack.unsloth_arguments import (
    LOADING,
    push_to_hub_merged,
    refuse_gguf,
    save_pretrained_merged,
    take,
    take_adapter_arguments,
    take_trained_ends,
)

logger = logging.getLogger("unsloth_pack")


class FastLanguageModel:
    """Load a language model ready for packed training, and put an adapter on it.

    ```python
    model, tokenizer = FastLanguageModel.from_pretrained("demo")
    model = FastLanguageModel.get_peft_model(model, r=16)
    config = SFTConfig(packing=True, padding_free=True, gradient_checkpointing=False)
    SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()
    ```
    """

    @staticmethod
    def from_pretrained(
        model_name: str = "demo",
        max_seq_length: int = 2048,
        dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        load_in_fp8: bool = False,
        full_finetuning: bool = False,
        attn_backend: str = "auto",
        device_map: object = None,
        token: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        random_state: int = 3407,
        **hf_kwargs: Any,
    ) -> tuple[Any, PreTrainedTokenizerBase]:
        """Load a patched model and its tokenizer.

        Args:
            model_name: "demo" or "vision-demo" (bundled), a local folder of a model or of a saved adapter, or
                a hub name.
            max_seq_length: tokens of the longest document or packed row, at most the model's positions.
            dtype: of the weights. None: bfloat16 where the GPU has it, else float16 on CUDA, else float32.
                For full fine-tuning None means float32, since small updates are lost in 16 bits.
            load_in_4bit: frozen weights in NF4 through bitsandbytes. Experts stored in MXFP4 stay so, here
                and in the next two.
            load_in_8bit: frozen weights in int8 through bitsandbytes.
            load_in_fp8: frozen weights of the layers in e4m3, with a scale for every output; needs a GPU that
                computes in it.
            full_finetuning: train every weight, without an adapter.
            attn_backend: see `patch_model`.
            device_map: as in transformers; None puts the model on this process's GPU, else on the CPU.
            token, revision, trust_remote_code, hf_kwargs: as in transformers' `from_pretrained`, including
                attributes of the configuration. Pickled weights are refused unless `use_safetensors=False`.
                `num_labels` gives it a head that answers once per document, as in transformers'
                `AutoModelForSequenceClassification`. `unpad` and `share_prefixes` are passed to
                `patch_model`. With `sharded=True` each process of a group loads and holds a part of the
                layers, which FSDP2 gathers once there is an adapter; train it under DDP. Unsloth's own
                arguments are accepted where they change nothing, such as `fast_inference=False`, and refused
                otherwise.
            random_state: seed of Python, numpy and torch.

        Returns:
            The model (a PEFT model if `model_name` is an adapter's folder) and the tokenizer. The model is
            ready to generate, or to train with `full_finetuning`.

        Raises:
            UnsupportedArchitecture: no patch is declared for the model.
            InputError: arguments contradict each other or are unknown, or a model cannot be found or loaded.
        """
        loading.check_loading(max_seq_length, load_in_4bit, load_in_8bit, load_in_fp8, full_finetuning)
        require_whole("random_state", random_state, 0, LAST_SEED)
        sharded = hf_kwargs.pop("sharded", False)
        if sharded and (load_in_8bit or full_finetuning):
            raise InputError("sharded=True takes frozen weights in 16 or 4 bits or fp8; load whole ones")
        set_seed(random_state)
        if not sharded:  # other processes can open such segments only if they may trace this one
            _let_segments_grow()
        dtype = loading.weight_dtype(dtype, full_finetuning)
        source, adapter = loading.find_model(model_name)
        if adapter is not None:
            hf_kwargs = loading.read_classes(adapter) | hf_kwargs
        hub: dict[str, Any] = {"token": token, "revision": revision, "trust_remote_code": trust_remote_code}
        take(LOADING, hf_kwargs, "from_pretrained", is_all=False)
        hub |= loading.take_file_options(hf_kwargs)
        unpad, share_prefixes = (hf_kwargs.pop(name, True) for name in ("unpad", "share_prefixes"))
        files = {"use_safetensors": hf_kwargs.pop("use_safetensors", True)}
        is_classifier = "num_labels" in hf_kwargs
        config, for_weights = loading.split_config(source, **hub, **hf_kwargs)
        if is_classifier:
            loading.check_classifies(config)
        text_config = config.get_text_config()
        arch_spec_for(text_config.model_type)
        if is_packed := is_in_mxfp4(config):
            del config.quantization_config  # transformers would unpack the experts
        loading.refuse_stored_quantised(source, config, load_in_4bit, load_in_8bit, load_in_fp8)
        loading.check_positions(max_seq_length, model_name, text_config)
        tokenizer_source = loading.tokenizer_folder(model_name)
        tokenizer = loading.load_tokenizer(tokenizer_source, **hub)
        for_weights |= hub | files | {"config": config, "dtype": dtype, "is_classifier": is_classifier}
        unquantised = list_unquantised_modules(config)
        quantised = loading.quantization(load_in_4bit, load_in_8bit, dtype, unquantised)
        if device_map in (None, "sequential"):  # Unsloth's default
            device_map = loading.own_device()
        if load_in_fp8 and dtype != torch.bfloat16:
            raise InputError(f"load_in_fp8=True computes in bfloat16, dtype is {dtype}; leave dtype out")

        def finish_layers(layers: nn.Module) -> None:
            if is_packed:
                hold_packed(layers, dtype, full_finetuning)
            _quantise(layers, load_in_4bit, load_in_fp8)

        for_weights |= {"is_packed": is_packed, "finish_layer": finish_layers if sharded else None}
        model = loading.load_model(
            source, device_map=device_map, quantization_config=quantised, **for_weights
        )
        if not sharded:
            finish_layers(model.get_decoder().layers)
        remember_vocabulary(model)
        if bundled := [name for name, folder in BUNDLED_MODELS.items() if source == str(folder)]:
            # An adapter stores this name, as a path into this package would not last. The configuration
            # keeps the path, from which trainers load a reference model or a tokenizer.
            model.name_or_path = bundled[0]
        elif os.path.isdir(source):  # elsewhere `models/llama` would be a name on the hub
            model.name_or_path = model.config._name_or_path = str(Path(source).absolute())
        model.max_seq_length, model.full_finetuning = max_seq_length, full_finetuning
        if adapter is not None:
            if adapter == tokenizer_source:
                loading.match_vocabulary(model, adapter)
            model = loading.load_adapter(model, adapter, **files)
        elif not full_finetuning:
            model.requires_grad_(False)
        patch_model(model, attn_backend, unpad, share_prefixes)
        if adapter is not None and sharded:
            gather_layers(model)
        return _finish(model.train(full_finetuning)), tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: str | Collection[str] | None = None,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: Literal["none", "all", "lora_only"] = "none",
        layers_to_transform: int | list[int] | None = None,
        modules_to_save: list[str] | None = None,
        use_gradient_checkpointing: CheckpointingMode = False,
        random_state: int = 3407,
        use_rslora: bool = False,
        use_dora: bool = False,
        loftq_config: dict[str, Any] | None = None,
        max_seq_length: int | None = None,
        **lora_kwargs: Any,
    ) -> Any:
        """Put a LoRA adapter (Hu et al. 2021) on the model, through PEFT, ready to train.

        Args:
            model: from `from_pretrained`, or one that `patch_model` has patched; without an adapter.
            r: rank, from 1 to the model's hidden size.
            target_modules: names of linear layers, "all-linear", or None for the projections of the
                architecture. Names of an expert's layers, such as "gate_proj", mean the stacks of all experts
                too; neither None nor "all-linear" adapts their routers. A list with the head ("lm_head")
                trains it in full, and the embeddings too if it names them, as `modules_to_save`; with
                `adapter_on_head=True` they get an adapter.
            lora_alpha: the adapter's output is scaled by `lora_alpha / r`.
            lora_dropout: probability in [0, 1).
            bias, layers_to_transform, modules_to_save, use_rslora, use_dora: as in PEFT's `LoraConfig`.
            use_gradient_checkpointing: False; True to recompute every layer; "offload" (alias "unsloth") to
                also hold the layers' inputs in host memory; or "auto" to recompute as few layers as the GPU's
                free memory allows.
            random_state: seed of the adapter's initial weights.
            loftq_config: arguments of PEFT's `LoftQConfig`; the adapter then starts from LoftQ.
            max_seq_length: None, or the value passed to `from_pretrained`; anything else is refused.
            lora_kwargs: further arguments of PEFT's `LoraConfig`, such as `rank_pattern`; and Unsloth's
                `finetune_attention_modules` and `finetune_mlp_modules`, False to leave those projections out.

        Raises:
            InputError: an argument is out of range or unknown to PEFT, the model does not have a target, or
                it has an adapter already.
        """
        _check_adaptable(model, max_seq_length)
        check_mode(use_gradient_checkpointing)
        require_whole("r", r, 1, model.config.get_text_config().hidden_size)  # no layer has a higher rank
        require_real("lora_dropout", lora_dropout, 0, 1)
        require_real("lora_alpha", lora_alpha, torch.finfo(torch.float32).tiny, 1e9)
        require_whole("random_state", random_state, 0, LAST_SEED)
        if loftq_config:
            loading.check_loftq(loftq_config)
        has_fp8 = any(isinstance(module, Fp8Linear) for module in model.modules())
        if has_fp8 and (use_dora or loftq_config):
            name = "use_dora" if use_dora else "loftq_config"
            raise InputError(f"{name} needs the exact base weights; load without load_in_fp8")
        target_modules = take_adapter_arguments(model, target_modules, lora_kwargs)
        if not lora_kwargs.pop("adapter_on_head", False):
            target_modules, modules_to_save = take_trained_ends(model, target_modules, modules_to_save)
        options = {"layers_to_transform": layers_to_transform, **lora_kwargs}
        all_options = options | {"lora_dropout": lora_dropout, "use_dora": use_dora}
        targets = lora_targets(model, target_modules, all_options)
        for note in targets.notes:
            logger.warning("%s", note)
        refuse_on_stacks(targets, all_options | {"loftq_config": loftq_config})
        check_parts(model, bias, modules_to_save, options)
        warn_of_longer_names(model, modules_to_save or ())
        rows = options.get("trainable_token_indices")
        check_rows_apart(model, targets.paths, rows, "target_modules", tied=False)
        make_whole(model, modules_to_save or ())
        set_seed(random_state)
        patch = patch_of(model)
        patch_options = () if patch is None else (patch.attn_backend, patch.unpad, patch.share_prefixes)
        task = "SEQ_CLS" if isinstance(model, GenericForSequenceClassification) else "CAUSAL_LM"
        fields: dict[str, Any] = {"task_type": task, "r": r, "bias": bias, "use_dora": use_dora}
        fields |= {"lora_alpha": lora_alpha, "lora_dropout": lora_dropout, "use_rslora": use_rslora}
        fields["modules_to_save"] = modules_to_save
        if loftq_config:
            fields |= {"init_lora_weights": "loftq", "loftq_config": LoftQConfig(**loftq_config)}
        try:
            config = LoraConfig(**fields | targets.config_fields(r, lora_alpha, options))
            with warnings.catch_warnings():  # PEFT matches our pattern of experts against modules alone
                warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern .*gate_up_proj'\]")
                # Saving and merging untie weights where they must
                warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
                with placeholder_stacks(model):
                    adapted = get_peft_model(model, config)
        except (ValueError, TypeError, ImportError) as error:
            raise InputError(f"cannot put an adapter on the model: {error}; correct its arguments") from error
        patch_model(adapted, *patch_options)  # anew, so that the adapter is fused too
        enable_checkpointing(adapted, use_gradient_checkpointing)
        if is_cut(adapted):
            gather_layers(adapted)
        return _finish(adapted.train())

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Prepare the model to generate: no dropout, no recomputation, cache on."""
        require_model(model)
        return model.eval()

    @staticmethod
    def for_training(model: Any) -> Any:
        """Prepare the model to train again."""
        require_model(model)
        return model.train()


FastModel = FastLanguageModel  # the name in newer notebooks


def is_bfloat16_supported() -> bool:
    """Return whether the GPU computes in bfloat16, which `dtype=None` then means; False without a GPU."""
    return loading.weight_dtype(None) == torch.bfloat16


def _quantise(layers: nn.Module, in_4bit: bool, in_fp8: bool) -> None:
    """Quantise what transformers and bitsandbytes leave as it is."""
    if in_fp8:
        quantize_to_fp8(layers)
    if in_4bit:
        prevent_cpu_packing(layers)
        quantise_experts(layers, "nf4")  # bitsandbytes quantises linear layers alone


def _check_adaptable(model: Any, max_seq_length: int | None) -> None:
    """Refuse a model that takes no adapter, and another `max_seq_length` than it was loaded with."""
    require_model(model, "give what from_pretrained returned first")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise InputError("the model has an adapter already; train it, merge it, or load the model anew")
    if getattr(model, "full_finetuning", False):
        raise InputError("full_finetuning=True trains every weight; leave out get_peft_model, or load anew")
    loaded_with = getattr(model, "max_seq_length", None)
    if max_seq_length not in (None, loaded_with):
        problem = f"max_seq_length is {max_seq_length}, the model was loaded with {loaded_with}"
        raise InputError(f"{problem}; give it to from_pretrained")


def _let_segments_grow() -> None:
    """Let torch reserve GPU memory in segments that grow, unless it has begun or the user configures it."""
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if torch.cuda.is_available() and not is_set and not torch.cuda.memory_reserved():
        with warnings.catch_warnings():  # torch deprecates it for another private function
            warnings.simplefilter("ignore", FutureWarning)
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def _finish(model: PreTrainedModel | PeftModel) -> Any:
    for method in (save_pretrained_merged, push_to_hub_merged):
        setattr(model, method.__name__, _bind(method, model))
    model.save_pretrained_gguf = model.push_to_hub_gguf = _bind(refuse_gguf, model)
    remember_use_cache(base_of(model))
    if isinstance(model, PeftModel):
        model.__dict__["save_pretrained"] = _bind(save_adapter, model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # memory that only loading and quantising needed
    return model


def _bind(function: Any, model: nn.Module) -> Any:
    """Bind a method to this one model; a bound method would be pickled by a name that the class lacks."""
    method = partial(function, model)
    method.__doc__ = function.__doc__
    return method
