#!/usr/bin/env bash
# Tests in the Python of Debian's next release, with the newest packages that pip finds for it: this
# machine's Python may hold JAX and ArviZ back. Needs root and debootstrap; without them the exit
# status is 77.
#
#     tests/debian_python.sh FOLDER [ARGUMENTS OF PYTEST]
set -euo pipefail
release=trixie
root=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
if ! command -v debootstrap > /dev/null || [ "$(id -u)" != 0 ]; then
  echo "no Python of Debian's: expected root, and debootstrap installed"
  exit 77
fi
if [ ! -x "$root/usr/bin/python3" ]; then
  debootstrap --variant=minbase --include=python3-venv,ca-certificates "$release" "$root" \
    http://deb.debian.org/debian > "$root.log" || exit 77
fi
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
rm -rf "$root/src" && mkdir "$root/src"
tar -c pyproject.toml README.md CHANGELOG.md LICENSE docs models numpyro_fed tests | tar -x -C "$root/src"
# mounts of its own, which end with it
unshare --mount bash -c '
  mount --bind /proc "$0/proc" && mount --bind /dev "$0/dev" && exec chroot "$0" bash -c "
    set -e
    cd /src
    python3 -m venv /venv && /venv/bin/pip install -q -e .[test]
    /venv/bin/pip list 2> /dev/null | grep -iE \"^(arviz|jax|jaxlib|numpyro|numpy) \"
    NUMPYRO_FED_DATA= exec /venv/bin/python -m pytest \"\$@\"" bash "$@"' "$root" "$@"
