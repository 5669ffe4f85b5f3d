"""What vLLM's loader refuses of an adapter is said in one line."""

import pytest
from peft import LoraConfig

from unsloth_pack.checkpoints.vllm_compat import note_on_vllm


def note(**options):
    targets = {"target_modules": ["q_proj", "v_proj"]}
    return note_on_vllm(LoraConfig(**{**targets, **options}).to_dict())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modules_to_save": ["lm_head"]}, "it takes no modules_to_save: merge it"),
        ({"trainable_token_indices": [3]}, "it takes no trained tokens"),
        ({"use_dora": True}, "it takes no DoRA"),
        ({"bias": "all"}, "it takes no trained biases"),
        ({"target_modules": ["q_proj", "lm_head"]}, "it takes no adapter on lm_head"),
        ({"target_modules": ["layers.0.self_attn.kv_b_proj"]}, "it takes no adapter on kv_b_proj"),
        ({"target_modules": ".*q_proj"}, "--save_method lora_vllm` saves it"),
        ({"target_parameters": ["gate_up_proj"]}, "--save_method lora_vllm` saves it"),
        ({"r": 600}, "its greatest rank is 512, and this is 600"),
        ({"r": 8, "rank_pattern": {"q_proj": 600}}, "and this is 600"),
        ({"r": 24}, "to serve this adapter, vLLM needs --max-lora-rank 32"),
        ({"r": 8, "rank_pattern": {"q_proj": 300}}, "needs --max-lora-rank 320"),
    ],
)
def test_what_is_said(options, says):
    said = note(**options)
    assert says in said
    assert "\n" not in said
