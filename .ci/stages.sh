# The stages of .ci/run, one function each, and their time limits in seconds, in which the first
# one that needs torch installs it. Sourced; defines functions only.

# Nothing that ties the sources to one machine.
LIMIT_hygiene=60
stage_hygiene() {
    local rows
    rows=$(git grep -nIE '(^|[^A-Za-z0-9_.])/(home|root|work|Users|opt)/[A-Za-z0-9_.-]+' -- . || true)
    [[ -z "$rows" ]] || { say "paths of one machine in tracked files:" "$rows"; return 1; }
    rows=$(git ls-files -z | xargs -0 -r ls -ld 2>/dev/null | awk '$5 > 1000000 {print $5, $NF}')
    [[ -z "$rows" ]] || { say "large tracked files:" "$rows"; return 1; }
    bash -n .ci/run .ci/lib.sh .ci/stages.sh
}

# The README's second command up to its `&&`, word for word, in a fresh copy and the fresh environment `test`, once. From a
# copy, because a build leaves its products beside the sources and would take older ones into the wheel.
install_viking() {
    [[ ! -e "$SCRATCH/viking-installed" ]] || return 0
    local folder bin
    folder=$(checkout_copy readme)
    bin=$(venv test)/bin
    (cd "$folder" && PATH=$bin:$PATH && pip install '.[test]' >"$SCRATCH/pip.log" 2>&1) ||
        { tail -n 40 "$SCRATCH/pip.log"; return 1; }
    touch "$SCRATCH/viking-installed"
}

# The C tests as they are, under each sanitizer, and against an engine that lacks a fence.
LIMIT_c_tests=1200
stage_c_tests() {
    local folder sanitizer runner
    folder=$(checkout_copy c-tests)
    for sanitizer in none address undefined thread; do
        # ThreadSanitizer of gcc 12 cannot map its shadow where the kernel randomises addresses by 32 bits.
        runner=()
        [[ $sanitizer != thread ]] || runner=(setarch "$(uname -m)" -R)
        say "-- SAN=$sanitizer"
        "${runner[@]}" make -s -j"$(processors)" -C "$folder/csrc" all SAN="$sanitizer"
        "${runner[@]}" env TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=1 \
            make -s -C "$folder/csrc" test SAN="$sanitizer"
    done
    say "-- without one fence each"
    make -s -j"$(processors)" -C "$folder/csrc" mutants
}

# The same C for Windows: compiled with mingw-w64 and run under wine. What cannot be installed here is skipped, aloud.
LIMIT_windows=1200
stage_windows() {
    local folder wine code=0 PATH=$PATH:/usr/lib/wine
    optional x86_64-w64-mingw32-gcc gcc-mingw-w64-x86-64 ||
        { say "-- skipped: there is no compiler for Windows here (gcc-mingw-w64-x86-64) and none can be installed"; return 0; }
    folder=$(checkout_copy windows)
    make -s -j"$(processors)" -C "$folder/csrc" windows
    optional wine64 wine64 || optional wine wine ||
        { say "-- compiled and linked, not run: there is no wine here and it cannot be installed"; return 0; }
    wine=$(command -v wine64 || command -v wine)
    export WINEPREFIX=$SCRATCH/wine WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml='
    timeout 180 "$wine" cmd.exe /c exit 0 >"$SCRATCH/wine.log" 2>&1 || # its first start makes the folder
        { say "-- compiled and linked, not run: wine does not start here"; tail -n 3 "$SCRATCH/wine.log"; return 0; }
    make -s -C "$folder/csrc" windows-test WINE="$wine" || code=$?
    wineserver -k || true # or its folder could not be removed yet
    return "$code"
}

# Our own declarations of the CUDA runtime and of DLPack against the originals: a file that compiles is the proof.
LIMIT_c_asserts=1200
stage_c_asserts() {
    local flags=(-std=c11 -Wall -Wextra -Werror -fsyntax-only -Icsrc) compiler include torch
    if [[ -f tests/c/assert_cuda.c ]]; then
        if compiler=$(command -v nvcc); then
            include=$(nvcc_include "$compiler")
            say "-- CUDA headers of $(nvcc --version | grep -o 'release [0-9.]*')"
            gcc "${flags[@]}" -isystem "$include" tests/c/assert_cuda.c
        else
            say "-- skipped: there is no CUDA toolkit here (no nvcc), so nothing to compare our CUDA declarations with"
        fi
    fi
    if [[ -f tests/c/assert_dlpack.c ]]; then
        install_viking
        torch=$("$(venv test)/bin/python" -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))')
        say "-- DLPack header of torch"
        gcc "${flags[@]}" -isystem "$torch" -isystem "$torch/ATen" tests/c/assert_dlpack.c
    fi
}

# The include folder that an nvcc (which may be a wrapper script) really uses.
nvcc_include() {
    local top
    top=$("$1" --dryrun -c -x cu /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
    [[ -n "$top" ]] || top=$(dirname "$(dirname "$(readlink -f "$1")")")
    for top in "$top/include" "$top/targets/$(uname -m)-linux/include"; do
        [[ -f "$top/cuda_runtime_api.h" ]] && { printf '%s\n' "$top"; return 0; }
    done
    say "no cuda_runtime_api.h beside nvcc" >&2
    return 1
}

# A warning is an error, a missing compiler is a sentence.
LIMIT_build=600
stage_build() {
    local folder output
    folder=$(checkout_copy build)
    install tools 'setuptools>=77' build abi3audit ruff==0.17.6 mypy==2.4.1 clang-format==14.0.6 clang-tidy==20.1.0
    (cd "$folder" && VIKING_WERROR=1 "$(venv tools)/bin/python" -m build --no-isolation --outdir "$SCRATCH/dist" . >"$SCRATCH/build.log" 2>&1) ||
        { tail -n 40 "$SCRATCH/build.log"; return 1; }
    ! grep -nE 'SetuptoolsDeprecationWarning|SetuptoolsWarning|_MissingDynamic' "$SCRATCH/build.log" || return 1
    ls -1 "$SCRATCH/dist"
    output=$(cd "$folder" && rm -rf build && CC=no-such-compiler "$(venv tools)/bin/python" setup.py -q build_ext 2>&1) && return 1
    grep -q 'there is no C compiler here' <<<"$output" || { say "$output"; return 1; }
}

# One wheel for every Python, complete without torch, and saying so.
LIMIT_wheel=600
stage_wheel() {
    local wheel python folder count=0
    [[ -d "$SCRATCH/dist" ]] || stage_build
    wheel=$(echo "$SCRATCH"/dist/*-cp311-abi3-*.whl)
    "$(venv tools)/bin/abi3audit" --strict "$wheel"
    "$PYTHON" -m zipfile -l "$wheel" | grep -q 'viking/patches/README.md'
    while read -r python; do
        count=$((count + 1))
        folder=$(venv "wheel-$count" "$python")
        "$folder/bin/python" -m pip install -q --no-index --no-deps "$wheel"
        "$folder/bin/python" -c '
import sys, importlib.util
import viking, viking._engine
assert importlib.util.find_spec("torch") is None
said = ""
try:
    viking.attach(None, "cpu")
except ImportError as error:
    said = str(error)
assert "pip install torch" in said and "\n" not in said, said
print(f"-- imported by {sys.version.split()[0]} without torch; attach says: {said}")' 2>&1 || return 1
    done < <(other_pythons)
    say "-- $count interpreters"
    [[ $count -gt 0 ]]
}

LIMIT_lint=1200
stage_lint() {
    local bin
    [[ -d "$SCRATCH/dist" ]] || stage_build
    bin=$(venv tools)/bin
    install_viking
    "$bin/ruff" check .
    "$bin/mypy" --python-executable "$(venv test)/bin/python"
    git ls-files -z '*.c' '*.h' | xargs -0 "$bin/clang-format" --dry-run -Werror
    git ls-files -z 'csrc/base/*.c' ':!csrc/base/windows.c' 'csrc/backend/*.c' 'csrc/core/*.c' 'csrc/python/*.c' |
        xargs -0 -n 8 -P "$(processors)" "$bin/clang-tidy" --quiet --extra-arg=-std=c11 --extra-arg=-D_GNU_SOURCE \
            --extra-arg=-DPy_LIMITED_API=0x030B0000 --extra-arg=-Icsrc --extra-arg=-isystem"$("$PYTHON" -c \
            'import sysconfig; print(sysconfig.get_path("include"))')" 2>"$SCRATCH/tidy.log" ||
        { grep -v 'warnings generated' "$SCRATCH/tidy.log"; return 1; }
}

# The rest of the README's second command.
LIMIT_pytest=2400
stage_pytest() {
    install_viking
    cd "$SCRATCH/readme"
    PATH=$(venv test)/bin:$PATH
    pytest
}

LIMIT_example=1200
stage_example() {
    install_viking
    (cd "$SCRATCH" && "$(venv test)/bin/python" "$OLDPWD/examples/train_lora.py" --steps 20)
}

# The README's first command, with fewer steps.
LIMIT_demo=1200
stage_demo() {
    install_viking
    (cd "$SCRATCH" && "$(venv test)/bin/python" -m viking.demo --quick --output demo.png)
    [[ -s "$SCRATCH/demo.png" ]]
}
