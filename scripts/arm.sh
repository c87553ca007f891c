#!/bin/bash
# Compile for 64-bit Arm on an x86 Debian, and run under qemu. BIN: the folder of a Python that has pip.
#
#     scripts/arm.sh test PYTEST_ARGUMENT...    build the extension into this tree, and run tests of it
#     scripts/arm.sh wheel SDIST                build a wheel into build/arm/repaired, and answer the demo from it
#
# build/arm has an aarch64 Python of Debian, wheels, and objects. `wheel` needs auditwheel and patchelf in BIN.
# torch 2.8 is the last release whose aarch64 wheel on PyPI is a small CPU build. qemu has SDOT and BFDOT.
set -e -o pipefail
WHEELS='filelock|fsspec|hypothesis|iniconfig|jinja2|llvmlite|markupsafe|mpmath|networkx|numba|numpy|packaging|pluggy'
WHEELS="$WHEELS|pybind11|pygments|pytest|setuptools|sortedcontainers|sympy|typing[_-]extensions|xxhash"
WHEELS="$WHEELS|annotated-doc|annotated-types|click|markdown-it-py|mdurl|pydantic|pydantic_core|rich|safetensors"
WHEELS="$WHEELS|shellingham|tokenizers|typer|typing-inspection"
PIP="$BIN/python -m pip --disable-pip-version-check"
PLATFORMS="$(printf -- '--platform manylinux_2_%s_aarch64 ' $(seq 17 40)) --platform manylinux2014_aarch64"

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do
    command -v $tool >/dev/null || { echo "no $tool: apt-get install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }
done
grep -q bookworm /etc/os-release || { echo "this needs Debian 12: its Python 3.11 for Arm is used"; exit 1; }
mkdir -p build/arm/part
cd build/arm
here=$PWD

if [ ! -d root ]; then  # packages of another architecture, without a change of this system
    rm -rf part apt && mkdir -p apt/state/lists/partial apt/cache/archives/partial && touch apt/status
    cat >apt.conf <<END
APT::Architecture "arm64"; APT::Architectures { "arm64"; };
Dir::State "$here/apt/state"; Dir::State::status "$here/apt/status"; Dir::Cache "$here/apt/cache";
END
    export APT_CONFIG=$here/apt.conf
    apt-get -qq update
    apt-get -qq install --download-only --yes --no-install-recommends python3.11 libpython3.11-dev libgomp1 \
        libstdc++6 >/dev/null
    unset APT_CONFIG
    for package in apt/cache/archives/*.deb; do dpkg -x "$package" part; done
    mv part root && rm -r apt
fi
grep -iE "^($WHEELS)==" ../../scripts/constraints.txt >wheels.txt
if ! cmp -s wheels.txt site/wheels.txt; then
    rm -rf part site
    (cd ../.. && $PIP install -qq --no-deps --target build/arm/part --only-binary :all: --python-version 3.11 \
        $PLATFORMS torch==2.8.0 -r build/arm/wheels.txt)
    cp wheels.txt part && mv part site
fi

cd ../..
export QEMU_LD_PREFIX=$here/root QEMU_CPU=max OMP_NUM_THREADS=1
export CPPFLAGS="-I$here/root/usr/include -I$here/root/usr/include/python3.11"
python="qemu-aarch64-static $here/root/usr/bin/python3.11"
case $1 in
test)
    export PYTHONPATH=$here/site:$PWD PAGEDKV_DEBUG=3
    $python setup.py -q build_ext --build-lib build/arm/lib --build-temp build/arm/objects
    cp build/arm/lib/pagedkv/kernels/_cpu.*.so pagedkv/kernels
    exec $python -m pytest --quiet -p no:cacheprovider "${@:2}"
    ;;
wheel)
    export PYTHONPATH=$here/site
    rm -rf build/arm/{source,made,repaired,tried} && mkdir build/arm/source
    tar -xzf "$2" -C build/arm/source --strip-components 1
    (cd build/arm/source && $python setup.py -q bdist_wheel --dist-dir ../made)
    PATH="$BIN:$PATH" auditwheel repair --wheel-dir build/arm/repaired build/arm/made/*.whl
    $PIP install -qq --no-deps --target build/arm/tried --only-binary :all: --python-version 3.11 $PLATFORMS \
        build/arm/repaired/*.whl
    cd build/arm/tried
    export PYTHONPATH=$PWD:$PYTHONPATH PAGEDKV_CACHE_DIR=$here/tried/cache
    $python -m pagedkv generate </dev/null | grep 'Mira keeps a red lamp in the cellar'
    $python -m pagedkv doctor
    ;;
esac
