"""Timing on a GPU: kernels inside captured graphs, rotated over inputs, medians of repeats."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

LEAST_CALLS = 8
"""In a graph: its launch by the host lies within the time taken, and is shared by all calls."""


def graph_time(calls: Sequence[Callable[[], object]], *, repeats: int = 15) -> list[float]:
    """Seconds per call: all calls in one captured graph, replayed `repeats` times.

    Give calls over different inputs whose bytes together exceed the L2 cache several times. Few
    calls are made several times each.
    """
    calls = list(calls) * -(-LEAST_CALLS // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / len(calls))
    return samples


def median(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2]


def environment() -> dict[str, str]:
    """Device, driver and versions, for every result file."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        card = "unknown"
    return {
        "device": card,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": " ".join(["benchmarks/gpu/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def save(path: str, results: object) -> None:
    """Write results with their environment as JSON."""
    Path(path).write_text(json.dumps({"environment": environment(), "results": results}, indent=1))
