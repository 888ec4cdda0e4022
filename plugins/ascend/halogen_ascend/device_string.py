"""`ascend`, `ascend:0`, `ascend:sim`, `ascend:sim:910B2`: which runtime and which part."""

from __future__ import annotations

import attrs

from halogen_core.spi import ConfigError

DEFAULT_PROFILE = "910B2"


@attrs.frozen(kw_only=True)
class DeviceChoice:
    """`runtime` is `npu` or `sim`; `index` of a real device, `profile` of a simulated part."""

    runtime: str
    index: int = 0
    profile: str = DEFAULT_PROFILE


def parse_device(text: str | None) -> DeviceChoice:
    """The choice that a device string makes; None means the first real device, never a simulator.

    Raises `ConfigError` (HRT-7101) for anything else; whether the part exists is asked later.
    """
    name, *rest = (text or "ascend").split(":")
    match rest:
        case _ if name != "ascend":
            pass
        case []:
            return DeviceChoice(runtime="npu")
        case ["sim"]:
            return DeviceChoice(runtime="sim")
        case ["sim", profile] if profile:
            return DeviceChoice(runtime="sim", profile=profile)
        case [digits] if digits.isdecimal():
            return DeviceChoice(runtime="npu", index=int(digits))
    raise ConfigError(
        f"device `{text}` is not an ascend device; allowed: `ascend`, `ascend:INDEX`, "
        "`ascend:sim`, `ascend:sim:PROFILE`",
        code="HRT-7101",
        fix="for the simulator write --device ascend:sim:910B2",
    )
