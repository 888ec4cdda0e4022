"""Capability profiles: what a file may hold, how a bad one is refused, bytes on the device."""

import json

import numpy as np
import pytest

from halogen_core.cli.profiles import find_profile, read_profile
from halogen_core.errors import ConfigError
from halogen_core.spi import QuantTensor

GOOD = {
    "name": "p",
    "backend": "b",
    "device": "d",
    "source": "s",
    "memory": {"free": 100, "reserve": 10},
    "bandwidth": {"best": 1e9},
    "compute": {"tuned": 1e12},
    "weight_formats": {"Q8_0": "native", "F8_E4M3": "emulated"},
    "packed_bits": {"F32": 16},
    "kv_dtypes": ["bf16"],
    "kv_block_sizes": [16],
    "head_dim_max": 256,
    "fallback_ops": {"add": "plain torch"},
}


def written(tmp_path, **changes):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return path


def test_bytes_on_the_device(tmp_path):
    profile = read_profile(written(tmp_path))

    def size(form, *shape, stored):
        data = np.zeros(stored, np.uint8)
        return profile.packed_bytes(QuantTensor(format=form, shape=shape, data=data))

    assert size("Q8_0", 2, 32, stored=68) == 68
    assert size("F32", 2, 32, stored=256) == 128
    assert size("F8_E4M3", 2, 32, stored=64) == 128
    assert size("F32", 32, stored=128) == 128, "norms stay exact"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": 3}, "memory is `3`"),
        ({"memory": {"reserve": 1}}, "`free` is missing"),
        ({"memory": {"free": "100", "reserve": 1}}, "memory.free is `100`"),
        ({"memory": {"free": -1, "reserve": 1}}, "memory.free is `-1`"),
        ({"memory": {"free": 1e99, "reserve": 1}}, "memory.free"),
        ({"bandwidth": [1]}, "bandwidth is"),
        ({"bandwidth": {"best": "fast"}}, "bandwidth.best is `fast`"),
        ({"bandwidth": {"best": 0}}, "bandwidth.best is `0`"),
        ({"compute": {"peak": None}}, "compute.peak is `None`"),
        ({"compute": {"peak": float("nan")}}, "compute.peak is `nan`"),
        ({"weight_formats": 3}, "weight_formats is `3`"),
        ({"packed_bits": {"Q4_K": True}}, "packed_bits.Q4_K"),
        ({"kv_dtypes": []}, "kv_dtypes"),
        ({"kv_dtypes": "bf16"}, "kv_dtypes"),
        ({"kv_dtypes": ["q2"]}, "allowed are some of f32"),
        ({"kv_block_sizes": [0]}, "kv_block_sizes"),
        ({"kv_block_sizes": []}, "kv_block_sizes"),
        ({"head_dim_max": None}, "head_dim_max"),
        ({"fallback_ops": ["add"]}, "fallback_ops"),
        ({"name": 3}, "name is `3`"),
    ],
)
def test_what_cannot_be_meant_is_named(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_profile(written(tmp_path, **changes))
    assert caught.value.code == "HRT-3422"


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe"])
def test_what_is_no_profile_is_refused(tmp_path, raw):
    path = tmp_path / "p.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="cannot be used"):
        find_profile(str(path))
    with pytest.raises(ConfigError, match="none.json"):
        find_profile(str(tmp_path / "none.json"))
