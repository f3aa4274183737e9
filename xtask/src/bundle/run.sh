#!/bin/sh
# What the bundle does on a machine with an NVIDIA GPU; see usage below. Nothing but the driver is needed.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
export VCA_DATA="$here/data"
export VCA_REQUIRE_GPU=1

usage() {
    cat <<'USAGE'
run tests [FILTER] [OPTION]...     the integration tests, then the attention kernels alone (gpu-check)
run sanitize [TOOL]...             the small tests under compute-sanitizer: memcheck synccheck racecheck initcheck
run bench [OPTION]...              times of the attention kernels (gpu-check --bench) and of whole calls (vca bench)
run cust                           the example of vc-attention-cust, where the bundle holds it
run vca ARGUMENT...                the program
USAGE
}

# A kernel that waits for ever would otherwise take the machine with it.
limited() {
    seconds=$1
    shift
    if command -v timeout >/dev/null; then timeout "$seconds" "$@"; else "$@"; fi
}

case "${1:-}" in
tests)
    shift
    limited 400 "$here/tests-gpu" --show-output "$@"
    status=$?
    if [ $# -eq 0 ]; then
        limited 180 "$here/gpu-check" || status=$?
    fi
    exit $status
    ;;
sanitize)
    shift
    [ $# -gt 0 ] || set -- memcheck synccheck racecheck
    sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
    [ -x "$sanitizer" ] || { echo "no compute-sanitizer in PATH or /usr/local/cuda/bin: set COMPUTE_SANITIZER" >&2; exit 2; }
    status=0
    for tool in "$@"; do
        echo "== compute-sanitizer --tool $tool"
        limited 500 "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
            "$here/tests-gpu" sanitize_ --test-threads=1 || status=$?
    done
    exit $status
    ;;
bench)
    shift
    limited 300 "$here/gpu-check" --bench "$@" || exit $?
    [ $# -gt 0 ] || limited 300 "$here/vca" bench --backend cuda
    ;;
cust)
    [ -x "$here/attend_with_cust" ] || { echo "this bundle was made without --cust" >&2; exit 2; }
    exec "$here/attend_with_cust"
    ;;
vca)
    shift
    exec "$here/vca" "$@"
    ;;
*)
    usage
    exit 2
    ;;
esac
