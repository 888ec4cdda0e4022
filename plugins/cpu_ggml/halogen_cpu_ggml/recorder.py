"""Which tape an op goes to: the step being recorded, or a tape of its own that runs at once."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from halogen_cpu_ggml.binding import F32, Library
from halogen_cpu_ggml.tape import EAGER_TENSORS, Node, PrivateArena, Tape
from halogen_cpu_ggml.threads import Team
from halogen_cpu_ggml.weights import Part


@attrs.define(eq=False)
class Recorder:
    """Hands out tapes; `current` is set while a step is recorded."""

    lib: Library
    team: Team
    current: Tape | None = None

    @contextmanager
    def tape(self) -> Iterator[Tape]:
        """The tape for one op. Eager: computed on leaving, its nodes then hold host memory."""
        if self.current is not None:
            yield self.current
            return
        tape = Tape(self.lib, self.team, EAGER_TENSORS, recording=False)
        try:
            yield tape
            arena = PrivateArena()
            tape.finish(arena)
            tape.compute()
            for node in tape.nodes:
                node.memory, node.emitter = arena.memory, None
        finally:
            tape.close()


def weight_tensor(tape: Tape, part: Part) -> Node:
    """A weight part as a ggml tensor [..., N, K], straight over its bytes."""
    return tape.external(
        part.data.ctypes.data, part.ggml_type, tuple(reversed(part.shape)), keep=part
    )


def joined(tape: Tape, node: Node) -> Node:
    """The parts of a lazy linear side by side: [T, sum of N]."""
    if not node.parts:
        return tape.use(node)
    if "joined" not in node.packed:
        whole = tape.use(node.parts[0])
        for piece in node.parts[1:]:
            shape = (whole.shape[0], whole.shape[1] + piece.shape[1])
            whole = tape.op("concat", whole, piece, 0, shape=shape)
        whole.rows = node.rows
        node.packed["joined"] = whole
    return tape.use(node.packed["joined"])


def columns(tape: Tape, node: Node, splits: tuple[int, ...]) -> list[Node]:
    """Column ranges of [T, sum(splits)]: the lazy parts themselves if they fit, else views."""
    if node.parts and tuple(p.shape[1] for p in node.parts) == splits:
        return [tape.use(p) for p in node.parts]
    whole = joined(tape, node)
    t, width = whole.shape
    views, at = [], 0
    for n in splits:
        views.append(tape.view(whole, (n, t), (width * 4,), at * 4))
        at += n
    return views


def in_order(tape: Tape, x: Node, part: Part) -> Node:
    """X [T, K] with its columns as the part's matrix has them; made once per order."""
    if part.perm is None:
        return x
    t, k = x.shape
    key = f"columns {hash(part.perm.tobytes())}"
    made = x.packed.get(key)
    if made is None or made.tape is not tape:
        turned = tape.op("permute", x, 1, 0, 2, 3, shape=(k, t), view=x)
        turned = tape.op("cont", turned, shape=(k, t))
        picked = tape.op("get_rows", turned, tape.constant(part.perm), shape=(k, t))
        made = tape.op("permute", picked, 1, 0, 2, 3, shape=(t, k), view=picked)
        made = x.packed[key] = tape.op("cont", made, shape=(t, k))
        made.rows = x.rows
    return made


def rows_address(tape: Tape, node: Node) -> int:
    """Where the live number of rows of `node` lies."""
    if node.rows:
        return node.rows
    key = ("rows", node.shape[0])
    if key not in tape.memo:
        tape.memo[key] = C.c_int64(node.shape[0])
    return C.addressof(tape.memo[key])


def column_total(parts: tuple[Part, ...]) -> int:
    """Output features of a stacked weight."""
    return sum(p.outputs for p in parts)


def empty_like(shape: tuple[int, ...], **fields: Any) -> Node:
    """An array without elements (steps of no tokens), made without ggml."""
    import numpy as np

    memory = np.zeros(shape, np.float32)
    return Node(shape, F32, address=memory.ctypes.data, memory=memory, **fields)
