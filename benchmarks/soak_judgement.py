"""Judges a soak by its notes and metrics, over all slices together.

Each session has one file of notes. Its first line names the checkpoint that the session began from and marks
every row of the data. Then each update and each evaluation has a line. The last line may be cut off.
"""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]

WINDOW = 8  # updates whose mean loss is compared before and after a resume
NEIGHBOURS = 100  # updates on each side of it, which show how much such means differ without a resume
JUMP = 1.5  # times the largest of those differences is allowed
WARM_UP = 50  # updates of a process before its memory counts
PROCESSES = 6  # that must have resumed before their memory is compared
GPU_GROWTH, HOST_GROWTH = 1.01, 1.02
CPU_GROWTH = 1.05  # for a host that holds the activations too, which differ from row to row


@dataclass(frozen=True)
class Verdict:
    """Args: passed: None where there was nothing to judge."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Session:
    """One process: where it began, its updates and evaluations, how it ended."""

    log: dict[str, Any]
    begin: dict[str, Any]
    updates: Lines
    evaluations: Lines


@dataclass(frozen=True)
class Run:
    """One run: its sessions in order, and its metrics file as it stands now, by kind."""

    number: int
    sessions: list[Session]
    metrics: dict[str, Lines]

    @property
    def updates(self) -> dict[int, dict[str, Any]]:
        """The notes of every update; for an update made several times, the last."""
        return {line["step"]: line for s in self.sessions for line in s.updates if line["step"] <= self.steps}

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics["log"] if "loss" in line]

    @property
    def steps(self) -> int:
        return max([line["step"] for line in self.metrics["log"]], default=0)

    @property
    def spread(self) -> float:
        """The median change of the loss from one update to the next."""
        losses = self.losses
        return statistics.median([abs(b - a) for a, b in pairwise(losses)] or [0.0])

    @property
    def per_epoch(self) -> int:
        begin = self.sessions[0].begin
        return -(-len(begin["rows"]) // begin["rows_per_update"])


def judge(work: Path) -> tuple[dict[str, Any], bool]:
    """Print the judgements, and return all figures and whether everything passed."""
    runs = read_runs(work)
    if not runs:
        print("nothing has been trained yet")
        return {"sessions": []}, False
    verdicts = [look(runs) for look in JUDGEMENTS]
    figures, resumes = figures_of(runs), list(resumes_of(runs))
    _print(figures, resumes, verdicts)
    about = {"devices": sorted({s.begin["device"] for run in runs for s in run.sessions})}
    about["versions"] = runs[-1].sessions[-1].begin["versions"]
    report = about | figures | {"judgements": [asdict(v) for v in verdicts], "resumes": resumes}
    return report, all(verdict.passed is not False for verdict in verdicts)


def _print(figures: dict[str, Any], resumes: Lines, verdicts: list[Verdict]) -> None:
    print()
    for name, value in figures.items():
        print(f"{name:<36}{value if isinstance(value, str) else format(value, ',')}")
    print(f"\n{'run':>3}  {'resumed after':<22}", end="")
    print(f"{'at':>7}{'from':>7}{'again':>7}{'loss differs':>14}{'jump':>8}{'usual':>8}")
    for r in resumes:
        jumps = ("-" if r[name] is None else f"{r[name]:.3f}" for name in ("jump", "usual_jump"))
        print(f"{r['run']:>3}  {r['after']:<22}{r['at']:>7}{r['from']:>7}{r['again']:>7}", end="")
        print(f"{r['loss_differs']:>14.1e}", *(f"{jump:>7}" for jump in jumps))
    print()
    for verdict in verdicts:
        said = {True: "passed", False: "FAILED", None: "-"}[verdict.passed]
        print(f"{verdict.name:<36}{said:<8}{verdict.detail}")


def read_runs(work: Path) -> list[Run]:
    sessions: dict[int, list[Session]] = {}
    for log in read_lines(work / "log.jsonl"):
        begin, *notes = read_lines(work / "sessions" / f"{log['number']:04}.jsonl") or [None]
        if begin is not None:  # else killed before it began
            of_kind = [[line for line in notes if name in line] for name in ("loss", "eval_loss")]
            sessions.setdefault(log["run"], []).append(Session(log, begin, *of_kind))
    runs = []
    for number, of_run in sorted(sessions.items()):
        metrics: dict[str, Lines] = {"log": [], "data": [], "summary": []}
        for line in read_lines(work / "runs" / str(number) / "metrics.jsonl"):
            metrics.setdefault(line["kind"], []).append(line)
        runs.append(Run(number, of_run, metrics))
    return runs


def read_lines(path: Path) -> Lines:
    """The lines of a file, without a last one that a killed process left incomplete."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]


def figures_of(runs: list[Run]) -> dict[str, Any]:
    sessions = [session for run in runs for session in run.sessions]
    timed = [session.updates for session in sessions if session.updates]
    logs = [session.log for session in sessions]
    last = {run.number: run.metrics["log"] for run in runs}
    evaluations = {n: [line["eval_loss"] for line in log if "eval_loss" in line] for n, log in last.items()}
    slices = [
        [line["time"] for s in sessions if s.log["slice"] == number for line in s.updates]
        for number in sorted({log["slice"] for log in logs})
    ]
    return {
        "minutes": round(sum(max(times) - min(times) for times in slices if times) / 60, 1),
        "minutes between starts and ends": round(sum(u[-1]["time"] - u[0]["time"] for u in timed) / 60, 1),
        "slices": len(slices),
        "runs": len(runs),
        "runs completed": sum(bool(run.metrics["summary"]) for run in runs),
        "updates": sum(run.steps for run in runs),
        "updates made, again included": sum(map(len, timed)),
        "tokens": sum(line["tokens"] for run in runs for line in run.updates.values()),
        "SIGKILL": sum(log["signal"] == "SIGKILL" for log in logs),
        "SIGTERM": sum(log["signal"] == "SIGTERM" for log in logs),
        "of them during a save": sum(log["saving"] for log in logs),
        "evaluations": sum(map(len, evaluations.values())),
        "evaluation loss by run": "; ".join(
            f"{n}: {found[0]:.3f} to {found[-1]:.3f}" for n, found in evaluations.items() if found
        ),
    }


def resumes_of(runs: list[Run]) -> Iterator[dict[str, Any]]:
    """Every session after the first of a run: where it began, and how its updates fit those before."""
    for run in runs:
        before: dict[int, dict[str, Any]] = {line["step"]: line for line in run.sessions[0].updates}
        for earlier, session in pairwise(run.sessions):
            start, log = session.begin["from"], earlier.log
            again = [line for line in session.updates if line["step"] in before]
            differ = [abs(line["loss"] - before[line["step"]]["loss"]) for line in again]
            jump, usual = jump_at(run.losses, start)
            yield {
                "run": run.number,
                "after": f"{log['signal'] or 'its end'}{' during a save' if log['saving'] else ''}",
                "at": max(before, default=0),
                "from": start,
                "again": len(again),
                "same_rows": all(line["rows"] == before[line["step"]]["rows"] for line in again),
                "loss_differs": max(differ, default=0.0),
                "spread": run.spread,
                "jump": jump,
                "usual_jump": usual,
                "on_gpu": any(line["gpu"] for line in session.updates),
            }
            before |= {line["step"]: line for line in session.updates}


def jump_at(losses: list[float], step: int) -> tuple[float | None, float | None]:
    """The change of the mean loss at a step, and its largest change at steps nearby."""

    def jump(i: int) -> float:
        return abs(statistics.fmean(losses[i : i + WINDOW]) - statistics.fmean(losses[i - WINDOW : i]))

    places = range(WINDOW, len(losses) - WINDOW + 1)
    nearby = [i for i in places if WINDOW <= abs(i - step) <= NEIGHBOURS]
    return (jump(step), max(map(jump, nearby))) if step in places and nearby else (None, None)


# The judgements


def judge_steps(runs: list[Run]) -> Verdict:
    """Every update is in the metrics once, in order, with the loss in the notes."""
    name = "every update once"
    for run in runs:
        log = [line for line in run.metrics["log"] if "loss" in line]
        if [line["step"] for line in log] != list(range(1, len(log) + 1)):
            return Verdict(name, False, f"run {run.number}: the steps in metrics.jsonl are not 1, 2, 3, ...")
        noted = run.updates
        if wrong := [x["step"] for x in log if noted.get(x["step"], {}).get("loss") != x["loss"]]:
            return Verdict(name, False, f"run {run.number}: update {wrong[0]} is not what was noted")
    return Verdict(name, True, "in metrics.jsonl, with the loss that the process had")


def judge_rows(runs: list[Run]) -> Verdict:
    """Every row is seen once an epoch, and an update that is made again sees the same rows."""
    name = "rows neither repeated nor missing"
    epochs = 0
    for run in runs:
        data = Counter(run.sessions[0].begin["rows"])
        if any(Counter(session.begin["rows"]) != data for session in run.sessions):
            return Verdict(name, False, f"run {run.number}: a resumed session has other data")
        seen: dict[int, Counter[int]] = {}
        for step, line in run.updates.items():
            seen.setdefault((step - 1) // run.per_epoch, Counter()).update(line["rows"])
        for epoch, rows in seen.items():
            if repeated := (rows - data).total():
                return Verdict(name, False, f"run {run.number}, epoch {epoch + 1}: {repeated} rows repeated")
            is_whole = run.steps >= (epoch + 1) * run.per_epoch
            if is_whole and (missing := (data - rows).total()):
                return Verdict(name, False, f"run {run.number}, epoch {epoch + 1}: {missing} rows missing")
            epochs += is_whole
    if not all(resume["same_rows"] for resume in resumes_of(runs)):
        return Verdict(name, False, "an update that was made again saw other rows")
    return Verdict(name, True, f"{epochs} whole epochs; updates made again saw the same rows")


def judge_losses(runs: list[Run]) -> Verdict:
    """An update that is made again has the same loss: bitwise on a CPU. On a GPU, where kernels add in
    another order each time, it differs by less than the median change from one update to the next."""
    name = "same losses again"
    resumes = [resume for resume in resumes_of(runs) if resume["again"]]
    if not resumes:
        return Verdict(name, None, "no update was made again")
    worst = max(resume["loss_differs"] for resume in resumes)
    on_gpu = any(resume["on_gpu"] for resume in resumes)
    spread = min(resume["spread"] for resume in resumes)
    n_again = sum(resume["again"] for resume in resumes)
    allowed = f"{spread:.1e} allowed, the step-to-step change" if on_gpu else "bitwise on a CPU"
    passed = worst < spread if on_gpu else worst == 0
    return Verdict(name, passed, f"{n_again} updates made again differ by {worst:.1e} at most; {allowed}")


def judge_continuity(runs: list[Run]) -> Verdict:
    name = "loss continuous"
    judged = [resume for resume in resumes_of(runs) if resume["jump"] is not None]
    if not judged:
        return Verdict(name, None, "no resume with enough updates around it")
    ratio = max(resume["jump"] / max(resume["usual_jump"], 1e-12) for resume in judged)
    detail = f"{len(judged)} resumes; at most {ratio:.2f} of the largest change nearby, {JUMP} allowed"
    return Verdict(name, ratio <= JUMP, detail)


def judge_evaluations(runs: list[Run]) -> Verdict:
    """Evaluations are at equal distances and at the end of a run, each once, and equal when made again."""
    name = "evaluations"
    total, differ = 0, 0.0
    for run in runs:
        lines = [line for line in run.metrics["log"] if "eval_loss" in line]
        steps = [line["step"] for line in lines]
        due = list(range(steps[0], run.steps + 1, steps[0])) if steps else []
        if run.metrics["summary"]:
            due = sorted({*due, run.steps})
        if steps != due:
            return Verdict(name, False, f"run {run.number}: evaluated after {steps}")
        if not all(isinstance(line["eval_loss"], float) for line in lines):
            return Verdict(name, False, f"run {run.number}: an evaluation is not finite")
        first: dict[int, float] = {}
        for session in run.sessions:
            for line in session.evaluations:
                again = abs(line["eval_loss"] - first.setdefault(line["step"], line["eval_loss"]))
                differ = max(differ, again)
        total += len(lines)
    on_gpu = any(line["gpu"] for run in runs for line in run.updates.values())
    allowed = min(run.spread for run in runs) if on_gpu else 0.0
    detail = f"{total}, all where they are due; made again they differ by {differ:.1e}"
    return Verdict(name, differ <= allowed, detail)


def judge_ledger(runs: list[Run]) -> Verdict:
    """The tokens are equal by the trainer's count, by the rows seen, and by the ledger times the epochs."""
    name = "ledger exact"
    compared = 0
    for run in runs:
        if not run.steps:
            continue
        ledger = next(line["ledger"] for line in run.metrics["data"] if line["use"] == "train")
        parts = ("tokens_masked_by_template", "tokens_masked_at_boundaries", "tokens_counted")
        an_epoch, seen, noted = sum(ledger[part] for part in parts), 0, run.updates
        for line in (line for line in run.metrics["log"] if "loss" in line):
            seen += noted.get(line["step"], {"tokens": 0})["tokens"]
            epochs, into = divmod(line["step"], run.per_epoch)
            if line["num_tokens"] != seen or (into == 0 and seen != epochs * an_epoch):
                said = f"{line['num_tokens']:,} logged, {seen:,} seen, the ledger has {an_epoch:,} an epoch"
                return Verdict(name, False, f"run {run.number}, update {line['step']}: {said}")
            compared += 1
        for summary in run.metrics["summary"]:
            expected = [round(summary["epochs"] * n) for n in (an_epoch, ledger["tokens_counted"])]
            if [summary["tokens_trained"], summary["tokens_counted"]] != expected:
                return Verdict(name, False, f"run {run.number}: its summary is not ledger times epochs")
    ended = sum(bool(run.metrics["summary"]) for run in runs)
    return Verdict(name, True, f"after each of {compared} updates, and in {ended} summaries")


def judge_gpu_memory(runs: list[Run]) -> Verdict:
    """GPU memory: the largest peak of the updates."""
    return _judge_memory(runs, "gpu", max, GPU_GROWTH)


def judge_host_memory(runs: list[Run]) -> Verdict:
    """Host memory after every update: the median, because the allocator's gaps come and go."""
    on_gpu = any(line["gpu"] for run in runs for line in run.updates.values())
    return _judge_memory(runs, "host", statistics.median, HOST_GROWTH if on_gpu else CPU_GROWTH)


def _judge_memory(
    runs: list[Run], kind: str, of_many: Callable[[list[int]], float], allowed: float
) -> Verdict:
    """The last third is compared with the first, within each process and over the resumed processes."""

    def growth(values: list[int]) -> float:
        third = -(-len(values) // 3)
        return of_many(values[-third:]) / of_many(values[:third])

    name = f"{kind} memory flat"
    samples = []  # for each process, and whether it resumed
    for session in (session for run in runs for session in run.sessions):
        settled = [line[kind] for line in session.updates[WARM_UP:]]
        if len(settled) >= WARM_UP and any(settled):
            samples.append((settled, session.begin["from"] > 0))
    if not samples:
        return Verdict(name, None, f"no process made {2 * WARM_UP} updates, or there is no GPU")
    growths = [max(growth(settled) for settled, _ in samples)]
    detail = f"{max(max(settled) for settled, _ in samples) / 2**30:.3f} GiB at most; x {allowed} allowed; "
    detail += f"within a process x {growths[0]:.4f}"
    resumed = [int(of_many(settled)) for settled, has_resumed in samples if has_resumed]
    if len(resumed) >= PROCESSES:
        growths.append(growth(resumed))
        detail += f", over {len(resumed)} that resumed x {growths[1]:.4f}"
    return Verdict(name, max(growths) <= allowed, detail)


JUDGEMENTS = (
    judge_steps,
    judge_rows,
    judge_losses,
    judge_continuity,
    judge_evaluations,
    judge_ledger,
    judge_gpu_memory,
    judge_host_memory,
)
