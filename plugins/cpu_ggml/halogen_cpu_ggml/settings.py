"""Options of this backend, checked: threads, pinning, kernels."""

from __future__ import annotations

import platform

import attrs

from halogen_core.spi import BackendOptions, ConfigError
from halogen_cpu_ggml import locking, native
from halogen_cpu_ggml.threads import usable_threads

SWITCH = {"on": True, "off": False}


@attrs.frozen(kw_only=True)
class Settings:
    """What `create` was asked for."""

    threads: int
    pinned: bool = False
    kernels: str = "auto"
    """Instruction set of our kernels; `off`: ggml's own ops only."""
    mlock: str = "auto"
    """Whether weights and KV are locked into memory; `auto`: as far as the system allows."""

    @classmethod
    def of(cls, options: BackendOptions) -> Settings:
        """Raises ConfigError (HRT-3603) for an unknown key or value."""
        if options.device not in (None, "cpu_ggml", "cpu_ggml:0", "ggml", "ggml:0"):
            raise ConfigError(
                f"device is `{options.device}`; `cpu_ggml` has only `cpu_ggml:0`",
                code="HRT-3603",
                fix="leave --device out",
            )
        extra = dict(options.extra)
        threads = options.threads or usable_threads()
        _choice(extra, "dtype", ("f32",))
        settings = cls(
            threads=threads,
            pinned=_switch(extra, "pin", default=False),
            kernels=_choice(extra, "kernels", kernel_choices()),
            mlock=_choice(extra, "mlock", locking.CHOICES),
        )
        if extra:
            raise ConfigError(
                f"cpu_ggml does not know the option `{next(iter(extra))}`; "
                "it knows dtype, kernels, mlock, pin",
                code="HRT-3603",
            )
        if not 1 <= threads <= 512:
            raise ConfigError(f"threads is {threads}; 1 to 512 are possible", code="HRT-3603")
        return settings


def kernel_choices() -> tuple[str, ...]:
    """What the option `kernels` takes on this kind of machine."""
    return ("auto", *native.isas(platform.machine()), "off")


def _switch(extra: dict[str, str], key: str, *, default: bool) -> bool:
    return SWITCH[_choice(extra, key, ("on", "off") if default else ("off", "on"))]


def _choice(extra: dict[str, str], key: str, choices: tuple[str, ...]) -> str:
    value = extra.pop(key, choices[0])
    if value not in choices:
        raise ConfigError(
            f"cpu_ggml option `{key}` is `{value}`; it takes {', '.join(choices)}", code="HRT-3603"
        )
    return value
