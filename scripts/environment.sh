# Shared by ./quickstart and ./test: a virtual environment with the torch build that the user chose.
# Sourced, not run. Needs Python 3.11 or newer.

PYTHON=${PYTHON:-python3}
TORCH=${HALOGEN_TORCH:-torch==2.13.0}

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

# make_environment DIR: create it, or go on with the one that is there.
make_environment() {
    VENV=$1
    if ! "$PYTHON" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: $PYTHON is $("$PYTHON" -V 2>&1 || true); 3.11 or newer with venv is needed —" \
            "install it (Debian, Ubuntu: python3-venv) or name another one: PYTHON=python3.12 $0" >&2
        exit 2
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        say "making a virtual environment in $VENV"
        "$PYTHON" -m venv "$VENV"
    fi
    local index=()
    [ -n "${HALOGEN_TORCH_INDEX:-}" ] && index=(--index-url "$HALOGEN_TORCH_INDEX")
    if ! "$VENV/bin/python" -c "import torch" 2>/dev/null; then
        say "installing $TORCH${HALOGEN_TORCH_INDEX:+ from $HALOGEN_TORCH_INDEX} (a few hundred MB)"
        "$VENV/bin/pip" install --quiet --disable-pip-version-check "${index[@]}" "$TORCH"
    fi
}

# install WHAT PIP-ARGUMENTS...: quiet unless it fails; nothing where the same was installed from the same sources.
# Editable packages see changed Python files by themselves, so only what a build reads counts.
install() {
    local what=$1 stamp
    shift
    stamp="$VENV/.installed-$({ printf '%s\n' "$@"; cat pyproject.toml {plugins/*,tests/*}/pyproject.toml \
        plugins/*/hatch_build.py plugins/*/csrc/*; } | cksum | tr ' ' -)"
    [ -e "$stamp" ] && return
    say "installing $what"
    "$VENV/bin/pip" install --quiet --disable-pip-version-check "$@"
    touch "$stamp"
}
