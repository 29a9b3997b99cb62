#!/usr/bin/env bash
# The load client with 1, 2, 4 and 8 processes against 8 sender processes, on a host of 16 cores or more (no GPU
# is used): as fast as it goes, and at 40,000 events/s and process. One JSON line a run is appended.
# usage: benchmarks/gpu/client_scale.sh OUTPUT_FOLDER   (from the repository's root; PYTHON picks the interpreter)
#        SENDERS, PROCESSES, PACED (processes of the runs at a rate), REPEATS, STREAMS and EVENTS change the sizes.
set -uo pipefail
out=${1:?usage: $0 OUTPUT_FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

run() { # run CLIENT_PROCESSES RATE: events grow with the processes, so that every run lasts about as long
    timeout 60 "$python" benchmarks/client_load.py --senders "${SENDERS:-8}" --client-processes "$1" \
        --streams "${STREAMS:-4096}" --events $(($1 * ${EVENTS:-64} + 32)) --rate "$2" >"$out/last.log" 2>&1 || status=1
    tail -1 "$out/last.log" | tee -a "$out/client_scale.jsonl"
}

lscpu | grep -E '^(Model name|CPU\(s\))' | tee "$out/host.txt"
for _ in $(seq "${REPEATS:-2}"); do
    for count in ${PROCESSES:-1 2 4 8}; do
        run "$count" 0
    done
done
for count in ${PACED:-1 2 4 8}; do
    run "$count" $((count * 40000))
done
STREAMS=8192 run 8 320000
exit $status
