#!/usr/bin/env bash
# setup-gpu.sh FOLDER
# Installs what the build with Vulkan needs on Debian, if it is missing. Where the system's Vulkan headers
# are older than llama.cpp's backend takes, newer ones (from Debian 13) are unpacked into FOLDER; the
# folder that CPATH has to name for the build, if any, is printed as the last line of stdout.
set -euo pipefail

folder=$1
oldest=275  # VK_HEADER_VERSION of 1.3.275

missing=()
[ -e /usr/include/vulkan/vulkan_core.h ] || missing+=(libvulkan-dev)
command -v glslc >/dev/null 2>&1 || missing+=(glslc)
[ -d /usr/include/spirv ] || missing+=(spirv-headers)
# Mesa's drivers: those of graphics cards and the one that computes on the CPU, which the tests use.
compgen -G "/usr/share/vulkan/icd.d/*.json" >/dev/null || missing+=(mesa-vulkan-drivers)

if [ ${#missing[@]} -gt 0 ]; then
    echo "installing: ${missing[*]}" >&2
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "setup-gpu: install these packages first (as root: apt-get install ${missing[*]})" >&2
        exit 1
    fi
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# Minor and patch number of the headers below a folder, as one number.
version() {
    local file=$1/vulkan/vulkan_core.h minor patch
    minor=$(sed -nE 's/.*VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(0, 1, ([0-9]+),.*/\1/p' "$file")
    patch=$(sed -nE 's/^#define VK_HEADER_VERSION ([0-9]+)$/\1/p' "$file")
    echo $((minor * 1000 + patch))
}
enough() { [ -e "$1/vulkan/vulkan_core.h" ] && [ "$(version "$1")" -ge $((3 * 1000 + oldest)) ]; }

enough /usr/include && exit 0
if ! enough "$folder/usr/include"; then
    command -v apt-get >/dev/null 2>&1 || {
        echo "setup-gpu: the Vulkan headers in /usr/include are older than 1.3.$oldest; name newer ones in CPATH" >&2
        exit 1
    }
    echo "the Vulkan headers of this system are older than 1.3.$oldest: unpacking Debian 13's into $folder" >&2
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts" "$folder"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$keys] http://deb.debian.org/debian trixie main" >"$work/sources.list"
    # A configuration of its own: the system's lists of packages stay as they are.
    apt=(-qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts="$work/parts"
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
    (cd "$work" && apt-get "${apt[@]}" update && apt-get "${apt[@]}" download libvulkan-dev/trixie) >&2
    dpkg-deb -x "$work"/libvulkan-dev_*.deb "$folder"
    enough "$folder/usr/include" || {
        echo "setup-gpu: Debian 13's headers could not be unpacked into $folder" >&2
        exit 1
    }
fi
echo "$folder/usr/include"
