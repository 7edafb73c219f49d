#!/usr/bin/env bash
# Makes a base image from Debian's packages, where no registry of images can be reached: base-image.sh ENGINE NAME
# ENGINE is docker, podman or buildah. Needs root and debootstrap; SUITE and MIRROR say which Debian, and from where.
set -euo pipefail

engine="$1"
name="$2"
suite="${SUITE:-bookworm}"
if [[ "$(id -u)" -ne 0 ]] || ! command -v debootstrap >/dev/null; then
    echo "base-image.sh: needs root and debootstrap (on Debian: apt-get install debootstrap)" >&2
    exit 1
fi
case "$suite" in
    bookworm) python=3.11 ;;
    jammy) python=3.10 ;;
    noble) python=3.12 ;;
    *) echo "base-image.sh: SUITE: expected bookworm, jammy or noble, which have Python 3.10 to 3.12, got $suite" >&2; exit 1 ;;
esac

root="$(mktemp -d)"
trap 'rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase --include="ca-certificates,python3,python3-venv,libpython$python" \
    "$suite" "$root" ${MIRROR:+"$MIRROR"} >/dev/null
# debootstrap leaves /proc mounted.
for mount in proc sys; do
    if mountpoint -q "$root/$mount"; then umount "$root/$mount"; fi
done
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*
if [[ "$engine" == buildah ]]; then
    container="$(buildah from scratch)"
    buildah add --quiet "$container" "$root" / >/dev/null
    buildah commit --rm --quiet "$container" "$name" >/dev/null
else
    tar -C "$root" -c . | "$engine" import - "$name" >/dev/null
fi
echo "$name"
