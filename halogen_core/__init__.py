"""halogen: a hardware-abstraction plugin framework for LLM inference (device-neutral core)."""

__version__ = "0.1.0"
