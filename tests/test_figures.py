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

ROOT, RESULTS = Path(__file__).parents[1], NEWEST.parent
COMPARISONS = sorted(RESULTS.glob("compare-*.json"))
PEERS = ("ours", "unsloth")
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
WITH_TRL = RESULTS / "compare-h200-2026-11-22.json"
HOST_BOUND = ("pr", "pr-16k")  # Unsloth is as fast as its host there, so the documents give a range


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def words(document):
    """The text of a document, however its lines are broken."""
    return " ".join(document.read_text().split())


def answer(question):
    """The section of the page of figures that answers a question."""
    return PERFORMANCE.read_text().split(f"\n## {question}", 1)[1].split("\n## ")[0]


@table("path", COMPARISONS, ids=lambda path: path.stem)
def test_peers_trained_as_many_tokens_an_update_or_the_file_says_it_is_wrong(path):
    if "wrong" in json.loads(path.read_text()):
        with pytest.raises(NotComparable, match=f"{path.name} is marked wrong .* read {NEWEST.name} instead"):
            read_pairs(path)
    else:
        assert read_pairs(path)


@pytest.mark.parametrize(
    ("case", "peer", "change", "refused"),
    [
        *(
            (case, peer, {"tokens_update": 2}, f"case {case}, peer unsloth: tokens_update is 7,9.* to 15,.*")
            for case in ("8b", "8b-gc")
            for peer in PEERS
        ),
        ("8b-auto", "ours", {"tokens_update": 2}, "case 8b-auto, peer unsloth"),
        (
            "pr",
            "trl",
            {"tokens_update": None},
            "case pr, peer trl: tokens_update is missing.*; measure again",
        ),
    ],
)
def test_a_peer_that_trained_other_tokens_is_refused(tmp_path, case, peer, change, refused):
    """One that trained twice the tokens, also in a case beside another, or that did not count them."""
    found = json.loads(WITH_TRL.read_text())
    (run,) = [run for run in found["runs"] if run["case"] == case]
    (result,) = [result for result in run["results"] if result["peer"] == peer]
    for name, times in change.items():
        tokens = result.pop(name)
        result |= {name: tokens * times} if times else {}
    (tmp_path / "compare.json").write_text(json.dumps(found))
    with pytest.raises(NotComparable, match=refused):
        read_pairs(tmp_path / "compare.json")


def test_the_tables_say_what_the_results_file_says():
    for document, lines in tables(Comparison()).items():
        assert "\n".join(lines) in document.read_text()
    assert len(tables(Comparison())[README]) == 2 + len(CASES_OF_README)

    (trl,) = [pair for pair in read_pairs(WITH_TRL) if pair.peer == "trl"]
    assert f"ours was {trl.speed:.2f} times as fast on the 0.5B" in words(PERFORMANCE)
    peaks = re.findall(r" \| ([\d.]+) / ([\d.]+) \|$", README.read_text(), re.MULTILINE)
    assert len(peaks) == len(CASES_OF_README)
    less = [round(100 * (1 - float(ours) / float(theirs))) for ours, theirs in peaks]
    assert f"In every row above we take {min(less)} to {max(less)}% less than Unsloth" in README.read_text()


def test_the_sweep_is_told_as_measured():
    ratios = []
    for name in ("sweep-h200-2026-11-25", "sweep-h100-2026-11-26"):
        points = {point["point"]: point["results"] for point in measured(name)["points"]}
        of_all = {name: ratio_to("unsloth", results) for name, results in points.items()}
        ratios.append({name: ratio for name, ratio in of_all.items() if isinstance(ratio, float)})
        assert min(ratios[-1].values()) >= 1
        if len(ratios) == 1:
            shown = _table(PERFORMANCE, "| point | ours, tokens/s |")
            for name, cells in shown.items():
                ours, theirs = (points[name][peer] for peer in PEERS)
                peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
                speeds = [f"{ours['tok_s']:,}", f"{theirs['tok_s']:,}"]
                assert cells == [*speeds, f"{ratios[-1][name]:.2f}", peaks]
    first, second = (sorted(found.values()) for found in ratios)
    expected = [f"{ratio:.2f}" for ratio in (*first[:3], statistics.median(first), first[-1])]
    assert [cells[2] for cells in shown.values()] == expected
    assert f"None of {len(first)} is slower" in words(PERFORMANCE)
    assert f"at none of the {len(first)} points that compare" in words(README)
    by = f"by {second[0]:.2f} to {second[-1]:.2f} times"
    assert f"{len(second)} of {len(second)} points are faster, {by}" in words(PERFORMANCE)


def test_preparation_is_told_as_measured():
    names = {"tokenizer": "the bare tokenizer", "ours": "prepared", "map": "`datasets.map`, not packed"}
    newest, day_before = (measured(f"preparation-cpu-2026-11-{day}")["results"] for day in (26, 25))
    rows = {
        f"| {run['documents']:,} | {names.get(run['case'], 'again, from the cache')} | {run['num_proc']} | "
        f"{run['seconds']:.1f} | {run['documents_per_second']:,.0f} | {run['peak_bytes'] / 2**30:.2f} |"
        for run in (*newest, *(run for run in day_before if run["documents"] == 2_000_000))
    }
    text = (ROOT / "docs" / "data.md").read_text()
    told = {line for line in text.splitlines() if re.match(r"\| [\d,]+ \| \S", line)}
    assert len(told) > 5
    assert told <= rows


def test_the_ranges_of_small_models_hold_every_round():
    section = PERFORMANCE.read_text().split("## Why is the ratio")[1]
    published = re.findall(r"([\d.]+) to (\d+\.\d+) times", section.split("\n\n")[2])
    for case, (low, high) in zip(HOST_BOUND, published, strict=True):
        _check_range(case, low, high)


def test_the_grid_is_told_as_measured():
    trust = (ROOT / "docs" / "trust.md").read_text()
    for device in ("h100", "images-h100"):
        table = (RESULTS / f"grid-{device}-2026-11-26.md").read_text()
        rows, n_measured, failed, refused, not_captured = map(
            int,
            re.search(r"(\d+) rows: (\d+) measured, (\d+) failed, (\d+) refused, (\d+) not", table).groups(),
        )
        above, worst = re.search(r"(\d+) rows were above .* by up to ([\d.]+),", table).groups()
        assert (rows, failed) == (n_measured + refused + not_captured, 0)
        file = f"(../benchmarks/results/grid-{device}-2026-11-26.md"
        (told,) = [line for line in trust.splitlines() if file in line]
        assert (
            f"| {rows:,} cases | {n_measured:,} measured, none above 1.5 ({int(above):,} were above" in told
        )
        assert f"at up to {worst}," in told
        assert "**Partial**" not in table
        assert f"{refused:,} refused and {not_captured:,} not captured" in told
        assert f"{rows:,} combinations" in words(README)
        assert re.search(rf"{n_measured:,} (were )?measured", words(README))


def test_full_fine_tuning_is_told_as_measured():
    told = answer("How fast is full").replace("| | |", "| |")
    for by_peer in measured("full-h200-2026-11-25")["runs"].values():
        ours = by_peer["ours"][0]
        for peer, (run,) in by_peer.items():
            name = {"unsloth": "Unsloth", "trl": "TRL"}.get(peer, peer)
            ratio = "" if peer == "ours" else f"{ours['tokens_s'] / run['tokens_s']:.2f} "
            figures = f"{run['ms']:.1f} | {run['tokens_s']:,.0f} | {ratio}| {run['peak_GiB']:.2f}"
            assert f"| {name} | {figures} | {run['losses'][-1]:.4f} |" in told


def test_large_models_in_full_on_one_gpu_are_told_as_measured():
    told = answer("How fast is full")
    shapes = {"8b": "Llama-3.1-8B shape", "3b": "Llama-3.2-3B shape"}
    optimizers = {
        "adamw_8bit": "`adamw_8bit`",
        "adamw_torch_8bit": "`adamw_torch_8bit` with stochastic rounding",
        "adamw_torch_fused": "`--masters_on_host`",
    }
    newest = measured("full-8b-h100-2026-11-26")["runs"]
    runs = measured("full-one-gpu-h100-2026-11-25")["runs"] | newest
    for case, by_peer in runs.items():
        for peer, (run,) in by_peer.items():
            how = optimizers[run["optimizer"].split()[0]]
            how += " and `--optimizer_in_backward`" if peer.endswith("in-backward") else ""
            row = re.escape(f"{shapes[case[:2]]}, {how}")
            figures = f"{run['ms']:,.1f} | {run['tokens_s']:,.0f} | {run['peak_GiB']:.2f} |"
            assert re.search(rf"{row}[^|]* \| {re.escape(figures)}", told)


@pytest.mark.parametrize("shape", ["1.7b", "8b"])
def test_four_ranks_are_told_as_measured(shape):
    name = f"ranks-ddp-four-{shape}-h100-2026-11-26"
    alone, *together = measured(name)["runs"]
    told = (PERFORMANCE.parent / "ranks.md").read_text().split(f"{name}.json")[1]
    assert f"| 1 | {alone['tokens_s']:,.0f} | | {max(alone['peak_GiB_by_rank']):.1f} | |" in told
    for run in together:
        waits = f"{max(run['peak_GiB_by_rank']):.1f} | {run['spread']['waiting']:.1%} |"
        assert f"| {run['gpus']} | {run['tokens_s']:,.0f} | {run['times_one']:.2f} | {waits}" in told
    assert f"{together[-1]['times_one']:.2f}" in PERFORMANCE.read_text()


def test_rows_with_images_are_told_as_measured():
    told = answer("How fast are rows with images")
    runs = measured("vision-h200-2026-11-26")["runs"]
    for case, by_peer in runs.items():
        ours, *others = (run for run in by_peer.values() if "failed" not in run)
        times = [f"{run['ms']:,.1f}" for run in (ours, *others)]
        peaks = " / ".join(f"{run['peak_GiB']:.2f}" for run in (ours, *others))
        ratio = f"{ours['tokens_s'] / max(run['tokens_s'] for run in others):.2f}"
        lines = [line.replace("| |", "|").replace("/ /", "/") for line in told.splitlines()]
        (row,) = [line for line in lines if f" {times[0]} |" in line]
        assert row.endswith(f"| {' | '.join(times)} | {ratio} | {peaks} |"), case


def test_padded_batches_of_dpo_are_told_as_measured():
    told = PERFORMANCE.read_text()
    long = measured("dpo-8b-mended-h100-2026-11-26")["updates_60"]
    mean = {name: statistics.mean(long[name]) for name in ("tokens", "places")}
    small = measured("dpo-h200-2026-11-26")["runs"]["dpo-0.5b"]
    runs = [
        small,
        measured("dpo-h200-2026-11-25")["runs"]["dpo-8b"],
        {peer: long[peer] | mean for peer in PEERS},
    ]
    for by_peer in runs:
        ours, theirs = by_peer["ours"], by_peer.get("trl") or by_peer["unsloth"]
        places = f"{ours['tokens']:,.0f} of {ours['places']:,.0f}"
        ratio = f"{ours['tokens_s'] / theirs['tokens_s']:.2f}"
        peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
        assert f"| {places} | {ours['ms']:,.1f} | {theirs['ms']:,.1f} | {ratio} | {peaks} |" in told


def test_start_up_is_told_as_measured():
    told, runs = words(PERFORMANCE), measured("start-up-h200-2026-11-26")["runs"]
    by_peer = runs.get("0.5b", runs)
    for seconds in (*by_peer["ours"], *by_peer["unsloth"]):
        assert f"| {seconds['first update']:.1f} | {seconds['all updates']:.1f} |" in told
    rehearsed = measured("start-up-rehearsed-h200-2026-11-26")
    cold, warm = (run["first update"] for run in rehearsed["runs"]["0.5b"]["ours"])
    assert f"after {cold:.1f} s with nothing compiled and after {warm:.1f} s otherwise" in told


def test_experts_are_told_as_measured():
    experts = measured("experts-h200-2026-11-23")
    for bits in ("16 bits", "4 bits"):
        whole = experts["model"][bits]["48 extrapolated"]
        assert f"{whole['ms']:.0f} ms and {whole['peak_GiB']:.0f} GiB" in words(PERFORMANCE)


def test_the_soaks_are_told_as_measured():
    on_gpu = [measured("soak-h200-2026-11-21"), *measured("soak-h200-2026-11-22")["soaks"]]
    columns = (on_gpu, [measured("soak-cpu-2026-11-21")])
    survival, trust = ((ROOT / "docs" / name).read_text() for name in ("trust-survival.md", "trust.md"))

    def total(soaks, key):
        return sum(soak[key] for soak in soaks)

    updates = " | ".join(f"{total(soaks, 'updates'):,}" for soaks in columns)
    signals = " | ".join(f"{total(soaks, 'SIGKILL')}, {total(soaks, 'SIGTERM')}" for soaks in columns)
    assert f"| updates | {updates} |" in survival
    assert f"| SIGKILL, SIGTERM | {signals} |" in survival
    for title, key in (("of these during a save", "of them during a save"), ("evaluations",) * 2):
        assert f"| {title} | {' | '.join(str(total(soaks, key)) for soaks in columns)} |" in survival
    interrupted = total(on_gpu, "SIGKILL") + total(on_gpu, "SIGTERM")
    assert f"{interrupted} interruptions in {total(on_gpu, 'updates'):,} updates" in trust


def test_the_fill_of_rows_is_told_as_measured():
    fills = measured("packers-xeon-2026-11-21")["fill"]
    planners = ("next_fit", "first_fit", "ffd", "bfd", "trl bfd")
    expected = [[f"{fill[planner]:.2%}" for planner in planners] for fill in fills]
    assert [*_table(ROOT / "docs" / "packing.md", "| mean length | next_fit").values()] == expected


def test_the_picture_was_drawn_from_the_newest_results():
    assert b"Source\0" + NEWEST.name.encode() in (ROOT / "docs" / "packed.png").read_bytes()


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
        runs = measured("pr-16k-accumulation-h200-2026-11-22")["runs"]
        speeds += _ratios([run for run in runs if run["acc"] == "1"])
    assert len(speeds) > 6
    return speeds


def _ratios(results, micro_batches_of_unsloth=1):
    ours, unsloth = ([r["tok_s"] for r in results if r["peer"] == peer] for peer in ("ours", "unsloth"))
    return [our / (their * micro_batches_of_unsloth) for our in ours for their in unsloth]


def _table(document, header):
    """The table that begins with a line, as {first cell: [the other cells]}, without what is bold."""
    _, found = document.read_text().split(header)
    lines = found.split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return {title: cells for title, *cells in rows}
