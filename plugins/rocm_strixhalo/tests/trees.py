"""Fake /proc and /sys trees: the profiles A to J of machines that people reported."""

from pathlib import Path

STRIX_HALO_CPU = "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S"
TUNED = {"vram": 536870912, "gtt": 133143986176, "mem_kb": 128643996}
CASES = {
    "A": TUNED,
    "B": {**TUNED, "gtt": 67080552448},
    "C": {"vram": 103079215104, "gtt": 16630415360, "mem_kb": 31 << 20},
    "D": {"vram": 68719476736, "gtt": int(31.22 * 2**30), "mem_kb": 62 << 20},
    "E": {**TUNED, "vram": 8589934592, "mem_kb": 120 << 20},
    "F": {"vram": 4294967296, "gtt": 103079215104, "mem_kb": 124 << 20, "pages": 25165824},
    "G": {
        **TUNED, "gtt": 12 << 30,
        "cmdline": "amdgpu.gttsize=122880 ttm.pages_limit=3145728 amd_iommu=off",
    },
    "H": {**TUNED, "gtt_used": 37580963840, "kfd_proc": []},
    "I": {**TUNED, "module": "amdttm", "cmdline": "ttm.pages_limit=31457280 amd_iommu=off"},
    "J": {
        "vram": 17163091968, "gtt": 33 << 30, "mem_kb": 64 << 20,
        "device": 0x744C, "gfx": 110000, "cpu": "AMD Ryzen 9 9950X 16-Core Processor",
    },
}  # fmt: skip


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tree(root: Path, name: str, **more) -> str:
    """A machine's tree below `root`; returns the root as text."""
    case = {**CASES[name], **more}
    mem = case["mem_kb"]
    device = "sys/class/drm/card1/device"
    write(
        root,
        {
            "proc/meminfo": f"MemTotal: {mem} kB\nMemFree: {mem // 2} kB\n"
            f"MemAvailable: {case.get('available_kb', mem - (4 << 20))} kB\nSwapTotal: 0 kB\n",
            "proc/cmdline": case.get("cmdline", "quiet amd_iommu=off"),
            "proc/sys/kernel/osrelease": case.get("kernel", "6.19.12"),
            "proc/cpuinfo": f"model name\t: {case.get('cpu', STRIX_HALO_CPU)}\n",
            f"{device}/vendor": "0x1002",
            f"{device}/device": hex(case.get("device", 0x1586)),
            f"{device}/mem_info_vram_total": str(case["vram"]),
            f"{device}/mem_info_vram_used": str(case.get("vram_used", 0)),
            f"{device}/mem_info_gtt_total": str(case["gtt"]),
            f"{device}/mem_info_gtt_used": str(case.get("gtt_used", 0)),
            f"{device}/pp_dpm_sclk": case.get("sclk", "0: 600Mhz *\n1: 1100Mhz\n2: 2900Mhz\n"),
            f"{device}/power_dpm_force_performance_level": case.get("level", "auto"),
            f"{device}/hwmon/hwmon3/temp1_input": case.get("temp", "61000"),
            "sys/class/kfd/kfd/topology/nodes/1/properties": f"device_id {case.get('device', 0x1586)}\n"
            f"gfx_target_version {case.get('gfx', 110501)}\nsimd_count {case.get('simds', 80)}\n",
            f"sys/module/{case.get('module', 'ttm')}/parameters/pages_limit": str(
                case.get("pages", 32505856)
            ),
            "dev/kfd": "",
            "dev/dri/renderD128": "",
            "sys/fs/cgroup/memory.max": case.get("cgroup", "max"),
            "sys/fs/cgroup/memory.current": "0",
        },
    )
    processes = root / "sys/class/kfd/kfd/proc"
    processes.mkdir(parents=True)
    for pid in case.get("kfd_proc", ["4242"]):
        (processes / pid).mkdir()
    if mes := case.get("mes"):
        text = f"MES feature version: 1, firmware version: 0x000000{mes}\n"
        write(root, {"sys/kernel/debug/dri/1/amdgpu_firmware_info": text})
    return str(root)
