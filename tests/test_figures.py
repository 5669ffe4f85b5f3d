"""The comparison with other libraries is fair, and the documents say what its results file says."""

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from comparison import CASES_OF_README, NEWEST, Comparison, NotComparable, read_pairs, tables
from sweep import ratio_to
from tables import table

ROOT = Path(__file__).parents[1]
COMPARISONS = sorted(NEWEST.parent.glob("compare-*.json"))
ONE_MACHINE = NEWEST.parent / "pr-16k-accumulation-h200-2026-11-22.json"
NEW_KERNEL = NEWEST.parent / "compare-scores-h200-2026-11-22.json"
SWEEPS = {  # by the first cell of their tables
    "point": NEWEST.parent / "sweep-h200-2026-11-25.json",
    "point, on an H100": NEWEST.parent / "sweep-h100-2026-11-26.json",
}
CAPTURES = NEWEST.parent / "captures-h200-2026-11-25.json"
PEERS = ("ours", "unsloth")
README, PERFORMANCE, SPEED = (ROOT / name for name in ("README.md", "docs/performance.md", "docs/speed.md"))
WITH_TRL = NEWEST.parent / "compare-h200-2026-11-22.json"
HOST_BOUND = ("pr", "pr-16k")  # Unsloth is as fast as its host there, so the documents give a range


@table("path", COMPARISONS, ids=lambda path: path.stem)
def test_peers_trained_as_many_tokens_an_update_or_the_file_says_it_is_wrong(path):
    if "wrong" in json.loads(path.read_text()):
        with pytest.raises(NotComparable, match=f"{path.name} is marked wrong .* read {NEWEST.name} instead"):
            read_pairs(path)
    else:
        assert read_pairs(path)


@pytest.mark.parametrize("peer", ["ours", "unsloth"])
@pytest.mark.parametrize("case", ["8b", "8b-gc"])
def test_a_peer_that_trained_twice_the_tokens_is_refused(tmp_path, case, peer):
    def double(result):
        result["tokens_update"] *= 2

    refused = r"tokens_update is 7,9\d\d to 15,\d\d\d, more than 5% apart; .*gradient_accumulation_steps=1"
    with pytest.raises(NotComparable, match=f"case {case}, peer unsloth: {refused}"):
        read_pairs(_changed(tmp_path, case, peer, double))


def test_a_file_that_does_not_count_tokens_is_refused(tmp_path):
    path = _changed(tmp_path, "pr", "trl", lambda result: result.pop("tokens_update"))
    with pytest.raises(NotComparable, match=r"case pr, peer trl: tokens_update is missing.*; measure again"):
        read_pairs(path)


def test_a_case_beside_another_is_checked_too(tmp_path):
    path = _changed(tmp_path, "8b-auto", "ours", lambda result: result.update(tokens_update=16_000))
    with pytest.raises(NotComparable, match="case 8b-auto, peer unsloth"):
        read_pairs(path)


def test_the_tables_say_what_the_results_file_says():
    for document, lines in tables(Comparison()).items():
        assert "\n".join(lines) in document.read_text()
    assert len(tables(Comparison())[README]) == 2 + len(CASES_OF_README)

    (trl,) = [pair for pair in read_pairs(WITH_TRL) if pair.peer == "trl"]
    speeds = [f"{trl.ours['tok_s']:,}", f"{trl.theirs['tok_s']:,}", f"{trl.speed:.2f}"]
    assert _table(PERFORMANCE, "| | ours | TRL | ratio |")[trl.title] == speeds


def test_the_first_screen_of_the_readme_says_what_the_results_file_says():
    first_screen = README.read_text().split("On one H200, in TRL", 1)[1].split("Train the bundled model")[0]
    speeds = {pair.case: pair.speeds for pair in _against("unsloth")}
    between = [speed for case in ("1.7b-2x4k", "3b", "3b-drop", "gemma3-1b") for speed in speeds[case]]
    ranges = [speeds["pr"], speeds["pr-16k"], between]
    told = [f"{min(one):.1f} to {max(one):.1f}" for one in ranges]
    told += [f"{min(speeds[case]):.2f} to {max(speeds[case]):.2f}" for case in ("8b", "8b-gc", "8b-q4")]
    told += [f"{min(speeds[case]):.1f}" for case in ("8b-auto", "8b-fp8")]
    assert re.findall(r"((?:[\d.]+ to )?\d+\.\d+) times", first_screen) == told
    peaks = re.findall(r"(\d+\.\d)(?: GiB)?\s+against (\d+\.\d)", first_screen)
    options = [pair for pair in _against("unsloth") if pair.case in ("8b-auto", "8b-fp8")]
    assert [tuple(map(float, each)) for each in peaks] == [
        pytest.approx((pair.ours["peak_GiB"], pair.theirs["peak_GiB"]), abs=0.051) for pair in options
    ]


@pytest.mark.parametrize("first_cell", SWEEPS)
def test_the_sweep_is_told_as_measured(first_cell):
    points = json.loads(SWEEPS[first_cell].read_text())["points"]
    ratios = {point["point"]: ratio_to("unsloth", point["results"]) for point in points}
    compared = {name: ratio for name, ratio in ratios.items() if isinstance(ratio, float)}
    assert min(compared.values()) >= 1
    told = _table(PERFORMANCE, f"| {first_cell} | ours, tokens/s |")
    assert told.keys() == ratios.keys()
    for name, ratio in compared.items():
        ours, theirs = (next(p["results"][peer] for p in points if p["point"] == name) for peer in PEERS)
        peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
        assert told[name] == [f"{ours['tok_s']:,}", f"{theirs['tok_s']:,}", f"{ratio:.2f}", peaks]
    assert f"None of {len(compared)} is slower" in PERFORMANCE.read_text()
    if first_cell == "point":
        assert f"none of the {len(compared)} points that compare" in README.read_text()


@pytest.mark.parametrize(
    ("name", "first_cell"),
    [("h100", "on an H100"), ("first-update-h100", "on another host, first update included")],
)
def test_the_rounds_on_h100s_are_told_as_measured(name, first_cell):
    rows = tables(Comparison(NEWEST.parent / f"compare-{name}-2026-11-26.json"))[PERFORMANCE][2:]
    told = _table(PERFORMANCE, f"| {first_cell} | step, ms |")
    assert [[title, *cells] for title, cells in told.items()] == [
        [cell.strip() for cell in row.strip("|").split("|")] for row in rows
    ]


def test_the_memory_of_a_first_update_is_told_as_measured():
    runs = json.loads((NEWEST.parent / "first-step-memory-h100-2026-11-26.json").read_text())["runs"]
    peaks = {(run["case"], run["step"]): [peak for _, peak in run["at_rest_and_peak_GiB"]] for run in runs}
    first, later, capture = ([] for _ in range(3))
    for case in ("8b-gc", "8b-q4"):
        first.append(f"{peaks[case, 'uncaptured'][0]:.2f}")
        later.append(f"{max(peaks[case, 'uncaptured'][1:]):.2f}")
        capture.append(f"{max(peaks[case, 'captured'][1:]):.2f}")
        assert peaks[case, "captured"][0] == peaks[case, "uncaptured"][0]
    text = " ".join(PERFORMANCE.read_text().split())
    assert (
        f"{first[0]} GiB with checkpointing and {first[1]} with 4 bits, and {' and '.join(later)} at" in text
    )
    assert f"The update that captures the step has {' and '.join(capture)}." in text


def test_what_a_log_line_takes_of_python_is_told_as_measured():
    runs = json.loads((NEWEST.parent / "log-lines-host-h100-2026-11-26.json").read_text())["runs"]
    late, tenth = ([run for run in runs if run["peer"] == peer] for peer in ("late", "tenth"))
    parts = [{part["what"]: f"{part['ms']:.1f}" for part in run["host"]} for run in late]
    begun, read, written = ([of[f"LogLine.{name}"] for of in parts] for name in ("__init__", "read", "write"))
    assert {of["see_to_all"] for of in parts} == {"0.8"}
    text = " ".join(PERFORMANCE.read_text().split())
    first, second = (run["ms"] for run in late)
    assert f"it takes {first:.1f} and {second:.1f} ms with a late line" in text
    assert {f"{run['ms']:.1f}" for run in tenth} == {"17.4"}
    assert "and 17.4 with one for every tenth. A line takes 0.8 ms of Python there" in text
    assert f"{' and '.join(begun)} until its numbers set out, {' and '.join(read)} to read them" in text
    assert {*written} == {"0.1"}
    assert "0.1 to write the line" in text


def test_preparation_is_told_as_measured():
    told = (ROOT / "docs" / "data.md").read_text()
    names = {"tokenizer": "the bare tokenizer", "ours": "prepared", "map": "`datasets.map`, not packed"}
    rows = {line for line in told.splitlines() if re.match(r"\| [\d,]+ \| \S", line)}
    newest, day_before = (
        json.loads((NEWEST.parent / f"preparation-cpu-2026-11-{day}.json").read_text()) for day in (26, 25)
    )

    def row(run):
        name = names.get(run["case"], "again, from the cache")
        return (
            f"| {run['documents']:,} | {name} | {run['num_proc']} | "
            f"{run['seconds']:.1f} | {run['documents_per_second']:,.0f} | {run['peak_bytes'] / 2**30:.2f} |"
        )

    largest = [run for run in day_before["results"] if run["documents"] == 2_000_000]
    assert rows == {*map(row, newest["results"]), *map(row, largest)}

    speeds = {(run["case"], run["documents"], run["num_proc"]): run for run in newest["results"]}
    bare, one = (speeds[case, 50_000, 1]["seconds"] for case in ("tokenizer", "ours"))
    assert f"one process takes {one / bare:.2f} times as long" in told
    for documents in (50_000, 200_000):
        one, two = (speeds["ours", documents, n]["documents_per_second"] for n in (1, 2))
        assert f"{two / one:.2f} times" in told
    steps = {(run["case"], run["num_proc"]): f"{run['first_step']:.1f}" for run in newest["first_steps"]}
    text = " ".join(told.split())
    assert f"it takes {steps['ours', 1]} s with one process and {steps['ours', 2]} with two" in text
    assert f"{steps['again', 1]} s from the cache" in text
    assert f"TRL's own preparation takes {steps['trl', 1]} and {steps['trl', 2]} s" in text


def test_commands_over_many_documents_are_told_as_measured():
    runs = json.loads((NEWEST.parent / "preparation-commands-cpu-2026-11-26.json").read_text())["results"]
    found = {(run["case"], run["documents"]): run for run in runs}
    told = (ROOT / "docs" / "data.md").read_text()

    gib = [
        [f"{found[name, n]['peak_bytes'] / 2**30:.2f}" for n in (200_000, 2_000_000)]
        for name in ("pack", "stats")
    ]
    assert f"{gib[0][0]} GiB for 200,000 documents and {gib[0][1]} for 2,000,000, and {gib[1][0]} and" in told
    assert f"and {gib[1][1]}\n(`preparation-commands" in told
    seconds, minutes = (
        [f"{found[name, n]['seconds'] / unit:.{digits}f}" for name in ("pack", "stats")]
        for n, unit, digits in ((200_000, 1, 0), (2_000_000, 60, 1))
    )
    assert f"take {' and '.join(seconds)} s for 200,000, and {' and '.join(minutes)} minutes for" in told
    assert all(run["peak_bytes"] < 1.2e9 for run in runs)


def test_captures_are_told_as_measured():
    cases = json.loads(CAPTURES.read_text())["cases"]
    told = [*_table(SPEED, "| shape | before, s | after, s |").values()]
    for cells, case in zip(told, ("pr-16k", "3b"), strict=True):
        measured = [cases[case][when] for when in ("before", "after")]
        assert cells[:2] == [f"{sum(one['update_ms'][:18]) / 1e3:.1f}" for one in measured]
        assert cells[3] == ", ".join(f"{one['median_ms']:.0f}" for one in measured)


def test_the_kernels_of_mlps_are_told_as_measured():
    measured = json.loads((NEWEST.parent / "mlp-kernels-h200-2026-11-25.json").read_text())["mlp"]
    names = {f"{one['tokens']:,} x {one['features']:,}, rank {one['rank']}": one for one in measured}
    told = _table(SPEED, "| tokens x features, rank | before | after |")
    assert len(told) == 4
    for name, cells in told.items():
        assert cells == [f"{names[name][when][0]}, {names[name][when][1]}" for when in ("before", "after")]


def test_the_ranges_of_small_models_hold_every_round():
    section = PERFORMANCE.read_text().split("## Small models depend on the host")[1]
    published = re.findall(r"([\d.]+) to (\d+\.\d+) times", section.split("\n\n")[1])
    for case, (low, high) in zip(HOST_BOUND, published, strict=True):
        _check_range(case, low, high)


def test_the_runs_of_one_machine_are_told_as_measured():
    rows_an_update = {"1": "1", "2": "2", "default": "2, its default"}
    expected = {}
    for number, run in enumerate(json.loads(ONE_MACHINE.read_text())["runs"], 1):
        peer = run["peer"].replace("unsloth", "Unsloth")
        times = [f"{run['step_ms']:.1f}", f"{run['p10_ms']:.1f} to {run['p90_ms']:.1f}"]
        expected[str(number)] = [peer, rows_an_update[run["acc"]], *times, f"{run['tok_s']:,}"]
    assert _table(PERFORMANCE, "| run | peer | rows an update |") == expected


def test_the_rounds_of_the_new_kernel_are_told_as_measured():
    rows = ("rows of 2,048", "rows of 16,384")
    expected = []
    for title, run in zip(rows, json.loads(NEW_KERNEL.read_text())["runs"], strict=True):
        ours, unsloth = ([r for r in run["results"] if r["peer"] == peer] for peer in ("ours", "unsloth"))
        for number, (our, their) in enumerate(zip(ours, unsloth, strict=True), 1):
            times = [str(our["step_ms"]), str(their["step_ms"])]
            speeds = [f"{our['tok_s']:,}", f"{their['tok_s']:,}", f"{our['tok_s'] / their['tok_s']:.2f}"]
            expected.append(" | ".join([title if number == 1 else "", str(number), *times, *speeds]))
    text = PERFORMANCE.read_text()
    assert all(f"| {line} |" in text.replace("| | ", "|  | ") for line in expected)


def test_the_grid_is_told_as_measured():
    trust = (ROOT / "docs" / "trust.md").read_text()
    for device, day in (("h100", 26), ("images-h100", 26), ("cpu", 25), ("images-cpu", 26)):
        table = (NEWEST.parent / f"grid-{device}-2026-11-{day}.md").read_text()
        rows, measured, failed, refused, not_captured = map(
            int,
            re.search(r"(\d+) rows: (\d+) measured, (\d+) failed, (\d+) refused, (\d+) not", table).groups(),
        )
        above, worst = re.search(r"(\d+) rows were above .* by up to ([\d.]+),", table).groups()
        assert (rows, failed) == (measured + refused + not_captured, 0)
        file = f"(../benchmarks/results/grid-{device}-2026-11-{day}.md"
        (told,) = [line for line in trust.splitlines() if file in line]
        assert f"| {rows:,} cases | {measured:,} measured, none above 1.5 ({int(above):,} were above" in told
        assert f"at up to {worst}," in told
        if "h100" in device:
            assert "**Partial**" not in table
            assert f"{refused:,} refused and {not_captured:,} not captured" in told
            readme = " ".join(README.read_text().split())
            assert f"{rows:,} combinations" in readme
            assert re.search(rf"{measured:,} (were )?measured", readme)


def _measured(name):
    return json.loads((NEWEST.parent / f"{name}-h200-2026-11-25.json").read_text())


def test_a_cold_start_is_told_as_measured():
    profile = json.loads((NEWEST.parent / "cold-start-h100-2026-11-25.json").read_text())
    told, stages = " ".join(PERFORMANCE.read_text().split()), profile["sum"]
    of_gcc = stages["launcher"] + profile["driver"]
    compiler = sum(stages[name] for name in ("make_ttir", "make_ttgir", "make_llir", "make_ptx"))
    assert len(profile["kernels"]) == 11
    assert f"{profile['first_step_seconds']:.1f} s under the profiler) had {of_gcc:.1f} s of gcc" in told
    assert f"{stages['launcher'] / 11:.2f} s each" in told
    assert f"Triton's compiler took {compiler:.1f} s, and `ptxas` {stages['make_cubin']:.1f} s" in told


def test_full_fine_tuning_is_told_as_measured():
    told = PERFORMANCE.read_text().split("\n## Full fine-tuning", 1)[1].split("\n## ")[0]
    for by_peer in _measured("full")["runs"].values():
        ours = by_peer["ours"][0]
        for peer, (run,) in by_peer.items():
            name = {"unsloth": "Unsloth", "trl": "TRL"}.get(peer, peer)
            ratio = "" if peer == "ours" else f"{ours['tokens_s'] / run['tokens_s']:.2f} "
            figures = f"{run['ms']:.1f} | {run['tokens_s']:,.0f} | {ratio}| {run['peak_GiB']:.2f}"
            assert f"| {name} | {figures} | {run['losses'][-1]:.4f} |" in told.replace("| | |", "| |")


def test_large_models_in_full_on_one_gpu_are_told_as_measured():
    told = PERFORMANCE.read_text().split("\n## Full fine-tuning", 1)[1].split("\n## ")[0]
    for name in ("full-8b-h200", "full-one-gpu-h100"):
        measured = json.loads((NEWEST.parent / f"{name}-2026-11-25.json").read_text())
        gpu = measured["device"].split()[1]
        shapes = {"8b": "Llama-3.1-8B shape, `adamw_8bit`", "3b": "Llama-3.2-3B shape, `--masters_on_host`"}
        for case, by_peer in measured["runs"].items():
            for peer, (run,) in by_peer.items():
                how = " and `--optimizer_in_backward`" if peer.endswith("in-backward") else ""
                figures = f"{run['ms']:,.1f} | {run['tokens_s']:,.0f} | {run['peak_GiB']:.2f} |"
                assert f"| {shapes[case]}{how} | {gpu} | {figures}" in told
                eight_bits = run["moment_dtypes"].get("uint8", 0)
                assert run["optimizer"].startswith("adamw_8bit") == (eight_bits > run["weights"])


def test_8b_in_full_on_one_h100_is_told_as_measured():
    told = PERFORMANCE.read_text().split("\n## Full fine-tuning", 1)[1].split("\n## ")[0]
    measured = json.loads((NEWEST.parent / "full-8b-h100-2026-11-26.json").read_text())
    by_optimizer = {
        "adamw_8bit": "`adamw_8bit`",
        "adamw_torch_8bit": "`adamw_torch_8bit` with stochastic rounding",
    }
    by_optimizer["adamw_torch_fused"] = "`--masters_on_host`"
    runs = [run for by_peer in measured["runs"].values() for (run,) in by_peer.values()]
    assert len(runs) == 3
    for run in runs:
        how = by_optimizer[run["optimizer"].split()[0]]
        figures = f"{run['ms']:,.1f} | {run['tokens_s']:,.0f} | {run['peak_GiB']:.2f} |"
        assert f"| Llama-3.1-8B shape, {how} | H100 | {figures}" in told


def test_the_tower_alone_is_told_as_measured():
    told = PERFORMANCE.read_text()
    measured = json.loads((NEWEST.parent / "vision-tower-kernels-h100-2026-11-26.json").read_text())
    for run in measured["towers"]:
        ours, plain = run["ours"], run["sdpa"]
        times = f"{ours['ms']:.1f} | {plain['ms']:.1f} | {plain['ms'] / ours['ms']:.2f}"
        peaks = f"{ours['peak_GiB']:.2f} / {plain['peak_GiB']:.2f}"
        assert f"| {statistics.mean(run['patches']):,.0f} | {times} | {peaks} |" in told


def test_two_ranks_with_late_log_lines_are_told_as_measured():
    told = (PERFORMANCE.parent / "ranks.md").read_text()
    found = json.loads((NEWEST.parent / "ranks-ddp-late-lines-h100-2026-11-26.json").read_text())
    alone, together = found["runs"]
    assert f"| 1 | {alone['tokens_s']:,.0f} | | {max(alone['peak_GiB_by_rank']):.1f} |" in told
    waits = f"{max(together['peak_GiB_by_rank']):.1f} | {together['spread']['waiting']:.1%} |"
    assert f"| 2 | {together['tokens_s']:,.0f} | {together['times_one']:.2f} | {waits}" in told


@pytest.mark.parametrize("shape", ["1.7b", "8b"])
def test_four_ranks_are_told_as_measured(shape):
    path = NEWEST.parent / f"ranks-ddp-four-{shape}-h100-2026-11-26.json"
    alone, *together = json.loads(path.read_text())["runs"]
    told = (PERFORMANCE.parent / "ranks.md").read_text().split(path.name)[1]
    assert f"| 1 | {alone['tokens_s']:,.0f} | | {max(alone['peak_GiB_by_rank']):.1f} | |" in told
    for run in together:
        waits = f"{max(run['peak_GiB_by_rank']):.1f} | {run['spread']['waiting']:.1%} |"
        assert f"| {run['gpus']} | {run['tokens_s']:,.0f} | {run['times_one']:.2f} | {waits}" in told
    said = PERFORMANCE.read_text().split(path.name)[0].rpartition(" shape")[2]
    assert re.findall(r"\d\.\d\d", said) == [f"{run['times_one']:.2f}" for run in together]


def test_late_log_lines_are_told_as_measured():
    told = PERFORMANCE.read_text()
    runs = json.loads((NEWEST.parent / "log-lines-h100-2026-11-26.json").read_text())["runs"]
    small, larger = ([run[how]["ms"] for how in ("late", "at-once")] for run in runs.values())
    said = f"{small[0]:.1f} and {small[1]:.1f} ms for the 0.5B shape, {larger[0]:.1f} and {larger[1]:.1f} ms"
    assert said in told
    assert f"every tenth update the 0.5B shape takes {runs['0.5b']['tenth']['ms']:.1f} ms" in " ".join(
        told.split()
    )


def test_where_two_ranks_wait_is_told_as_measured():
    told = (PERFORMANCE.parent / "ranks.md").read_text()
    found = json.loads((NEWEST.parent / "ranks-ddp-profile-h100-2026-11-26.json").read_text())
    alone = [run["median_ms"] for run in found["alone_at_the_same_time"]]
    together = found["two_ranks"]["median_ms"]
    said = f"takes {alone[0]:.1f} ms on the one and {alone[1]:.1f} on the other."
    assert f"{said} Together it takes {together:.1f}." in " ".join(told.split())
    of_gradients = [
        exchange["ms"]
        for rank in found["profile"]
        for exchange in rank["exchanges"]
        if "Sum_f32" in exchange["kernel"] and exchange["ms"] > 0.1
    ]
    itself = min(of_gradients)
    waits = statistics.mean(ms - itself for ms in of_gradients)
    assert f"**{waits:.1f} ms** the average rank waits" in told
    assert f"**{itself:.1f} ms** is the exchange of the gradients" in told


def test_the_memory_of_the_readme_is_that_of_its_table():
    peaks = re.findall(r" \| ([\d.]+) / ([\d.]+) \|$", README.read_text(), re.MULTILINE)
    assert len(peaks) == len(CASES_OF_README)
    less = [round(100 * (1 - float(ours) / float(theirs))) for ours, theirs in peaks]
    assert f"In every row above we take {min(less)} to {max(less)}% less than Unsloth" in README.read_text()


def test_rows_with_images_are_told_as_measured():
    told = PERFORMANCE.read_text().split("\n### Rows with images", 1)[1].split("\n### ")[0]
    for name in ("vision-h200", "vision-sizes-h200", "vision-four-h100"):
        runs = json.loads((NEWEST.parent / f"{name}-2026-11-26.json").read_text())["runs"]
        for case, by_peer in runs.items():
            ours, *others = (run for run in by_peer.values() if "failed" not in run)
            times = [f"{run['ms']:,.1f}" for run in (ours, *others)]
            peaks = " / ".join(f"{run['peak_GiB']:.2f}" for run in (ours, *others))
            fastest = max((run["tokens_s"] for run in others), default=None)
            ratio = f"{ours['tokens_s'] / fastest:.2f}" if fastest else ""
            lines = [line.replace("| |", "|").replace("/ /", "/") for line in told.splitlines()]
            (row,) = [line for line in lines if f" {times[0]} |" in line]
            assert f"| {' | '.join(times)} |" in row, case
            assert f"| {ratio} |".replace("|  |", "|") in row, case
            assert row.endswith(f"| {peaks} |"), case


def test_padded_batches_of_dpo_are_told_as_measured():
    told = PERFORMANCE.read_text()
    newest = json.loads((NEWEST.parent / "dpo-h200-2026-11-26.json").read_text())
    runs = [*_measured("dpo")["runs"].values(), newest["runs"]["dpo-0.5b"], newest["shorter"]]
    mended = json.loads((NEWEST.parent / "dpo-8b-mended-h100-2026-11-26.json").read_text())
    runs.append({peer: run for peer, (run,) in mended["updates_20"]["dpo-8b"].items()})
    long = mended["updates_60"]
    mean = {name: statistics.mean(long[name]) for name in ("tokens", "places")}
    runs.append({peer: long[peer] | mean for peer in ("ours", "unsloth")})
    ours, theirs = (long[peer]["seconds"] for peer in ("ours", "unsloth"))
    times_as_fast = sum(theirs[26:]) / sum(ours[27:])  # the first update of theirs was not timed
    assert f"From update 28 on ours trains {times_as_fast:.2f} times as fast" in told
    steps = json.loads((NEWEST.parent / "dpo-8b-h100-2026-11-26.json").read_text())["watched"]
    first = next(number for number, step in enumerate(steps) if step["step"].startswith("captured"))
    before, after = (
        sum(step["tokens"] for step in part) / sum(step["seconds"] for step in part)
        for part in (steps[1:first], steps[first:])
    )
    assert f"first capture trained {before:,.0f} tokens/s and those from there on {after:,.0f}" in told
    for by_peer in runs:
        ours, theirs = by_peer["ours"], by_peer.get("trl") or by_peer["unsloth"]
        places = f"{ours['tokens']:,.0f} of {ours['places']:,.0f}"
        ratio = f"{ours['tokens_s'] / theirs['tokens_s']:.2f}"
        peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
        assert f"| {places} | {ours['ms']:,.1f} | {theirs['ms']:,.1f} | {ratio} | {peaks} |" in told


def test_start_up_is_told_as_measured():
    told = PERFORMANCE.read_text()
    shares = []
    for day in (26, 25):
        measured = json.loads((NEWEST.parent / f"start-up-h200-2026-11-{day}.json").read_text())
        by_peer = measured["runs"].get("0.5b", measured["runs"])
        ours, theirs = (by_peer[peer] for peer in PEERS)
        shares += [f"{a['first update'] / b['first update']:.2f}" for a, b in zip(ours, theirs, strict=True)]
        if day == 26:
            for seconds in ours + theirs:
                assert f"| {' | '.join(f'{seconds[stage]:.1f}' for stage in measured['stages'])} |" in told
            cold, warm = (run["first update"] - run["import"] for run in ours)
            assert f"a first update with nothing compiled took {cold - warm:.1f} s longer" in told
    cold, warm, cold_busy, warm_busy = shares
    assert f"after {warm} of Unsloth's time, and after {cold} where nothing was compiled" in told
    assert f"it was {warm_busy} and {cold_busy}" in told
    rehearsed = json.loads((NEWEST.parent / "start-up-rehearsed-h200-2026-11-26.json").read_text())
    cold, warm = rehearsed["runs"]["0.5b"]["ours"]
    first = "first update"
    assert f"after {cold[first]:.1f} s with nothing compiled and after {warm[first]:.1f} s" in told
    longer = (cold[first] - cold["import"]) - (warm[first] - warm["import"])
    assert f"From the imports on, it takes {longer:.1f} s longer" in told
    assert cold["losses"] == warm["losses"]


def test_what_a_layer_reads_and_writes_is_told_as_measured():
    told = (
        (PERFORMANCE.parent / "speed.md").read_text().split("## What a layer reads", 1)[1].split("\n## ")[0]
    )
    folder = NEWEST.parent
    copied = json.loads((folder / "kernels-h200-2026-11-22.json").read_text())["ceilings"]["copy"] * 1e9
    step = json.loads((folder / "profiles-h200-2026-11-26.json").read_text())["runs"][0]
    tokens, hidden, inner, layers = 8192, 2048, 6144, 28
    x, gate, qk = (2 * tokens * width for width in (hidden, inner, (16 + 8) * 128))
    by_kernel = {  # launches a layer, and the bytes of one
        "_norm_kernel": (4, (2 + 4 + 2 + 2) * x / 4),
        "_norm_backward_kernel": (2, 4 * x),
        "turn_kernel": (1, 2 * qk),
        "norm_backward_kernel": (1, 3 * qk),
        "_gated_lora_kernel": (1, 3 * gate),
        "_gated_lora_backward_kernel": (1, 5 * gate),
        "void at::native::vectorized_elementwise_kernel": (1, 3 * x),
    }
    rows = [line for line in told.splitlines() if line.startswith("|")][2:]
    measured = of_bytes = 0.0
    for (name, (launches, moved)), row in zip(by_kernel.items(), rows, strict=True):
        found = next(kernel for kernel in step["kernels"] if kernel["kernel"].startswith(name))
        assert found["launches"] == layers * launches
        ideal = 1e6 * moved / copied
        assert row.endswith(f"| {launches} | {moved / 1e6:.0f} | {found['us']:.0f} | {ideal:.0f} |")
        measured, of_bytes = measured + launches * found["us"], of_bytes + launches * ideal
    assert f"Together {measured:.0f} us, {of_bytes:.0f} of them for the bytes" in told
    above = layers * (measured - of_bytes) / 1e3
    assert (
        f"{layers * measured / 1e3:.1f} of the step's {step['busy_ms']} ms on the GPU, and {above:.1f} ms"
        in told
    )


def test_the_host_does_not_hold_the_loss_up():
    told, folder = (PERFORMANCE.parent / "speed.md").read_text(), NEWEST.parent
    marks = json.loads((folder / "host-marks-h200-2026-11-26.json").read_text())["marks"]["pr"]
    at = {name: ms for ms, name in marks}
    assert f"needs {at['sync ]'] - at['replay [']:.1f} ms from the forward pass's graph" in " ".join(
        told.split()
    )
    runs = json.loads((folder / "profiles-h200-2026-11-25.json").read_text())["runs"]
    busy = next(run["busy_ms"] for run in runs if run["case"] == "pr" and run["peer"] == "ours")
    assert f"In a profile it computes for {busy} ms of a step" in " ".join(told.split())


def test_the_losses_on_the_same_rows_are_told_as_measured():
    told = PERFORMANCE.read_text().split("\n### The losses on the same rows", 1)[1].split("\n### ")[0]
    runs = json.loads((NEWEST.parent / "losses-by-rows-h200-2026-11-26.json").read_text())["runs"]
    shapes = {"3b-drop": "| Llama-3.2-3B", "3b-nodrop": "| the same without", "gemma3-1b": "| Gemma-3"}
    for run in runs:
        (row,) = [line for line in told.splitlines() if line.startswith(shapes[run["case"]])]
        assert f"| {run['loss'][1]:.4f}, {run['loss'][2]:.4f} |" in row


def test_what_gate_and_up_cost_is_told_as_measured():
    told = PERFORMANCE.read_text()
    for run in _measured("gate-and-up")["runs"]:
        is_told = f"| {run['ms']} | {run['peak_GiB']} |" in told
        assert is_told or (run["case"], run["recomputed"]) == ("pr-16k", 1)


def test_experts_are_told_as_measured():
    measured = json.loads((NEWEST.parent / "experts-h200-2026-11-23.json").read_text())
    text = PERFORMANCE.read_text()
    told = text[text.index("## Experts") :].split("\n## ")[0]
    layouts = ("qwen3-30b-a3b, 8 of 128", "gpt_oss-20b, 4 of 32")
    kinds = [name.split(": ")[1] for name in measured["layer"] if name.startswith(layouts[0])]
    for kind in kinds:
        rows = [measured["layer"][f"{layout}: {kind}"] for layout in layouts]
        cells = [f"{row[figure]:.2f}" for row in rows for figure in ("ms", "peak_GiB")]
        assert f"| {kind} | {' | '.join(cells)} |" in told
    for bits in ("16 bits", "4 bits"):
        whole = measured["model"][bits]["48 extrapolated"]
        assert f"{whole['ms']:.0f} ms and" in told
        assert f"{whole['peak_GiB']:.0f} GiB" in told


def test_a_step_with_experts_is_told_as_measured():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks" / "results" / "experts-step-h200-2026-11-23.json"
    ours, theirs = json.loads(path.read_text())["results"]
    assert f"{ours['step_ms']} ms and {ours['peak_GiB']} GiB, Unsloth" in text
    assert f"{theirs['step_ms']} ms and {theirs['peak_GiB']} GiB" in text
    told = theirs["step_ms"] / ours["step_ms"], ours["peak_GiB"] / theirs["peak_GiB"]
    assert f"{told[0]:.2f} times as fast, with {told[1]:.2f} of the memory" in text.replace("\n", " ")
    assert abs(ours["tokens_update"] - theirs["tokens_update"]) <= 1


def test_the_soaks_are_told_as_measured():
    first = json.loads((NEWEST.parent / "soak-h200-2026-11-21.json").read_text())
    others = json.loads((NEWEST.parent / "soak-h200-2026-11-22.json").read_text())["soaks"]
    on_cpu = json.loads((NEWEST.parent / "soak-cpu-2026-11-21.json").read_text())
    survival, trust = ((ROOT / "docs" / name).read_text() for name in ("trust-survival.md", "trust.md"))

    def total(soaks, key):
        return sum(soak[key] for soak in soaks)

    columns = ([first], others, [on_cpu])
    updates = " | ".join(f"{total(soaks, 'updates'):,}" for soaks in columns)
    signals = " | ".join(f"{total(soaks, 'SIGKILL')}, {total(soaks, 'SIGTERM')}" for soaks in columns)
    assert f"| updates | {updates} |" in survival
    assert f"| SIGKILL, SIGTERM | {signals} |" in survival
    for title, key in {
        "of these during a save": "of them during a save",
        "evaluations": "evaluations",
    }.items():
        assert f"| {title} | {' | '.join(str(total(soaks, key)) for soaks in columns)} |" in survival
    on_gpu = [first, *others]
    interrupted = total(on_gpu, "SIGKILL") + total(on_gpu, "SIGTERM")
    assert f"{interrupted} interruptions in {total(on_gpu, 'updates'):,} updates" in trust


def test_the_fill_of_rows_is_told_as_measured():
    fills = json.loads((NEWEST.parent / "packers-xeon-2026-11-21.json").read_text())["fill"]
    planners = ("next_fit", "first_fit", "ffd", "bfd", "trl bfd")
    expected = [[f"{fill[planner]:.2%}" for planner in planners] for fill in fills]
    assert [*_table(ROOT / "docs" / "packing.md", "| mean length | next_fit").values()] == expected


def test_the_picture_was_drawn_from_the_newest_results():
    assert b"Source\0" + NEWEST.name.encode() in (ROOT / "docs" / "packed.png").read_bytes()


def _against(peer):
    return [pair for pair in read_pairs() if pair.peer == peer]


def _check_range(case, low, high):
    """A published range may understate our lead, and never overstates it."""
    speeds = _speeds_of_all_rounds(case)
    assert high == f"{max(speeds):.1f}"
    assert 0 <= round(min(speeds), 1) - float(low) < 0.5


def _speeds_of_all_rounds(case):
    """Our tokens per second, times Unsloth's, in every round that is kept."""
    speeds = []
    for path in COMPARISONS:
        found = json.loads(path.read_text())
        if "wrong" not in found:
            pairs = [p for p in read_pairs(path) if (p.case, p.peer) == (case, "unsloth")]
            speeds += [speed for pair in pairs for speed in pair.speeds]
            continue
        for run in found["runs"]:
            results = [result for result in run["results"] if result["case"] == case]
            speeds += _ratios(results, micro_batches_of_unsloth=2)
    if case == "pr-16k":
        runs = json.loads(ONE_MACHINE.read_text())["runs"]
        speeds += _ratios([run for run in runs if run["acc"] == "1"])
    assert len(speeds) > 6
    return speeds


def _ratios(results, micro_batches_of_unsloth=1):
    ours, unsloth = ([r["tok_s"] for r in results if r["peer"] == peer] for peer in ("ours", "unsloth"))
    return [our / (their * micro_batches_of_unsloth) for our in ours for their in unsloth]


def _changed(folder, case, peer, change):
    """The results of one round with one of them changed."""
    found = json.loads(WITH_TRL.read_text())
    (run,) = [run for run in found["runs"] if run["case"] == case]
    (result,) = [result for result in run["results"] if result["peer"] == peer]
    change(result)
    path = folder / "compare.json"
    path.write_text(json.dumps(found))
    return path


def _table(document, header):
    """The table that begins with a line, as {first cell: [the other cells]}, without what is bold."""
    _, found = document.read_text().split(header)
    lines = found.split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return {title: cells for title, *cells in rows}
