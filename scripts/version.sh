#!/usr/bin/env bash
# version.sh: the version of these sources: what `git describe` says, or "unknown" outside of git. Where that does not say
# all (changes that are not committed; no git), a checksum of the program's sources is added.
set -euo pipefail
cd "$(dirname "$0")/.."

version=unknown
if [[ -e .git ]]; then # not the repository of a folder above
    version=$(git describe --always --tags --dirty 2>/dev/null) || version=unknown
fi
if [[ $version == unknown || $version == *-dirty ]]; then
    version+=+$(cat train_gpt_fp8.cu lib/* | cksum | cut -d' ' -f1)
fi
echo "$version"
