#!/usr/bin/env bash
# Certify the cuda backend on this machine and leave report, log and the small record below $OUT.
#
#     benchmarks/gpu/wheels.sh                 # once, where there is a network
#     OUT=out benchmarks/gpu/conformance.sh    # on the GPU machine, with .whl beside the repository
#
# LEVEL (5), JOBS (14), LIMIT seconds (330), PATIENCE (2: compiling counts as time) and DTYPE (f16) may be set. L1 opens the
# backend in f32, f16 and bf16 whatever DTYPE is; the whole models of L3 hold one mixture of experts whose routing has a
# tie in bf16 (plain torch in bf16 fails it too). A run that meets LIMIT still writes its report, in which the rest is
# NOT_RUN; RESUME=1 goes on with it, and compiled kernels stay in TRITON_CACHE_DIR (/tmp/triton-cache). KEEP_KERNELS=1
# packs them into $OUT, to be unpacked there on a fresh machine of the same kind.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-out}
mkdir -p "$OUT"
PYTHONPATH=${PYTHONPATH:-}
. benchmarks/gpu/setup.sh
export HALOGEN_CACHE_DIR=/tmp/halogen-cache
{
  python3 - <<'PY'
import importlib
import platform

names = """attrs click fastapi gguf halogen_conformance.commands halogen_core.engine.worker halogen_core.server.app
halogen_core.server.serving halogen_cuda.backend httpx importlib_metadata jinja2 jsonschema msgspec numpy packaging
pluggy prometheus_client psutil pytest rich safetensors tokenizers torch triton uvicorn yaml""".split()
missing = []
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as exc:
        missing.append(f"{name}: {exc}")
import torch
import triton

print(f"python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}")
print("\n".join(missing) or "every import is there")
raise SystemExit(bool(missing))
PY
  found=$?
  if [ $found -ne 0 ]; then
    echo "run benchmarks/gpu/wheels.sh first and carry .whl along"
    exit $found
  fi
  # SIGTERM makes it write its report; it has half a minute for that
  timeout -k 30 "${LIMIT:-330}" python3 -m halogen_core.cli conform --backend cuda --level "${LEVEL:-5}" \
    --jobs "${JOBS:-14}" ${RESUME:+--resume} --backend-option "dtype=${DTYPE:-f16}" --patience "${PATIENCE:-2}" \
    --out "$OUT/conformance-cuda"
  status=$?
  [ $status -eq 124 ] && echo "stopped after ${LIMIT:-330} s: RESUME=1 goes on, compiled kernels were kept"
  python3 benchmarks/gpu/conformance_summary.py "$OUT/conformance-cuda" "$OUT"
  [ -n "${KEEP_KERNELS:-}" ] && tar -czf "$OUT/triton-cache.tgz" -C "$TRITON_CACHE_DIR" .
  echo "exit status $status"
  exit $status
} 2>&1 | tee "$OUT/conformance-cuda.log"
exit "${PIPESTATUS[0]}"
