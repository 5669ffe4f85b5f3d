"""Code that uses the package keeps working: names, order and defaults of arguments, flags."""

import inspect
import operator
import subprocess
import sys
from pathlib import Path

from tables import table

import unsloth_pack
from unsloth_pack import chat_templates, kernels, packing
from unsloth_pack.attention import BACKENDS
from unsloth_pack.cli import SUBCOMMANDS
from unsloth_pack.config import train_parser

REQUIRED = inspect.Parameter.empty
CALLS = """
FastLanguageModel.from_pretrained: model_name='demo' max_seq_length=2048 dtype=None load_in_4bit=False
  load_in_8bit=False load_in_fp8=False full_finetuning=False attn_backend='auto' device_map=None token=None
  revision=None trust_remote_code=False random_state=3407 hf_kwargs
FastLanguageModel.get_peft_model: model r=16 target_modules=None lora_alpha=16 lora_dropout=0.0 bias='none'
  layers_to_transform=None modules_to_save=None use_gradient_checkpointing=False random_state=3407
  use_rslora=False use_dora=False loftq_config=None
FastVisionModel.from_pretrained: model_name max_seq_length=2048 dtype=None load_in_4bit=False
  load_in_8bit=False full_finetuning=False max_pixels=None min_pixels=None kwargs
FastVisionModel.get_peft_model: model r=16 target_modules=None lora_alpha=16 lora_dropout=0.0 bias='none'
  finetune_vision_layers=False finetune_language_layers=True finetune_attention_modules=True
  finetune_mlp_modules=True finetune_aligner='full'
VisionDataCollator: model processor max_seq_length=None
FastLanguageModel.for_inference: model
FastLanguageModel.for_training: model
patch_model: model attn_backend='auto'
pool_documents: hidden_states packed_seq_lengths how='last'
supported_architectures:
patching.patch.Patch.undo: self
packing.pack_sequences: sequences max_length pad_token_id strategy='next_fit' return_boundaries=False
  sep_token_id=None overlong='error'
packing.concatenate_and_pack: input_ids labels attention_masks max_length pad_token_id label_pad_id=-100
packing.plan_packs: lengths capacity strategy='bfd'
packing.PackingStream: capacity buffer_size=256 min_fill_ratio=0.7 drop_last=None strategy=None
packing.pack_dataset: dataset capacity strategy='bfd'
packing.length_report: lengths capacities=() world_size=1 per_device_batch=1 target_effective=32
  bin_size=512
packing.plan_accumulation: target_effective samples_per_pack world_size=1 per_device_batch=1
chat_templates.get_chat_template: tokenizer chat_template='chatml' mapping=None map_eos_token=True
chat_templates.train_on_responses_only: trainer instruction_part=None response_part=None
chat_templates.standardize_sharegpt: dataset
kernels.rope_qk: q k cos sin position_ids=None
"""  # arguments may be added behind these, with a default
CALLS = [line.split(":") for line in CALLS.strip().replace("\n  ", " ").splitlines()]
FLAGS = """
    model_name max_seq_length dtype load_in_4bit dataset r lora_alpha lora_dropout bias
    use_gradient_checkpointing random_state use_rslora use_dora loftq_config per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps warmup_steps max_steps num_train_epochs
    learning_rate optim weight_decay lr_scheduler_type seed report_to logging_steps output_dir save_model
    save_method save_path sample_packing packing padding_free attn_backend eval_dataset eval_packing
    train_on_responses_only config debug
"""


@table(("name", "arguments"), CALLS, ids=[name for name, _ in CALLS])
def test_arguments_keep_their_names_order_and_defaults(name, arguments):
    function = operator.attrgetter(name)(unsloth_pack)
    parameters = list(inspect.signature(function).parameters.values())
    said = [each.name if each.default is REQUIRED else f"{each.name}={each.default!r}" for each in parameters]
    n_kept = len(arguments.split())
    assert " ".join(said[:n_kept]) == arguments.strip()
    assert all(each.default is not REQUIRED or each.kind is each.VAR_KEYWORD for each in parameters[n_kept:])


def test_flags_and_subcommands_keep_their_names():
    known = set(train_parser()._option_string_actions)
    assert {f"--{name}" for name in FLAGS.split()} <= known
    named = "train stats pack teach verify doctor generate chat merge export bench config recipe estimate"
    assert {*named.split()} == set(SUBCOMMANDS)


def test_everything_public_has_a_docstring():
    for module in (unsloth_pack, chat_templates, packing, kernels):
        for name in getattr(module, "__all__", [name for name in dir(module) if name[0] != "_"]):
            thing = getattr(module, name)
            assert inspect.getdoc(thing), name
            if inspect.isclass(thing):
                methods = [value for key, value in vars(thing).items() if not key.startswith("_")]
                assert all(inspect.getdoc(m) for m in methods if callable(m) or isinstance(m, property)), name


def test_the_guide_lists_the_architectures_and_the_backends():
    guide = (Path(unsloth_pack.__file__).parents[1] / "docs" / "models.md").read_text()
    for name in (*unsloth_pack.supported_architectures(), *BACKENDS):
        assert f"`{name}`" in guide, name


def test_planning_needs_no_torch():
    code = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "trl", "peft", "datasets")))  # not to be had
from unsloth_pack import packing
assert packing.plan_packs([3, 5, 2, 7], 8).n_bins == 3
assert len(packing.pack_sequences([[1, 2], [3]], 4, 0)) == 1
assert len(packing.concatenate_and_pack([[1]], [[1]], [[1]], max_length=2, pad_token_id=0)) == 3
assert len(list(packing.PackingStream(8, 2).pack([[1, 2], [3], [4]]))) == 2
assert packing.length_report([5, 9], [16]).forecasts[0].packs == packing.plan_accumulation(1, 2) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
