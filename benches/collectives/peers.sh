#!/bin/bash
# How fast are our local collectives beside Intel MPI, MPICH, Open MPI and gloo, on this machine, one after the other in one run?
#
#   benches/collectives/peers.sh [ranks] [rounds]
#
# What is measured is said in peers.c and in `zrt_collectives::bench`. Peers are found by environment variables; one that is not named is
# reported as not run: IMPI, MPICH, OPENMPI = the prefix of an installation (bin/, lib/, include/; the packages `impi-devel`, `mpich` and
# `openmpi` of the Python package index are such prefixes when installed into an environment of their own), PYTHON = one that imports torch.
# Every MPI runs over shared memory with a rank bound to a core where there are enough. Prints `name operation bytes microseconds`.
set -u
here=$(cd "$(dirname "$0")" && pwd)
ranks=${1:-2} rounds=${2:-2}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cores=$(nproc)
[ "$ranks" -le "$cores" ] && bound=1 || bound=

(cd "$here/../.." && cargo build -q --release -p zrt-collectives --example collective_rate) || exit 1
ours="$here/../../target/release/examples/collective_rate"

compile() { # prefix, name
    "${CC:-gcc}" -O3 -o "$build/$2" "$here/peers.c" -I"$1/include" -L"$1/lib" -lmpi -Wl,-rpath,"$1/lib" || echo "$2: not run: does not compile" >&2
}
for peer in IMPI MPICH OPENMPI; do
    prefix=${!peer:-}
    [ -n "$prefix" ] && compile "$prefix" "$peer" || echo "$peer: not run: $peer is not set to an installation" >&2
done
[ -n "${PYTHON:-}" ] || echo "gloo: not run: PYTHON is not set" >&2

for round in $(seq "$rounds"); do
    "$ours" "$ranks" f32 processes | awk '{ print "ours(" $1 ")", $4, $5 * 1024, $7 }'
    if [ -x "$build/IMPI" ]; then
        I_MPI_ROOT=$IMPI I_MPI_FABRICS=shm I_MPI_PIN=${bound:-0} timeout 100 "$IMPI/bin/mpiexec.hydra" -n "$ranks" "$build/IMPI" impi
    fi
    if [ -x "$build/MPICH" ]; then
        timeout 100 "$MPICH/bin/mpiexec" ${bound:+-bind-to core} -n "$ranks" "$build/MPICH" mpich
    fi
    if [ -x "$build/OPENMPI" ]; then
        OPAL_PREFIX=$OPENMPI OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 100 "$OPENMPI/bin/mpirun" \
            --mca pml ob1 --mca btl self,sm --bind-to "$([ -n "$bound" ] && echo core || echo none)" --oversubscribe -n "$ranks" "$build/OPENMPI" openmpi
    fi
    [ -n "${PYTHON:-}" ] && timeout 100 "$PYTHON" "$here/peers.py" "$ranks"
done
exit 0
