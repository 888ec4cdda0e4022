"""Every op of the seam on the simulated device, each a launch of micro-tasks."""

from __future__ import annotations

import attrs
import torch

from halogen_ascend.errors import OutOfRange
from halogen_ascend.sim import vector
from halogen_ascend.sim.attention_ops import AttentionOps
from halogen_ascend.sim.buffer import DeviceBuffer
from halogen_ascend.sim.cube import matmul
from halogen_ascend.sim.launcher import Meta, Packed, row_bytes
from halogen_ascend.sim.moe import grouped_mlp, route
from halogen_ascend.sim.sample_op import launch_sample
from halogen_ascend.sim.signatures import refuse_moe
from halogen_ascend.sim.tasks import Program
from halogen_ascend.sim.weights import Experts, Weight
from halogen_core.spi import (
    Activation,
    MoESpec,
    Sampled,
    StepBatch,
    UnsupportedOp,
)


@attrs.define(eq=False, slots=False)
class SimOps(AttentionOps):
    """The op table."""

    def embed(self, token_ids: DeviceBuffer, table: Packed, *, scale: float = 1.0) -> DeviceBuffer:
        weight = _weight(table, "embed")
        out = self.new(token_ids.shape[0], weight.k)

        def build(_: StepBatch | None) -> Program:
            ids = self.device.read(token_ids, "embed", "token_ids").long()
            _check_ids(ids, weight.n)
            target = self.device.write(out, "embed")

            def work(a: int, b: int) -> None:
                target[a:b] = weight.rows(ids[a:b]) * scale

            row = weight.k * 2
            return self.rows("embed", len(ids), row, work, hbm=row)

        self.device.submit("embed", build)
        return out

    def rms_norm(self, x: DeviceBuffer, weight: Packed, *, eps: float) -> DeviceBuffer:
        out = self.new(*x.shape)

        def build(_: StepBatch | None) -> Program:
            source, gamma = self.read(x, "rms_norm", "x"), self.vector(weight, "rms_norm")
            target = self.device.write(out, "rms_norm")

            def work(a: int, b: int) -> None:
                target[a:b] = vector.rms_norm(source[a:b], gamma, eps)

            return self.rows("rms_norm", len(source), 2 * row_bytes(x), work)

        self.device.submit("rms_norm", build)
        return out

    def add_rms_norm(
        self, x: DeviceBuffer, residual: DeviceBuffer, weight: Packed, *, eps: float
    ) -> tuple[DeviceBuffer, DeviceBuffer]:
        out, total = self.new(*x.shape), self.new(*x.shape)

        def build(_: StepBatch | None) -> Program:
            left = self.read(x, "add_rms_norm", "x").float()
            right = self.read(residual, "add_rms_norm", "residual").float()
            gamma = self.vector(weight, "add_rms_norm")
            normed, summed = (self.device.write(b, "add_rms_norm") for b in (out, total))

            def work(a: int, b: int) -> None:
                summed[a:b] = left[a:b] + right[a:b]
                normed[a:b] = vector.rms_norm(summed[a:b], gamma, eps)

            return self.rows("add_rms_norm", len(left), 4 * row_bytes(x), work)

        self.device.submit("add_rms_norm", build)
        return out, total

    def add(self, x: DeviceBuffer, y: DeviceBuffer) -> DeviceBuffer:
        out = self.new(*x.shape)

        def build(_: StepBatch | None) -> Program:
            left, right = self.read(x, "add", "x").float(), self.read(y, "add", "y").float()
            target = self.device.write(out, "add")

            def work(a: int, b: int) -> None:
                target[a:b] = left[a:b] + right[a:b]

            return self.rows("add", len(left), 3 * row_bytes(x), work)

        self.device.submit("add", build)
        return out

    def linear(
        self, x: DeviceBuffer, weight: Packed, *, bias: Packed | None = None
    ) -> DeviceBuffer:
        matrix = _weight(weight, "linear")
        out = self.new(x.shape[0], matrix.n)
        self.device.submit("linear", lambda _: self._linear("linear", x, matrix, out, bias))
        return out

    def gated_act(self, gate_up: DeviceBuffer, kind: Activation) -> DeviceBuffer:
        out = self.new(gate_up.shape[0], gate_up.shape[1] // 2)
        self.device.submit("gated_act", lambda _: self._gated(gate_up, out, kind))
        return out

    def mlp(self, x: DeviceBuffer, gate_up: Packed, down: Packed, kind: Activation) -> DeviceBuffer:
        first, last = _weight(gate_up, "mlp"), _weight(down, "mlp")
        inner = self.new(x.shape[0], first.n)
        acted = self.new(x.shape[0], last.k)
        out = self.new(x.shape[0], last.n)

        def build(_: StepBatch | None) -> Program:
            fused = self._linear("mlp", x, first, inner, None)
            fused.then(self._gated(inner, acted, kind))
            return fused.then(self._linear("mlp", acted, last, out, None))

        self.device.submit("mlp", build)
        return out

    def moe(
        self, x: DeviceBuffer, router: Packed, gate_up: Packed, down: Packed, spec: MoESpec
    ) -> DeviceBuffer:
        refuse_moe(spec)
        gate = _weight(router, "moe")
        logits = self.device.empty((x.shape[0], gate.n), "f32")
        self.device.submit("moe_router", lambda _: self._router(x, gate, logits))
        out = self.new(*x.shape)
        experts = (_experts(gate_up), _experts(down))

        def build(_: StepBatch | None) -> Program:
            source = self.read(x, "moe", "x")
            weights, chosen = route(self.device.read(logits, "moe", "logits"), spec)
            target = self.device.write(out, "moe")
            graph, parts = grouped_mlp(self.device, source, chosen, experts, spec)

            def work(a: int, b: int) -> None:
                total = torch.zeros(b - a, parts.shape[2])
                for choice in range(spec.top_k):
                    total += weights[a:b, choice, None] * parts[a:b, choice]
                target[a:b] = total

            row = row_bytes(x) * (spec.top_k + 1)
            return graph.then(self.rows("moe_combine", len(source), row, work))

        self.device.submit("moe", build)
        return out

    def select_rows(self, x: DeviceBuffer, meta: Meta) -> DeviceBuffer:
        out = self.new(meta.logit_rows.shape[0], *x.shape[1:])

        def build(_: StepBatch | None) -> Program:
            source = self.read(x, "select_rows", "x")
            rows = self.device.read(meta.logit_rows, "select_rows", "logit_rows").long()
            target = self.device.write(out, "select_rows")

            def work(a: int, b: int) -> None:
                target[a:b] = source[rows[a:b]]

            return self.rows("select_rows", len(rows), 2 * row_bytes(x), work)

        self.device.submit("select_rows", build)
        return out

    def logits(
        self, x: DeviceBuffer, weight: Packed, *, scale: float = 1.0, softcap: float | None = None
    ) -> DeviceBuffer:
        matrix = _weight(weight, "logits")
        out = self.device.empty((x.shape[0], matrix.n), "f32")

        def epilogue(tile: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
            tile = tile * scale
            return tile if softcap is None else softcap * torch.tanh(tile / softcap)

        def build(_: StepBatch | None) -> Program:
            source = self.read(x, "logits", "x")
            target = self.device.write(out, "logits")
            return matmul(
                "logits", source, matrix, target, part=self.device.part, epilogue=epilogue
            )

        self.device.submit("logits", build)
        return out

    def sample(self, logits: DeviceBuffer, meta: Meta) -> Sampled[DeviceBuffer]:
        return launch_sample(self, logits, meta)

    # -- pieces
    def _linear(
        self, op: str, x: DeviceBuffer, weight: Weight, out: DeviceBuffer, bias: Packed | None
    ) -> Program:
        shift = self.optional(bias, op)

        def epilogue(tile: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
            return tile if shift is None else tile + shift[n0:n1]

        source = self._operand(x, op, weight)
        target = self.device.write(out, op)
        return matmul(
            op,
            source,
            weight,
            target,
            part=self.device.part,
            epilogue=epilogue,
        )

    def _router(self, x: DeviceBuffer, gate: Weight, logits: DeviceBuffer) -> Program:
        source, target = self._operand(x, "moe", gate), self.device.write(logits, "moe")
        # softmax turns an absolute error of a logit into a relative one of a weight
        part, exact = self.device.part, torch.float64
        return matmul("moe_router", source, gate, target, part=part, accumulate=exact)

    def _gated(self, gate_up: DeviceBuffer, out: DeviceBuffer, kind: Activation) -> Program:
        source = self.read(gate_up, "gated_act", "gate_up")
        target = self.device.write(out, "gated_act")

        def work(a: int, b: int) -> None:
            target[a:b] = vector.gated(source[a:b], kind)

        return self.rows("gated_act", len(source), 2 * row_bytes(gate_up), work)

    def _operand(self, x: DeviceBuffer, op: str, weight: Weight) -> torch.Tensor:
        source = self.read(x, op, "x")
        if source.shape[-1] != weight.k:
            raise UnsupportedOp(
                f"`{op}` multiplies x {list(source.shape)} by a weight "
                f"[{weight.n}, {weight.k}]: the inner sizes differ",
                fix="the model definition and the checkpoint disagree",
            )
        return source


def _weight(packed: Packed, op: str) -> Weight:
    if not isinstance(packed.payload, Weight):
        raise UnsupportedOp(
            f"`{op}` wants a matrix, got a weight of role `{packed.role}`",
            fix="pack it as linear or embedding",
        )
    return packed.payload


def _experts(packed: Packed) -> Experts:
    if not isinstance(packed.payload, Experts):
        raise UnsupportedOp(
            f"`moe` wants experts, got a weight of role `{packed.role}`", fix="pack it as experts"
        )
    return packed.payload


def _check_ids(ids: torch.Tensor, vocab: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise OutOfRange(
            f"`embed`: token {int(wrong[0])} is outside the vocabulary of {vocab}",
            fix="the tokenizer and the model do not belong together",
        )
