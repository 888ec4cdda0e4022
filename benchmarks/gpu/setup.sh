# Source before a run: repository and plugins on the path, wheels in .whl (where there are any) installed
# aside, and the metadata by which plugins are found.
if ls .whl/*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
fi
note() { # distribution, version, entry points
  mkdir -p "/tmp/site/$1-$2.dist-info"
  printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$2" >"/tmp/site/$1-$2.dist-info/METADATA"
  printf '%b' "$3" >"/tmp/site/$1-$2.dist-info/entry_points.txt"
}
note halogen_core 0.1.0 ''
note halogen_cuda 0.1.0 '[halogen.plugins]\ncuda = halogen_cuda.plugin\n'
note halogen_conformance 0.1.0 ""
note halogen_cpu_reference 0.1.0 '[halogen.plugins]\ncpu_reference = halogen_cpu_reference.plugin\n'
export PYTHONPATH="$PWD:$PWD/plugins/triton_kernels:$PWD/plugins/cuda:$PWD/plugins/cpu_reference:$PWD/tests/conformance:$PWD/benchmarks/gpu:/tmp/site:$PYTHONPATH"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-cache
