#!/usr/bin/env bash
# Correctness of the CUDA engine beyond `make test-gpu`, and profiles of steady decode.
# usage: benchmarks/gpu/correctness.sh OUTPUT_FOLDER [PART...]   (from the repository's root)
# Parts: wide (4096 rows, 10,000 requests), heads (head dims, FlashInfer refuses some), smollm2 (must have been
# pulled), memcheck and memcheck-eager (a server under compute-sanitizer), profile-MODEL[-mixed|-eager].
# A part that ended well leaves PART.ok and is not run again; its log is PART.log. PYTHON picks the interpreter.
set -uo pipefail
out=${1:?usage: $0 OUTPUT_FOLDER [PART...]}
shift
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

tests() { "$python" -m pytest -q -s -m gpu -p no:cacheprovider -W default --durations=5 "$@"; }

profile() { # MODEL FLAGS...
  local model=$1
  shift
  "$python" -m phalanx profile --model "$model" --load-format dummy --context-length 4096 --random-seed 0 \
    --max-running-requests 4096 --output "$out/$part.json.gz" "$@"
}

steady="--num-prompts 4096 --random-range-ratio 1 --warm-up-steps 64"

run_part() {
  case $1 in
    wide) tests tests/models/test_gpu_wide.py ;;
    heads) tests tests/models/test_cuda_engine.py -k "logits_are_as_near" ;;
    smollm2) tests tests/models/test_gpu_smollm2.py ;;
    memcheck) "$python" benchmarks/gpu/server_memcheck.py "$out" ;;
    # Every tensor is an allocation of its own then, so that a byte past its end is seen.
    memcheck-eager)
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$python" benchmarks/gpu/server_memcheck.py "$out/eager" \
        --disable-cuda-graph --max-running-requests 8
      ;;
    # shellcheck disable=SC2086
    profile-*-mixed) profile "${1:8:-6}" --num-prompts 16000 --random-output-len 128 --warm-up-steps 100 ;;
    # shellcheck disable=SC2086
    profile-*-eager) profile "${1:8:-6}" $steady --disable-cuda-graph --disable-overlap-schedule ;;
    # shellcheck disable=SC2086
    profile-*) profile "${1:8}" $steady ;;
    *) echo "no such part: $1" && return 2 ;;
  esac
}

parts=("$@")
((${#parts[@]})) || parts=(wide heads smollm2 memcheck memcheck-eager profile-qwen3-0.6b profile-llama-3-8b
  profile-qwen3-0.6b-mixed profile-qwen3-0.6b-eager)
for part in "${parts[@]}"; do
  [[ -f $out/$part.ok ]] && continue
  start=$SECONDS
  if run_part "$part" >"$out/$part.log" 2>&1; then
    touch "$out/$part.ok"
    echo "== $part: well, $((SECONDS - start)) s"
  else
    status=1
    echo "== $part: FAILED, $((SECONDS - start)) s"
  fi
  tail -n "${TAIL:-4}" "$out/$part.log" | cut -c1-600
done
exit $status
