"""Medians and ratios of measured rows as the README's table: python3 table.py FILE.jsonl ..."""
import collections
import json
import statistics
import sys

BUSY_CORES_MAX = 0.2


def size_name(size):
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def load(paths):
    """(peer, op, size, batch) -> rows of one thread; rows taken on a busy machine are dropped and counted."""
    rows, dropped = collections.defaultdict(list), 0
    for path in paths:
        for line in open(path, encoding="utf-8"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if not isinstance(row, dict) or "GBps" not in row or row.get("threads", 1) != 1:
                continue
            if row.get("other_cores", 0) > BUSY_CORES_MAX:
                dropped += 1
                continue
            op = row["op"].removeprefix("batch_")
            rows[row["peer"], op, row["size"], row.get("batch", 1)].append(row)
    return rows, dropped


def main(paths):
    rows, dropped = load(paths)

    def median(peer, op, size, batch, field):
        values = [row[field] for row in rows.get((peer, op, size, batch), []) if row.get(field) is not None]
        return statistics.median(values) if values else None

    def cell(value, unit):
        if value is None:
            return "-"
        return f"{value:.1f} us" if unit == "p50_us" else f"{value:.2f} GB/s"

    def ratio(ours, other):
        return "-" if not ours or not other else f"{ours / other:.2f}x"

    # what, our peer name, its op, size, batch, the figure, the bare row, the peers' rows
    lines = []
    for size, batch, unit in ((4096, 1, "p50_us"), (65536, 1, "GBps"), (1 << 20, 1, "GBps"), (16 << 20, 1, "GBps"),
                              (4096, 128, "GBps"), (65536, 64, "GBps"), (1 << 20, 16, "GBps")):
        lines.append(("tcp write", "millpond-tcp", "write", size, batch, unit, ("bare-spin", "write"),
                      ("mooncake-te", "write"), ("nixl-ucx-tcp", "write")))
    for size, unit in ((4096, "p50_us"), (1 << 20, "GBps"), (16 << 20, "GBps")):
        lines.append(("tcp read", "millpond-tcp", "read", size, 1, unit, None, ("mooncake-te", "read"), ("nixl-ucx-tcp", "read")))
    for op in ("write", "read"):
        for size, unit in ((4096, "p50_us"), (1 << 20, "GBps"), (16 << 20, "GBps")):
            lines.append((f"shm {op}", "millpond-shm", op, size, 1, unit, ("bare-shm", "write"), None, None))
    for op, theirs in (("put", "put_from"), ("get", "get_into")):
        for size, unit in ((4096, "p50_us"), (1 << 20, "GBps")):
            lines.append((f"store {op}, tcp", "millpond-store-tcp", op, size, 1, unit, None, ("mooncake-store", theirs), None))

    print("| what | size | Millpond | bare | ratio | Mooncake | ratio | NIXL (UCX tcp) | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for what, peer, op, size, batch, unit, bare, mooncake, nixl in lines:
        ours = median(peer, op, size, batch, unit)
        text = [what, (f"{batch} x " if batch > 1 else "") + size_name(size), cell(ours, unit)]
        for other in (bare, mooncake, nixl):
            value = median(*other, size, batch, unit) if other else None
            text += [cell(value, unit), ratio(ours, value)]
        print("| " + " | ".join(text) + " |")
    if dropped:
        print(f"\n{dropped} rows were dropped: another process used more than {BUSY_CORES_MAX} cores meanwhile.")


if __name__ == "__main__":
    main(sys.argv[1:])
