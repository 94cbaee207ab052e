#!/usr/bin/env python3
"""Runs what the scheduler is measured by through `millpond replay`, and says of each bar whether it is held.

    verify/measure/scheduler.py TRACE [--bin target/release/millpond] [--seeds 5] [--out target/scheduler]

TRACE is the public conversation trace. Prints a table: what, found, bar, held or NOT HELD; the rows that `replay` printed lie
in OUT as JSON lines. Exit code 1 if a bar is not held, 3 without the trace. Nothing here depends on the machine but the rows of
seconds of processor. Needs Python 3.10 and nothing else.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys

CAPACITIES = [1_000, 3_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000, None]
# Hits in per cent of blocks, computed independently of this code; the last column without limit.
HITS = {
    "lru": [4.45, 6.50, 11.04, 21.12, 28.75, 32.57, 35.46, 36.37, 36.64],
    "fifo": [4.34, 6.27, 10.53, 18.15, 25.77, 29.44, 33.35, 35.63, 36.64],
    "lfu": [4.81, 7.47, 9.23, 13.18, 20.99, 27.59, 34.38, 36.31, 36.64],
    "sieve": [4.81, 7.47, 9.23, 13.18, 20.99, 27.59, 34.38, 36.31, 36.64],
    "s3-fifo": [5.56, 8.74, 13.82, 19.52, 25.28, 30.39, 34.90, 36.24, 36.64],
    "arc": [5.29, 8.58, 11.24, 22.21, 28.92, 31.07, 34.33, 36.31, 36.64],
    "rhg-s": [8.26, 14.02, 17.76, 23.58, 30.18, 33.26, 35.60, 36.35, 36.64],
    "optimum": [19.07, 29.45, 34.12, 36.64, 36.64, 36.64, 36.64, 36.64, 36.64],
}
CACHE_KEYS = ["evict", "cache_blocks", "requests", "hit_blocks_pct", "hit_tokens_pct"]
RUN_KEYS = [
    "policy", "admission", "speed", "seed", "effective", "rejected_early", "rejected_late", "wasted_prefill_s",
    "ttft_mean_s", "ttft_p99_s", "tbt_p90_ms", "hit_blocks_pct",
]
# Student's t, 97.5 %, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093}


class Bars:
    """What was found beside what it must be."""

    def __init__(self):
        self.failed = 0

    def row(self, line, what, found, bar, holds):
        """One bar; `holds` is None where there is an aim and no bar."""
        verdict = {None: "-", True: "held", False: "NOT HELD"}[holds]
        self.failed += holds is False
        print(f"| {line} | {what} | {found} | {bar} | {verdict} |", flush=True)


class Replay:
    """The command, its trace, and where its rows go."""

    def __init__(self, args):
        self.args = args
        self.seeds = str(args.seeds)
        args.out.mkdir(parents=True, exist_ok=True)

    def rows(self, name, *arguments):
        """What `replay TRACE --json` printed, and its seconds of processor."""
        begun = processor_s()
        command = [self.args.bin, "replay", self.args.trace, "--json", *arguments]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        took = processor_s() - begun
        (self.args.out / f"{name}.jsonl").write_text(printed)
        return [json.loads(line) for line in printed.splitlines()], took


def processor_s():
    """Seconds of processor that ended children took: what others do meanwhile counts for little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mean(rows, key, **which):
    """The mean over the seeds; of a list, element by element."""
    values = [row[key] for row in rows if all(row[name] == value for name, value in which.items())]
    if isinstance(values[0], list):
        return [statistics.mean(each) for each in zip(*values, strict=True)]
    return statistics.mean(values)


def paired(rows, key, speed, ours, theirs):
    """The difference by seed, in per cent of theirs: its mean and its 95 % interval."""
    def by_seed(policy):
        return {row["seed"]: row[key] for row in rows if row["speed"] == speed and row["policy"] == policy}

    a, b = by_seed(ours), by_seed(theirs)
    parts = [100 * (a[seed] / b[seed] - 1) for seed in a]
    middle = statistics.mean(parts)
    half = STUDENT[len(parts) - 1] * statistics.stdev(parts) / len(parts) ** 0.5
    return middle, middle - half, middle + half


def cache(replay, bars):
    rows, _ = replay.rows("cache", "--cache-only", "--evict", ",".join(HITS), "--cache-blocks", "1000,3000,5000,10000,20000,30000,50000,100000,inf")
    found = {(row["evict"], row["cache_blocks"]): row for row in rows}
    for name, expected in HITS.items():
        off = [abs(found[name, blocks]["hit_blocks_pct"] - value) for blocks, value in zip(CAPACITIES, expected, strict=True)]
        limit = 0.3 if name == "rhg-s" else 0.00501
        bars.row("a", f"{name}: largest difference from the table, 9 capacities", f"{max(off):.4f} points", f"<= {limit}", max(off) <= limit)
    all_of_it = found["lru", None]
    whole = (round(all_of_it["hit_blocks_pct"], 2), round(all_of_it["hit_tokens_pct"], 2))
    bars.row("a", "without limit, % of blocks and of tokens", whole, "36.64, 37.36", whole == (36.64, 37.36))
    bars.row("item 8", "keys of --cache-only", len(rows), "as documented", all(sorted(row) == sorted(CACHE_KEYS) for row in rows))
    for name in HITS:
        took = max(replay.rows("timing", "--cache-only", "--evict", name, "--cache-blocks", str(blocks or "inf"))[1] for blocks in CAPACITIES)
        limit = 0.6 if name == "rhg-s" else 0.3
        bars.row("a", f"{name}: seconds of processor of the slowest cell by itself, the trace loaded", f"{took:.2f} s", f"< {limit} s", took < limit)


def paper(replay, bars):
    rows, _ = replay.rows("paper", "--paper", "--seeds", replay.seeds)
    by = {(row["figure"], row["what"]): row for row in rows}
    eight = [by["FAST'25 Figure 8", what]["ours"] for what in ("prefill without a cache, s a request", "prefill with an endless cache, s a request", "their ratio")]
    for what, value, target, part in zip(("without a cache", "with an endless one", "ratio"), eight, (1.674, 1.063, 1.56), (0.01, 0.01, 0.03), strict=True):
        bars.row("b", f"prefill seconds a request, {what}", f"{value:.3f}", f"{target} +- {part:.0%}", abs(value / target - 1) <= part)
    for row in rows:
        if row["figure"] == "FAST'25 Figure 14a":
            off = row["ours"] / row["authors"] - 1
            bars.row("b", row["what"], f"{row['ours']:.2f} ({off:+.1%})", f"{row['authors']} +- 5 %", abs(off) <= 0.05)
    for row in rows:
        if row["figure"] == "FAST'25 Figure 5" and " over " in row["what"]:
            off = row["ours"] / row["authors"] - 1
            bars.row("c", row["what"], f"{row['ours']:.2f} ({off:+.1%})", f"{row['authors']:.2f} +- 20 %", abs(off) <= 0.2)
    for row in rows:
        if any(claim in row["what"] for claim in ("best with whole", "best of all", " over ")) and row["figure"].startswith(("FAST'25 Figure 1", "arXiv, ")):
            ours = "pending" if row["pending"] else f"{row['ours']:+.0f} %"
            bars.row("e", f"{row['figure']}: {row['what']}", ours, f"theirs {row['authors']:+.0f} %", None)
    figures = {row["figure"] for row in rows}
    there = all(any(figure.startswith(start) for figure in figures) for start in ("FAST'25 Figure 1", "FAST'25 Figure 15", "arXiv, 75", "arXiv, 50 to 525"))
    bars.row("e", "525 %, 75 %, Figure 1, Figure 15 have rows; what needs another trace is pending", f"{len(rows)} rows, {sum(row['pending'] for row in rows)} pending", "there", there)


def placement(replay, bars):
    rows, _ = replay.rows("placement", "--seeds", replay.seeds, "--speed", "1,1.25,1.5", "--admission", "none", "--policy", "random,least_loaded,local_prefix,mooncake_fast25,mooncake_arxiv,millpond")
    for speed in (1, 1.25, 1.5):
        means = ", ".join(f"{policy} {mean(rows, 'ttft_mean_s', policy=policy, speed=speed):.2f}" for policy in dict.fromkeys(row["policy"] for row in rows))
        bars.row("c", f"{speed}x, mean TTFT in seconds", means, "", None)
        middle, low, high = paired(rows, "ttft_mean_s", speed, "millpond", "mooncake_fast25")
        bars.row("c", f"{speed}x, mean TTFT against mooncake_fast25", f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})", "upper end <= +1 %", high <= 1)
        middle, low, high = paired(rows, "ttft_p99_s", speed, "millpond", "mooncake_fast25")
        bars.row("c", f"{speed}x, its 99th percentile", f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})", "no worse: the interval reaches 0", low <= 0)
    six, _ = replay.rows("placement6", "--seeds", replay.seeds, "--admission", "none", "--prefill", "6", "--policy", "random,least_loaded,local_prefix,mooncake_fast25,millpond")
    means = ", ".join(f"{policy} {mean(six, 'ttft_mean_s', policy=policy):.2f}" for policy in dict.fromkeys(row["policy"] for row in six))
    bars.row("c", "6 prefill nodes, mean TTFT in seconds", means, "", None)
    bars.row("item 8", "keys of a run", len(rows), "as documented", all(sorted(row) == sorted(RUN_KEYS) for row in rows))
    again, _ = replay.rows("again", "--seeds", replay.seeds, "--admission", "none", "--policy", "millpond")
    bars.row("j", "the same rows in another run", len(again), "equal", again == [row for row in rows if row["policy"] == "millpond" and row["speed"] == 1])


def overload(replay, bars):
    policies = ("none", "late", "early", "early_uniform", "millpond")
    rows, _ = replay.rows("overload", "--details", "--seeds", replay.seeds, "--speed", "1,1.5,2,3", "--admission", ",".join(policies))
    for speed in (1.5, 2, 3):
        for policy in policies:
            values = [mean(rows, key, speed=speed, admission=policy) for key in ("effective", "rejected_late", "wasted_prefill_s", "ttft_mean_s")]
            bars.row("d", f"{speed}x, {policy}: effective, refused late, prefill seconds in vain, mean TTFT", "{:,.0f}, {:,.0f}, {:,.0f}, {:.1f} s".format(*values), "", None)
    for speed in (2, 3):
        ours, late, vain, vain_late, bound = (
            mean(rows, "effective", speed=speed, admission="millpond"),
            mean(rows, "effective", speed=speed, admission="late"),
            mean(rows, "wasted_prefill_s", speed=speed, admission="millpond"),
            mean(rows, "wasted_prefill_s", speed=speed, admission="late"),
            mean(rows, "length_blind_bound", speed=speed, admission="millpond"),
        )
        bars.row("d", f"{speed}x, effective over the length-blind bound {bound:,.0f}", f"{ours / bound:.3f}", ">= 0.99", ours >= 0.99 * bound)
        bars.row("d", f"{speed}x, effective over late's", f"{ours / late:.3f}", ">= 1", ours >= late)
        bars.row("d", f"{speed}x, prefill in vain over late's", f"{vain / vain_late:.2f}", "<= 0.55", vain <= 0.55 * vain_late)
    arrivals = 12_031
    late = mean(rows, "rejected_late", speed=1.5, admission="millpond") / arrivals
    bars.row("d", "1.5x, refused late, of arrivals", f"{late:.2%}", "aim < 2 %", late < 0.02)
    hints, _ = replay.rows("hints", "--details", "--seeds", replay.seeds, "--speed", "2,3", "--set", "hint_noise=0.5")
    for speed in (2, 3):
        ours, deciles = mean(hints, "effective", speed=speed), mean(hints, "served_by_output_decile", speed=speed)
        shown = ", ".join(f"{100 * part:.0f}" for part in deciles)
        bars.row("d", f"{speed}x, answers announced, off by 50 %: effective", f"{ours:,.0f}", ">= 9,500" if speed == 2 else "", ours >= 9_500 if speed == 2 else None)
        bars.row("d", f"{speed}x, the same, served by decile of output length, %", shown, "each > 5", min(deciles) > 0.05)
    for speed in (1, 1.5, 2, 3):
        covered = mean(rows, "interval_coverage", speed=speed, admission="millpond")
        bars.row("f", f"{speed}x, 90 % intervals for the first token hold for", f"{covered:.1%}", "88 to 92 %", 0.88 <= covered <= 0.92)


def swings(replay, bars):
    for tbt in (33, 36, 100):
        rows, _ = replay.rows(f"swings{tbt}", "--details", "--seeds", replay.seeds, "--prefill", "4", "--decode", "16", "--set", f"tbt_ms={tbt}", "--admission", "early,millpond")
        early, ours = (mean(rows, "load_correlation", admission=policy) for policy in ("early", "millpond"))
        served = ", ".join(f"{mean(rows, 'effective', admission=policy):,.0f}" for policy in ("early", "millpond"))
        bars.row("f", f"4 + 16, {tbt} ms: correlation of loads, early and millpond (effective {served})", f"{early:.2f}, {ours:.2f}", "millpond > -0.2", ours > -0.2)
    rows, _ = replay.rows("tenants", "--details", "--seeds", replay.seeds, "--speed", "2", "--set", "tenants=1:9")
    worst = mean(rows, "unfairness")
    bars.row("f", "two tenants, 1:9 offered at 2x: the worse off below its max-min share by", f"{worst:.1%}", "<= 10 %", worst <= 0.1)


def speed(replay, bars):
    for policy in ("mooncake_fast25", "millpond"):
        for pace in ("1", "2"):
            _, took = replay.rows("timing", "--policy", policy, "--speed", pace)
            bars.row("g", f"the whole trace on 8 + 8 at {pace}x, {policy}, the trace loaded: seconds of processor", f"{took:.2f} s", "< 1.5 s", took < 1.5)


def hashes(replay, bars):
    runs = [replay.rows("hashes", "--details", "--seeds", "3", "--speed", "2", "--policy", "mooncake_fast25,millpond")[0] for _ in range(2)]
    found = [[row["decisions"] for row in rows] for rows in runs]
    bars.row("j", "decision hashes of 6 runs, twice", " ".join(found[0][-3:]), "equal, and different by seed", found[0] == found[1] and len(set(found[0])) == 6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release/millpond"))
    parser.add_argument("--seeds", type=int, default=5, choices=[seeds for seeds in range(5, 21) if seeds - 1 in STUDENT])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("target/scheduler"))
    args = parser.parse_args()
    if not args.trace.exists():
        print(f"SKIPPED: there is no {args.trace}; nothing was measured", file=sys.stderr)
        return 3
    replay, bars = Replay(args), Bars()
    print("| line | what | found | bar | |\n|---|---|---|---|---|")
    for part in (cache, paper, placement, overload, swings, speed, hashes):
        part(replay, bars)
    if bars.failed:
        print(f"{bars.failed} bars are not held", file=sys.stderr)
    return int(bars.failed > 0)


sys.exit(main())
