"""Opening `ascend`: the real device or the simulator, as the device string says and never else."""

from __future__ import annotations

import logging
from typing import Any

from halogen_ascend.device_string import parse_device
from halogen_core.spi import Backend, BackendOptions

log = logging.getLogger(__name__)


def create(options: BackendOptions) -> Backend[Any]:
    """The backend that `options.device` names; the choice is logged once."""
    choice = parse_device(options.device)
    if choice.runtime == "sim":
        from halogen_ascend.options import sim_options
        from halogen_ascend.sim.backend import SimBackend

        made = sim_options(options)
        log.info("ascend runtime: simulator, part %s", made.part.name)
        return SimBackend.open(made)
    from halogen_ascend.npu.backend import open_npu

    log.info("ascend runtime: torch_npu, device %d", choice.index)
    return open_npu(choice.index, options)
