# Source before a run: repository and plugins on the path, wheels in .whl (where there are any) installed aside.
if ls .whl/*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
fi
export PYTHONPATH="$PWD:$PWD/plugins/triton_kernels:$PWD/plugins/cuda:$PWD/benchmarks/gpu:/tmp/site:$PYTHONPATH"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-cache
