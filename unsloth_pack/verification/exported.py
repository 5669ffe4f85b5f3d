"""Check an exported model against the trained one: the greedy tokens and logits of the same prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from unsloth_pack.errors import InputError, RunStopped, written

MOST_PROMPTS, NEW_TOKENS, LONGEST = 8, 32, 1024  # prompts, and tokens of an answer and of a prompt
# Relative errors of logits. Sound exports were off by up to 0.015, and by 0.04 where computed in bfloat16
_ALLOWED, _ALLOWED_IN_16_BITS = 0.05, 0.1
_TIE = 0.1  # standard deviations of the logits between tokens that rounding may exchange
_LEAST_SHARE = 0.75  # of greedy tokens that a quantised model has to share

Prompt = Mapping[str, Any]  # `text`, or `turns` and what the chat template reads beside them
Logits = Callable[[list[int]], np.ndarray]  # of token ids, `[tokens, vocabulary]`


@dataclass(frozen=True)
class Answer:
    """The trained model's answer to a prompt."""

    prompt: Prompt
    ids: list[int]  # of prompt and answer
    n_prompt: int  # tokens
    logits: np.ndarray  # `[answer, vocabulary]`, which predict its tokens
    allowed: float  # relative error of an export's logits


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """The text of a prompt, in the chat template if it has turns."""
    if "text" in prompt:
        return str(prompt["text"])
    turns, beside = prompt["turns"], {name: prompt[name] for name in prompt if name != "turns"}
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **beside))


@torch.no_grad()
def answer_greedily(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[Answer]:
    """Let the trained model answer the first prompts that are short enough.

    Raises:
        InputError: all are too long.
    """
    longest = min(LONGEST, model.config.get_text_config().max_position_embeddings - NEW_TOKENS)
    answers: list[Answer] = []
    allowed = _ALLOWED if model.dtype == torch.float32 else _ALLOWED_IN_16_BITS
    for prompt in prompts:
        encoded = tokenizer(
            render(tokenizer, prompt), add_special_tokens="text" in prompt, return_tensors="pt"
        )
        ids = encoded["input_ids"].to(model.device)
        if len(answers) == MOST_PROMPTS or not 0 < ids.shape[1] <= longest:
            continue
        plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
        attended = torch.ones_like(ids)
        whole = model.generate(
            inputs=ids,
            attention_mask=attended,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.eos_token_id,
            **plain,
        )
        n_prompt = ids.shape[1]
        logits = model(input_ids=whole).logits[0, n_prompt - 1 : -1].float().cpu().numpy()
        answers.append(Answer(prompt, whole[0].tolist(), n_prompt, logits, allowed))
    if not answers:
        raise InputError(
            f"all prompts are longer than {longest} tokens; give --prompts FILE with shorter ones"
        )
    return answers


def check_tokens(
    answers: Sequence[Answer],
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[[str, bool], list[int]],
    template: str | None,
) -> None:
    """Compare how an export splits the prompts into tokens; `template` is its own chat template.

    Raises:
        RunStopped: one is split otherwise. Names the first token.
    """
    for number, answer in enumerate(answers, 1):
        is_text, expected = "text" in answer.prompt, answer.ids[: answer.n_prompt]
        prompt = answer.prompt if is_text else {**answer.prompt, "chat_template": template}
        got = encode(render(tokenizer, prompt), is_text)
        if got != expected:
            pairs = zip([*got, None], [*expected, None], strict=False)
            place, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            said = [each if each is None else tokenizer.convert_ids_to_tokens(each) for each in (one, other)]
            raise RunStopped(
                f"prompt {number}, token {place}: the file reads {said[0]!r}, the run {said[1]!r}"
            )


def check_logits(
    answers: Sequence[Answer],
    tokenizer: PreTrainedTokenizerBase,
    logits_of: Logits,
    is_quantised: bool = False,
) -> str:
    """Compare an export's greedy tokens and logits with the trained model's. Returns what was found.

    Raises:
        RunStopped: they differ by more than rounding, or a quantised model shares too few tokens.
    """
    n_same = n_tokens = 0
    worst = 0.0
    for number, answer in enumerate(answers, 1):
        expected = answer.logits
        got = logits_of(answer.ids)[answer.n_prompt - 1 : -1, : expected.shape[1]]
        ours, theirs = expected.argmax(-1), got.argmax(-1)
        behind = expected.max(-1) - np.take_along_axis(expected, theirs[:, None], -1)[:, 0]
        differing = np.flatnonzero(~(behind <= _TIE * expected.std(-1)))
        n_same, n_tokens = n_same + int((ours == theirs).sum()), n_tokens + len(ours)
        if len(differing) and not is_quantised:
            place = int(differing[0])
            one, other = (written(tokenizer.decode([int(ids[place])])) for ids in (theirs, ours))
            raise RunStopped(
                f"prompt {number}, token {place} of the answer: {one}, the trained model has {other}"
            )
        centred = [each - each.mean(-1, keepdims=True) for each in (got, expected)]
        error = float(np.linalg.norm(centred[0] - centred[1]) / np.linalg.norm(centred[1]))
        if not error <= answer.allowed and not is_quantised:
            raise RunStopped(
                f"prompt {number}: logits are off by {error:.1%}, and {answer.allowed:.0%} is allowed"
            )
        worst = max(worst, error)
    if n_same < _LEAST_SHARE * n_tokens:
        raise RunStopped(f"only {n_same} of {n_tokens} greedy tokens are the trained model's")
    return f"{n_same} of {n_tokens} greedy tokens are the trained model's, logits off by {worst:.1%} at most"
