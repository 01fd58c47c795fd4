# Shared by the scripts beside it: source it, which leads to the repository's root, then call `ensure_environment`.
#
#   ensure_environment [EXTRA...]
#
# makes .venv when there is none and installs jpaged in it (editable, at the versions of constraints.txt) when that
# has not been done since pyproject.toml or constraints.txt last changed.
#
#   PYTHON          the interpreter to make .venv with   (default: the first Python >= 3.12 on the PATH)
#   JPAGED_EXTRAS   further extras, for example "cuda" or "tpu"

cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="$(pwd -P)/.venv"

_fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

_find_python() {
    local candidate candidates="${PYTHON:-python3.12 python3.13 python3.14 python3 python}"
    for candidate in $candidates; do
        # Run it: a version manager's stand-in is on the PATH even where its version is not installed.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    _fail "jpaged needs Python 3.12 or newer, found none (tried: $candidates);" \
        "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

_ensure_venv() {
    if [[ -e $VENV ]]; then
        # Scripts in a virtual environment name its folder: a copied or moved one would run the original.
        grep -qF "$VENV" "$VENV/bin/activate" 2>/dev/null && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
            _fail "$VENV has no working pip, or was made for another folder; remove it and run this again"
        return
    fi
    local python
    python="$(_find_python)" || exit 1
    echo "Making .venv with $("$python" --version)"
    if ! "$python" -m venv "$VENV"; then
        rm -rf "$VENV"
        _fail "'$python -m venv' failed; on Debian and Ubuntu it comes with the package python3-venv"
    fi
}

ensure_environment() {
    _ensure_venv
    local stamp="$VENV/jpaged-installed" asked="${JPAGED_EXTRAS:-}" wanted installed extras
    wanted="$(cat pyproject.toml constraints.txt | cksum)"
    installed="$(tail -n +2 "$stamp" 2>/dev/null || true)"
    # What was installed before stays wanted, so that the quickstart does not undo the tests' environment.
    extras="$(printf '%s\n' "$@" ${asked//,/ } $installed | sed '/^$/d' | sort -u)"
    if [[ "$(head -n 1 "$stamp" 2>/dev/null)" == "$wanted" && "$installed" == "$extras" ]]; then
        return
    fi
    local target=".${extras:+[${extras//$'\n'/,}]}"
    echo "Installing jpaged (-e $target) in .venv; the first time takes a few minutes"
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e "$target" ||
        _fail "pip could not install jpaged; its lines above say why"
    printf '%s\n' "$wanted" $extras >"$stamp"
}
