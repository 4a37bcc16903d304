#!/usr/bin/env bash
# Installs what the build needs on Debian, if it is missing. Asks for nothing when all is there.
set -euo pipefail

missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need cc gcc
need c++ g++
need cmake cmake
need make make
need git git
need clang clang
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
# bindgen loads libclang at build time.
ls /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/*/libclang*.so* >/dev/null 2>&1 || missing+=(libclang-dev)

if [ ${#missing[@]} -gt 0 ]; then
    echo "installing: ${missing[*]}"
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "setup: install these packages first (as root: apt-get install ${missing[*]})" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi

command -v cargo >/dev/null 2>&1 || {
    echo "setup: Rust is missing; install a toolchain of version 1.90 or newer with rustup" >&2
    exit 1
}
