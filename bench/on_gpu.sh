#!/usr/bin/env bash
# Everything that can be learnt on a machine with a GPU, in order of value, within a time limit.
#
#   bench/on_gpu.sh [SECONDS] [first|second|third]      (default: 540, all three)
#
# On a machine that is lent for minutes, three calls of 540 s spend half an hour best:
#   first     what must be right: tests on the GPU, again under CUDA's sanitizers, Adam against its memory bound
#   second    the promise: 8B parameters under 6 GB, predictions from CPU and CUDA fakes against measured bytes, the
#             fast path
#   third     the largest models, the other systems, the bound, ranks on all GPUs through NCCL
#
# Needs torch 2.11 or newer, Triton 3.6 or newer, transformers, pytest, pytest-timeout, and what pyproject.toml names;
# where one of these is missing it says so and goes no further. Wheels in ${WHEELS:-.whl} are used for this run; where a
# machine reaches no registry, fetch them before, for its Python and system, each with what it requires:
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#       -d .whl pydantic pydantic-core==VERSION annotated-types typing-inspection typing-extensions
# Other systems are measured where they are installed. Without a GPU every step is rehearsed on the CPU, in small form;
# with SMALL=1 on the GPU, which is how it is rehearsed on the GPU made of RAM (docs/cuda.md).
# A GPU's kernels are compiled by Triton, which needs a C compiler and Python's headers: one is compiled first.
# Under ${OUT:-bench/results/gpu}, few files, as they come: log.txt with all that the steps print, a JSON per suite,
# results.md, table.txt. A step cut short leaves what it wrote. Ends with a table of step, seconds and exit code (124 or
# 137: out of time; "-": not begun), and always exits 0.
# PYTHON names the interpreter. Where chunkc is not installed in it, it is, without its dependencies; where even that
# fails, links stand for the installation.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 0

limit_s=${1:-540}
if ! [[ $limit_s =~ ^[0-9]+$ ]]; then
    echo "usage: bench/on_gpu.sh [SECONDS], a whole number; not '$limit_s'" >&2
    limit_s=540
fi
limit_s=$((10#$limit_s))
part=${2:-all}
if ! [[ $part =~ ^(all|first|second|third)$ ]]; then
    echo "usage: bench/on_gpu.sh [SECONDS] [first|second|third]; not '$part'" >&2
    part=all
fi
out=${OUT:-bench/results/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
scratch=$(mktemp -d)
export PYTHON PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$scratch/inductor}

: >"$out/log.txt"
steps=()
child=
finish() {
    trap '' INT TERM
    [[ -n $child ]] && kill -TERM "$child" 2>/dev/null
    {
        printf '\n%-12s %8s %6s\n' step seconds exit
        for row in ${steps[@]+"${steps[@]}"}; do
            # shellcheck disable=SC2086  # three words
            printf '%-12s %8s %6s\n' $row
        done
        printf '%-12s %8s %6s\n' total "$SECONDS" ""
    } | tee "$out/table.txt"
    rm -rf "$scratch"
    exit 0
}
trap finish EXIT
trap 'exit 0' INT TERM

# step NAME PERCENT COMMAND...: run it with its output in log.txt, for as long as its share of the limit (of all
# parts; alone, a part has more) and what is left of the whole allow. An argument @limit becomes the seconds that the
# command has for itself.
ready=yes
step() {
    local name=$1 at_most_s=$((limit_s * $2 / 100)) left_s=$((limit_s - SECONDS - 3)) start_s=$SECONDS code begin
    shift 2
    [[ $part != all ]] && at_most_s=$((at_most_s * 2))
    [[ $ready == no ]] && left_s=0
    ((left_s < at_most_s)) && at_most_s=$left_s
    if ((at_most_s < 4)); then
        steps+=("$name 0 -")
        return
    fi
    local own_s=$((at_most_s > 24 ? at_most_s - 12 : at_most_s / 2))
    echo "== $name (at most $at_most_s s)" | tee -a "$out/log.txt"
    begin=$(($(wc -c <"$out/log.txt") + 1))
    timeout --kill-after=3 "$at_most_s" "${@/#@limit/$own_s}" >>"$out/log.txt" 2>&1 &
    child=$!
    wait "$child"
    code=$?
    child=
    tail -c "+$begin" "$out/log.txt" | tail -n "${LINES_SHOWN:-25}"
    steps+=("$name $((SECONDS - start_s)) $code")
}

if compgen -G "${WHEELS:-.whl}/*.whl" >/dev/null; then
    timeout 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" \
        "${WHEELS:-.whl}"/*.whl >>"$out/log.txt" 2>&1
    export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
fi

has_chunkc() {
    "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("chunkc") is None)' 2>/dev/null
}

# The package as an installation would lay it out, with its entry point, from links alone: needs nothing.
link_package() {
    local package=$scratch/package path room
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
}

if ! has_chunkc; then
    timeout 60 "$PYTHON" -m pip install -q --no-build-isolation --no-deps -e . >>"$out/log.txt" 2>&1
    has_chunkc || link_package
fi

environment() {
    nvidia-smi
    uname -srm
    g++ --version | head -1
    nproc
    df -h "${TMPDIR:-/tmp}" | tail -1
    "$PYTHON" - <<'END'
import importlib.metadata as metadata
import sys


def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


print("python", sys.version)
for name in ("torch", "triton", "numpy", "pydantic", "sympy", "nvidia-ml-py", "ninja", "transformers", "pytest",
             "pytest-timeout", "hypothesis", "matplotlib", "rich", "setuptools", "torchao", "bitsandbytes", "deepspeed"):
    print(name, version(name) or "MISSING")
lacking = [
    f"{name} {least[0]}.{least[1]} or newer"
    for name, least in {
        **{"torch": (2, 11), "triton": (3, 6), "transformers": (5, 0), "pydantic": (2, 0), "numpy": (1, 0)},
        **{"sympy": (1, 0), "nvidia-ml-py": (11, 0), "rich": (10, 0), "pytest": (7, 0), "pytest-timeout": (2, 0)},
    }.items()
    if tuple(int(part) for part in (version(name) or "0.0").split(".")[:2]) < least
]
if lacking:
    sys.exit(f"needed here: {', '.join(lacking)}; put wheels of what is missing into .whl (see bench/on_gpu.sh)")
import torch

print("cuda", torch.version.cuda, "available", torch.cuda.is_available(), "threads", torch.get_num_threads())
if torch.cuda.is_available():
    print(torch.cuda.get_device_properties(0))
import chunkc

print("chunkc from", chunkc.__file__)
torch._dynamo.lookup_backend("chunkc")
END
    local code=$?
    if ((code == 0)) && [[ $device == cuda ]]; then
        "$PYTHON" bench/one_kernel.py
        code=$?
    fi
    return "$code"
}
export -f environment

device=cpu form=(--small --device cpu)
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    device=cuda form=(--device cuda)
    [[ -n ${SMALL:-} ]] && form=(--small --device cuda)
    # Blocks split exactly and freed pages given back, where the driver can; see `passes/cuda_memory.py`.
    if PYTORCH_ALLOC_CONF=expandable_segments:True "$PYTHON" -c \
        'import torch; torch.ones(1 << 26, device="cuda").sum().item()' >>"$out/log.txt" 2>&1; then
        export PYTORCH_ALLOC_CONF=expandable_segments:True
    fi
fi
export device
echo "device: $device"

bench() { # NAME PERCENT SUITE ARGUMENTS...
    local name=$1 percent=$2 suite=$3
    shift 3
    step "$name" "$percent" "$PYTHON" bench/run.py "$suite" "${form[@]}" --out "$out/$name.json" --time-limit @limit "$@"
}
pick() { # the second argument with a GPU, else, and in small form, the first
    if [[ $device == cuda && -z ${SMALL:-} ]]; then echo "$2"; else echo "$1"; fi
}

wants() { [[ $part == all || $part == "$1" ]]; }

# Only these files: others need not even be importable here. The door to CUDA first, training last.
mapfile -t eager_tests < <(grep -rlE --include='test_*.py' 'mark\.gpu\b' tests | grep -v test_train | sort -r)
gpu_tests=("${eager_tests[@]}" tests/gpu/test_train.py)
quick=(-q -p no:cacheprovider --timeout=120)
spread=() sanitized=(env)
if [[ $device == cuda ]]; then
    sanitized=(env TORCH_CUDA_SANITIZER=1) # asks for a CUDA device whatever runs: nothing to rehearse without one
    "$PYTHON" -c 'import xdist' 2>/dev/null && spread=(-n 4) # most of their time is compilation, on the CPU
fi
step environment 12 bash -c environment
[[ ${steps[-1]##* } == 1 ]] && ready=no # not where it was only slow
if wants first; then
    step tests 26 "$PYTHON" -m pytest "${gpu_tests[@]}" -m gpu "${quick[@]}" ${spread[@]+"${spread[@]}"}
    # Without what is compiled: under the sanitizer Dynamo compiles nothing.
    step sanitizer 12 "${sanitized[@]}" \
        "$PYTHON" -m pytest "${eager_tests[@]}" -m "gpu and not slow" "${quick[@]}" ${spread[@]+"${spread[@]}"}
    if command -v compute-sanitizer >/dev/null; then
        step memcheck 10 compute-sanitizer --error-exitcode 9 "$PYTHON" -m pytest tests/kernels -m gpu "${quick[@]}"
    fi
    bench adam 14 adam
fi
if wants second; then
    bench budget 34 budget --case "$(pick 'tiny-3@*' 'llama3-8b@6GB')" --systems chunkc
    bench prediction 20 prediction
    bench fits 20 fits
fi
if wants third; then
    bench scale 24 scale
    bench peers 40 budget --case "$(pick 'tiny-3@*' 'gpt-*')"
    bench bound 20 bound
    bench ranks 14 ranks # as many as there are GPUs; one goes through NCCL, too
fi

shopt -s nullglob
results=("$out"/*.json)
if ((${#results[@]})); then
    "$PYTHON" bench/report.py "${results[@]}" >"$out/results.md" 2>>"$out/log.txt"
fi
exit 0
