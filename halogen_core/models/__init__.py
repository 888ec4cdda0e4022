"""Model definitions over one parametrised decoder, composed from `spi.Ops`."""

from halogen_core.models.decoder import Decoder
from halogen_core.models.registry import ARCHITECTURES, config_of

__all__ = ["ARCHITECTURES", "Decoder", "config_of"]
