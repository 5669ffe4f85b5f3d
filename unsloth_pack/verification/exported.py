"""Check an exported model against the trained one: the greedy tokens and logits of the same prompts."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from unsloth_pack.errors import RunStopped, written

# Relative errors of logits. Sound exports were off by up to 0.015, and by 0.04 where computed in bfloat16
_ALLOWED, _ALLOWED_IN_16_BITS = 0.05, 0.1
_TIE = 0.1  # standard deviations of the logits between tokens that rounding may exchange
_LEAST_SHARE = 0.75  # of greedy tokens that a quantised model has to share


@dataclass(frozen=True)
class Answer:
    """The trained model's answer to a prompt."""

    text: str  # of the prompt, as the export has to read it
    ids: list[int]  # of prompt and answer
    n_prompt: int  # tokens
    logits: np.ndarray  # `[answer, vocabulary]`, which predict its tokens


@dataclass(frozen=True)
class TrainedAnswers:
    """The answers of a trained model, which those of its export are compared with.

    Checks return what was found, or raise RunStopped with the first token that differs.
    """

    answers: Sequence[Answer]
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype  # in which they were computed

    def check_folder(self, model: str | Path, adapter: Path | None = None) -> str:
        """Compare a folder, or an adapter on it, as transformers and PEFT read it."""
        plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if adapter:
            plain = PeftModel.from_pretrained(plain, str(adapter))
        with torch.no_grad():
            return self._check_logits(lambda ids: plain(input_ids=torch.tensor([ids])).logits[0].numpy())

    def check_file(self, file: Path, is_quantised: bool = False) -> str:
        """Compare a GGUF file as llama.cpp reads it; if quantised, a quarter of its tokens may differ."""
        from llama_cpp import Llama

        room = max(len(answer.ids) for answer in self.answers)
        llama: Any = Llama(
            str(file), n_ctx=room, n_batch=room, n_gpu_layers=0, logits_all=True, verbose=False
        )
        begins = not self.tokenizer.chat_template  # which writes the first token itself

        def logits_of(ids: list[int]) -> np.ndarray:
            llama.reset()
            llama.eval(ids)
            return np.asarray(llama.scores[: len(ids)])

        with closing(llama):
            self._check_tokens(lambda text: llama.tokenize(text.encode(), add_bos=begins, special=True))
            return self._check_logits(logits_of, is_quantised)

    def _check_tokens(self, encode: Callable[[str], list[int]]) -> None:
        for number, answer in enumerate(self.answers, 1):
            got, expected = encode(answer.text), answer.ids[: answer.n_prompt]
            if got != expected:
                pairs = zip_longest(got, expected)
                place, pair = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
                one, other = (id if id is None else self.tokenizer.convert_ids_to_tokens(id) for id in pair)
                raise RunStopped(f"prompt {number}, token {place}: the file reads {one!r}, the run {other!r}")

    def _check_logits(self, logits_of: Callable[[list[int]], np.ndarray], is_quantised: bool = False) -> str:
        """`logits_of` computes `[tokens, vocabulary]` of token ids."""
        allowed = _ALLOWED if self.dtype == torch.float32 else _ALLOWED_IN_16_BITS
        n_same = n_tokens = 0
        worst = 0.0
        for number, answer in enumerate(self.answers, 1):
            expected = answer.logits
            got = logits_of(answer.ids)[answer.n_prompt - 1 : -1, : expected.shape[1]]
            ours, theirs = expected.argmax(-1), got.argmax(-1)
            behind = expected.max(-1) - np.take_along_axis(expected, theirs[:, None], -1)[:, 0]
            differing = np.flatnonzero(~(behind <= _TIE * expected.std(-1)))
            if len(differing) and not is_quantised:
                place = differing[0]
                one, other = (written(self.tokenizer.decode([int(ids[place])])) for ids in (theirs, ours))
                said = f"token {place} of the answer: {one}, the trained model has {other}"
                raise RunStopped(f"prompt {number}, {said}")
            centred = [each - each.mean(-1, keepdims=True) for each in (got, expected)]
            error = float(np.linalg.norm(centred[0] - centred[1]) / np.linalg.norm(centred[1]))
            if not error <= allowed and not is_quantised:
                said = f"logits are off by {error:.1%}, and {allowed:.0%} is allowed"
                raise RunStopped(f"prompt {number}: {said}")
            n_same, n_tokens = n_same + int((ours == theirs).sum()), n_tokens + len(ours)
            worst = max(worst, error)
        found = f"{n_same} of {n_tokens} greedy tokens are the trained model's"
        if n_same < _LEAST_SHARE * n_tokens:
            raise RunStopped(f"only {found}")
        return f"{found}, logits off by {worst:.1%} at most"
