"""Kernel packs: ops that a plugin gives to somebody else's backend."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from halogen_core.plugins.loading import PluginRegistry
from halogen_core.spi import Backend, KernelPack, OpImplementation, TakesKernels

log = logging.getLogger(__name__)


def install_packs(registry: PluginRegistry, name: str, backend: Backend[Any]) -> None:
    """Give `backend` (called `name`) the packs that plugins have for it, best last.

    A pack that cannot be loaded is logged and left out: the backend's own op serves.
    """
    if not isinstance(backend, TakesKernels):
        return
    offers = [o for _, o in registry.collect("halogen_ops", backend=name) if o.backend == name]
    for offer in sorted(offers, key=lambda offer: offer.priority):
        try:
            pack = _load(offer, backend)
        except Exception as exc:  # a vendor's library raises anything while it loads
            log.warning("kernel pack `%s` for `%s` is left out: %s", offer.factory, name, exc)
        else:
            backend.install(pack)


def _load(offer: OpImplementation, backend: Backend[Any]) -> KernelPack:
    make, supports = _attribute(offer.factory), _attribute(offer.supports)
    return KernelPack(
        op=offer.op,
        name=offer.factory.partition(":")[0],
        call=make(backend),
        supports=supports,
    )


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
