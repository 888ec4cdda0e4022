"""`python -m halogen_conformance.mutants [--write FILE] [NAME...]`: run mutants, print survivors."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from halogen_conformance.mutants.score import judge_all, page


def main() -> int:
    """1 when a mutant survives, or is killed by a case that a sound backend fails too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="where to write the page")
    parser.add_argument("names", nargs="*", help="mutants to run; default: all")
    given = parser.parse_args()
    torch.set_num_threads(1)  # tiny shapes: threads only wait for each other
    began = time.perf_counter()
    verdicts = judge_all(given.names)
    bad = 0
    for verdict in verdicts:
        if verdict.killed and verdict.fair:
            continue
        bad += 1
        words = "unfair" if verdict.killed else "survived"
        print(f"{verdict.mutant.name}: {words}")
        for result in (*verdict.results, *verdict.control):
            print(f"  {result.status} {result.id} {result.reason[:160]}")
    killed = len(verdicts) - bad
    print(f"{killed} of {len(verdicts)} killed in {time.perf_counter() - began:.0f} s")
    if given.write:
        given.write.write_text(page(verdicts), encoding="utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
