#!/usr/bin/env bash
# Runs the tests as other processors would, under several instruction sets and thread counts; arguments go to pytest:
#   bash scripts/test_cpus.sh tests/trainer tests/models
# Every set of kernels rounds in its own way. What this processor lacks falls back to what it has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SETS=(
    "OMP_NUM_THREADS=1"
    "OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE"
    "OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
    "OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=COMPATIBLE"
    "OMP_NUM_THREADS=2 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 ONEDNN_DEFAULT_FPMATH_MODE=STRICT"
)
export OMP_WAIT_POLICY=PASSIVE  # threads that wait must not spin: the tests themselves run several processes
CACHE=$(mktemp -d)
trap 'rm -rf "$CACHE"' EXIT
number=0
failed=()
for settings in "${SETS[@]}"; do
    echo "== $settings"
    read -ra each <<<"$settings"
    # torch.compile keeps what it has generated, and reads it back without asking for which processor that was.
    export TORCHINDUCTOR_CACHE_DIR="$CACHE/$((++number))"
    env "${each[@]}" bash scripts/test.sh "$@" || failed+=("$settings")
done
for settings in ${failed[@]+"${failed[@]}"}; do
    echo "failed with $settings" >&2
done
exit $((${#failed[@]} > 0))
