#!/usr/bin/env bash
# Usage: requirements/find-python.sh MIN MAX     (for example: 3.12 3.99)
#
# Prints the newest interpreter found whose version lies between MIN and MAX, or fails silently. Looks for
# python3.x on PATH and among pyenv's versions, then at $PYTHON or python3, whatever version that is.
set -euo pipefail
shopt -s nullglob

# Candidates are run, not looked up: a name on PATH may be a version manager's stub that fails.
fits='
import ensurepip, sys, venv
low, high = (tuple(map(int, arg.split("."))) for arg in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] <= high)
'
try() {
    if "$1" -c "$fits" "$2" "$3" > /dev/null 2>&1; then
        echo "$1"
        exit
    fi
}
least=${1#3.} most=${2#3.}
for minor in $(seq "$((most < 20 ? most : 20))" -1 "$least"); do
    for python in "python3.$minor" "$HOME/.pyenv/versions/3.$minor".*/bin/python3; do
        try "$python" "3.$minor" "3.$minor"
    done
done
try "${PYTHON:-python3}" "$1" "$2"
exit 1
