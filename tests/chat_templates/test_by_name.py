"""Templates by name write what the makers of the models document."""

import pytest
from chat_tokenizers import FAMILIES, TURNS, WITH_SYSTEM, tokenizer_of
from tables import table

from unsloth_pack import InputError
from unsloth_pack.chat_templates import CHAT_FORMATS, get_chat_template

_CHATML = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nTa<|im_end|>\n"
)
_CHATML_SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n"
_THOUGHT = _CHATML.replace("\nTa", "\n<think>\n\n</think>\n\nTa")
_GEMMA = (
    "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nYo<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\nTa<end_of_turn>\n"
)
_LLAMA_3 = "".join(
    f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n{turn['content']}<|eot_id|>"
    for turn in WITH_SYSTEM
)
_DATED = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_PHI_3 = "".join(f"<|{turn['role']}|>\n{turn['content']}<|end|>\n" for turn in WITH_SYSTEM)
_PHI_4 = "".join(f"<|im_start|>{t['role']}<|im_sep|>{t['content']}<|im_end|>" for t in WITH_SYSTEM)
RENDERED = {
    "alpaca": "<s>Be kind.\n\n### Instruction:\nHi\n\n### Response:\nYo<eos>\n\n"
    "### Instruction:\nBye\n\n### Response:\nTa<eos>\n\n",
    **dict.fromkeys(("chatml", "qwen-2.5", "qwen-3-instruct"), _CHATML_SYSTEM + _CHATML),
    **dict.fromkeys(("qwen-3", "qwen-3-thinking"), _CHATML_SYSTEM + _THOUGHT),
    **dict.fromkeys(("gemma", "gemma-2", "gemma-3", "gemma-3n"), _GEMMA),
    "llama": "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Yo <eos><s>[INST] Bye [/INST] Ta <eos>",
    "llama-3": f"<s>{_LLAMA_3}",
    **dict.fromkeys(
        ("llama-3.1", "llama-3.2", "llama-3.3"), f"<s>{_LLAMA_3}".replace("Be kind.", f"{_DATED}Be kind.")
    ),
    "mistral": "<s>[INST] Be kind.\n\nHi [/INST] Yo<eos>[INST] Bye [/INST] Ta<eos>",
    **dict.fromkeys(("phi-3", "phi-3.5"), _PHI_3),
    "phi-4": _PHI_4,
    "vicuna": "<s>Be kind. USER: Hi ASSISTANT: Yo<eos>USER: Bye ASSISTANT: Ta<eos>",
    "zephyr": "".join(f"<|{t['role']}|>\n{t['content']}<eos>\n" for t in WITH_SYSTEM),
}


def rendered(tokenizer, turns, **options):
    return tokenizer.apply_chat_template(turns, tokenize=False, **options)


@table("name", FAMILIES)
def test_what_it_writes(name):
    tokenizer = tokenizer_of(name)
    assert get_chat_template(tokenizer, name) is tokenizer
    assert rendered(tokenizer, WITH_SYSTEM) == RENDERED[name]
    asked = rendered(tokenizer, TURNS[:1], add_generation_prompt=True)
    assert rendered(tokenizer, TURNS[:2]).startswith(asked)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, *TURNS[1:]]
    assert rendered(tokenizer, parts) == rendered(tokenizer, TURNS)
    assert tokenizer.eos_token == (CHAT_FORMATS[name].end or "<eos>")


@table("name", FAMILIES)
def test_answers_are_marked(name):
    """As TRL's `assistant_only_loss` needs it."""
    tokenizer = tokenizer_of(name)
    get_chat_template(tokenizer, name)
    encoded = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    learned = tokenizer.decode([token for token, mark in pairs if mark])
    ends = CHAT_FORMATS[name].before_end + tokenizer.eos_token
    thought = "<think>\n\n</think>\n\n" if "think" in RENDERED[name] else ""
    assert learned.replace(" ", "") == f"Yo{ends}{thought}Ta{ends}".replace(" ", "")


def test_a_mapping():
    mapping = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    tokenizer = get_chat_template(tokenizer_of("chatml"), "ChatML", mapping=mapping)
    turns = [
        {
            "from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]),
            "value": turn["content"],
        }
        for turn in WITH_SYSTEM
    ]
    assert rendered(tokenizer, turns) == _CHATML_SYSTEM + _CHATML


def test_a_system_message():
    tokenizer = get_chat_template(tokenizer_of("chatml"), "chatml", system_message='Say "so"\n{{ x }}')
    assert rendered(tokenizer, TURNS).startswith('<|im_start|>system\nSay "so"\n{{ x }}<|im_end|>\n')
    assert rendered(tokenizer, WITH_SYSTEM) == _CHATML_SYSTEM + _CHATML


def test_thoughts_of_a_hybrid():
    tokenizer = get_chat_template(tokenizer_of("qwen-3"), "qwen-3")
    thinking = [
        *TURNS[:1],
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nYo"},
        *TURNS[2:3],
        {"role": "assistant", "content": "<think>\nsecond\n</think>\n\nTa"},
    ]
    assert rendered(tokenizer, thinking) == _THOUGHT.replace("<think>\n\n<", "<think>\nsecond\n<")
    asked = rendered(tokenizer, TURNS[:1], add_generation_prompt=True, enable_thinking=False)
    assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_of_ones_own():
    own = "{% for m in messages %}{{ m.content }}<stop>{% endfor %}"
    tokenizer = tokenizer_of("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    get_chat_template(tokenizer, (own, "<stop>"))
    assert (tokenizer.chat_template, tokenizer.eos_token) == (own, "<stop>")
    assert get_chat_template(tokenizer_of("chatml"), own).eos_token == "<eos>"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"chat_template": "lama-3"}, "'lama-3'; choose one of alpaca, chatml"),
        ({"chat_template": "chatml", "mapping": {"rol": "from"}}, "mapping holds 'rol'"),
        ({"chat_template": "{{ x }}", "mapping": {"role": "from"}}, "need the name of a template"),
        ({"chat_template": ("{{ x }}", "<stop>")}, "'<stop>', which is no token"),
    ],
)
def test_refusals(given, says):
    tokenizer = tokenizer_of("chatml")
    with pytest.raises(InputError, match=says.replace("{", "\\{")):
        get_chat_template(**{"tokenizer": tokenizer, **given})
    assert tokenizer.chat_template is None
    assert tokenizer.eos_token == "<eos>"


@table(
    ("turns", "options", "says"),
    [
        (TURNS, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "writes no tools"),
        ([*TURNS, {"role": "tool", "content": "5"}], {}, "no turn of role tool"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "text alone"),
    ],
)
@table("name", FAMILIES)
def test_what_a_template_would_drop_is_refused(turns, options, says, name):
    tokenizer = tokenizer_of(name)
    get_chat_template(tokenizer, name)
    with pytest.raises(Exception, match=says):
        rendered(tokenizer, turns, **options)
