"""Options of Axolotl, LLaMA-Factory, ms-swift, TRL, transformers and Unsloth, and what to give instead."""

# Their name -> our name.
FLAGS = {
    "base_model": "model_name",
    "model_name_or_path": "model_name",
    "model": "model_name",
    "cutoff_len": "max_seq_length",
    "max_length": "max_seq_length",
    "sequence_len": "max_seq_length",
    "bf16": "dtype",
    "fp16": "dtype",
    "quantization_bit": "load_in_4bit",
    "flash_attn": "attn_backend",
    "flash_attention": "attn_backend",
    "attn_implementation": "attn_backend",
    "lora_r": "r",
    "lora_rank": "r",
    "peft_use_dora": "use_dora",
    "data_path": "dataset",
    "datasets": "dataset",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "dataset_dir": "dataset",
    "test_datasets": "eval_dataset",
    "dataset_num_proc": "num_proc",
    "dataset_processes": "num_proc",
    "preprocessing_num_workers": "num_proc",
    "neat_packing": "sample_packing",
    "eval_sample_packing": "eval_packing",
    "val_set_size": "eval_dataset",
    "train_on_inputs": "train_on_responses_only",
    "assistant_only_loss": "train_on_responses_only",
    "completion_only_loss": "train_on_responses_only",
    "batch_size": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps",
    "resume_from_checkpoint": "resume",
}
_ADAPTER = "every run trains a LoRA adapter; leave it out"
_TARGETS = "all projections are adapted; in Python, get_peft_model takes target_modules"
_OTHERS = "nothing beside the projections is trained; in Python, get_peft_model takes modules_to_save"
_TEMPLATE = "the tokenizer's own chat template is used; change that, or leave it out"
_HUB = "nothing is uploaded; give the folder to `hf upload`"
_GGUF = "give --save_model, and its folder to llama.cpp's convert_hf_to_gguf.py"
# Their name -> what to do, as `train` has no such option.
REMEDIES = {
    **dict.fromkeys(("stage", "do_train", "finetuning_type", "train_type", "adapter"), _ADAPTER),
    **dict.fromkeys(("target_modules", "lora_target", "lora_target_modules", "lora_target_linear"), _TARGETS),
    **dict.fromkeys(("modules_to_save", "lora_modules_to_save", "additional_target"), _OTHERS),
    **dict.fromkeys(("chat_template", "template"), _TEMPLATE),
    **dict.fromkeys(("push_model", "push_to_hub", "hub_path", "hub_token", "hub_model_id"), _HUB),
    **dict.fromkeys(("save_gguf", "quantization"), _GGUF),
    "pad_to_sequence_len": "packed rows need no padding; leave it out",
    "max_grad_norm": "gradients are clipped to a norm of 1; leave it out",
}
