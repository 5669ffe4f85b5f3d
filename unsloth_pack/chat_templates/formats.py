"""Chat formats as data, as documented by the makers of the models."""

from dataclasses import dataclass, replace

Around = tuple[str, str]  # the text before and after a turn


@dataclass(frozen=True)
class ChatFormat:
    """A format of conversations as text. `{bos}` and `{end}` stand for tokens.

    Args:
        user: around the text of a question.
        answer: before an answer. Its last space belongs to the answer.
        instruction_part, response_part: the markers of questions and answers for `train_on_responses_only`.
        system: around the system's text.
        is_within_user: True if the system's text is inside the first question.
        end: the token at the end of an answer; None for the tokenizer's end-of-sequence token.
        before_end: between an answer and `end`.
        after_answer: after `end`, without loss.
        default_system: the default system text; None for no system turn.
        begin: before everything.
        trims: True to strip white space around the text of a turn.
        thinking: "hybrid" for a model that may think aloud, whose earlier answers lose their thoughts;
            "always" if every answer begins with "<think>".
    """

    user: Around
    answer: str
    instruction_part: str
    response_part: str
    system: Around
    is_within_user: bool = False
    end: str | None = None
    before_end: str = ""
    after_answer: str = ""
    default_system: str | None = None
    begin: str = "{bos}"
    trims: bool = False
    thinking: str | None = None


def _turns(before: str, behind: str, answer_of: str = "assistant") -> ChatFormat:
    """Build a format with the same text for all roles: `before`, where `*` is the role, and `behind`."""
    user, answer = before.replace("*", "user"), before.replace("*", answer_of)
    system, after = before.replace("*", "system"), behind.removeprefix("{end}")
    return ChatFormat((user, behind), answer, user, answer, (system, behind), after_answer=after)


_CHATML = replace(_turns("<|im_start|>*\n", "{end}\n"), end="<|im_end|>", begin="")
_QWEN_2_5 = replace(
    _CHATML, default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
)
_PHI_3 = replace(_turns("<|*|>\n", "{end}\n"), end="<|end|>", begin="")
_PHI_4 = replace(_turns("<|im_start|>*<|im_sep|>", "{end}"), end="<|im_end|>", begin="")
_LLAMA_3 = replace(_turns("<|start_header_id|>*<|end_header_id|>\n\n", "{end}"), end="<|eot_id|>", trims=True)
# The dates are those of Llama 3.1's own template
_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_LLAMA_3_1 = replace(_LLAMA_3, system=(_LLAMA_3.system[0] + _DATES, "{end}"), default_system="")
_GEMMA = replace(
    _turns("<start_of_turn>*\n", "{end}\n", answer_of="model"),
    end="<end_of_turn>",
    system=("", "\n\n"),
    is_within_user=True,
    trims=True,
)
_ZEPHYR = replace(_turns("<|*|>\n", "{end}\n"), begin="")
_MISTRAL = ChatFormat(
    ("[INST] ", " [/INST]"), " ", "[INST]", "[/INST]", ("", "\n\n"), is_within_user=True, trims=True
)
_LLAMA_2 = replace(
    _MISTRAL,
    user=("{bos}[INST] ", " [/INST]"),
    system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
    before_end=" ",
    begin="",
)
_VICUNA = ChatFormat(
    ("USER: ", " "),
    "ASSISTANT: ",
    "USER:",
    "ASSISTANT:",
    ("", " "),
    default_system="A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite answers to the user's questions.",
)
_ALPACA = ChatFormat(
    ("### Instruction:\n", "\n\n"),
    "### Response:\n",
    "### Instruction:\n",
    "### Response:\n",
    ("", "\n\n"),
    after_answer="\n\n",
    default_system="Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.",
)
CHAT_FORMATS = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    **dict.fromkeys(("gemma", "gemma-2", "gemma-3", "gemma-3n"), _GEMMA),
    "llama": _LLAMA_2,
    "llama-3": _LLAMA_3,
    **dict.fromkeys(("llama-3.1", "llama-3.2", "llama-3.3"), _LLAMA_3_1),
    "mistral": _MISTRAL,
    **dict.fromkeys(("phi-3", "phi-3.5"), _PHI_3),
    "phi-4": _PHI_4,
    "qwen-2.5": _QWEN_2_5,
    "qwen-3": replace(_CHATML, thinking="hybrid"),
    "qwen-3-instruct": _CHATML,
    "qwen-3-thinking": replace(_CHATML, thinking="always"),
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}
"""The formats by name. `get_chat_template` ignores case, hyphens and dots in names."""
