"""Options of Axolotl, LLaMA-Factory, ms-swift, TRL, torchtune, transformers and Unsloth; what to give here.

A nested name, such as `rlhf.beta`, comes before its last part. An option that `train` gets leaves the tables.
"""

# Our name -> theirs, of the same meaning.
_SAME = {
    "model_name": "base_model base_model_name model model_name_or_path model_id model_path"
    " pretrained_model_name_or_path checkpointer.checkpoint_dir",
    "max_seq_length": "block_size context_length cutoff_len max_length max_seq_len max_sequence_length"
    " model_max_length packing_length seq_length sequence_len sequence_length",
    "dtype": "torch_dtype",
    "load_in_4bit": "load_4bit load_in_4_bit",
    "load_in_8bit": "load_8bit load_in_8_bit",
    "attn_backend": "attention_backend attn_impl attn_implementation flash_attention flash_attn",
    "r": "lora_dim lora_r lora_rank lora.r lora.rank rank",
    "lora_alpha": "alpha",
    "lora_dropout": "lora.dropout lora_config.dropout",
    "tuning": "finetuning_type train_type tuner_type",
    "target_modules": "lora_attn_modules lora_target lora_target_modules target_regex",
    "modules_to_save": "additional_target lora_modules_to_save",
    "train_modules": "unfrozen_parameters",
    "layers_to_transform": "lora_layers_to_transform peft_layers_to_transform",
    "init_adapter": "adapter_name_or_path adapters lora_model_dir",
    "add_tokens": "new_special_tokens_config",
    "lora_plus_ratio": "loraplus_lr_ratio lorap_lr_ratio",
    "embedding_learning_rate": "embedding_lr",
    "effective_batch_size": "global_batch_size total_batch_size",
    "warmup_ratio": "warmup_proportion",
    "lr_scheduler_kwargs": "lr_scheduler_args scheduler_kwargs",
    "max_grad_norm": "clip_grad clip_grad_norm clip_gradient_norm grad_clip gradient_clip_val"
    " gradient_clipping max_norm",
    "optimizer_in_backward": "optimizer_in_bwd",
    "neftune_noise_alpha": "neftune_alpha noisy_embedding_alpha",
    "push_to_hub": "hub_model_id",
    "use_dora": "dora lora_use_dora peft_use_dora",
    "use_rslora": "lora_use_rslora peft_use_rslora rslora",
    "dataset": "custom.train_jsonl data_files data_path dataset_name dataset_path datasets train_data"
    " train_data_path train_dataset train_file train_files train_path training_data",
    "eval_dataset": "custom.val_jsonl dev_file eval_data eval_data_path eval_file test_dataset"
    " test_datasets val_dataset val_file valid_dataset validation_dataset"
    " validation_file",
    "num_proc": "dataset_num_proc dataset_processes preprocessing_num_workers",
    "dataloader_num_workers": "num_workers",
    "image_folder": "image_dir media_dir",
    "max_pixels": "image_max_pixels",
    "min_pixels": "image_min_pixels",
    "freeze_vit": "freeze_vision freeze_vision_tower",
    "freeze_aligner": "freeze_mm_mlp_adapter freeze_multi_modal_projector freeze_projector",
    "freeze_llm": "freeze_language_model",
    "sample_packing": "neat_packing pack packed",
    "eval_packing": "eval_sample_packing",
    "eval_fraction": "split_dataset_ratio val_split_ratio validation_split",
    "split": "dataset_train_split train_split",
    "sample_limit": "custom.train_sample_limit max_train_samples train_sample_limit",
    "train_on_responses_only": "assistant_only_loss completion_only_loss train_on_completions",
    "per_device_train_batch_size": "device_batch_size micro_batch_size per_device_batch_size"
    " per_gpu_train_batch_size train_micro_batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
    "gradient_accumulation_steps": "accumulate_grad_batches grad_accum grad_accumulation_steps"
    " gradient_accumulation",
    "use_gradient_checkpointing": "activation_checkpointing enable_activation_checkpointing"
    " gradient_checkpointing",
    "num_train_epochs": "epochs max_epochs n_epochs num_epochs",
    "max_steps": "max_iters num_steps num_training_steps total_steps train_steps",
    "learning_rate": "lr",
    "optim": "optimizer optimizer_name optimizer_type",
    "lr_scheduler_type": "lr_decay_style lr_scheduler lr_scheduler_name scheduler scheduler_type",
    "warmup_steps": "lr_warmup_steps num_warmup_steps warmup_iters",
    "seed": "manual_seed random_seed seed_everything",
    "output_dir": "out_dir output output_path save_dir",
    "logging_steps": "log_every_n_steps log_interval log_steps",
    "report_to": "log_with",
    "deepspeed": "deepspeed_config",
    "early_stopping_patience": "early_stop_interval early_stopping_steps",
    "optim_args": "optim_kwargs optimizer_args optimizer_kwargs",
    "save_steps": "save_every save_interval",
    "vit_lr": "vision_lr vit_learning_rate",
    "aligner_lr": "projector_lr",
    "save_path": "export_dir save_merged_path",
}

_TUNING = "give tuning: lora, or tuning: full"
_ALL_LINEAR = "give target_modules: all-linear"
_LAST_LAYERS = "give tuning: full, and train_modules with a pattern of these layers"
_NEW_TOKENS = "write them into a file, one a line, and give it as add_tokens"
_FREEZE = (
    "give freeze_modules, regular expressions that stand for whole parts of names, so that a prefix "
    "model.layers.1 is that layer, and not the tenth"
)
_TRAIN = (
    "give train_modules, regular expressions that stand for whole parts of names; with tuning: full nothing "
    "else trains"
)
_METHOD = "that method is not here; leave it out, and give tuning: lora, or tuning: full"
_LOWER_LAYERS = "give freeze_modules with a pattern of the lower layers"
_VIDEO = "images are trained on, and no video; leave it out"
_PAD = "the tokenizer's own is used; name one in tokenizer_config.json"
_OBJECTIVE = "objective is sft, which has no such setting; leave it out"
_LORA_EMBEDDINGS = (
    "it is of LoRA's second matrix on the embeddings; give learning_rates: {lora_embedding_B: RATE}"
)
_BATCH = "give per_device_train_batch_size, or effective_batch_size"
_WARMUP = "give warmup_steps, or warmup_ratio"
_FLOOR = "give lr_scheduler_type: cosine_with_min_lr, and lr_scheduler_kwargs: {min_lr: RATE}"
_BITS = "give load_in_4bit or load_in_8bit"
_NF4 = "load_in_4bit is NF4 and computes in dtype; leave it out"
_DTYPE = "give dtype"
_TEMPLATE = "the tokenizer's own chat template is used; change that, or leave it out"
_SYSTEM = "write it into the data, as a turn of the role system or a column system"
_COLUMNS = "formats are recognised by their columns; give columns for others"
_EVALUATION = "give eval_steps; a run with evaluation data evaluates ten times without it"
_BEST = "give load_best_model_at_end, which goes by the evaluation loss"
_WEIGHTS = "give each data set a weight in dataset"
_HELD_OUT = "give eval_fraction, a share of the documents; of a number of them, that number divided by all"
_MIX = "give mixture: concatenate for concat or interleave_once, else interleave_under or interleave_over"
_STOPPING = "give mixture: interleave_under for first_exhausted, interleave_over for all_exhausted"
_LIMITS = "give each data set a limit in dataset, or sample_limit, which holds for all of them together"
_PLANNED = "rows are packed over the whole data set, without a buffer; leave it out"
_FULL = "rows are as full as the plan makes them; leave it out"
_EVERY_ROW = "every row is trained on, the last too; leave it out"
_NO_PADDING = "packed rows need no padding; leave it out"
_OVERLONG = "what is longer than max_seq_length is cut or refused; see max_token_loss"
_ADAM = "give optim_args: {beta1: ..., beta2: ..., eps: ...}, those that differ"
_FUSED = "a patched model's layers and loss are fused already; leave it out"
_CHECKPOINTS = "give save_steps; the last two checkpoints are kept"
_RESUME = "give resume, and the run's folder as output_dir"
_HUB = "give push_to_hub: OWNER/NAME; the token comes from `hf auth login`"
_TOKEN = "no token is read from here; set HF_TOKEN in the environment"
_GGUF = "give save_model, and its folder to llama.cpp's convert_hf_to_gguf.py"
_TRACKER = "give report_to, and the tracker's own variables in the environment"
_IN_PYTHON = "it has no option; in Python, from_pretrained takes it"
_FROM_MODEL = "it is read from the model's folder; leave it out"
_DEVICE = "the GPU that is there is used, else the CPU; choose with CUDA_VISIBLE_DEVICES"
_METRICS = "metrics go into output_dir; leave it out"
_GENERATES = "nothing is generated in training; give it to `unsloth-pack generate`, or leave it out"
_PEFT = "it has no option; in Python, get_peft_model takes it"
_RECOMPUTE = "give use_gradient_checkpointing: true, false, offload or auto"
_IN_CONFIG = "change config.json in the model's folder"
_ORDERED = "seed orders the data; leave it out"
_PROCESSES = "torchrun says how many processes train; leave it out"
_ONE_GPU = "a row is computed on one GPU; leave it out, or divide the weights with fsdp"
_CACHED = "documents are kept in the data set cache; to pack once for several runs, use `unsloth-pack pack`"
_ANSWERS = "give train_on_responses_only, which finds the answers by the chat template"
_MEASURED = "tokens per second and memory are always measured; leave it out"
_FSDP = "give the file, or full, as fsdp"

# What to do -> their names, as `train` has no such option.
_OTHERWISE = {
    _TUNING: "adapter full_finetuning use_lora use_peft",
    _ALL_LINEAR: "apply_lora_to_mlp lora_target_linear",
    "name lm_head in target_modules": "apply_lora_to_output",
    "every run trains a causal language model; leave it out": "do_train task_type",
    "PEFT makes the adapter; leave it out": "tuner_backend",
    _LAST_LAYERS: "freeze_trainable_layers",
    _NEW_TOKENS: "new_special_tokens add_special_tokens",
    _PAD: "pad_token",
    _OBJECTIVE: "beta dpo_beta kl_coef kto_beta lmbda loss_type num_generations orpo_beta pref_beta"
    " pref_loss ref_model rl rlhf rlhf_type seq_kd sft_alpha stage teacher_model loss loss._component_"
    " cpo_alpha desirable_weight dpo dpo_label_smoothing dpo_loss_type grpo grpo_beta kto"
    " kto_desirable_weight kto_undesirable_weight label_smoothing label_smoothing_factor"
    " max_completion_length num_sample_generations orpo orpo_alpha ppo ppo_epochs pref_ftx"
    " process_reward_model reward_funcs reward_model reward_weights rpo_alpha simpo_gamma trl"
    " undesirable_weight rlhf.max_new_tokens rlhf.temperature use_vllm vllm_mode",
    _LORA_EMBEDDINGS: "loraplus_lr_embedding",
    _FREEZE: "freeze_parameters freeze_parameters_regex exclude_modules",
    _LOWER_LAYERS: "freeze_parameters_ratio",
    _TRAIN: "trainable_parameters trainable_parameters_regex freeze_extra_modules freeze_trainable_modules",
    _METHOD: "use_galore use_badam use_apollo use_llama_pro relora relora_steps lisa_n_layers"
    " lisa_activated_layers",
    "attention within a document is exact; leave it out": "s2_attention shift_attn",
    "an unknown name is always refused; leave it out": "strict",
    _BATCH: "batch_size train_batch_size auto_find_batch_size mini_batch_size",
    _WARMUP: "warmup",
    _FLOOR: "cosine_min_lr_ratio min_lr min_lr_ratio min_learning_rate",
    _BITS: "load_in_bits quant_bits quant_method quantization_bit quantization_method",
    _NF4: "bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant double_quantization"
    " bnb_4bit_quant_storage bnb_config_kwargs llm_int8_threshold",
    f"{_DTYPE}: bfloat16": "bf16 bfloat16 pure_bf16",
    f"{_DTYPE}: float16": "fp16 float16",
    f"{_DTYPE}: float32": "fp32 float32",
    "16 bits are the default; leave it out": "load_in_16bit",
    "tf32 is torch's to decide; leave it out": "tf32",
    "give attn_backend: xformers": "xformers_attention",
    "give attn_backend: sdpa": "sdp_attention",
    "give use_gradient_checkpointing: offload": "enable_activation_offloading activation_offloading",
    _TEMPLATE: "chat_template template agent_template chat_template_jinja chat_template_path"
    " prompt_format prompt_template use_chat_template tool_prompt",
    _SYSTEM: "default_system system system_prompt default_system_message",
    _COLUMNS: "dataset_text_field field_messages formatting formatting_func message_field text_field"
    " column_map column_mapping columns_mapping conversation_column field_human field_input"
    " field_instruction field_model field_output field_system message_field_content message_field_role"
    " message_property_mappings messages_field",
    _EVALUATION: "do_eval eval_strategy evals_per_epoch evaluation_strategy eval_delay eval_on_start",
    _BEST: "greater_is_better metric_for_best_model",
    _WEIGHTS: "interleave_prob interleave_probs",
    _HELD_OUT: "eval_size test_size val_set_size val_size validation_split_percentage",
    _MIX: "mix_strategy",
    _STOPPING: "stopping_strategy",
    _LIMITS: "max_samples",
    "give the file itself as dataset": "dataset_dir dataset_info",
    "it says the opposite; give train_on_responses_only": "train_on_input train_on_inputs train_on_prompt",
    "in conversations, train_on_responses_only trains on every answer; leave it out": "mask_history"
    " roles_to_train train_on_eos",
    "give max_seq_length, the one length of a run": "global_max_length max_prompt_length max_response_length",
    _PLANNED: "multipack_real_batches packing_avg_samples packing_buffer packing_mode packing_strategy"
    " sample_packing_bin_size sample_packing_eff_est sample_packing_group_size packing_wait_timeout_s"
    " append_concat_token chars_per_token num_of_sequences packing_num_proc sample_packing_sequentially",
    _FULL: "packing_min_fill_ratio",
    _EVERY_ROW: "dataloader_drop_last drop_last packing_drop_last",
    _NO_PADDING: "pad_to_max_length pad_to_multiple_of pad_to_sequence_len padding padding_side",
    _OVERLONG: "excess_length_strategy overlong packing_allow_single_long truncation truncation_strategy",
    "packed rows are even; leave it out": "group_by_length length_column_name",
    _ORDERED: "data_seed dataset_shuffle shuffle shuffle_buffer_size buffer_size shuffle_dataset"
    " shuffle_merged_datasets curriculum_sampling train_dataloader_shuffle",
    "pages are locked where there is a GPU; leave it out": "dataloader_pin_memory",
    _ADAM: "adam_beta1 adam_beta2 adam_epsilon betas eps adam_eps beta1 beta2",
    "give optim: adamw_torch_fused": "optimizer.fused",
    "give masters_on_host, with tuning: full and dtype: bfloat16": "offload_optimizer optimizer_cpu_offload",
    _FUSED: "compile enable_liger_kernel liger_kernel torch_compile unsloth_cross_entropy_loss use_liger"
    " use_liger_kernel use_unsloth chunked_cross_entropy cut_cross_entropy flash_attn_cross_entropy"
    " flash_attn_fuse_mlp flash_attn_fuse_qkv flash_attn_rms_norm liger_fused_linear_cross_entropy"
    " liger_glu_activation liger_layer_norm liger_rms_norm liger_rope liger_swiglu lora_mlp_kernel"
    " lora_o_kernel lora_qkv_kernel torch_compile_backend torch_compile_mode unsloth_lora_mlp"
    " unsloth_lora_o unsloth_lora_qkv unsloth_rms_norm unsloth_rope",
    "it is of Axolotl itself; leave it out": "plugins",
    _CHECKPOINTS: "save_only_model save_strategy save_total_limit saves_per_epoch",
    "give init_adapter, the folder of the first run": "resume_only_model",
    _RESUME: "auto_resume_from_checkpoints resume_from_checkpoint",
    _HUB: "hub_path hub_private_repo hub_strategy push_model export_hub_model_id hub_always_push"
    " hub_revision push_to_hub_model_id push_to_hub_organization",
    _TOKEN: "hf_token hf_use_auth_token hub_token token use_hf_token hf_hub_token push_to_hub_token",
    _GGUF: "quantization save_gguf",
    "give save_model": "merge_lora save_merged merge_adapter",
    _TRACKER: "metric_logger metric_logger._component_ swanlab_project use_wandb wandb wandb_entity"
    " wandb_name wandb_project wandb_run_id wandb_watch mlflow_experiment_name comet_project_name"
    " mlflow_tracking_uri swanlab_mode tensorboard_dir trackio_space_id use_mlflow use_swanlab"
    " use_tensorboard wandb_log_model wandb_mode",
    _METRICS: "log_dir logging_dir logging_root",
    "give output_dir, the whole path": "artifact_subdir output_root run_name",
    "loss.png is always drawn; leave it out": "plot_loss",
    "the cache knows its data; leave it out": "overwrite_cache load_from_cache_file",
    _VIDEO: "video_max_pixels video_min_pixels",
    "the tokenizer's own are used; leave it out": "special_tokens tokens bos_token eos_token",
    _IN_PYTHON: "model_revision revision trust_remote_code",
    _FROM_MODEL: "is_llama_derived_model model_arch model_type tokenizer tokenizer_config tokenizer_path"
    " tokenizer_type tokenizer.path split_special_tokens tokenizer_legacy tokenizer_use_fast"
    " use_fast_tokenizer",
    _DEVICE: "device device_map no_cuda use_cpu",
    "give model_name": "model._component_ checkpointer._component_ tokenizer._component_"
    " checkpointer.checkpoint_files",
    "give optim, a name of transformers": "optimizer._component_",
    "give lr_scheduler_type, a name of transformers": "lr_scheduler._component_ cosine_constant_lr_ratio",
    "give max_steps, updates of the whole run": "max_steps_per_epoch",
    _GENERATES: "do_sample eval_max_new_tokens max_new_tokens num_beams predict_with_generate temperature"
    " top_k top_p do_predict eval_table_size infer_backend",
    _PEFT: "alpha_pattern init_lora_weights init_weights lora_bias lora_target_parameters"
    " peft_init_lora_weights pissa_init rank_pattern target_parameters",
    "give loftq_config: {loftq_bits: 4}": "loftq",
    "give load_in_4bit": "load_in_nf4 qlora",
    "give merge_init_adapter, with init_adapter": "create_new_adapter",
    _RECOMPUTE: "ac_mode ac_option activation_checkpoint_mode disable_gradient_checkpointing"
    " gradient_checkpointing_kwargs gradient_checkpointing_ratio use_reentrant use_unsloth_gc",
    "give attn_backend: flash": "flash_attention_2 flash_attn2 use_flash_attention_2 use_flash_attn",
    "give attn_backend: auto, or leave it out": "eager_attention flex_attention",
    _PROCESSES: "ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout local_rank",
    "give deepspeed: zero2, or zero3": "zero_stage",
    _ONE_GPU: "context_parallel_degree context_parallel_size pipeline_parallel_size"
    " sequence_parallel_degree sequence_parallel_size tensor_parallel_dim tensor_parallel_size",
    _CACHED: "dataset_kwargs dataset_prepared_path lazy_tokenize preprocessing_only skip_prepare_dataset"
    " tokenized_path",
    "unused columns are left out, and named; leave it out": "remove_unused_columns",
    "a resumed run goes on with the rows that it has not seen; leave it out": "ignore_data_skip",
    "give eval_dataset: [{path: ..., split: ...}]": "dataset_test_split eval_split test_split",
    "any lower evaluation loss is better; leave it out": "early_stopping_threshold",
    _IN_CONFIG: "config_overrides model_init_kwargs model_kwargs moe_aux_loss_coef output_router_logits"
    " overrides_of_model_config overrides_of_model_kwargs rope_scaling rope_theta router_aux_loss_coef",
    "add_tokens makes room for its tokens; leave it out": "resize_token_embeddings resize_vocab"
    " resize_token_embeddings_to_32x",
    _ANSWERS: "instruction_template response_template loss_scale",
    "write it into the data, in a column chat_template_kwargs": "enable_thinking",
    "give learning_rates, a rate for each regular expression": "lr_groups",
    "give lr_scheduler_kwargs: {num_cycles: ...}": "num_cycles",
    "give optim_args: {momentum: ...}": "momentum",
    "give logging_steps": "logging_strategy",
    _MEASURED: "include_num_input_tokens_seen include_tokens_per_second log_peak_memory_stats"
    " skip_memory_metrics",
    "an adapter is saved alone, as safetensors; leave it out": "save_adapter_weights_only save_safetensors",
    _DTYPE: "amp mixed_precision precision",
    "give max_pixels, height times width": "image_max_resolution image_resolution image_size max_image_size",
    "set HF_HOME in the environment": "cache_dir model_cache_dir",
    "set HF_HUB_OFFLINE=1 in the environment": "local_files_only",
    "download that part of it, and give its files as dataset": "dataset_config dataset_config_name",
    "that is decided here; leave it out": "dataloader_persistent_workers dataloader_prefetch_factor"
    " disable_tqdm fan_in_fan_out log_level logging_first_step lora_fan_in_fan_out low_cpu_mem_usage"
    " profiler save_on_each_node use_cache",
    _FSDP: "fsdp_config fsdp_transformer_layer_cls_to_wrap fsdp_cpu_offload fsdp_final_state_dict_type"
    " fsdp_offload_params fsdp_state_dict_type fsdp_version",
}

# Their sections, each name of which is told of itself -> what to do about a name that is not in the tables.
GROUPS: dict[str, str | None] = {
    **dict.fromkeys(("custom", "quantization", "sft_config", "template", "trainer", "training_args")),
    **dict.fromkeys(("checkpointer", "lr_scheduler", "metric_logger", "optimizer", "tokenizer")),
    **dict.fromkeys(("lora", "lora_config", "peft", "peft_config", "tuner")),
    **dict.fromkeys(("distill", "loss", "rlhf"), _OBJECTIVE),
}

FLAGS = {theirs: ours for ours, names in _SAME.items() for theirs in names.split()}
REMEDIES = {theirs: remedy for remedy, names in _OTHERWISE.items() for theirs in names.split()}
