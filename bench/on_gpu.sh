#!/usr/bin/env bash
# What can be learnt on a machine with a GPU that is lent for half an hour: three calls, of nine minutes each or less.
#
#   bench/on_gpu.sh first|second|third [SECONDS]    (default: 540, 560, 460; bench/gpu/calls.py says what they do)
#   bench/on_gpu.sh wheels [FOLDER]                 before, where there is a network: fetch what that machine lacks
#
# Wheels in ${WHEELS:-.whl} are used for a call. Results go to ${OUT:-runs/gpu}; bench/report.py makes tables of the JSON
# files. PYTHON names the interpreter. Without a GPU every step is rehearsed on the CPU, in small form; with SMALL=1 on
# the GPU, which is how it is rehearsed on the GPU made of RAM (docs/cuda.md); BREAK="STEP=crash STEP=hang" breaks steps.
# A call always ends with a table of its steps and exit code 0; 124 in the table: cut short; "-": not begun.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=$PWD/.venv/bin/python
fi
export PYTHON PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
case ${1:-} in
    wheels)
        exec "$PYTHON" bench/gpu/wheels.py "${2:-${WHEELS:-.whl}}"
        ;;
    first | second | third)
        breaks=()
        for one in ${BREAK:-}; do breaks+=(--break "$one"); done
        exec "$PYTHON" bench/gpu/calls.py "$1" ${2:+--seconds "$2"} --out "${OUT:-runs/gpu}" --wheels "${WHEELS:-.whl}" \
            ${SMALL:+--small} ${breaks[@]+"${breaks[@]}"}
        ;;
    *)
        echo "usage: bench/on_gpu.sh first|second|third [SECONDS] | wheels [FOLDER]" >&2
        exit 2
        ;;
esac
