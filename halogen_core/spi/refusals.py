"""The words for a KV pool that cannot be, so that every backend's plan says them alike."""

from __future__ import annotations

from collections.abc import Sequence

from halogen_core.errors import OutOfMemory
from halogen_core.spi.memory import MemoryRequest

MIB = 1 << 20


def pool_refusal(
    request: MemoryRequest, *, left: int, extra: int = 0, reasons: Sequence[str] = ()
) -> OutOfMemory:
    """Why no KV pool can be planned with `left` bytes after everything else; sizes in MiB.

    `extra` bytes of a pool hold no blocks that sequences get (padding); `reasons` are the
    arithmetic.
    """
    each, size = request.kv_layout.bytes_per_block, request.kv_layout.spec.block_size
    need = request.min_blocks * each + extra
    session = f"a session of {request.min_blocks * size} tokens takes {_mib(need)}"
    asked = request.kv_bytes
    if asked is None:
        share = f"a share of {request.kv_ratio:g} of {_mib(max(0, left))}"
        text = f"the KV pool would be {share} that are left; {session}"
        fix = "lower --max-context, choose a smaller kv dtype, or a smaller or quantised model"
    elif asked > left:
        text = f"the KV pool is to be {_mib(asked)}; {_mib(max(0, left))} are left, {session}"
        fix = "choose a smaller or quantised model, or lower --max-context"
        if left >= need:
            fix = f"set --pool-size to at most {left // MIB}MiB, or leave it out"
    else:
        tokens = max(0, asked - extra) // each * size
        text = f"a KV pool of {_mib(asked)} holds {tokens} tokens; {session}"
        fix = f"set --pool-size to at least {-(-need // MIB)}MiB"
        if tokens:
            fix += f", or --max-context to at most {tokens}"
    # what the workspace takes beyond the weights is that of very many rows
    if request.temp_bytes > max(request.static_bytes, need) and left + request.temp_bytes >= need:
        fix = f"lower --max-batch or --max-batch-tokens: a step takes {_mib(request.temp_bytes)}"
    return OutOfMemory(f"{text} ({'; '.join(reasons)})", fix=fix)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
