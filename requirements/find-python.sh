#!/usr/bin/env bash
# Usage: requirements/find-python.sh MIN MAX     (for example: 3.12 3.99)
#
# Prints the first interpreter found whose version lies between MIN and MAX, or fails silently.
set -euo pipefail
shopt -s nullglob

# Candidates are run, not looked up: a name on PATH may be a version manager's stub that fails.
fits='
import ensurepip, sys, venv
low, high = (tuple(map(int, arg.split("."))) for arg in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] <= high)
'
for python in python3.13 python3.12 python3.11 "${PYTHON:-python3}" \
    "$HOME"/.pyenv/versions/3.1[1-9]*/bin/python3; do
    if "$python" -c "$fits" "$1" "$2" > /dev/null 2>&1; then
        echo "$python"
        exit
    fi
done
exit 1
