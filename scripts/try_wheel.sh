#!/bin/bash
# Try a wheel and an sdist in an empty environment, build/tried: scripts/try_wheel.sh PYTHON WHEEL SDIST TORCH
#
# The wheel has to answer from an empty cache, and to leave no file after an uninstall. The sdist has to install without
# a compiler, and to answer with the numba kernels.
set -e -o pipefail
wheel=$PWD/$2 sdist=$PWD/$3
rm -rf build/tried
"$1" -m venv build/tried
cd build/tried
export PAGEDKV_CACHE_DIR=$PWD/cache
pip="bin/python -m pip --disable-pip-version-check"
$pip install -qq "$4"

ask() { bin/pagedkv generate </dev/null | grep 'Mira keeps a red lamp in the cellar'; }
uninstall() {
    $pip uninstall -qq --yes pagedkv
    left=$(find bin lib* -ipath '*pagedkv*')
    [ -z "$left" ] || { echo "an uninstall leaves $left"; exit 1; }
}

SECONDS=0
$pip install -qq "$wheel[engine]"
installed=$SECONDS
ask
echo "from pip install to the end of the first answer: $SECONDS s, of which pip took $installed s"
echo "wheel: $(du -h "$wheel" | cut -f1)B, installed: $(du -sh lib/python3*/site-packages/pagedkv | cut -f1)B"
PAGEDKV_CACHE_DIR=$PWD/cache-of-warm bin/pagedkv warm
bin/pagedkv doctor
uninstall

CC=/nonexistent CXX=/nonexistent $pip install -v "$sdist" >sdist.log 2>&1
grep -o 'pagedkv: .*The numba kernels serve instead.*' sdist.log
COLUMNS=200 bin/pagedkv doctor | grep 'The numba kernels serve instead'
ask
uninstall
