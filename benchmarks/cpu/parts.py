"""What is measured: loads, rounds, figures and their targets."""

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
from serving import busy_seconds, halogen, llama, load

OURS, PEER, PLAIN_PEER = "halogen", "llama.cpp", "llama.cpp without flash attention"
VOCABULARY = (1000, 40000)


class Part:
    """A load on each server in turn, for some rounds."""

    def __init__(self, job, figures, *, rounds=1, plain_peer=False, context=8192, slots=8, busy=0):
        self.job, self.figures, self.rounds = job, figures, rounds
        self.plain_peer, self.context, self.slots = plain_peer, context, slots
        self.busy = busy  # processes that do nothing but take time, beside the load


def prompts(rng, count, length):
    """Token ids, never seen before."""
    return rng.integers(*VOCABULARY, (count, length)).tolist()


def shared(rng):
    system = prompts(rng, 1, 3072)[0]
    # one after another, so that the peer's one slot keeps the prompt
    return [system + p for p in prompts(rng, 20, 16)], 16, 1


PARTS = {
    "decode": Part(lambda g: (prompts(g, 1, 16), 96, None), ("decode_tok_s",), rounds=5),
    "prefill": Part(lambda g: (prompts(g, 1, 512), 1, None), ("prefill_tok_s",), rounds=5),
    "streams_8": Part(
        lambda g: (prompts(g, 8, 128), 64, None),
        ("total_tok_s", "ttft_p50_s", "itl_p99_ms"), rounds=3,
    ),
    "depth": Part(
        lambda g: (prompts(g, 1, 4096), 32, None),
        ("prefill_tok_s", "decode_tok_s"), rounds=2, plain_peer=True,
    ),
    "streams_32": Part(
        lambda g: (prompts(g, 32, 512), 128, None),
        ("total_tok_s", "ttft_p50_s", "itl_p99_ms"), context=32 * 704, slots=32,
    ),
    "shared_3k": Part(shared, ("wall_s", "ttft_p50_s"), context=3328, slots=1),
    "contended": Part(
        lambda g: (prompts(g, 1, 16), 24, None), ("decode_tok_s",), rounds=3, busy=2
    ),
    "start": None,
}  # fmt: skip
TARGETS = {
    "decode.decode_tok_s": 1.0, "contended.decode_tok_s": 1.0,
    "prefill.prefill_tok_s": 1.4, "depth.prefill_tok_s": 1.4,
    "depth.decode_tok_s": 1.2, "streams_8.total_tok_s": 2.0, "streams_8.ttft_p50_s": 1 / 0.6,
    "streams_8.itl_p99_ms": 1.0, "streams_32.total_tok_s": 2.0, "shared_3k.wall_s": 1.5,
    "start.resident_mib": 1 / 1.25, "start.rss_mib": 1 / 1.25, "start.cold_start_s": 1 / 2,
}  # fmt: skip
"""Ratios in which more is better for us: figures where less is better are turned round."""


def target(model, figure):
    """The ratio asked for, None: none was set."""
    if "f16" in model and figure.endswith("prefill_tok_s"):
        return 1.0
    return TARGETS.get(figure)


def less_is_better(figure):
    return figure.endswith(("_s", "_ms", "_mib")) and not figure.endswith("tok_s")


def start_servers(stack, path, part, options):
    """Ours and the peers', stopped with `stack`."""
    size = {"slots": part.slots, "context": part.context}
    servers = [halogen(path, options.threads, options=options.backend_option, name=OURS)]
    stack.callback(servers[0].stop)
    servers.append(llama(path, options.threads, flash=options.flash, name=PEER, **size))
    stack.callback(servers[1].stop)
    if part.plain_peer:
        servers.append(llama(path, options.threads, flash="off", name=PLAIN_PEER, **size))
        stack.callback(servers[2].stop)
    for s in servers:  # graphs are built and pages touched before anything counts
        load(s, prompts(np.random.default_rng(7), min(8, part.slots), 32), 8)
    for _ in range(part.busy):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(process.kill)
    return servers


def measure(name, path, options, seconds):
    """Samples by server, and how busy others kept the machine meanwhile (cores)."""
    if name == "start":
        return measure_start(path, options), None
    part, end = PARTS[name], time.time() + seconds
    with contextlib.ExitStack() as stack:
        servers = start_servers(stack, path, part, options)
        samples = {s.name: [] for s in servers}
        began, before = time.time(), others(servers)
        longest = 0.0
        for number in range(part.rounds):
            if number and time.time() + longest > end:
                break
            since = time.time()
            job = part.job(np.random.default_rng([number, len(name)]))
            for s in servers if number % 2 == 0 else servers[::-1]:
                samples[s.name].append(load(s, *job))
            longest = max(longest, time.time() - since)
        return samples, (others(servers) - before) / (time.time() - began)


def others(servers):
    own = os.times()
    return busy_seconds() - own.user - own.system - sum(s.cpu_seconds() for s in servers)


def measure_start(path, options, rounds=3):
    """From the command to the first token, and memory after eight short requests."""
    samples = {OURS: [], PEER: []}
    for _ in range(rounds):
        for make, extra in ((halogen, {"options": options.backend_option}), (llama, {})):
            server = make(path, options.threads, **extra)
            try:
                load(server, prompts(np.random.default_rng(7), 8, 32), 8)
                samples[server.name].append(
                    {
                        "cold_start_s": server.cold_start_s,
                        "resident_mib": server.resident_mib(),
                        "rss_mib": server.rss_mib(),
                    }
                )
            finally:
                server.stop()
    return samples


def summary(model, name, samples):
    """Medians, the better peer, and our ratio to it, figure by figure."""
    figures = PARTS[name].figures if PARTS[name] else ("cold_start_s", "resident_mib", "rss_mib")
    out = {}
    for figure in figures:
        median = {n: float(np.median([r[figure] for r in rs])) for n, rs in samples.items()}
        peers = {n: v for n, v in median.items() if n != OURS}
        pick = min if less_is_better(figure) else max
        peer = pick(peers, key=peers.get)
        ratio = median[OURS] / median[peer] if median[peer] else 0.0
        ratio = 1 / ratio if less_is_better(figure) and ratio else ratio
        out[figure] = {
            "median": median, "peer": peer, "ratio": round(ratio, 3),
            "target": target(model, f"{name}.{figure}"), "rounds": len(samples[OURS]),
        }  # fmt: skip
    return out
