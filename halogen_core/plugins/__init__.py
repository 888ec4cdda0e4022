"""Plugin discovery, version gate, isolated probe and backend selection."""

from halogen_core.plugins.loading import Plugin, PluginOptions, PluginRegistry, PluginStatus
from halogen_core.plugins.manifest import Manifest
from halogen_core.plugins.packs import install_packs
from halogen_core.plugins.selection import Candidate, candidates, create_backend, select

__all__ = [
    "Candidate",
    "Manifest",
    "Plugin",
    "PluginOptions",
    "PluginRegistry",
    "PluginStatus",
    "candidates",
    "create_backend",
    "install_packs",
    "select",
]
