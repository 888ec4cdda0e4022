"""What each `HRT-nnnn` code means, why it happens and how to mend it (`halogen explain`).

Ranges: 10xx configuration, 11xx plugins, 20xx-23xx model files, 24xx model definitions, 30xx devices,
31xx-36xx backends' memory and numerics, 40xx-42xx requests, 50xx engine and server, 60xx conformance,
70xx-71xx vendor plugins.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class CatalogueEntry:
    """One code for people."""

    title: str
    cause: str
    fix: str


CATALOGUE: dict[str, CatalogueEntry] = {
    "HRT-0001": CatalogueEntry(
        "unexpected failure",
        "halogen met a state that it does not expect",
        "report it with the output of `halogen doctor`",
    ),
    # -- 11xx plugins
    "HRT-1100": CatalogueEntry(
        "plugin misbehaves",
        "a plugin returned something its hook does not allow",
        "`halogen plugins list` names it; upgrade it or block it with --no-plugin",
    ),
    "HRT-1101": CatalogueEntry(
        "backend cannot run here",
        "its probe found no usable device, driver or library",
        "read the reasons; `halogen doctor` checks the platform. halogen never replaces an "
        "explicitly chosen backend by another device",
    ),
    "HRT-1102": CatalogueEntry(
        "kernel not found for op",
        "the backend has no implementation for this combination of dtype, format and shape",
        "`halogen plugins list --json` and the placement report show what it can do; choose another "
        "format or backend, or allow fallbacks",
    ),
    "HRT-1103": CatalogueEntry(
        "plugin speaks another SPI version",
        "the plugin was built for a newer or older core",
        "install the plugin's release for this core, or upgrade halogen-core",
    ),
    "HRT-1104": CatalogueEntry(
        "plugin manifest not found",
        "the installed package lacks `halogen-backend.toml` or cannot be found at all",
        "reinstall the plugin; vendors: ship the manifest as package data",
    ),
    "HRT-1105": CatalogueEntry(
        "plugin manifest is invalid",
        "`halogen-backend.toml` has missing, unknown or malformed keys",
        "vendors: see docs/tutorials/write-a-backend.md",
    ),
    "HRT-1106": CatalogueEntry(
        "plugin wants another Python or torch",
        "the manifest's version range excludes what is installed",
        "install a matching version, or another release of the plugin",
    ),
    "HRT-1107": CatalogueEntry(
        "backend is not installed",
        "no installed plugin offers a backend of that name",
        "check the spelling with `halogen plugins list`, or pip install the plugin",
    ),
    # -- 20xx-23xx model files
    "HRT-2001": CatalogueEntry(
        "model cannot be used",
        "a model file is missing, damaged, foreign or of an unknown kind",
        "read the message; `halogen inspect FILE` shows what the file says of itself",
    ),
    # -- 30xx devices
    "HRT-3001": CatalogueEntry(
        "device failed",
        "an operation failed on the device",
        "`halogen doctor` checks driver and health; the engine restarts when serving",
    ),
    "HRT-3002": CatalogueEntry(
        "device lost",
        "the device reset or disappeared",
        "check the kernel log and power; the engine restarts when serving",
    ),
    "HRT-3003": CatalogueEntry(
        "transient device fault",
        "the device was busy or briefly unavailable",
        "the call is repeated; if it persists, see `halogen doctor`",
    ),
    # -- 31xx-36xx memory
    "HRT-3201": CatalogueEntry(
        "out of memory",
        "weights, workspace and KV pool do not fit",
        "use a smaller context or pool, or a more strongly quantised model; the message has the sums",
    ),
    "HRT-3202": CatalogueEntry(
        "device pool exhausted",
        "a pool was asked for more than it has left",
        "lower --max-batch-tokens or the KV pool",
    ),
    # -- 40xx-42xx requests
    "HRT-4001": CatalogueEntry(
        "invalid request",
        "a field of the request is missing, of the wrong type or out of range",
        "the message names the field, the value and what is allowed",
    ),
    "HRT-4290": CatalogueEntry(
        "queue full",
        "more requests wait than --max-queue allows",
        "retry after the time in Retry-After, or raise --max-queue",
    ),
    # -- 50xx engine and server
    "HRT-5030": CatalogueEntry(
        "engine unavailable",
        "the engine is starting, draining or being restarted",
        "retry; /ready says when it serves again",
    ),
}
