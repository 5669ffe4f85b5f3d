"""Labels on answers alone, found by the markers around them, for rows that are encoded one at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np

from unsloth_pack.chat_templates.answer_labels import AnswerLabels
from unsloth_pack.chat_templates.by_name import parts_of
from unsloth_pack.data.encoding import marks_answers
from unsloth_pack.errors import InputError


def answers_of(
    tokenizer: Any, question: str | None = None, answer: str | None = None
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """What makes labels `[n]` of ids and labels `[n]`: those on what stands behind `answer` stay.

    Args:
        question, answer: what the chat template puts before each. None where it marks answers itself, or is
            one that is known.

    Returns:
        None where the chat template marks answers itself.

    Raises:
        InputError: the markers are not known.
    """
    if question is None and answer is None:
        if marks_answers(tokenizer.get_chat_template()):
            return None
        question, answer = parts_of(tokenizer) or (None, None)
    if not question or not answer:
        raise InputError(
            f"train_on_responses_only is set, instruction_part is {question!r} and response_part {answer!r}; "
            "give what the chat template puts before a question and before an answer"
        )
    labels = AnswerLabels(question, answer, tokenizer)
    return lambda ids, given: labels.of_row(ids.tolist(), given.tolist(), None)[0].astype(np.int32)
