#!/bin/sh
# venv.sh FOLDER REQUIREMENT: make a virtual environment and install REQUIREMENT (editable) there.
# $PYTHON chooses the interpreter, python3 by default.
set -eu

folder=$1 requirement=$2 python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null; then
    echo "celery-anarchon needs Python 3.10 or newer, and there is no $python here." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "celery-anarchon needs Python 3.10 or newer; $python is $("$python" -V 2>&1)." >&2
    echo "Name another one: make PYTHON=python3.12 …" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing python3-venv …"
        apt-get update -qq </dev/null
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            python3-venv </dev/null >/dev/null
    else
        echo "$python has no venv module. As root, run: apt-get install python3-venv" >&2
        exit 1
    fi
fi

if ! [ -x "$folder/bin/python" ] || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$folder"
fi
"$folder/bin/python" -m pip install -qq --editable "$requirement"
touch "$folder/.installed"
