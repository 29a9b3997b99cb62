#!/usr/bin/env bash
# What docs/measured.md tells of the CUDA engine, in parts of at most 8 minutes that can be resumed; but not what
# earlier code did, nor the single experiments under "Launches that wait". The KV-index kernels: kv_indices.sh.
# usage: benchmarks/gpu/parts.sh OUTPUT_FOLDER [PART...]   (from the repository's root)
# numbers: offline-MODEL, with -mixed, -mixed-eager, -flashinfer and -eager-serial (that with FlashInfer)
#   (throughput, steady decode, linears alone), seed-MODEL, ordinary-default, -baseline and -chunked,
#   http-MODEL-seed and -graphs, http-qwen3-0.6b-4-workers, decode-shapes (three models), decode-configs,
#   long-rows, model-kernels (norms, SiLU, RoPE, prompt attention; FlashInfer's beside them, whose modules
#   compile-flashinfer builds beforehand, several at once).
# correctness: tests-kernels, tests-models, wide (4096 rows, 10,000 requests), heads (head dims, FlashInfer
#   refuses some), smollm2 (must have been pulled), memcheck and memcheck-eager (a server under
#   compute-sanitizer).
# profiles: profile-MODEL, -mixed and -eager.
# Default: all of them. MODEL is llama-3-8b or qwen3-0.6b. A part that ended well leaves PART.ok and is not run
# again; its log is PART.log, its numbers are added to .jsonl files. PYTHON picks the interpreter (.venv's if there
# is one), REPEATS (3) the runs of each number, TAIL (4) the lines of a log that are shown.
set -uo pipefail
out=${1:?usage: $0 OUTPUT_FOLDER [PART...]}
shift
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
repeats="--repeats ${REPEATS:-3}"

numbers=(compile-flashinfer offline-{llama-3-8b,qwen3-0.6b} ordinary-{default,baseline,chunked}
  seed-{llama-3-8b,qwen3-0.6b} offline-qwen3-0.6b-{flashinfer,eager-serial,mixed,mixed-eager}
  offline-llama-3-8b-mixed http-{llama-3-8b,qwen3-0.6b}-{graphs,seed} http-qwen3-0.6b-4-workers
  decode-shapes decode-configs long-rows model-kernels)
correctness=(tests-kernels tests-models wide heads smollm2 memcheck memcheck-eager)
profiles=(profile-{qwen3-0.6b,llama-3-8b} profile-qwen3-0.6b-{mixed,eager})

fail() { echo "$0: $1" >&2 && exit 2; }

# In the background, so that a signal is heard at once; timeout passes it on to all that it started.
run() {
  timeout -k 30 480 "$python" "$@" &
  child=$!
  wait $child
}

stop() {
  [[ -n ${child:-} ]] && kill -TERM "$child" 2>/dev/null && wait "$child"
  exit 130
}
trap stop INT TERM

bench() { # SCRIPT ARGUMENTS...
  local script=$1
  shift
  run "benchmarks/gpu/$script.py" "$out" "$@"
}

# Nothing but skipped tests is no success.
tests() {
  run -m pytest -q -s -m gpu -p no:cacheprovider -W default -rs --durations=5 "$@" &&
    grep -q ' passed' "$out/$part.log"
}

offline() { # MODEL:BACKEND[:FLAG]
  # shellcheck disable=SC2086
  bench engine --parts "offline:$1" $repeats
}

profile() { # MODEL FLAGS...
  local model=$1
  shift
  run -m phalanx profile --model "$model" --load-format dummy --context-length 4096 --random-seed 0 \
    --max-running-requests 4096 --output "$out/$part.json.gz" "$@"
}

steady="--num-prompts 4096 --random-range-ratio 1 --warm-up-steps 64"

# shellcheck disable=SC2086
run_part() {
  local name=${1#*-}
  case $1 in
    offline-*-mixed-eager) offline "${name%-mixed-eager}:triton:mixed:eager" ;;
    offline-*-mixed) offline "${name%-mixed}:triton:mixed" ;;
    offline-*-eager-serial) offline "${name%-eager-serial}:flashinfer:eager:serial" ;;
    offline-*-flashinfer) offline "${name%-flashinfer}:flashinfer" ;;
    offline-*) offline "$name:triton" ;;
    seed-*) bench seed_experiment --models "$name" $repeats ;;
    ordinary-*) bench ordinary_shape --variants "$name" $repeats ;;
    # A folder of its own, since what stands in one is told apart by model and mode.
    http-*-4-workers)
      run benchmarks/gpu/http_serving.py "$out/4-workers" --models "${name%-4-workers}" --modes graphs \
        --serve "--api-workers 4" $repeats
      ;;
    http-*) bench http_serving --models "${name%-*}" --modes "${name##*-}" $repeats ;;
    decode-shapes)
      bench decode_shapes --parts backends &&
        for model in qwen3-0.6b llama-3.2-1b; do
          bench decode_shapes --parts backends --model $model \
            --shapes 4096x84,1024x800,280x1024,128x2048,8x2048 || return 1
        done
      ;;
    decode-configs) bench decode_shapes --parts configs ;;
    compile-flashinfer) run benchmarks/gpu/model_kernels.py --compile ;;
    model-kernels) run benchmarks/gpu/model_kernels.py --parts elementwise,prefill --output "$out" ;;
    long-rows) bench long_rows ;;
    tests-kernels) tests tests/kernels ;;
    # The others that are for a GPU are parts of their own.
    tests-models) tests tests/unit/test_memory.py tests/models/test_{cuda_engine,cuda_loops,captured_prompts,first_use,flashinfer_plan,weights}.py ;;
    wide) tests tests/models/test_gpu_wide.py ;;
    heads) tests tests/models/test_cuda_engine.py -k "logits_are_as_near" ;;
    smollm2) tests tests/models/test_gpu_smollm2.py ;;
    memcheck) run benchmarks/gpu/server_memcheck.py "$out" ;;
    # Every tensor is an allocation of its own then, so that a byte past its end is seen.
    memcheck-eager)
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 run benchmarks/gpu/server_memcheck.py "$out/eager" \
        --disable-cuda-graph --max-running-requests 8
      ;;
    profile-*-mixed) profile "${name%-mixed}" --num-prompts 16000 --random-output-len 128 --warm-up-steps 100 ;;
    profile-*-eager) profile "${name%-eager}" $steady --disable-cuda-graph --disable-overlap-schedule ;;
    profile-*) profile "$name" $steady ;;
  esac
}

parts=("$@")
all=("${numbers[@]}" "${correctness[@]}" "${profiles[@]}")
((${#parts[@]})) || parts=("${all[@]}")
for part in "${parts[@]}"; do
  [[ " ${all[*]} " == *" $part "* ]] || fail "no such part: $part (there are ${all[*]})"
done
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || fail "these parts need a CUDA device"
mkdir -p "$out"
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
