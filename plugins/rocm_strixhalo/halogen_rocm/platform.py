"""What the kernel says about an AMD GPU and this machine's memory; everything below one root.

Sizes in bytes. A fact that cannot be read is None, never a guess.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

STRIX_HALO = (0x1002, 0x1586)
GFX1151 = 110501
PAGE = 4096


@attrs.frozen(kw_only=True)
class Gpu:
    """One AMD GPU of /sys/class/drm with its KFD node."""

    card: str
    device_id: int
    gfx: int | None = None
    """KFD's `gfx_target_version`, e.g. 110501 for gfx1151."""
    simd_count: int | None = None
    vram_total: int = 0
    vram_used: int = 0
    gtt_total: int = 0
    gtt_used: int = 0
    path: Path = Path()

    @property
    def is_strix_halo(self) -> bool:
        return self.device_id == STRIX_HALO[1] or self.gfx == GFX1151

    @property
    def arch(self) -> str:
        """`gfx1151` for 110501."""
        if self.gfx is None:
            return "unknown"
        major, minor, step = self.gfx // 10000, self.gfx // 100 % 100, self.gfx % 100
        return f"gfx{major}{minor:x}{step:x}"


@attrs.frozen(kw_only=True)
class Platform:
    """All that checks and the memory rules need."""

    gpus: tuple[Gpu, ...]
    mem_total: int | None
    mem_available: int | None
    swap_total: int
    cgroup_limit: int | None
    """Of the control group that leaves this process the least, its own or one around it."""
    cgroup_used: int
    """Less what it would drop first (file cache)."""
    cmdline: str
    kernel: str
    modules: frozenset[str]
    pages_limit: int | None
    """Of module ttm or amdttm, in pages."""
    gpu_processes: tuple[str, ...] | None
    """Process ids with KFD contexts; None: cannot be listed."""
    has_kfd: bool
    render_nodes: tuple[str, ...]
    cpu: str
    """Its model name; empty where it is not told."""
    on_bus: bool
    """A Strix Halo's GPU is a PCI device here, whether or not a driver has it."""

    @property
    def strix_halo(self) -> Gpu | None:
        """The integrated GPU this backend is for."""
        return next((gpu for gpu in self.gpus if gpu.is_strix_halo), None)

    @property
    def has_strix_halo_cpu(self) -> bool:
        """Whether the CPU is of a chip that has such a GPU."""
        return "RYZEN AI MAX" in self.cpu.upper()

    @property
    def memory_module(self) -> str:
        """The kernel module whose `pages_limit` counts here: distributors' kernels rename it."""
        return "amdttm" if "amdttm" in self.modules and "ttm" not in self.modules else "ttm"


def read_platform(root: str = "/") -> Platform:
    """Read everything below `root`."""
    top = Path(root)
    lines = re.findall(r"(\w+):\s+(\d+) kB", text(top / "proc/meminfo"))
    meminfo = {key: int(value) * 1024 for key, value in lines}
    limit, used = _control_group(top)
    modules = top / "sys/module"
    processes = top / "sys/class/kfd/kfd/proc"
    return Platform(
        gpus=tuple(_gpus(top)),
        mem_total=meminfo.get("MemTotal"),
        mem_available=meminfo.get("MemAvailable"),
        swap_total=meminfo.get("SwapTotal", 0),
        cgroup_limit=limit,
        cgroup_used=used,
        cmdline=text(top / "proc/cmdline").strip(),
        kernel=text(top / "proc/sys/kernel/osrelease").strip(),
        modules=frozenset(p.name for p in modules.iterdir()) if modules.is_dir() else frozenset(),
        pages_limit=_first_number(
            modules / "ttm/parameters/pages_limit", modules / "amdttm/parameters/pages_limit"
        ),
        gpu_processes=tuple(sorted(p.name for p in processes.iterdir()))
        if processes.is_dir()
        else None,
        has_kfd=(top / "dev/kfd").exists(),
        render_nodes=tuple(sorted(p.name for p in (top / "dev/dri").glob("renderD*"))),
        cpu=_cpu(top),
        on_bus=any(
            (_hex(vendor), _hex(vendor.with_name("device"))) == STRIX_HALO
            for vendor in (top / "sys/bus/pci/devices").glob("*/vendor")
        ),
    )


def _cpu(root: Path) -> str:
    found = re.search(r"^model name\s*: (.*)$", text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else ""


def compaction_stalls(root: str = "/") -> int:
    """How often an allocation waited for memory to be compacted since boot; 0 where unknown."""
    found = re.search(r"^compact_stall (\d+)$", text(Path(root, "proc/vmstat")), re.MULTILINE)
    return int(found.group(1)) if found else 0


def text(path: Path) -> str:
    """A file's text; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _control_group(root: Path) -> tuple[int | None, int]:
    """(limit, used) of the tightest control group around this process, version 2."""
    mount = root / "sys/fs/cgroup"
    own = re.search(r"^0::/(.*)$", text(root / "proc/self/cgroup"), flags=re.MULTILINE)
    group = mount / own[1] if own else mount
    found = []
    for folder in (group, *group.parents):
        limit = _first_number(folder / "memory.max")
        if limit is not None:
            cache = re.search(r"^inactive_file (\d+)$", text(folder / "memory.stat"), re.MULTILINE)
            used = _first_number(folder / "memory.current") or 0
            found.append((limit, max(0, used - int(cache[1] if cache else 0))))
        if folder == mount:
            break
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        value = text(path).strip()
        if value.isdecimal():
            return int(value)
    return None


def _gpus(root: Path) -> list[Gpu]:
    nodes = _kfd_nodes(root)
    found = []
    # an APU's card may be number 0, 1 or 128
    for card in sorted((root / "sys/class/drm").glob("card*")):
        device = card / "device"
        if not re.fullmatch(r"card\d+", card.name) or _hex(device / "vendor") != STRIX_HALO[0]:
            continue
        number = _hex(device / "device") or 0
        node = nodes.get(number, {})
        found.append(
            Gpu(
                card=card.name,
                device_id=number,
                gfx=node.get("gfx_target_version"),
                simd_count=node.get("simd_count"),
                path=device,
                **{
                    key: _first_number(device / f"mem_info_{key}") or 0
                    for key in ("vram_total", "vram_used", "gtt_total", "gtt_used")
                },
            )
        )
    return found


def _hex(path: Path) -> int | None:
    value = text(path).strip()
    return int(value, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]+", value) else None


def _kfd_nodes(root: Path) -> dict[int, dict[str, int]]:
    """KFD properties by PCI device id."""
    nodes = {}
    for properties in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        pairs = re.findall(r"^(\w+) (\d+)$", text(properties), flags=re.MULTILINE)
        values = {key: int(value) for key, value in pairs}
        if values.get("gfx_target_version"):
            nodes[values.get("device_id", 0)] = values
    return nodes
