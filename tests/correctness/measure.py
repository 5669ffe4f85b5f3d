"""The rows of one case: how far its gradients, loss and logits are from the truth, or why there are none."""

import gc
from dataclasses import asdict
from functools import lru_cache, partial

from unsloth_pack import patch_model
from unsloth_pack.errors import BackendUnavailable

from .cases import DIVERGENCES, DTYPES, WITH_IMAGES
from .judge import Draw, judge_as_few
from .models import NotApplicable, drawing_dropout, enable_checkpointing
from .sharded import Sharded, TwoRanks
from .subjects import Branches, Distillation, Text, WithImages

_STEPS_BEFORE_REPLAY = 3  # two rows of a form run uncaptured, the third is captured


def measure(case):
    """The rows of a case, uncaptured and captured.

    Returns:
        Two dicts with the case, `captured`, and one of: the fields of `judge`, with `first_draw` and `draws`
        if one draw was not enough; `refused`, why the case cannot exist; `uncaptured`, why the step is not
        captured; `failed`, the error that ended it. Also `unfused`, `unshared` (why branches share no prefix)
        and `plan`, from the reports of the patch and of the plan.
    """
    rows, steps, said = [], _uncaptured_and_captured(case), {}
    for captured in (False, True):
        try:
            said = next(steps, said)  # what ended the first row ends the second
        except (NotApplicable, BackendUnavailable) as refusal:
            said = {"refused": str(refusal)}
        except Exception as error:  # one case that breaks is one failure
            said = {"failed": [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]}
        rows.append({**asdict(case), "captured": captured, **said})
    return rows


def _uncaptured_and_captured(case):
    references = _references(case.arch, case.window, case.variant, case.dtype)
    model = references.to_patch()
    patch = patch_model(model, case.backend)
    if case.variant == "sharded":
        yield from references.judge_ranks(case)
        return
    with drawing_dropout(model):
        yield from _in_turn(case, references, model, patch)


def _in_turn(case, references, model, patch):
    about = enable_checkpointing(model, case.checkpointing, patch)
    decoder = model.get_decoder()
    if case.variant == "branches" and (why := decoder.unpadding.why_no_sharing):
        about["unshared"] = why
    plan = decoder.recompute_plan
    graphs = decoder.step_graphs
    why_never, graphs.why_never = graphs.why_never, "it is to run uncaptured"
    yield {**about, **references.judge(model)}
    graphs.why_never = graphs.why_not = why_never
    if plan is not None:
        plan.n_recomputed = 0
        about["plan"] = str(plan)
    yield _captured(model, graphs, references, about)


def _captured(model, graphs, references, about):
    """The row of a step that is replayed after rows with other documents."""
    if graphs.why_not is None:
        gc.collect()  # graphs of models before are freed now, not while one is captured
    for seed in range(1, 1 + _STEPS_BEFORE_REPLAY):
        if graphs.why_not is not None:
            break
        references.warm_up(model, seed)
    if not str(graphs).startswith("captured"):
        return {"uncaptured": str(graphs)}
    row = {**about, **references.judge(model)}
    if graphs.why_not is not None:
        row["failed"] = [f"captured, and yet run uncaptured: {graphs.why_not}"]
    return row


class _References:
    """What the cases of one architecture, window, variant and dtype share: all that is not ours."""

    def __init__(self, arch, window, variant, dtype):
        self._subject = _subject(arch, window, variant)
        self._model = self._subject.build(dtype)
        self._dtype = DTYPES[dtype]
        if dtype == "nf4":
            self._truth = lru_cache(partial(_truth, self._subject, self._subject.build_exact(self._model)))
        else:
            self._truth = _truths(arch, window, variant)
        self._draws = lru_cache(self._draw)

    def to_patch(self):
        """A copy of the model, to be patched."""
        return self._subject.to_patch(self._model)

    def warm_up(self, model, seed):
        """A step over other documents in a row of the same form."""
        self._subject.run_packed(model, self._subject.documents(seed, turned=True))

    def judge(self, model):
        """What `judge_as_few` says of a patched model."""

        def run(seed):
            draw = self._draws(seed)
            return self._subject.run_packed(model, self._subject.documents(seed), draw.truth.routes), draw

        return judge_as_few(run, self._dtype)

    def judge_ranks(self, case):
        """The rows of two ranks, that fail too where a step is not that of a whole model to the bit."""
        ranks = TwoRanks(case, self._draws)
        row = judge_as_few(ranks.run, self._dtype)
        if ranks.different:
            row["failed"] = [f"not as whole: {', '.join(ranks.different)}", *row.get("failed", [])]
        uncaptured = ranks.about.pop("uncaptured")
        yield {**ranks.about, **row}
        yield {"uncaptured": uncaptured}

    def _draw(self, seed):
        documents, truth = self._subject.documents(seed), self._truth(seed)
        alone = self._subject.run_alone(self._model, documents, truth.routes)
        return Draw(truth, alone, self._subject.on_the_same_row(self._model, documents, truth.routes))


_references = lru_cache(maxsize=1)(_References)  # cases come in order
_SUBJECTS = {"branches": Branches, "sharded": Sharded} | dict.fromkeys(DIVERGENCES, Distillation)


def _subject(arch, window, variant):
    if arch in WITH_IMAGES:
        return WithImages(arch, variant)
    return _SUBJECTS.get(variant, Text)(arch, window, variant)


@lru_cache(maxsize=1)
def _truths(arch, window, variant):
    subject = _subject(arch, window, variant)
    return lru_cache(partial(_truth, subject, subject.build_exact()))


def _truth(subject, exact, seed):
    return subject.run_alone(exact, subject.documents(seed))
