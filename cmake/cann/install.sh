#!/usr/bin/env bash
# Installs this operator package: ./install.sh [--install-path=FOLDER], by default into CANN's folder ASCEND_OPP_PATH.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
target=${ASCEND_OPP_PATH:-}
for argument in "$@"; do
    case $argument in
    --install-path=*) target=${argument#*=} ;;
    *) echo "install.sh: $argument is no option, expected --install-path=FOLDER" >&2 && exit 2 ;;
    esac
done
if [ -z "$target" ]; then
    echo "install.sh: needs a folder: --install-path=FOLDER, or ASCEND_OPP_PATH of CANN's set_env.sh" >&2
    exit 1
fi

vendor=$(basename "$here"/vendors/*)
mkdir -p "$target/vendors"
rm -rf "$target/vendors/$vendor"
cp -r "$here/vendors/$vendor" "$target/vendors/"

# CANN looks for operators in these folders, in this order.
config=$target/vendors/config.ini
others=$(sed -n 's/^load_priority=//p' "$config" 2>/dev/null | tr ',' '\n' | grep -vx "$vendor" | paste -sd, - || true)
echo "load_priority=$vendor${others:+,$others}" >"$config"
echo "installed $target/vendors/$vendor; elsewhere than in ASCEND_OPP_PATH: source $target/vendors/$vendor/bin/set_env.bash"
