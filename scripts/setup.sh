#!/usr/bin/env bash
# setup.sh [--what cpu|gpu|test] [--dry-run]: find out what is missing to build and run, and install it.
#
#   cpu    compiler, OpenMPI, PCRE2, xxHash, Python 3: the program for any machine, the data tools, the
#          comparison (default)
#   gpu    the same, the CUDA toolkit and NCCL; cuDNN's headers where cuDNN itself is there (optional)
#   test   the same as cpu, and xz; for the test of scripts/export_hf.py three small Python packages in .deps/python
#          (optional); what the GPU tests need is not installed for `make test`
#
# On Debian and Ubuntu the missing packages are installed with apt-get, by root or through sudo when it asks for no
# password; otherwise the one line to type is printed. Elsewhere the list of what is missing is printed. Nothing is
# touched, and nothing printed, when nothing is missing. Exit status 0: all there; 1: something is still missing.
set -euo pipefail
cd "$(dirname "$0")/.."

what=cpu
dry_run=0
while [[ $# -gt 0 ]]; do
    case $1 in
        --what)
            what=${2:-}
            shift
            ;;
        --dry-run) dry_run=1 ;;
        --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"
            exit 0
            ;;
        *)
            echo "error: unknown argument '$1', want --what cpu|gpu|test or --dry-run" >&2
            exit 2
            ;;
    esac
    shift || break
done
case $what in
    cpu | gpu | test) ;;
    *)
        echo "error: --what '$what', want cpu, gpu or test" >&2
        exit 2
        ;;
esac

as_root=()
[[ $(id -u) -eq 0 ]] || as_root=(sudo)
can_be_root() { [[ $(id -u) -eq 0 ]] || { have sudo && sudo -n true 2>/dev/null; }; }

say() { echo "setup: $*"; }
have() { command -v "$1" >/dev/null 2>&1; }

# Does a C program with these lines compile? Headers are looked for where the compiler looks, not at a package's name.
compiles() { # LINES [FLAGS...]
    local lines=$1
    shift
    printf '%b\n' "$lines" | "${CC:-gcc}" "$@" -fsyntax-only -x c - 2>/dev/null
}

# ----------------------------------------------------------------------------------------------------------------------
# what is missing: Debian packages, and the same in words for everybody else

packages=()
words=()
missing() { # WORDS PACKAGE...
    words+=("$1")
    shift
    packages+=("$@")
}

min_cuda=12.8 # sm_90a and every cuBLASLt call since 12.3; 12.8 is the oldest whose NCCL packages know FP8
nvcc=$(command -v nvcc || true)
[[ -n $nvcc || ! -x /usr/local/cuda/bin/nvcc ]] || nvcc=/usr/local/cuda/bin/nvcc

cuda_version() { "$nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p'; }
at_least() { [[ $(printf '%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; } # VERSION MINIMUM

look_for_host_tools() {
    if ! have gcc || ! have g++ || ! have make || ! compiles '#include <stdio.h>'; then
        missing "a C and C++ compiler and make" build-essential
    fi
    if ! have mpicc || ! have mpirun; then
        missing "OpenMPI" libopenmpi-dev openmpi-bin
    fi
    compiles '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>' || missing "PCRE2 headers" libpcre2-dev
    # hashes of 64 bits have their final form since 0.8
    compiles '#include <xxhash.h>\n#if XXH_VERSION_NUMBER < 800\n#error\n#endif' -isystem .deps/xxhash ||
        missing "xxHash 0.8 or newer" libxxhash-dev
    have python3 || missing "Python 3" python3
    if [[ $what == test ]]; then
        have xz || missing "xz" xz-utils
    fi
}

has_nccl() {
    [[ -e .deps/nccl/include/nccl.h ]] && return 0
    local include
    include=$(dirname "$(dirname "$(realpath "$nvcc")")")/include
    compiles '#include <nccl.h>\n#if NCCL_VERSION_CODE < 22400 // no FP8\n#error\n#endif' -I "$include"
}

apt_candidate() { # PACKAGE: the version apt would install, or nothing
    apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: //p' | grep -v '(none)' || true
}

# A fresh machine's lists may be empty, and then no package has a candidate.
refresh_package_lists() {
    if [[ $dry_run -eq 0 ]] && have apt-get && can_be_root; then
        say "apt-get update"
        "${as_root[@]}" apt-get update -qq || true
    fi
}

# NVIDIA's own packages first (cuda-toolkit), then the distribution's, when it is new enough.
look_for_cuda() {
    if [[ -z $nvcc ]]; then
        local package version
        refresh_package_lists
        for package in cuda-toolkit nvidia-cuda-toolkit; do
            version=$(have apt-cache && apt_candidate "$package")
            if [[ -n $version ]] && at_least "${version#*:}" "$min_cuda"; then
                missing "the CUDA toolkit (nvcc)" "$package"
                [[ -z $(apt_candidate libnccl-dev) ]] || missing "NCCL" libnccl2 libnccl-dev
                return
            fi
        done
        echo "error: there is a GPU but no CUDA compiler: nvcc is neither on PATH nor in /usr/local/cuda/bin, and no" \
            "package of it is known to this system (want the CUDA toolkit $min_cuda or newer). Without it: make cpu," \
            "or make quickstart DEVICE=cpu" >&2
        exit 1
    fi
    if ! at_least "$(cuda_version)" "$min_cuda"; then
        echo "error: $nvcc is CUDA $(cuda_version), want $min_cuda or newer. Without it: make cpu, or make quickstart" \
            "DEVICE=cpu" >&2
        exit 1
    fi
    if ! has_nccl; then
        if have apt-cache && [[ -n $(apt_candidate libnccl-dev) ]]; then
            missing "NCCL" libnccl2 libnccl-dev
        else
            fetch_nccl || missing "NCCL's header and library (make NCCL_PATH=... for one outside the toolkit)"
        fi
    fi
}

# ----------------------------------------------------------------------------------------------------------------------
# from the Python package index into .deps/: headers that no system package brings, and what one test needs. Nothing is
# installed into the system's Python.

unpack_wheel() { # PACKAGE FOLDER: download the newest wheel and unpack it there
    have python3 && python3 -m pip --version >/dev/null 2>&1 || return 1
    local folder=$2
    mkdir -p "$folder"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" "$1" &&
        python3 -m zipfile -e "$folder"/*.whl "$folder"
}

fetch_nccl() {
    local major wheel
    major=$(cuda_version)
    major=${major%%.*}
    say "python3 -m pip download nvidia-nccl-cu$major    # NCCL, into .deps/nccl"
    [[ $dry_run -eq 0 ]] || return 0
    wheel=$(mktemp -d)
    if unpack_wheel "nvidia-nccl-cu$major" "$wheel" && [[ -e $wheel/nvidia/nccl/include/nccl.h ]]; then
        mkdir -p .deps
        rm -rf .deps/nccl
        mv "$wheel/nvidia/nccl" .deps/nccl
        ln -sf libnccl.so.2 .deps/nccl/lib/libnccl.so
    fi
    rm -rf "$wheel"
    [[ -e .deps/nccl/include/nccl.h ]]
}

# Optional, so a failure is a note: attention is then this program's own.
fetch_cudnn_frontend() {
    local wheel status
    status=$(make --no-print-directory --silent cudnn-status 2>/dev/null || true)
    [[ $status == *"cudnn_frontend.h not found"* ]] || return 0
    say "python3 -m pip download nvidia-cudnn-frontend    # headers only, into .deps/cudnn-frontend"
    [[ $dry_run -eq 0 ]] || return 0
    wheel=$(mktemp -d)
    if unpack_wheel nvidia-cudnn-frontend "$wheel" && [[ -e $wheel/include/cudnn_frontend.h ]]; then
        mkdir -p .deps/cudnn-frontend
        rm -rf .deps/cudnn-frontend/include
        mv "$wheel/include" .deps/cudnn-frontend/include
    else
        say "not to be had, so attention by cuDNN is left out; the built-in attention needs nothing"
    fi
    rm -rf "$wheel"
}

# Optional, so a failure is a note: what scripts/test_hf.py tests needs them, and it skips what it cannot do.
fetch_python_packages() {
    local wanted=(numpy safetensors ml_dtypes) target
    ! PYTHONPATH=.deps/python python3 -c 'import numpy, safetensors.numpy, ml_dtypes' 2>/dev/null || return 0
    say "python3 -m pip install --target .deps/python ${wanted[*]}"
    [[ $dry_run -eq 0 ]] || return 0
    mkdir -p .deps
    target=$(mktemp -d -p .deps)
    if PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --retries 1 \
        --only-binary=:all: --target "$target" "${wanted[@]}"; then
        chmod 755 "$target"
        rm -rf .deps/python
        mv "$target" .deps/python
    else
        rm -rf "$target"
        say "not to be had, so what the tests of export_hf.py and import_hf.py need them for is skipped"
    fi
}

# ----------------------------------------------------------------------------------------------------------------------

install_packages() {
    local apt=(apt-get install -y --no-install-recommends "${packages[@]}")
    local line="apt-get update && ${apt[*]}"
    if ! have apt-get; then
        local list
        list=$(printf ', %s' "${words[@]}")
        echo "error: missing: ${list:2}. This system has no apt-get: please install them with its own package manager" >&2
        exit 1
    fi
    if [[ ${#packages[@]} -eq 0 ]]; then
        echo "error: missing, and no package of it is known to this system: ${words[*]}" >&2
        exit 1
    fi
    [[ $(id -u) -eq 0 ]] || line="sudo apt-get update && sudo ${apt[*]}"
    if [[ $dry_run -eq 0 ]] && ! can_be_root; then
        echo "error: packages are missing, and installing them needs a password. Please run this, then try again:" \
            "$line" >&2
        exit 1
    fi
    say "$line"
    [[ $dry_run -eq 0 ]] || return 0
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "${apt[@]}" >/dev/null
}

look_for_host_tools
if [[ $what == gpu ]]; then
    look_for_cuda
fi
if [[ ${#words[@]} -gt 0 ]]; then
    install_packages
    if [[ $dry_run -eq 0 ]]; then
        # Look again: a package that does not bring what it should would else show up as a compiler's complaint.
        words=() packages=()
        nvcc=$(command -v nvcc || true)
        [[ -n $nvcc || ! -x /usr/local/cuda/bin/nvcc ]] || nvcc=/usr/local/cuda/bin/nvcc
        look_for_host_tools
        if [[ $what == gpu ]]; then
            look_for_cuda
        fi
        if [[ ${#words[@]} -gt 0 ]]; then
            echo "error: still missing after installing: ${words[*]}" >&2
            exit 1
        fi
    fi
fi
if [[ $what == gpu ]]; then
    fetch_cudnn_frontend
elif [[ $what == test ]]; then
    fetch_python_packages
fi
