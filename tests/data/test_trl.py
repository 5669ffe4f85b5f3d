"""What to_trl gives goes through SFTTrainer, and the loss is on the responses and nothing else."""

import json

import pytest
import torch
from model_folder import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from unsloth_pack.data import check_token_ids, to_trl
from unsloth_pack.data.lossless_json import to_dataset

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[call]{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def prepared(rows, tokenizer, tmp_path, chat_template=True, **config):
    """(text, the part of it that carries loss) of each row, as SFTTrainer sees it."""
    tokenizer.chat_template = TEMPLATE if chat_template else None
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).to(torch.float32)
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None, **config)
    data = to_trl(to_dataset(rows), chat_template=chat_template)
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    check_token_ids(trainer.train_dataset, len(tokenizer))
    batch = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return [
        (tokenizer.decode(row["input_ids"][0]), tokenizer.decode(row["labels"][row["labels"] != -100]))
        for row in batch
    ]


def test_alpaca(tokenizer, tmp_path):
    rows = [{"instruction": "greet é", "output": "hi"}, {"instruction": "add", "input": "1 1", "output": "2"}]
    assert prepared(rows, tokenizer, tmp_path) == [
        ("[user]greet é[assistant]hi<eos>", "hi<eos>"),
        ("[user]add\n1 1[assistant]2<eos>", "2<eos>"),
    ]
    plain = prepared(rows, tokenizer, tmp_path, chat_template=False)
    assert [loss for _, loss in plain] == ["hi<eos>", "2<eos>"]
    assert plain[0][0].endswith("### Instruction:\ngreet é\n\n### Response:\nhi<eos>")


def test_sharegpt_and_tool_calls(tokenizer, tmp_path):
    turns = [("human", "q"), ("function_call", "call"), ("observation", "seen"), ("gpt", "a")]
    rows = [
        {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": '[{"name": "f"}]'},
        {"conversations": [{"from": who, "value": text} for who, text in turns[::3]], "tools": "[]"},
    ]
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    assert prepared(rows, tokenizer, tmp_path, assistant_only_loss=True) == [
        (f"[tools]{tools}[user]q[assistant]call<eos>[tool]seen[assistant]a<eos>", "call<eos>a<eos>"),
        ("[user]q[assistant]a<eos>", "a<eos>"),
    ]


def test_messages_with_ragged_tool_calls(tokenizer, tmp_path):
    user = {"role": "user", "content": "q"}
    rows = [
        {"messages": [user, {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]}
        for arguments in ({"t": 0.6}, {"unit": None, "x": 157.830435654872})
    ]
    assert [loss for _, loss in prepared(rows, tokenizer, tmp_path, assistant_only_loss=True)] == [
        '[call]{"t": 0.6}<eos>',
        '[call]{"unit": null, "x": 157.830435654872}<eos>',
    ]


def test_text(tokenizer, tmp_path):
    assert prepared([{"text": "one\ntwo"}], tokenizer, tmp_path) == [("one\ntwo<eos>", "one\ntwo<eos>")]
