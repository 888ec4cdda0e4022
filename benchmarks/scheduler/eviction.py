"""Tokens that agents' conversations compute again, per eviction policy, against the optimum.

    python benchmarks/scheduler/eviction.py [--json benchmarks/scheduler/eviction.json]

Counts, not times: the same on every machine. Also what partial blocks save by block size.
"""

import argparse
import json
from pathlib import Path

from halogen_core.kv.eviction import LRU
from halogen_core.simulation.caching import agent_trace, compare_policies, replay

SIZE = 16


def policies(agents, seed):
    trace = agent_trace(agents=agents, seed=seed)
    longest = max(len(access.tokens) for access in trace)
    rows = []
    for share in (0.5, 0.75):
        blocks = max(longest // SIZE + 2, int(share * agents * longest / SIZE))
        results = compare_policies(trace, blocks, SIZE)
        lost = {r.policy: r.recomputed_tokens for r in results}
        rows.append(
            {
                "agents": agents,
                "seed": seed,
                "share": share,
                "turns": len(trace),
                "prompt_tokens": results[0].prompt_tokens,
                "recomputed": lost,
            }
        )
    return rows


def tails(size):
    """Prompt tokens computed in a large pool, with and without partial blocks."""
    trace = agent_trace(agents=3, seed=9)
    blocks = sum(len(access.tokens) // size + 2 for access in trace)
    whole = replay(trace, blocks, LRU(), size)
    partial = replay(trace, blocks, LRU(), size, min_tail=max(1, size // 4))
    return {"block_size": size, "whole_blocks": whole, "with_tails": partial, "turns": len(trace)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row for agents in (2, 4, 8) for seed in (1, 2, 3) for row in policies(agents, seed)]
    total = {name: sum(row["recomputed"][name] for row in rows) for name in rows[0]["recomputed"]}
    result = {"total_recomputed": total, "tails": [tails(s) for s in (16, 64, 256)], "runs": rows}
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
