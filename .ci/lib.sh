# What the stages share: the scratch folder, the interpreter, virtual environments, and how a stage is run.
# Sourced by .ci/run; defines functions only.

say() { printf '%s\n' "$@"; }
processors() { getconf _NPROCESSORS_ONLN; } # nproc would answer with OMP_NUM_THREADS
die() { printf 'ci: %s\n' "$*" >&2; exit 1; }

# A scratch folder, an interpreter, and an environment in which times and results repeat: two OpenMP threads on a busy
# machine with two cores are forty times slower than one.
prepare() {
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONHASHSEED=0 MPLBACKEND=Agg
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
    export PIP_NO_COMPILE=1 # what is imported is compiled then; most of torch and its company never is
    unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
    SCRATCH=$(mktemp -d "${TMPDIR:-/tmp}/viking-ci.XXXXXX")
    export MPLCONFIGDIR=$SCRATCH/matplotlib
    STARTED=$SECONDS
    TIMES=()
    trap finish EXIT
    need gcc gcc; need make make; need git git
    PYTHON=$(find_python) || die "no Python 3.11 or later that can make virtual environments"
    say "ci: $("$PYTHON" --version), $(gcc --version | head -n 1), $(processors) cores, scratch $SCRATCH"
}

finish() {
    local code=$?
    [[ "${KEEP:-}" == 1 ]] && say "ci: kept $SCRATCH" || rm -rf "$SCRATCH"
    [[ $code == 0 ]] || say "ci: FAILED${CURRENT:+ in stage $CURRENT} after $((SECONDS - STARTED)) s"
    exit "$code"
}

# A command that must be there, and the Debian package that has it.
need() {
    command -v "$1" >/dev/null 2>&1 && return
    say "ci: installing $2"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2"; } >/dev/null 2>&1 || true
    command -v "$1" >/dev/null 2>&1 || die "$1 is missing: install $2"
}

# optional COMMAND PACKAGE: as need, but a status where it cannot be had within three minutes.
optional() {
    command -v "$1" >/dev/null 2>&1 && return
    say "-- installing $2"
    { timeout 60 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 180 apt-get install -y -qq --no-install-recommends "$2"; } \
        >/dev/null 2>&1 || true
    command -v "$1" >/dev/null 2>&1
}

# Prints the first interpreter of 3.11 or later with venv, ensurepip and the C headers.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13 /usr/bin/python3; do
        "$candidate" - >/dev/null 2>&1 <<'CODE' && { command -v "$candidate"; return 0; }
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 11)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
CODE
    done
    return 1
}

# Every other interpreter on this machine that the wheel claims to serve, one a line.
other_pythons() {
    local path
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python /usr/bin/python3 /usr/bin/python3.[0-9]*; do
        [[ -x "$path" && "$path" != *-config ]] || continue
        "$path" -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' >/dev/null 2>&1 && readlink -f "$path"
    done | sort -u
}

# venv NAME [INTERPRETER]: make the virtual environment once and print its folder.
venv() {
    local folder=$SCRATCH/venv-$1
    [[ -d "$folder" ]] || "${2:-$PYTHON}" -m venv "$folder" >&2
    printf '%s\n' "$folder"
}

# install NAME REQUIREMENT...: into that environment, quietly; a failure shows what pip said. One retry, because an
# index that is busy for a moment is no reason to fail.
install() {
    local folder
    folder=$(venv "$1")
    shift
    "$folder/bin/python" -m pip install -q "$@" >"$SCRATCH/pip.log" 2>&1 ||
        { sleep 5; "$folder/bin/python" -m pip install -q "$@" >"$SCRATCH/pip.log" 2>&1; } ||
        { cat "$SCRATCH/pip.log" >&2; return 1; }
}

# A copy of what git would commit, so that no build product of the checkout can help or shadow anything.
checkout_copy() {
    local folder=$SCRATCH/$1
    mkdir -p "$folder"
    git ls-files -z --cached --others --exclude-standard | xargs -0 -I{} sh -c '[ -e "$1" ] && printf "%s\0" "$1"' _ {} |
        tar --null -T - -cf - | tar -xf - -C "$folder"
    printf '%s\n' "$folder"
}

# stage NAME: run the function stage_NAME under its limit; the first failure ends the run.
stage() {
    local function=stage_${1//-/_} began=$SECONDS limit
    CURRENT=$1
    limit=LIMIT_${1//-/_}
    say "" "== $1"
    export SCRATCH PYTHON
    timeout --kill-after=20 "${!limit}" bash -Eeuo pipefail -c "source .ci/lib.sh; source .ci/stages.sh; $function" </dev/null ||
        { local code=$?; [[ $code != 124 ]] || say "ci: $1 took longer than ${!limit} s"; exit 1; }
    TIMES+=("$(printf '%-10s %5d s' "$1" $((SECONDS - began)))")
    say "== $1: $((SECONDS - began)) s"
    CURRENT=
}

summary() {
    say "" "ci: every stage passed"
    printf '    %s\n' "${TIMES[@]}"
    say "ci: $((SECONDS - STARTED)) s in all"
}
