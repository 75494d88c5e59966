#!/usr/bin/env bash
# Writes the exact versions that the package and its cli, plots and dev extras resolve to now,
# to py311.lock for Python 3.11 and to py312.lock for everything newer.
set -euo pipefail
cd "$(dirname "$0")"

extras=cli,plots,dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

lock() {
    local version=$1 lockfile=$2 python
    python=$(./find-python.sh "$version" "$version") || {
        echo "lock: no Python $version found; $lockfile is left as it was." >&2
        return 1
    }
    "$python" -m venv "$work/$version"
    local pip=("$work/$version/bin/python" -m pip --disable-pip-version-check)
    "${pip[@]}" install --quiet --editable "..[$extras]"
    "${pip[@]}" check
    "${pip[@]}" freeze --exclude-editable > "$work/pins"

    # A path, an address or a local version would resolve on the machine that wrote it alone.
    if grep -vE '^[A-Za-z0-9._-]+==[A-Za-z0-9.!]+$' "$work/pins"; then
        echo "lock: not plain pins, see above; $lockfile is left as it was." >&2
        return 1
    fi
    {
        echo "# moonwalk-jax[$extras] on Linux, Python $version. Written by: make lock"
        cat "$work/pins"
    } > "$lockfile"
    echo "lock: wrote $lockfile"
}

lock 3.11 py311.lock
# Resolved on the oldest Python that it serves, for newer ones accept what 3.12 accepts.
lock 3.12 py312.lock
