# What both generators of bindings share: the tools at fixed versions, in target/bindings, and one way to call bindgen.
# Needs python3 with pip and venv, cargo, apt (to unpack headers; nothing is installed) and gcc's own headers.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$root/target/bindings
python=$work/python/bin/python

mkdir -p "$work"
[ -x "$python" ] || python3 -m venv "$work/python"
"$python" -m pip install --quiet libclang==18.1.1
[ -x "$work/bin/bindgen" ] || cargo install --quiet bindgen-cli --version 0.72.1 --locked --root "$work"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export LIBCLANG_PATH=$packages/clang/native

# wheel NAME==VERSION GLOB...: unpacks the files of a wheel that match into $work/headers.
wheel() {
    "$python" -m pip download --quiet --no-deps --dest "$work/wheels" "$1"
    "$python" - "$work" "$@" <<'PYTHON'
import fnmatch, glob, sys, zipfile
work, (name, version), patterns = sys.argv[1], sys.argv[2].split("=="), sys.argv[3:]
[path] = glob.glob(f"{work}/wheels/{name.replace('-', '_')}-{version}-*.whl")
with zipfile.ZipFile(path) as archive:
    archive.extractall(f"{work}/headers", [n for n in archive.namelist() if any(fnmatch.fnmatch(n, p) for p in patterns)])
PYTHON
}

# generate OUT HEADER ALLOW CLANG_ARGUMENT...: writes the constants and types of that pattern and, for each function, a pointer type of its name.
# Enums are integers: a number that this build has never heard of is an error value, not undefined behaviour.
generate() {
    local out=$1 header=$2 allow=$3
    shift 3
    "$work/bin/bindgen" "$header" --allowlist-item "$allow" --default-enum-style consts --no-prepend-enum-name --no-doc-comments \
        --no-layout-tests --use-core --rust-target 1.85 --rust-edition 2024 --disable-header-comment --opaque-type hipDeviceArch_t -- \
        -isystem "$(gcc -print-file-name=include)" "$@" | "$python" "$here/pointers.py" "$script" "$allow" > "$out.new"
    mv "$out.new" "$out"
    rustfmt --edition 2024 --config-path "$root" "$out"
}
