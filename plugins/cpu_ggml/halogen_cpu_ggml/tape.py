"""A tape: ops recorded into one ggml graph, its memory planned here, then computed at will.

Used twice: eagerly (one op, computed at once, results stay) and recorded (a whole step, its
intermediates packed by lifetime into one arena, computed once per step).
"""

from __future__ import annotations

import ctypes as C
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from halogen_core.spi import DeviceError
from halogen_cpu_ggml.binding import ALL_THREADS, F32, I8, InitParams, Library
from halogen_cpu_ggml.planning import Request, place
from halogen_cpu_ggml.threads import Team

ALIGN = 64
MAP_NORESERVE = 0x4000
"""Linux's value; Python's mmap module does not name it."""
FREE_OPS = ("view_4d", "permute")
"""They compute nothing, so their place among kernels does not matter."""
MAX_TENSORS, EAGER_TENSORS = 24576, 256
"""Per context; pages that are never touched cost nothing."""
ELEMENT_BYTES = {F32: 4, 1: 2, 26: 4, 27: 8, 30: 2, I8: 1}
DTYPES = {"float32": F32, "int32": 26, "int64": 27, "uint32": 26, "int8": I8, "uint8": I8}


@attrs.define(eq=False)
class Node:
    """The backend's device array: a tensor of a tape, or host memory that any tape may read.

    `shape` is row-major; a recorded node's first axis is the bucket's capacity and `rows` tells
    where the live count of rows lies (an address of an int64).
    """

    shape: tuple[int, ...]
    dtype: int
    tape: Tape | None = None
    tensor: int = 0
    nbytes: int = 0
    born: int = 0
    last_use: int = 0
    base: Node | None = None
    """What this node is a view of."""
    offset: int = 0
    address: int = 0
    memory: NDArray[Any] | None = None
    rows: int = 0
    parts: tuple[Node, ...] = ()
    """Outputs of a several-part linear that nobody has put side by side yet."""
    packed: dict[str, Node] = attrs.field(factory=dict)
    """This array in forms that kernels want (quantised), made once."""
    emitter: Any = None
    """The kernel parameters of the producer, if it can also write a packed form."""

    def root(self) -> Node:
        """The node whose memory this one looks into."""
        node = self
        while node.base is not None:
            node = node.base
        return node


def host_node(array: NDArray[Any]) -> Node:
    """Host memory as a device array; the array is kept, not copied."""
    array = np.ascontiguousarray(array)
    return Node(
        shape=array.shape,
        dtype=DTYPES[array.dtype.name],
        nbytes=array.nbytes,
        address=array.ctypes.data,
        memory=array,
    )


def view_f32(node: Node) -> NDArray[np.float32]:
    """A float32 node's memory as numpy, no copy; valid while the node's memory is."""
    count = math.prod(node.shape)
    if count == 0:
        return np.zeros(node.shape, np.float32)
    buffer = memoryview((C.c_float * count).from_address(node.address))
    flat: NDArray[np.float32] = np.frombuffer(buffer.cast("B"), np.float32, count)
    return flat.reshape(node.shape)


@attrs.define(eq=False)
class Tape:
    """One ggml graph under construction, later ready to compute."""

    lib: Library
    team: Team
    capacity: int
    recording: bool
    context: int = 0
    graph: int = 0
    nodes: list[Node] = attrs.field(factory=list)
    leaves: dict[int, Node] = attrs.field(factory=dict)
    keep: list[Any] = attrs.field(factory=list)
    """Kernel parameters, arrays and weights that must live as long as the graph."""
    pointers: list[tuple[C.Structure, str, Node]] = attrs.field(factory=list)
    """Parameter fields to fill with node addresses."""
    memo: dict[Any, Any] = attrs.field(factory=dict)
    """Things made once per tape, by key."""
    program: list[tuple[int, C.Structure]] = attrs.field(factory=list)
    """Kernels of ours, with parameters, that are not in the graph yet."""
    heavy: bool = False
    """ggml has work for several threads."""
    plan: Any = None
    count: int = 0
    clock: int = 0

    def __attrs_post_init__(self) -> None:
        fn = self.lib.fn
        size = self.capacity * fn["tensor_overhead"]() + (1 << 12)
        size += fn["graph_overhead_custom"](self.capacity, False)
        # calloc'd pages stay virtual until a tensor lands on them
        buffer = np.empty(size, np.uint8)
        self.keep.append(buffer)
        self.context = fn["init"](InitParams(size, buffer.ctypes.data, True))
        self.graph = fn["new_graph_custom"](self.context, self.capacity, False)

    def close(self) -> None:
        """Free the context (its memory is ours)."""
        if self.context:
            self.lib.fn["free"](self.context)
            self.context = 0

    # -- building

    def _count(self) -> None:
        self.count += 1
        # ggml would abort the process; reserve a few for tensors that ggml makes inside
        if self.count > self.capacity - 16:
            raise DeviceError(
                f"a step graph needs more than {self.capacity} tensors",
                code="HRT-3604",
                fix="use cpu_reference for this model and report it",
            )

    def external(self, key: int, dtype: int, ne: Sequence[int], *, keep: Any = None) -> Node:
        """A tensor over memory at address `key` that lives elsewhere; ggml extents, fastest first.

        Made once per tape, type and shape.
        """
        memo = (key, dtype, tuple(ne))
        if memo not in self.memo:
            self._count()
            full = [*ne, 1, 1, 1][:4]
            tensor = self.lib.fn["new_tensor_4d"](self.context, dtype, *full)
            self.lib.set_data(tensor, key)
            self.keep.append(keep)
            node = Node(tuple(reversed(ne)), dtype, self, tensor, address=key)
            self.memo[memo] = node
        node = self.memo[memo]
        assert isinstance(node, Node)
        return node

    def constant(self, array: NDArray[Any]) -> Node:
        """A host array that the tape keeps."""
        return self.use(host_node(array))

    def use(self, node: Node) -> Node:
        """`node` as a tensor of this tape: itself, or a leaf over its memory."""
        if node.tape is self:
            node.root().last_use = self.clock
            return node
        if not node.address:
            raise DeviceError("an array of another captured step was used", code="HRT-3605")
        ne = tuple(reversed(node.shape)) or (1,)
        leaf = self.external(node.address, node.dtype, ne, keep=node)
        leaf.rows, leaf.packed = leaf.rows or node.rows, node.packed
        return leaf

    def op(
        self,
        name: str,
        *args: Any,
        shape: tuple[int, ...],
        dtype: int = F32,
        view: Node | None = None,
        offset: int = 0,
    ) -> Node:
        """Record `ggml_<name>(context, *args)`; nodes among the arguments are used.

        `view` says whose memory the result shares.
        """
        if name not in FREE_OPS:
            self._close_program()
        self.heavy |= name.startswith("mul_mat")
        self._count()
        self.clock += 1
        call = [self.use(a).tensor if isinstance(a, Node) else a for a in args]
        tensor = self.lib.fn[name](self.context, *call)
        self.lib.fn["build_forward_expand"](self.graph, tensor)
        return self._append(tensor, shape, dtype, view=view, offset=offset)

    def _append(
        self,
        tensor: int,
        shape: tuple[int, ...],
        dtype: int,
        *,
        view: Node | None = None,
        offset: int = 0,
    ) -> Node:
        nbytes = math.prod(shape) * ELEMENT_BYTES.get(dtype, 4)
        node = Node(shape, dtype, self, tensor, nbytes, self.clock, self.clock, view, offset)
        node.root().last_use = self.clock
        self.nodes.append(node)
        return node

    def view(self, node: Node, ne: Sequence[int], nb: Sequence[int], offset: int = 0) -> Node:
        """A strided view; extents and byte strides (from axis 1 on) as ggml has them."""
        node = self.use(node)
        full = [*ne, 1, 1, 1][:4]
        strides = [*nb, *([nb[-1] * ne[-1] if nb else node.nbytes] * 3)][:3]
        shape = tuple(reversed(list(ne)))
        return self.op(
            "view_4d", node, *full, *strides, offset, shape=shape, view=node, offset=offset
        )

    def scratch(self, nbytes: int) -> Node:
        """Plain memory, alive from now to its last use."""
        return Node((nbytes,), I8, self, 0, nbytes, self.clock + 1, self.clock + 1)

    def second(self, shape: tuple[int, ...]) -> Node:
        """A float32 array that the next kernel writes beside its result."""
        self._count()
        tensor = self.lib.fn["new_tensor_4d"](self.context, F32, *[*reversed(shape), 1, 1, 1][:4])
        size, born = math.prod(shape) * 4, self.clock + 1
        return Node(shape, F32, self, tensor, size, born, born)

    def custom(
        self,
        kernel: int,
        params: C.Structure,
        *,
        shape: tuple[int, ...],
        reads: dict[str, Node] | None = None,
        writes: dict[str, Node] | None = None,
        out: str = "out",
    ) -> Node:
        """Record one of our kernels; pointer fields of `params` are filled when memory is known."""
        self._count()
        self.clock += 1
        for field, node in (reads or {}).items():
            self.point(params, field, self.use(node))
        full = [*reversed(shape), 1, 1, 1][:4]
        tensor = self.lib.fn["new_tensor_4d"](self.context, F32, *full)
        self.program.append((kernel, params))
        node = self._append(tensor, shape, F32)
        self.point(params, out, node)
        for field, extra in (writes or {}).items():
            self.own(extra)
            self.point(params, field, extra)
        self.keep.append(params)
        return node

    def _close_program(self) -> None:
        """Put the kernels recorded since the last op of ggml's into the graph, as one node."""
        if not self.program:
            return
        crew = self.team.crew
        assert crew is not None
        program = crew.program(self.program)
        self._count()
        address = C.addressof(program)
        tensor = self.lib.fn["custom_4d"](
            self.context, F32, 1, 1, 1, 1, None, 0, crew.entry, ALL_THREADS, address
        )
        self.lib.set_data(tensor, address)
        self.lib.fn["build_forward_expand"](self.graph, tensor)
        self.keep.append(program)
        self.program = []

    def own(self, extra: Node) -> None:
        """Plan memory for a node that has no tensor of its own."""
        extra.last_use = max(extra.last_use, self.clock)
        self.nodes.append(extra)

    def point(self, params: C.Structure, field: str, node: Node) -> None:
        """Fill `params.field` with the address of `node` when it is known."""
        node.root().last_use = max(node.root().last_use, self.clock)
        self.pointers.append((params, field, node))

    def point_last(self, node: Node) -> None:
        """Keep `node` alive to the end: it is the graph's result."""
        node.root().last_use = self.clock + 1

    # -- memory and computing

    def finish(self, arena: Arena) -> int:
        """Place every intermediate, bind pointers, plan the run. Returns the arena bytes used."""
        requests = [
            Request(n.nbytes, n.born, n.last_use if self.recording else self.clock)
            for n in self.nodes
            if n.base is None
        ]
        offsets, size = place(requests, ALIGN)
        self._close_program()
        threads, pool = (self.team.threads, self.team.ggml_pool()) if self.heavy else (1, None)
        plan = self.lib.fn["graph_plan"](self.graph, threads, pool)
        address = arena.reserve(size + plan.work_size + ALIGN)
        roots = (n for n in self.nodes if n.base is None)
        for node, offset in zip(roots, offsets, strict=True):
            node.address = address + offset
        for node in self.nodes:
            if node.base is not None:
                node.address = node.root().address + self._distance(node)
            if node.tensor:
                self.lib.set_data(node.tensor, node.address)
        for params, field, node in self.pointers:
            setattr(params, field, node.address)
        plan.work_data = address + size
        self.plan = plan
        return size + int(plan.work_size)

    def _distance(self, node: Node) -> int:
        total, base = node.offset, node.base
        while base is not None:
            total, base = total + base.offset, base.base
        return total

    def compute(self) -> None:
        """Run the graph once on all threads. Raises DeviceError when ggml reports a failure."""
        status = self.lib.fn["graph_compute"](self.graph, C.byref(self.plan))
        if status:
            raise DeviceError(f"ggml_graph_compute returned {status}", code="HRT-3606")


class Arena(ABC):
    """Where a tape's intermediates live."""

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """An address with `nbytes` writable bytes behind it."""


class PrivateArena(Arena):
    """A fresh array per tape (eager ops), kept by whoever keeps the arena."""

    def reserve(self, nbytes: int) -> int:
        self.memory = np.empty(nbytes + ALIGN, np.uint8)
        address = self.memory.ctypes.data
        return address + (-address) % ALIGN


class SharedArena(Arena):
    """One reservation that all captured steps lie over: they never run at the same time.

    Address space is reserved once, so pointers stay valid; only touched pages take memory.
    """

    def __init__(self, limit: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.map = mmap.mmap(-1, limit, flags=flags)
        self.limit = limit
        self.used = 0
        self.view = np.frombuffer(self.map, np.uint8)

    def reserve(self, nbytes: int) -> int:
        if nbytes > self.limit:
            raise DeviceError(
                f"a step needs {nbytes} bytes of workspace, {self.limit} are reserved",
                code="HRT-3607",
                fix="lower max_batch_tokens",
            )
        self.used = max(self.used, nbytes)
        return int(self.view.ctypes.data)
