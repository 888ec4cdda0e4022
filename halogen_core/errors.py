"""Every error a user can meet, with its stable `HRT-nnnn` code.

    HalogenError
    ├── ConfigError       HRT-1xxx   flags, environment, files that contradict or are unknown
    ├── PluginError       HRT-11xx   discovery, version gate, probe, selection
    │   ├── BackendUnavailable
    │   ├── SpiMismatch
    │   └── UnsupportedOp
    ├── ModelError        HRT-2xxx   model files, tokenizers, chat templates
    ├── DeviceError       HRT-3xxx   a device failed while working
    │   ├── DeviceLost
    │   └── Transient
    ├── OutOfMemory       HRT-32xx
    │   └── OutOfDeviceMemory
    └── RequestError      HRT-4xxx   one request is at fault; nobody else is hurt
        ├── Overloaded
        └── EngineUnavailable

A message says what was wrong, the value got, what is allowed and what to do. The catalogue
(cause and fix per code, `halogen explain`) lives in `error_catalogue.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


class HalogenError(Exception):
    """Root of the tree; `code` is stable and documented, `fix` says what to do next."""

    default_code = "HRT-0001"

    def __init__(self, message: str, *, code: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.fix = fix

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text} — {self.fix}" if self.fix else text


class ConfigError(HalogenError):
    """A setting is unknown, contradicts another, or is out of range."""

    default_code = "HRT-1001"


class PluginError(HalogenError):
    """A plugin is broken, incompatible, unknown or misbehaves."""

    default_code = "HRT-1100"


class BackendUnavailable(PluginError):
    """The backend asked for cannot run here; `reasons` says why, one line each."""

    default_code = "HRT-1101"

    def __init__(
        self,
        message: str,
        *,
        reasons: Sequence[str] = (),
        code: str | None = None,
        fix: str | None = None,
    ) -> None:
        detail = f"{message}: {'; '.join(reasons)}" if reasons else message
        super().__init__(detail, code=code, fix=fix)
        self.reasons = tuple(reasons)


class SpiMismatch(PluginError):
    """The plugin was built for an SPI version that this core does not speak."""

    default_code = "HRT-1103"


class UnsupportedOp(PluginError):
    """A backend was asked for a call it does not do (and had said so in `supports`)."""

    default_code = "HRT-1102"


class ModelError(HalogenError):
    """A model file is missing, damaged, foreign or of an unknown kind."""

    default_code = "HRT-2001"


class DeviceError(HalogenError):
    """A device failed while working."""

    default_code = "HRT-3001"


class DeviceLost(DeviceError):
    """The device is gone; the engine must be started anew."""

    default_code = "HRT-3002"


class Transient(DeviceError):
    """The call may succeed when repeated after `retry_after_s` seconds."""

    default_code = "HRT-3003"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class OutOfMemory(HalogenError):
    """Memory that was planned or asked for is not there."""

    default_code = "HRT-3201"


class OutOfDeviceMemory(OutOfMemory):
    """A device pool cannot give what was asked; sizes in bytes."""

    default_code = "HRT-3202"

    def __init__(self, pool: str, *, asked: int, free: int, fix: str | None = None) -> None:
        super().__init__(f"pool `{pool}` was asked for {asked} bytes and has {free} free", fix=fix)
        self.pool, self.asked, self.free = pool, asked, free


class RequestError(HalogenError):
    """One request is invalid; `param` names the field at fault (OpenAI error shape)."""

    default_code = "HRT-4001"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message, code=code, fix=fix)
        self.param = param


class Overloaded(RequestError):
    """The bounded queue is full; retry after `retry_after_s` seconds."""

    default_code = "HRT-4290"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, fix="retry later or raise --max-queue")
        self.retry_after_s = retry_after_s


class EngineUnavailable(RequestError):
    """The engine is starting, draining or being restarted."""

    default_code = "HRT-5030"
