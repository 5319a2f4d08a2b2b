#!/usr/bin/env bash
# Builds the operator package for Ascend, where CANN is. `./build.sh --help` explains how.
set -euo pipefail

top=$(cd "$(dirname "$0")" && pwd)
soc=ascend910b vendor=alltoallv build=

usage() {
    cat <<'END'
usage: ./build.sh [--soc=ascend910b|ascend910_93] [--vendor=NAME] [--build-dir=FOLDER]

Compiles the kernels of op_kernel/ascendc and the aclnn interface, definitions, infer shape and tiling of op_host with
CANN's compiler, and packs them as the operator package FOLDER/NAME-SOC.tar.gz:

    tar -xzf build/ascend910b/alltoallv-ascend910b.tar.gz -C DIRECTORY
    DIRECTORY/install.sh                            # into ASCEND_OPP_PATH, or --install-path=FOLDER
    source DIRECTORY/vendors/alltoallv/bin/set_env.bash       # or use it where it is

  --soc=SOC           the product: ascend910b (Atlas A2, default) or ascend910_93 (Atlas A3)
  --vendor=NAME       the folder under vendors/ (alltoallv)
  --build-dir=FOLDER  where to build (build/SOC)
  --help              this text

Needs CANN 8.0 or newer with its compiler bisheng, found by ASCEND_HOME_PATH, and cmake 3.25 or newer. Without CANN
`make build` compiles the same kernels with their twin, for tests on any machine.
END
}

fail() {
    echo "build.sh: $1" >&2
    exit "${2:-1}"
}

while [ $# -gt 0 ]; do
    argument=$1
    shift
    case $argument in
    --soc | --vendor | --build-dir) # the value is a word of its own
        [ $# -gt 0 ] || fail "$argument has no value" 2
        argument+==$1
        shift
        ;;
    esac
    case $argument in
    --soc=*) soc=${argument#*=} ;;
    --vendor=*) vendor=${argument#*=} ;;
    --build-dir=*) build=${argument#*=} ;;
    --help | -h)
        usage
        exit 0
        ;;
    *) fail "$argument is no option, expected --soc=, --vendor=, --build-dir= or --help" 2 ;;
    esac
done
case $soc in
ascend910b | ascend910_93) ;;
*) fail "--soc is $soc, expected ascend910b or ascend910_93" 2 ;;
esac
[[ $vendor =~ ^[A-Za-z0-9_]+$ ]] || fail "--vendor is '$vendor', expected letters, digits and underscores" 2
build=${build:-$top/build/$soc}

home=${ASCEND_HOME_PATH:-}
[ -n "$home" ] || fail "needs CANN 8.0 or newer: ASCEND_HOME_PATH is not set; source CANN's set_env.sh first"
[ -d "$home" ] || fail "needs CANN 8.0 or newer: ASCEND_HOME_PATH is $home, which is no folder"
bisheng=
for folder in "$home/bin" "$home/compiler/ccec_compiler/bin" "$home"/*-linux/ccec_compiler/bin; do
    if [ -x "$folder/bisheng" ]; then bisheng=$folder/bisheng && break; fi
done
bisheng=${bisheng:-$(command -v bisheng || true)}
[ -n "$bisheng" ] || fail "needs CANN's compiler: no bisheng below $home; install the toolkit package of CANN, not the runtime alone"
command -v cmake >/dev/null || fail "needs cmake 3.25 or newer: pip install cmake"

cmake -S "$top/cmake/cann" -B "$build" -DALLTOALLV_SOC="$soc" -DALLTOALLV_VENDOR="$vendor" \
    -DALLTOALLV_BISHENG="$bisheng" -DALLTOALLV_CANN="$home"
cmake --build "$build" --parallel
rm -rf "$build/package"
cmake --install "$build" --prefix "$build/package"
tar -czf "$build/$vendor-$soc.tar.gz" -C "$build/package" install.sh vendors
echo "$build/$vendor-$soc.tar.gz"
