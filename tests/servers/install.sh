#!/bin/sh
# Install the Debian packages that the servers of the tests come from; does nothing when all are there.
# No system service is started by it, and none is used by the tests.
set -eu

packages="redis-server redis-sentinel redis-tools postgresql pgbouncer rabbitmq-server mmdebstrap openssl faketime"

missing=""
for package in $packages; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
        missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "The tests need real servers. Install what these Debian packages bring:$missing" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    root=""
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    root="sudo -n"
else
    echo "The tests need real servers. As root, run: apt-get install --no-install-recommends$missing" >&2
    exit 1
fi

# Debian starts a service as soon as its package is installed, unless this policy forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | $root tee "$policy" >/dev/null
    $root chmod 755 "$policy"
    trap '$root rm -f "$policy"' EXIT
fi

log=$(mktemp)
echo "Installing$missing …"
if ! { $root apt-get update -qq &&
    $root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    rm -f "$log"
    exit 1
fi
rm -f "$log"
