#!/usr/bin/env bash
# Everything that can be learnt on a machine with a GPU, in order of value, within a time limit.
#
#   bench/on_gpu.sh [SECONDS]      (default 540)
#
# Outputs are saved as they come under ${OUT:-bench/results/gpu}: a step cut short leaves what it wrote. Ends with
# a table of step, seconds and exit code (124 or 137: out of time; "-": no time left to begin), and always exits 0.
# PYTHON names the interpreter; chunkc need not be installed in it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 0

limit_s=${1:-540}
if ! [[ $limit_s =~ ^[0-9]+$ ]]; then
    echo "usage: bench/on_gpu.sh [SECONDS], a whole number; not '$limit_s'" >&2
    limit_s=540
fi
limit_s=$((10#$limit_s))
out=${OUT:-bench/results/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
scratch=$(mktemp -d)
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1

# The package as an installation would lay it out, with its entry point, from links alone: needs no network.
package=$scratch/package
mkdir -p "$package/chunkc" "$package/chunkc-0.dist-info"
for path in chunkc/*; do
    [[ $path == */__pycache__ ]] || ln -s "$PWD/$path" "$package/chunkc/"
done
for room in passes runtime kernels; do
    ln -s "$PWD/$room" "$package/chunkc/$room"
done
printf 'Metadata-Version: 2.1\nName: chunkc\nVersion: 0\n' >"$package/chunkc-0.dist-info/METADATA"
printf '[torch_dynamo_backends]\nchunkc = chunkc.backend:chunkc\n' >"$package/chunkc-0.dist-info/entry_points.txt"
export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}

steps=()
finish() {
    {
        printf '\n%-14s %8s %6s\n' step seconds exit
        for row in ${steps[@]+"${steps[@]}"}; do
            # shellcheck disable=SC2086  # three words
            printf '%-14s %8s %6s\n' $row
        done
        printf '%-14s %8s %6s\n' total "$SECONDS" ""
    } | tee "$out/table.txt"
    rm -rf "$scratch"
    exit 0
}
trap finish EXIT
trap 'exit 0' INT TERM

# step NAME AT_MOST_S COMMAND...: run it with its output in NAME.txt, for as long as it and the whole may take.
step() {
    local name=$1 left_s=$((limit_s - SECONDS - 5)) at_most_s=$2 start_s=$SECONDS code
    shift 2
    if ((left_s < 5)); then
        steps+=("$name 0 -")
        return
    fi
    ((left_s < at_most_s)) && at_most_s=$left_s
    echo "== $name (at most $at_most_s s)"
    timeout --kill-after=3 "$at_most_s" "$@" 2>&1 | tee "$out/$name.txt"
    code=${PIPESTATUS[0]}
    steps+=("$name $((SECONDS - start_s)) $code")
}

environment() {
    nvidia-smi
    uname -srm
    g++ --version | head -1
    nproc
    df -h "${TMPDIR:-/tmp}" | tail -1
    "$PYTHON" - <<'END'
import importlib.metadata as metadata
import sys

print("python", sys.version)
for name in ("torch", "triton", "numpy", "pydantic", "sympy", "nvidia-ml-py", "ninja", "transformers",
             "pytest", "pytest-timeout", "hypothesis", "matplotlib", "rich", "setuptools"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "MISSING")
import torch

print("cuda", torch.version.cuda, "available", torch.cuda.is_available(), "threads", torch.get_num_threads())
if torch.cuda.is_available():
    print(torch.cuda.get_device_properties(0))
import chunkc

print("chunkc from", chunkc.__file__)
torch._dynamo.lookup_backend("chunkc")
END
}
export -f environment
export PYTHON

step environment 60 bash -c environment
step tests $((limit_s * 6 / 10)) "$PYTHON" -m pytest tests -m "not slow" -q -p no:cacheprovider
step demo 300 "$PYTHON" bench/demo.py --size small --steps 15 --out "$scratch/demo"
for file in summary.json plan.txt memory.png losses.png; do
    [[ -f $scratch/demo/$file ]] && cp "$scratch/demo/$file" "$out/"
done
exit 0
