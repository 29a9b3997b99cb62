#!/usr/bin/env bash
# Proof and numbers of the KV-index kernels on a CUDA host: compiled tests, compute-sanitizer, the benchmark.
# usage: benchmarks/gpu/kv_indices.sh OUTPUT_FOLDER   (from the repository's root; PYTHON picks the interpreter)
set -uo pipefail
out=${1:?usage: $0 OUTPUT_FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

"$python" -m pytest -q -m gpu -p no:cacheprovider --durations=5 \
    tests/kernels/test_kv_gpu.py tests/kernels/test_kv_indices.py \
    tests/kernels/test_step_prep.py tests/kernels/test_store_kv.py 2>&1 | tee "$out/pytest.log" | tail -25 || status=1

for tool in memcheck initcheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 200 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$python" benchmarks/gpu/kv_indices_memcheck.py >"$out/$tool.log" 2>&1 || status=1
    echo "== $tool:"; tail -3 "$out/$tool.log"
done

"$python" -m phalanx bench kv-indices --batch 4096 --context 4096 --repeats 40 --plot "$out/kv_indices.png" \
    2>&1 | tee "$out/bench_4096.log" || status=1
"$python" -m phalanx bench kv-indices --batch 8192 --context 4096 2>&1 | tee "$out/bench_8192.log" || status=1
"$python" -m phalanx bench kv-indices --batch 4096 --context 4096 --page-size 16 \
    2>&1 | tee "$out/bench_page16.log" || status=1
"$python" -m phalanx bench kv-indices --batch 1 64 --context 131072 --lens full \
    2>&1 | tee "$out/bench_long.log" || status=1
exit $status
