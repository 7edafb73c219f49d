#!/bin/sh
# Installs Headwater from this folder into FOLDER (/opt/headwater), without a network:
#   ./install.sh [--python PATH] [FOLDER]
# --python: the Python that the server's environment is made of.
set -eu

fail() {
    echo "install.sh: $1" >&2
    exit 1
}

here=$(cd "$(dirname "$0")" && pwd)
expected=$(sed -n 's/^  "python": "\(.*\)",$/\1/p' "$here/manifest.json")
python=
folder=/opt/headwater
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n 's/^# \{0,1\}//p' "$0" | sed 1d; exit ;;
        --python) [ $# -gt 1 ] || fail "$1: expected a value, got none" ;;
        -*) fail "expected [--python PATH] [FOLDER], got $1" ;;
    esac
    case "$1" in
        --python) python=$2; shift ;;
        *) folder=$1 ;;
    esac
    shift
done

if [ -z "$python" ]; then
    python=$(command -v "python$expected" || command -v python3) ||
        fail "expected Python $expected, found neither python$expected nor python3. Install it, or name it: --python PATH"
fi
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "--python: expected a Python interpreter, got $python"
[ "$found" = "$expected" ] || fail "expected Python $expected, which these wheels are for, got $found ($python).\
 Name another (--python PATH), or build a folder for it: make offline PYTHON_VERSION=$found"
exec "$python" "$here/install.py" "$folder"
