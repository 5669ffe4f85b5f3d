"""The criterion: errors against the truth, as multiples of those of plain transformers and PEFT.

Plain is run with each document alone and on the same row with position_ids, because the rounding of a GEMM
depends on its rows, and that of attention on its mask: the greater error of the two is the yardstick. Where
plain's documents leak into each other on a row, it is the error of documents alone. A relative error can
be 0 by luck where a scalar is compared, so the loss is granted one unit of rounding.

Errors of rounding are random, and the worst of tens of gradients in thousands of cases is judged. So a case
above its bound is judged again over several draws of documents: luck averages out, a fault stays.
"""

import math
from dataclasses import dataclass, replace

import tiny
import torch
from tiny import Outcome, error
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from unsloth_pack.models import arch_spec_for

FACTOR = 1.5
NUMBERS_OF_DRAWS = (1, 4, 16, 64)  # the next where fewer are above
QUANTITIES = ("logits", "loss", "gradient", "other_gradient")
_SANE = 32  # units of rounding that plain's logits may be off: above, the truth is of another model


@dataclass
class Draw:
    """Plain transformers and PEFT on some documents: each alone in float64, each alone, and on the row."""

    truth: Outcome
    alone: Outcome
    same_row: Outcome


def judge_as_few(run, dtype):
    """The judgement of `judge` on the smallest number of draws that is within bounds.

    Args:
        run: takes a seed, returns an outcome and its `Draw`.

    Returns:
        Also `first_draw` and `draws` where one was not enough.
    """
    gots, draws, first = [], [], None
    for number in NUMBERS_OF_DRAWS:
        for seed in range(len(draws), number):
            got, draw = run(seed)
            gots.append(got)
            draws.append(draw)
        row = judge(gots, draws, dtype)
        if number == 1:
            first = max(row.get(name) or 0 for name in QUANTITIES)
        else:
            row |= {"first_draw": first, "draws": number}
        if holds(row):
            break
    return row


def on_the_same_row(model, documents, routes=None, runs=tiny):
    """Plain transformers on the packed row: position_ids keep documents apart, without a cache or a mask.

    Where layers carry a state they do not: there all documents of one length are a batch. gpt_oss makes its
    masks without position_ids: there it is given masks of transformers' own that are made with them.

    Args:
        runs: has `run_alone` and `run_packed`.
    """
    config = model.config.get_text_config()
    if arch_spec_for(config.model_type).mixers:
        return _by_length(model, documents, routes, runs.run_alone)
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None].to(model.device)
    masks = {"attention_mask": _masks(model, config, positions)} if config.model_type == "gpt_oss" else {}
    return runs.run_packed(model, documents, routes, position_ids=positions, use_cache=False, **masks)


def _masks(model, config, positions):
    """By kind of layer, so that a model takes them as they are."""
    embeddings = torch.empty(*positions.shape, 0, dtype=model.dtype, device=positions.device)
    made = {"inputs_embeds": embeddings, "attention_mask": None, "past_key_values": None}
    kinds = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: make(config, position_ids=positions, **made) for kind, make in kinds.items()}


def _by_length(model, documents, routes, run_alone):
    """Every document in a row of its own, those of one length as one batch."""
    order = sorted(range(len(documents)), key=lambda number: len(documents[number]))
    lengths = [len(document) for document in documents]

    def sorted_by_length(tokens):
        parts = tokens.split(lengths)
        return torch.cat([parts[number] for number in order])

    sorted_routes = {name: sorted_by_length(chosen) for name, chosen in (routes or {}).items()}
    outcome = run_alone(model, [documents[number] for number in order], sorted_routes or None)
    place = sorted_by_length(torch.arange(sum(lengths))).argsort()
    return replace(outcome, logits=outcome.logits[place])


def judge(gots, draws, dtype):
    """The fields of a row that judge the outcomes for some draws of documents.

    Returns:
        The multiple of each of QUANTITIES, of gradients the worst (of the adapter's, and of all else that is
        trained; None where nothing is); `of_alone` and `of_same_row`, the worst of all by that yardstick
        alone; where anything is above FACTOR, `failed`, what and by how much; where neither of plain's runs
        is finite, `not_finite`, in what: there nothing is judged.
    """
    for got, draw in zip(gots, draws, strict=True):
        if strangers := got.grads.keys() ^ draw.truth.grads.keys():
            return {"failed": [f"gradients on one side only: {', '.join(sorted(strangers))}"]}
    truths = [draw.truth for draw in draws]
    ours, alone, same_row = (
        _errors(outcomes, truths)
        for outcomes in (gots, [draw.alone for draw in draws], [draw.same_row for draw in draws])
    )
    unit = torch.finfo(dtype).eps
    if min(alone["logits"], same_row["logits"]) > _SANE * unit:
        return {"failed": [f"plain's own logits are off by {alone['logits']:.1e}: no truth to judge by"]}
    plains = (
        [alone, same_row] if same_row["logits"] <= _SANE * unit else [alone]
    )  # where plain leaks in a row
    of_both = _multiples(ours, plains, unit)
    row = {quantity: _worst(of_both, quantity) for quantity in QUANTITIES}
    row["of_alone"] = _worst(_multiples(ours, [alone], unit))
    row["of_same_row"] = _worst(_multiples(ours, [same_row], unit))
    failed = sorted((name for name in of_both if of_both[name] > FACTOR), key=lambda name: -of_both[name])
    if failed:
        row["failed"] = [f"{name}: {of_both[name]:.2f} times plain ({ours[name]:.1e})" for name in failed]
    if not_finite := [name for name in ours if name not in of_both]:
        row["not_finite"] = not_finite
    return row


def holds(row):
    """Whether nothing in a row failed. One that says why nothing was measured holds too."""
    return not row.get("failed")


def _errors(outcomes, truths):
    """The relative error of everything, its root mean square over the draws."""
    by_draw = [_errors_of_one(outcome, truth) for outcome, truth in zip(outcomes, truths, strict=True)]
    return {
        name: math.sqrt(sum(errors[name] * errors[name] for errors in by_draw) / len(by_draw))
        for name in by_draw[0]
    }


def _errors_of_one(outcome, truth):
    errors = {
        "logits": error(outcome.logits, truth.logits),
        "loss": abs(float(outcome.loss / truth.loss) - 1),
    }
    for name, grad in truth.grads.items():
        errors[name.removeprefix("base_model.model.")] = error(outcome.grads[name], grad)
    return errors


def _multiples(ours, plains, unit):
    """Our errors over the greatest of plain's, where any of plain's is finite."""
    multiples = {}
    for name, error_of_ours in ours.items():
        yardstick = max((p[name] for p in plains if math.isfinite(p[name])), default=None)
        if yardstick is not None:
            multiples[name] = _quotient(error_of_ours, max(yardstick, unit if name == "loss" else 0))
    return multiples


def _quotient(ours, yardstick):
    if ours == 0:
        return 0.0
    return ours / yardstick if yardstick and math.isfinite(ours) else math.inf


def _worst(multiples, quantity=None):
    """Rounded, None where there is nothing of this quantity; infinity is not JSON and shows in `failed`."""
    worst = max((m for name, m in multiples.items() if quantity in (None, _quantity(name))), default=None)
    return None if worst is None else round(min(worst, 1e9), 3)


def _quantity(name):
    if name in QUANTITIES:
        return name
    return "gradient" if "lora_" in name else "other_gradient"
