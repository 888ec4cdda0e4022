#!/usr/bin/env bash
# Fetch into .whl all that halogen and its conformance suite import beyond torch, Triton and numpy, as wheels
# for Python 3.12, to be carried to a GPU machine without a network (about 20 MB).
#
#     benchmarks/gpu/wheels.sh [PIP]
set -euo pipefail
cd "$(dirname "$0")/../.."
PIP=${1:-pip}
mkdir -p .whl
"$PIP" download -q --dest .whl --python-version 3.12 --only-binary=:all: \
  --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 --platform any \
  attrs click fastapi gguf huggingface-hub importlib-metadata jinja2 msgspec packaging pluggy prometheus-client \
  psutil pyyaml rich safetensors tokenizers uvicorn httpx jsonschema llguidance hypothesis pytest pytest-asyncio pytest-timeout \
  pytest-xdist
# the machine's own numpy belongs to its torch
rm -f .whl/numpy-*.whl
du -sh .whl
