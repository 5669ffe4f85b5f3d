"""Train on targets that a user's function makes of rollouts, which the model generates while it trains.

    prompts -> generate -> function -> targets -> RowStream -> packed rows

    def target(rollout):  # of one `Rollout`
        return ids        # or (ids, weights), or None to drop it

After each update, and before a checkpoint, as many rows are made as the next update needs. So a checkpoint
holds all targets that were generated and not trained on. Random numbers depend on the place in the prompts.
"""

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from accelerate.utils import gather_object, send_to_device
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from unsloth_pack.config.options import RolloutOptions
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.rows import fail
from unsloth_pack.data.streaming import DocumentBlock, Place, RawBlock, RowSource, Share, endless
from unsloth_pack.data.token_counts import SpanCounts, TokenLedger
from unsloth_pack.data.tokenize import DocumentMaker, RowHashes, document_schema
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.modules import evaluation_mode
from unsloth_pack.patching.deferred_logging import LOSS_WEIGHTS

PREFIX = "rollouts/"  # of the names of what is logged
_FIRST_PROMPTS = 100  # that are looked at before the training, of each data set
_PROMPTS_IN_VAIN = 256  # in a pass, at its beginning


@dataclass(eq=False)
class Rollout:
    """An answer that the model generated.

    Args:
        row: of the data set, with all of its columns.
        prompt: token ids, up to where the answer begins.
        ids: of the answer, with its end token if it ended by itself.
        text: the answer without special tokens.
        ended: False where it was cut at `max_new_tokens`.
        counters: numbers by name, to add to; the log has the mean over all rollouts.
        group: all rollouts of this prompt.
    """

    row: Mapping[str, Any]
    prompt: list[int]
    ids: list[int]
    text: str
    ended: bool
    tokenizer: PreTrainedTokenizerBase
    counters: dict[str, float] = field(default_factory=partial(defaultdict, float))
    group: "list[Rollout]" = field(default_factory=list, repr=False)


Target = Callable[[Rollout], Any]  # returns ids that follow the prompt, with weights or without, or None


class RolloutStream:
    """The targets of a stream of prompts: the documents of a `RowStream`.

    Args:
        source: rows with a prompt, in a format that has one, or in a column `prompt` alone.
        function: makes targets.
        options: how rollouts are generated, and the function's name.
        max_length: tokens of the longest target with its prompt. Longer ones are dropped and counted.
        seed: of the random numbers.

    Attributes:
        model: generates; set it before the first row is read.
        first_ledger, fingerprint: of the first prompts.

    Raises:
        InputError: the first rows have no prompt.
    """

    has_images = False

    def __init__(
        self,
        source: RowSource,
        tokenizer: PreTrainedTokenizerBase,
        function: Target,
        options: RolloutOptions,
        max_length: int,
        seed: int,
    ):
        self._source, self._tokenizer, self._max_length = source, tokenizer, max_length
        self._function, self._name = function, str(options.rollout_function)
        self._options, self._seed = options, seed
        self.model: Any = None
        self.n_parts = len(source.parts)
        self._counters: dict[str, float] = defaultdict(float)  # of the rollouts since the last log line
        self._n_rollouts = 0
        self.first_ledger, self.fingerprint = self._look_at_first_prompts()

    def blocks(
        self, place: Place, share: Share, worker: int = 0, workers: int = 1
    ) -> Iterator[DocumentBlock]:
        """Yield the targets of a batch of prompts, from a place on, without an end.

        Raises:
            InputError: a row has no prompt, the function fails, or it drops all rollouts of a pass, or of its
                first prompts.
        """
        n_prompts = max(1, self._options.generation_batch_size // self._options.num_generations)
        done, n_seen, n_targets = place.done, 0, int(place.seen > 0 or place.done > 0)
        for block in endless(self._source, replace(place, done=0)):
            begin, n_skipped = block.begin, min(done, block.n_rows)
            done -= n_skipped
            chosen = [row for row in share.indices(block) if row >= n_skipped]
            for first in range(0, len(chosen), n_prompts):
                some = chosen[first : first + n_prompts]
                targets = self._targets(block, some, share.number)
                n_targets, n_seen = n_targets + len(targets), n_seen + len(some)
                end = replace(begin, done=some[-1] + 1)
                yield DocumentBlock(_table(targets), _tally(targets), end, False)
                if n_seen >= _PROMPTS_IN_VAIN and not n_targets:
                    raise self._error_in_vain(n_seen)
            if block.ends_pass:
                if n_seen and not n_targets:
                    raise self._error_in_vain(n_seen)
                n_seen = n_targets = 0
            yield DocumentBlock(_table([]), SpanCounts(), block.end, False)  # what waits is carried over

    def _error_in_vain(self, n_prompts: int) -> InputError:
        n_long = sum(int(self._counters[f"{what}_too_long"]) for what in ("prompt", "target"))
        said = f"{self._name} made no target of {n_prompts} prompts, and {n_long} prompts or targets"
        return InputError(f"{said} were too long; correct it, or the data")

    def take_metrics(self) -> dict[str, list[float]]:
        """Take the means of the counters over the rollouts of all processes since the last call."""
        gathered = gather_object([(dict(self._counters), self._n_rollouts)])
        self._counters.clear()
        self._n_rollouts = 0
        names = sorted({name for counters, _ in gathered for name in counters})
        n_rollouts = max(1, sum(n for _, n in gathered))
        return {
            f"{PREFIX}{name}": [sum(counters.get(name, 0) for counters, _ in gathered) / n_rollouts]
            for name in names
        }

    def _look_at_first_prompts(self) -> tuple[TokenLedger, str]:
        tally, hashes = SpanCounts(), RowHashes()
        for part in self._source.parts:
            block = next(block for block in endless(part, Place()) if block.n_rows)
            _, prompts = self._prompts(block, range(min(block.n_rows, _FIRST_PROMPTS)))
            documents = [(prompt, [IGNORE_INDEX] * len(prompt), [0.0] * len(prompt)) for prompt in prompts]
            tally += _tally(documents)
            hashes.update(_table(documents))
        return tally.ledger, hashes.hexdigest()

    def _prompts(self, block: RawBlock, chosen: Sequence[int]) -> tuple[datasets.Dataset, list[list[int]]]:
        """Read some rows of a block, and encode their prompts."""
        rows = block.read(range(chosen[0], chosen[-1] + 1))
        rows = rows.select([row - chosen[0] for row in chosen])
        numbers = range(block.begin.row + chosen[0], block.begin.row + chosen[-1] + 1)
        numbers = numbers[:: chosen[1] - chosen[0]] if len(chosen) > 1 else numbers
        with_answer = rows
        if "prompt" in rows.column_names and not {"completion", "response"} & {*rows.column_names}:
            is_chat = isinstance(rows[0]["prompt"], list)
            answer: object = [{"role": "assistant", "content": "-"}] if is_chat else "-"
            with_answer = rows.add_column("completion", [answer] * len(rows))
        try:
            make = DocumentMaker(with_answer, self._tokenizer, self._max_length, None, None, numbers)
            prompts = make.prompts()
            if [] in prompts:
                fail(numbers[prompts.index([])], "prompt", "nothing to answer", "", "remove the row")
            return rows, prompts
        except InputError as error:
            raise InputError(f"{block.name}: {error}") from None

    def _targets(self, block: RawBlock, chosen: Sequence[int], process: int) -> list["_Document"]:
        """Generate rollouts of some rows of a block, and make targets of them."""
        rows, prompts = self._prompts(block, chosen)
        fits = [len(prompt) + self._options.max_new_tokens <= self._max_length for prompt in prompts]
        seed = [self._seed, process, block.begin.turn, block.begin.seen + chosen[0]]
        answers = self._generate([p for p, fit in zip(prompts, fits, strict=True) if fit], seed)
        documents: list[_Document] = []
        for row, prompt, fit in zip(rows, prompts, fits, strict=True):
            group: list[Rollout] = []
            for _ in range(self._options.num_generations if fit else 0):
                ids, ended = next(answers)
                text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
                group.append(Rollout(row, prompt, ids, text, ended, self._tokenizer, group=group))
            if not fit:
                self._counters["prompt_too_long"] += 1
            documents += filter(None, map(self._document, group))
        return documents

    def _document(self, rollout: Rollout) -> "_Document | None":
        """Call the user's function on a rollout; returns the target with its prompt, or None."""
        rollout.counters["truncated"] = not rollout.ended
        try:
            target = self._function(rollout)
            counters = dict(zip(rollout.counters, map(float, rollout.counters.values()), strict=True))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[1:2]  # the function's, if it was reached
            where = "".join(f" in line {frame.lineno}" for frame in frames)
            why = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{self._name} failed{where}: {why}; correct it") from error
        document = None if target is None else self._checked(rollout.prompt, target)
        is_too_long = document is not None and len(document[0]) > self._max_length
        counters["dropped"] = document is None or is_too_long
        if is_too_long:
            counters["target_too_long"] = 1
        self._n_rollouts += 1
        for name, number in counters.items():
            self._counters[name] += number
        return None if is_too_long else document

    def _checked(self, prompt: list[int], target: Any) -> "_Document | None":
        """Check a target, and put its prompt before it; None without a token that counts."""
        has_weights = isinstance(target, tuple) and len(target) == 2 and np.ndim(target[0]) == 1
        ids: Any = None
        weights: Any = None
        with suppress(RuntimeError, TypeError, ValueError):
            ids = np.array(target[0] if has_weights else target)
            weights = np.array(target[1], np.float64) if has_weights else np.ones(ids.shape)
        is_wrong = weights is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu")
        if is_wrong or weights.shape != ids.shape or not np.isfinite(weights).all():
            said = f"{self._name} returned {type(target).__name__}"
            raise InputError(f"{said}; return token ids, (ids, weights), a number for each, or None")
        vocab_size = len(self._tokenizer)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise InputError(f"{self._name} returned an id outside of 0 to {vocab_size - 1}; give its tokens")
        tokens, of_tokens = prompt + ids.tolist(), [0.0] * len(prompt) + weights.tolist()
        labels = [token if weight else IGNORE_INDEX for token, weight in zip(tokens, of_tokens, strict=True)]
        return (tokens, labels, of_tokens) if weights.any() else None

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], seed: list[int]) -> Iterator[tuple[list[int], bool]]:
        """Yield the answers to prompts, `num_generations` of each, and whether each ended by itself."""
        if not prompts:
            return
        how, tokenizer, device = self._options, self._tokenizer, self.model.device
        longest = max(map(len, prompts))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        n_pads = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        sampling = {"do_sample": True, "temperature": how.rollout_temperature, "top_k": 0, "top_p": 1.0}
        own_end = self.model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(own_end if isinstance(own_end, list) else [own_end])} - {None}
        devices = [device] if device.type == "cuda" else []
        with evaluation_mode(self.model), torch.random.fork_rng(devices):
            torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
            generated = self.model.generate(
                input_ids=ids,
                attention_mask=(torch.arange(longest, device=device) >= n_pads[:, None]).long(),
                max_new_tokens=how.max_new_tokens,
                num_return_sequences=how.num_generations,
                pad_token_id=pad,
                eos_token_id=sorted(ends) or None,
                num_beams=1,
                use_cache=True,
                **(sampling if how.rollout_temperature else {"do_sample": False}),
            )
        for answer in generated[:, longest:].tolist():
            end = next((place for place, token in enumerate(answer) if token in ends), None)
            yield answer[: None if end is None else end + 1], end is not None


_Document = tuple[list[int], list[int], list[float]]  # ids, labels and weights of a prompt with its target


def _table(documents: Sequence[_Document]) -> pa.Table:
    schema = document_schema().append(pa.field(LOSS_WEIGHTS, pa.list_(pa.float32())))
    columns = zip(*documents, strict=True) if documents else ((), (), ())
    return pa.table([pa.array(list(x), kind) for x, kind in zip(columns, schema.types, strict=True)], schema)


def _tally(documents: Sequence[_Document]) -> SpanCounts:
    lengths = [len(ids) for ids, *_ in documents]
    n_labels = sum(label != IGNORE_INDEX for _, labels, _ in documents for label in labels)
    sums = {"rows_read": len(documents), "tokens_read": sum(lengths), "tokens_counted": n_labels}
    sums |= {"tokens_masked_by_template": sum(lengths) - n_labels}
    return SpanCounts(Counter(sums), Counter(lengths))


class LoaderOfReadyRows(DataLoader[Any]):
    """A loader that reads no batch before it is asked for, unlike accelerate's."""

    def __init__(self, rows: Any, batch_size: int, collate: Callable[[Any], Any], device: torch.device):
        # With a generator of its own it leaves the run's random numbers alone
        super().__init__(rows, batch_size, collate_fn=collate, generator=torch.Generator())
        self._device = device

    def __iter__(self) -> Any:
        return (send_to_device(batch, self._device) for batch in super().__iter__())
