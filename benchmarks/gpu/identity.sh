#!/usr/bin/env bash
# Real models on the GPU beside what the CPU picked (`greedy.py`), where files arrive in pieces and not all at once.
#
#     benchmarks/gpu/identity.sh split MODEL.gguf NAME   # where the file is: .pieces/NAME.00, .01, ... of 56 MB and a sum
#     OUT=out benchmarks/gpu/identity.sh                 # on the GPU machine, once for each piece or for all at once
#
# NAME is that of a file in `expected/`: smollm2 or gemma3. On the GPU machine what lies in .pieces is kept in
# /tmp/halogen-pieces (KEPT; BACKEND, RUNS and EXPECTED may be set too); as soon as a model is whole and agrees with its sum it is run, and its result is in $OUT.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "${1:-}" = split ]; then
  mkdir -p .pieces
  split -b 56M -d "$2" ".pieces/$3."
  sha256sum <"$2" | cut -d' ' -f1 >".pieces/$3.sum"
  du -h .pieces/"$3".*
  exit
fi
OUT=${OUT:-out} KEPT=${KEPT:-/tmp/halogen-pieces} EXPECTED=${EXPECTED:-benchmarks/gpu/expected}
mkdir -p "$OUT" "$KEPT"
cp -n .pieces/* "$KEPT"/ 2>/dev/null || true
PYTHONPATH=${PYTHONPATH:-}
. benchmarks/gpu/setup.sh
status=0
for expected in "$EXPECTED"/*.json; do
  name=$(basename "$expected" .json)
  result=$OUT/greedy_$name.json
  [ -e "$KEPT/$name.done" ] && continue
  cat "$KEPT/$name".[0-9][0-9] >"$KEPT/$name.gguf" 2>/dev/null || true
  if [ "$(sha256sum <"$KEPT/$name.gguf" | cut -d' ' -f1)" != "$(cat "$KEPT/$name.sum" 2>/dev/null)" ]; then
    echo "$name is not whole: $(cd "$KEPT" && echo "$name".[0-9][0-9]) are here"
    continue
  fi
  if python3 benchmarks/gpu/greedy.py check "$KEPT/$name.gguf" "$expected" "$result" --backend "${BACKEND:-cuda}" ${RUNS:+--runs "$RUNS"}; then
    touch "$KEPT/$name.done"
  else
    status=1
  fi
done
exit $status
