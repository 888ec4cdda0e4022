"""Models: one parametrised decoder composed from `spi.Ops`, one short file per architecture."""

from halogen_core.models.architectures import ARCHITECTURES, config_of
from halogen_core.models.decoder import Decoder
from halogen_core.models.dense import dense_config, kv_spec
from halogen_core.models.hparams import HParams
from halogen_core.models.rope import rope_spec
from halogen_core.models.weights import DecoderWeights, LayerWeights

__all__ = [
    "ARCHITECTURES",
    "Decoder",
    "DecoderWeights",
    "HParams",
    "LayerWeights",
    "config_of",
    "dense_config",
    "kv_spec",
    "rope_spec",
]
