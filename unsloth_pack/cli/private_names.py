"""Private names of other libraries that are used. Any release may drop one.

`TESTED` in `known.py` says in which releases they have been seen.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """A name that begins with an underscore, or that its library does not document.

    Args:
        owner: the module that makes it, or the object that has it.
        purpose: what it is used for here.
        files: of this package, that use it.
        needs_cuda: torch has it in builds with CUDA alone.
    """

    owner: str
    name: str
    purpose: str
    files: tuple[str, ...]
    needs_cuda: bool = False

    @property
    def library(self) -> str:
        return self.owner.partition(".")[0]


_HOOKS = "to see whether calling a module does more than its forward"
_STREAMS = "packed streams: a new order each epoch, and nothing lost when they resume"
_CHECKPOINTS = "checkpoints that are whole or not there"

PRIVATE_NAMES = (
    *(
        PrivateName("torch.nn.modules.module", name, _HOOKS, ("modules/hooks.py",))
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ),
    PrivateName(
        "torch.nn.modules.module",
        "_apply",
        "to let go of CUDA graphs over weights that move",
        ("layers/decoder.py", "layers/vision/tower.py"),
    ),
    PrivateName(
        "torch.nn.modules.module",
        "_modules",
        "to see which modules were added or wrapped, and to copy one without its weights",
        (
            "checkpoints/merging.py",
            "layers/mlp.py",
            "cuda_graphs/capture.py",
            "modules/hooks.py",
            "modules/sharding.py",
            "modules/walk.py",
        ),
    ),
    PrivateName(
        "torch.nn.modules.module",
        "_parameters",
        "to see whether a parameter was replaced, and to put a stand-in into its place",
        ("layers/mixers/attention.py", "cuda_graphs/capture.py", "cuda_graphs/capture.py", "modules/walk.py"),
    ),
    PrivateName(
        "torch.nn.modules.dropout",
        "_DropoutNd",
        "to turn dropout off in a probe",
        ("layers/leak_probe.py",),
    ),
    PrivateName(
        "torch.Tensor",
        "_version",
        "to see that a tensor was changed in place",
        ("layers/unpadding.py", "lora/arithmetic.py", "lora/linear.py", "losses/cross_entropy.py"),
    ),
    PrivateName(
        "torch.nn.modules.module",
        "_non_persistent_buffers_set",
        "buffers that a saved model does not hold",
        ("checkpoints/merging.py",),
    ),
    PrivateName("torch", "_foreach_add_", "to sum over tiles in one launch", ("lora/mlp.py",)),
    PrivateName(
        "torch",
        "_foreach_copy_",
        "to cast adapters in one launch",
        ("cuda_graphs/capture.py", "lora/arithmetic.py"),
    ),
    PrivateName("torch", "_scaled_mm", "GEMMs in fp8", ("kernels/quantized.py",)),
    PrivateName(
        "torch.ops.aten",
        "_unsafe_view",
        "a shape that autograd does not take for a view",
        ("lora/arithmetic.py",),
    ),
    PrivateName(
        "accelerate.accelerator",
        "_original_forward",
        "undo() removes the forward that was wrapped for mixed precision",
        ("layers/forward_slot.py",),
    ),
    PrivateName(
        "torch.cuda", "_POOL_HANDLE", "the type of a pool of graph memory", ("cuda_graphs/memory.py",)
    ),
    PrivateName("torch.cuda.memory", "_set_allocator_settings", "segments that grow", ("api.py",)),
    *(
        PrivateName("torch._C", name, "to free the memory of CUDA graphs", ("cuda_graphs/memory.py",), True)
        for name in ("_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool")
    ),
    PrivateName(
        "torch._C._autograd",
        "_get_current_graph_task_keep_graph",
        "gradients take the place of what no later backward pass reads",
        ("kernels/launch.py",),
    ),
    PrivateName(
        "torch.optim.adam",
        "_step_supports_amp_scaling",
        "to leave out an update that is not finite, on the device",
        ("training/cpu_master_weights.py",),
    ),
    PrivateName(
        "torch.distributed.fsdp._common_utils",
        "_fsdp_wrapped_module",
        "to see that FSDP1 shards the model",
        ("modules/sharding.py",),
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "_is_fsdp_managed_module",
        "to see that FSDP2 shards the head",
        ("modules/sharding.py",),
    ),
    PrivateName(
        "transformers.configuration_utils",
        "_attn_implementation",
        "the masks that an ordinary batch gets",
        (
            "bench/measure.py",
            "verification/subject.py",
            "layers/decoder.py",
            "patching/patch.py",
            "patching/patch.py",
            "patching/patch.py",
        ),
    ),
    PrivateName(
        "transformers.configuration_utils",
        "_name_or_path",
        "the name that a saved model gives",
        ("api.py", "checkpoints/saving.py", "recipe/merged_base.py"),
    ),
    PrivateName(
        "transformers.configuration_utils",
        "_experts_implementation",
        "to see whether the biases of experts are added in the type of their outputs",
        ("layers/moe.py",),
    ),
    PrivateName(
        "transformers.modeling_utils",
        "_set_gradient_checkpointing",
        "trainers turn checkpointing on: our own mode stays",
        ("layers/causal_lm.py",),
    ),
    PrivateName(
        "transformers.modeling_utils",
        "_gradient_checkpointing_func",
        "to recompute by a plan, or to offload",
        (
            "layers/mlp.py",
            "layers/layer.py",
            "layers/layer.py",
            "cuda_graphs/capture.py",
            "cuda_graphs/recomputed_layers.py",
            "memory/checkpointing.py",
        ),
    ),
    PrivateName(
        "transformers.modeling_utils",
        "_tied_weights_keys",
        "which merged weights are left out as tied",
        ("checkpoints/saving.py",),
    ),
    PrivateName(
        "transformers.training_args",
        "_n_gpu",
        "a process trains on one GPU",
        ("training/trainer.py",),
    ),
    *(
        PrivateName("transformers.trainer", name, _CHECKPOINTS, ("training/trainer.py",))
        for name in ("_get_output_dir", "_load_from_checkpoint", "_save_checkpoint")
    ),
    PrivateName(
        "transformers.trainer",
        "_inner_training_loop",
        "the seconds of a run, and log lines that an error does not take along",
        ("patching/trainer_hooks/deferred_logging.py", "training/trainer.py"),
    ),
    *(
        PrivateName(
            "transformers.trainer",
            name,
            "updates that are not finite, and those of an adapter as one tensor",
            ("patching/trainer_hooks/optimizer.py", "training/trainer.py"),
        )
        for name in ("_clip_grad_norm", "_get_grad_norm")
    ),
    PrivateName(
        "transformers.trainer",
        "_maybe_log_save_evaluate",
        "log lines that do not wait, and updates that are not finite",
        ("patching/trainer_hooks/deferred_logging.py", "training/trainer.py"),
    ),
    *(
        PrivateName(
            "transformers.trainer",
            name,
            "log lines that do not wait",
            ("patching/trainer_hooks/deferred_logging.py",),
        )
        for name in ("_globalstep_last_logged", "_total_loss_scalar")
    ),
    *(
        PrivateName(
            "transformers.trainer", name, "which checkpoint is the best, and where", ("training/trainer.py",)
        )
        for name in ("_determine_best_metric", "_load_best_model")
    ),
    PrivateName(
        "transformers.trainer", "_get_train_sampler", "the order of packed rows", ("training/trainer.py",)
    ),
    PrivateName(
        "transformers.trainer",
        "_prepare_inputs",
        "pixels that are normalised on the device",
        ("training/trainer.py",),
    ),
    PrivateName(
        "transformers.trainer",
        "_prepare_for_training",
        "to adapt the patch once the weights are sharded",
        ("training/trainer.py",),
    ),
    PrivateName(
        "transformers.trainer",
        "DEFAULT_CALLBACKS",
        "to free memory when a trainer ends, and to refuse collators that drop where documents end",
        ("patching/trainer_hooks/install.py",),
    ),
    PrivateName(
        "transformers.core_model_loading",
        "revert_weight_conversion",
        "stacked experts are saved one by one",
        ("checkpoints/saving.py",),
    ),
    PrivateName(
        "transformers.loss.loss_utils",
        "ForCausalLMLoss",
        "to see that a model has the loss that is fused",
        ("losses/fusable.py",),
    ),
    PrivateName(
        "transformers.utils.output_capturing",
        "capture_outputs",
        "hidden states that a caller asks for",
        ("layers/decoder.py", "layers/vision/variable_size_tower.py"),
    ),
    *(
        PrivateName(
            "transformers.integrations.deepspeed",
            name,
            "to load a model whole where DeepSpeed trains",
            ("training/distributed.py",),
        )
        for name in ("set_hf_deepspeed_config", "unset_hf_deepspeed_config")
    ),
    *(
        PrivateName(
            "peft.tuners.tuners_utils",
            name,
            "a captured step takes the adapters for granted",
            ("cuda_graphs/capture.py",),
        )
        for name in ("_active_adapter", "_disable_adapters")
    ),
    PrivateName(
        "peft.tuners.lora.layer",
        "ParamWrapper",
        "adapters of experts are fused and merged",
        ("checkpoints/merging.py", "lora/linear.py", "lora/expert_stacks.py"),
    ),
    PrivateName(
        "peft.tuners.trainable_tokens.layer",
        "_get_embed_scale",
        "what trained rows of embeddings are scaled by",
        ("layers/layer.py",),
    ),
    PrivateName(
        "peft.tuners.lora.layer",
        "_did_swap_in_out_features",
        "how the factors of an adapter on experts lie",
        ("lora/expert_stacks.py",),
    ),
    PrivateName(
        "transformers.integrations.moe",
        "_apply_gate",
        "what experts do with gate and up",
        ("layers/moe.py",),
    ),
    PrivateName(
        "transformers.integrations.moe",
        "_is_expert_parallel",
        "whether a process holds some of the experts",
        ("layers/moe.py",),
    ),
    PrivateName(
        "peft.utils.integrations",
        "dequantize_module_weight",
        "quantised weights are merged",
        ("checkpoints/merging.py",),
    ),
    PrivateName(
        "accelerate.data_loader",
        "_non_blocking",
        "batches go to the device while it computes",
        ("patching/trainer_hooks/prefetch.py",),
    ),
    PrivateName(
        "trl.trainer.sft_trainer",
        "_metrics",
        "what the log says of entropy, accuracy and tokens",
        ("patching/trainer_hooks/deferred_logging.py", "training/trainer.py"),
    ),
    PrivateName(
        "trl.trainer.sft_trainer",
        "_prepare_dataset",
        "rows that are cut where they are joined without packing",
        ("training/notebooks.py",),
    ),
    PrivateName(
        "trl.trainer.sft_trainer",
        "_total_train_tokens",
        "the tokens trained on, in the log",
        ("patching/trainer_hooks/deferred_logging.py",),
    ),
    PrivateName(
        "trl.trainer.base_trainer",
        "_send_telemetry",
        "TRL's report of its use over the network is off",
        ("training/trainer.py",),
    ),
    *(
        PrivateName(
            "trl.chat_template_utils",
            name,
            "templates that mark the assistant's turns",
            ("training/trainer.py",),
        )
        for name in ("get_training_chat_template", "has_generation_markers")
    ),
    PrivateName(
        "transformers.tokenization_utils_tokenizers",
        "_encode_plus",
        "to see whether a tokenizer does more than its fast backend",
        ("data/encoding.py",),
    ),
    PrivateName(
        "datasets.arrow_dataset",
        "_fingerprint",
        "to find the tokens of the same data in the cache",
        ("data/tokenize.py",),
    ),
    *(
        PrivateName("datasets.iterable_dataset", name, _STREAMS, ("packing/iterable.py",))
        for name in (
            "_ex_iterable",
            "_state_dict",
            "BufferShuffledExamplesIterable",
            "FilteredExamplesIterable",
            "MappedExamplesIterable",
        )
    ),
)
