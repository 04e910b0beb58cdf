#!/usr/bin/env bash
# A representative part of the tests on every PyTorch that chunkc was checked on, each in an environment of its own.
#
#   tests/versions.sh [VERSION...]      (default: all of CHECKED in chunkc/torch_private/versions.py)
#
# Environments are made once, under .versions/, and kept; remove a folder there to have it made anew. Which build of
# PyTorch is installed is up to pip's settings: a build for CPUs takes 1 GB, one with CUDA's libraries 6 GB. No GPU is
# needed. PYTHON names the interpreter. Goes on after a version that fails, prints a table, and exits with 1 if any did.
# A test that is rightly different on a version says so itself, where it is skipped.
#
# The part is one of promises: a file for each thing that PyTorch may change under chunkc, and of each test in it at most
# three variants, spread evenly: some 440 tests. CHUNKC_VARIANTS=0 takes all, some 1,040; most of the others differ in
# shapes alone.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONSAFEPATH=1 OMP_WAIT_POLICY=PASSIVE CHUNKC_VARIANTS=${CHUNKC_VARIANTS:-3}

TESTS=(
    tests/test_torch_private.py
    # bits under every budget, bytes as predicted, in eager code and with Inductor
    tests/properties/test_ladder.py tests/end_to_end/test_prediction.py
    tests/passes/memory/test_segment_memory.py tests/passes/memory/scratch
    tests/passes/memory/test_kept_bytes.py
    # what Inductor generates, and what is made of code that nobody can read
    tests/passes/memory/inductor tests/kernels/test_cpp.py
    tests/end_to_end/test_unknown_operators.py
    # what Dynamo and AOTAutograd hand over
    tests/test_backend.py tests/tracing/test_autograd_checks.py tests/tracing/test_capture.py
    tests/tracing/test_decompositions.py tests/tracing/test_names.py tests/tracing/test_trace_cache.py
    tests/end_to_end/test_compiled_steps.py
    tests/end_to_end/test_several_graphs.py tests/end_to_end/test_autocast.py tests/properties/test_user_actions.py
    # sizes in symbols
    tests/end_to_end/test_dynamic_shapes.py
    # optimizers
    tests/optim/test_optimizer.py tests/optim/test_lamb.py tests/optim/test_overlap_seams.py tests/kernels/test_adam_cpu.py
    tests/kernels/test_rules.py
    # explanations; the texts under tests/golden depend on no version
    tests/explaining/formats/test_golden.py tests/explaining/test_explain.py tests/explaining/test_offline.py
)

versions=("$@")
if [ ${#versions[@]} = 0 ]; then
    read -ra versions <<<"$(sed -n 's/^CHECKED = (\(.*\))$/\1/p' chunkc/torch_private/versions.py | tr -d '",')"
fi

make_environment() { # make_environment FOLDER VERSION
    [ -e "$1/.stamp" ] && return
    "${PYTHON:-python3}" -m venv --clear "$1" &&
        "$1/bin/python" -m pip install -qq "setuptools>=77" wheel &&
        "$1/bin/python" -m pip install -qq "torch==$2.*" &&
        "$1/bin/python" -m pip install -qq --no-build-isolation -e ".[dev]" &&
        touch "$1/.stamp"
}

table=() failed=0
for version in "${versions[@]}"; do
    folder=$PWD/.versions/$version
    mkdir -p "$folder"
    start=$SECONDS found="" result="not installed"
    echo "== PyTorch $version"
    if make_environment "$folder" "$version"; then
        found=$("$folder/bin/python" -c 'import torch; print(torch.__version__)')
        TORCHINDUCTOR_CACHE_DIR=$folder/inductor TORCH_EXTENSIONS_DIR=$folder/extensions \
            "$folder/bin/python" -m pytest -q -n 2 --dist loadfile --show-capture=no --tb=short -p no:cacheprovider \
            -m "not slow and not second_tier" "${TESTS[@]}" 2>&1 | tee "$folder/log.txt"
        status=${PIPESTATUS[0]}
        result=$(grep -E "[0-9]+ (passed|failed|error)" "$folder/log.txt" | tail -n 1)
    else
        status=1
    fi
    [ "$status" = 0 ] || failed=1
    mark=$([ "$status" = 0 ] && echo green || echo RED)
    table+=("$(printf '%-8s %-14s %-6s %5d s  %s' "$version" "$found" "$mark" $((SECONDS - start)) "$result")")
done
echo
printf '%-8s %-14s %-6s %7s  %s\n' version torch "" time "pytest said"
printf '%s\n' "${table[@]}"
exit "$failed"
