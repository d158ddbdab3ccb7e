# shellcheck shell=bash
# Sourced by `build_wheel` and `test`, after bootstrap.sh: builds for aarch64 on another machine, and runs them in an emulator.
#
#   ensure_cross                          the cross compiler, and a root of arm64 packages to link with
#   cross_wheel VENV BUILD WHEELS         a wheel of the Python of a virtual environment, not yet repaired
#   ensure_cross_packages                 the packages that an emulated Python imports: this tree, cross built, and what it needs
#   cross_python ARGUMENT...              runs the emulated Python, Debian's of the root
#   run_cross_tests aarch64 [ARGUMENT...] the tests of ARM
#
# All of it lies in build/aarch64. The root is extracted, not installed: nothing of it runs but in the emulator.

# What tells in minutes whether kernels, pages, sampling and threads work there. Others start processes and take hours. The
# emulator ignores what asks for memory to be made resident.
CROSS_TESTS=(
  tests/kernels/test_{jit,thread_pool,page_pool,page_map,radix_tree,sampler,checksum,topology,token_index}.py
  tests/kernels/test_{emit,quantized_products}.py
  -k "not software and not touching_by_node"
)

CROSS=$QUIRE_ROOT/build/aarch64
CROSS_ROOT=$CROSS/root
CROSS_TOOLCHAIN=$QUIRE_ROOT/scripts/cross/aarch64.cmake
CROSS_PACKAGES=(
  libc6-dev libstdc++-12-dev zlib1g-dev libzstd-dev "llvm-$LLVM_VERSION-dev" "libmlir-$LLVM_VERSION-dev" "mlir-$LLVM_VERSION-tools"
  python3 libpython3-dev ca-certificates
)

missing_cross_tools() {
  command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
  command -v mmdebstrap >/dev/null || [[ -d $CROSS_ROOT ]] || echo mmdebstrap
}

# The emulator: $QUIRE_QEMU, or Debian's, from qemu-user or qemu-user-static.
find_emulator() { command -v "${QUIRE_QEMU:-qemu-aarch64}" || command -v qemu-aarch64-static; }

make_cross_root() {
  local suite root=$CROSS_ROOT.new link
  suite=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
  rm -rf "$root"
  mkdir -p "$CROSS"
  mmdebstrap --variant=extract --architectures=arm64 --include="$(IFS=, && printf '%s' "${CROSS_PACKAGES[*]}")" \
    "$suite" "$root" || return
  # What names a file from the root of the file system has to name the same file of this root.
  find "$root"/usr/lib -type l -lname '/*' | while IFS= read -r link; do
    ln -sfn "$(realpath -m --relative-to="$(dirname "$link")" "$root$(readlink "$link")")" "$link"
  done
  find "$root/usr/lib/llvm-$LLVM_VERSION/lib/cmake" -name '*.cmake' \
    -exec sed -i -E 's#([;"])/usr/lib/#\1${CMAKE_SYSROOT}/usr/lib/#g' {} +
  mv -T "$root" "$CROSS_ROOT"
}

ensure_cross() {
  local packages hash
  mapfile -t packages < <(missing_cross_tools)
  ((${#packages[@]} == 0)) || die "a build for aarch64 needs ${packages[*]}; install them with $(apt_line "${packages[@]}")"
  hash=$(printf '%s\n' "${CROSS_PACKAGES[@]}" | sha256sum)
  [[ -f $CROSS/.stamp-root && $(<"$CROSS/.stamp-root") == "$hash" && -d $CROSS_ROOT ]] && return
  rm -rf "$CROSS_ROOT"
  run_logged "making a root of arm64 packages" make_cross_root || exit 1
  printf '%s\n' "$hash" >"$CROSS/.stamp-root"
}

# cross_wheel VENV BUILD WHEELS: the type stub is that of the native build. Python's headers are those of the root, or the
# virtual environment's where the root has another version; they differ in nothing between 64-bit machines.
cross_wheel() {
  local venv=$1 build=$2 wheels=$3 version headers options=()
  version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  headers=$CROSS_ROOT/usr/include/python$version
  [[ ! -d $headers ]] || options=(--config-settings cmake.define.Python_INCLUDE_DIR="$headers")
  QUIRE_SYSROOT=$CROSS_ROOT _PYTHON_HOST_PLATFORM=linux-aarch64 PATH=$venv/bin:$PATH \
    SETUPTOOLS_EXT_SUFFIX=.cpython-${version/./}-aarch64-linux-gnu.so \
    "$venv/bin/python" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --config-settings build-dir="$build" \
    --config-settings cmake.define.CMAKE_TOOLCHAIN_FILE="$CROSS_TOOLCHAIN" \
    --config-settings cmake.define.MLIR_DIR="$CROSS_ROOT/usr/lib/llvm-$LLVM_VERSION/lib/cmake/mlir" \
    --config-settings cmake.define.QUIRE_STUB="$QUIRE_ROOT/kernels/_native.pyi" "${options[@]}" --wheel-dir "$wheels" "$QUIRE_ROOT"
}

# What Quire and its tests need, for the emulated Python.
fill_cross_site() {
  local version needs glibc platforms=()
  version=$(basename "$(readlink "$CROSS_ROOT/usr/bin/python3")") # python3.11
  mapfile -t needs < <(
    "$VENV_PYTHON" -c 'import sys, tomllib; print(*tomllib.load(sys.stdin.buffer)["project"]["dependencies"], sep="\n")' \
      <"$QUIRE_ROOT/pyproject.toml"
    requirements test | grep -E '^(gguf|hypothesis|pytest|xxhash)'
  )
  for glibc in 2014 _2_{17..36}; do
    platforms+=(--platform "manylinux${glibc}_aarch64")
  done
  rm -rf "$CROSS/site"
  pip_install --target "$CROSS/site" --only-binary :all: --implementation cp --python-version "${version#python}" \
    --abi "cp${version//[^0-9]/}" --abi abi3 --abi none "${platforms[@]}" "${needs[@]}"
}

# This tree's packages as links, and the cross built extension, in front of what they need.
build_cross_packages() {
  local entry folder=$CROSS/packages
  QUIRE_SYSROOT=$CROSS_ROOT cmake -G Ninja -S "$QUIRE_ROOT" -B "$CROSS/build" -DCMAKE_TOOLCHAIN_FILE="$CROSS_TOOLCHAIN" \
    -DMLIR_DIR="$CROSS_ROOT/usr/lib/llvm-$LLVM_VERSION/lib/cmake/mlir" -DPython_EXECUTABLE="$VENV_PYTHON" \
    -DPython_INCLUDE_DIR="$(compgen -G "$CROSS_ROOT/usr/include/python3.*")" -DNB_SUFFIX=.so \
    -DCMAKE_BUILD_TYPE=Release && QUIRE_SYSROOT=$CROSS_ROOT cmake --build "$CROSS/build" || return
  rm -rf "$folder"
  mkdir -p "$folder/quire/kernels" "$CROSS/bin"
  for entry in protocol frontend engine_core; do
    ln -s "$QUIRE_ROOT/$entry" "$folder/quire/$entry"
  done
  for entry in "$QUIRE_ROOT"/kernels/*; do
    [[ $entry == */_native.*.so ]] || ln -s "$entry" "$folder/quire/kernels/"
  done
  QUIRE_SYSROOT=$CROSS_ROOT cmake --install "$CROSS/build" --prefix "$folder"
  # Processes that Python starts are emulated too: the system cannot run its interpreter.
  printf 'import sys\n\nsys.executable = "%s"\n' "$CROSS/bin/python" >"$folder/sitecustomize.py"
  printf '#!/bin/sh\nexec "%s" -L "%s" "%s" "$@"\n' "$(find_emulator)" "$CROSS_ROOT" "$CROSS_ROOT/usr/bin/python3" >"$CROSS/bin/python"
  chmod +x "$CROSS/bin/python"
}

ensure_cross_packages() {
  find_emulator >/dev/null || die "there is no emulator (qemu-aarch64); install it with $(apt_line qemu-user)"
  ensure_quire
  ensure_cross
  PATH=$QUIRE_VENV/bin:$PATH run_logged "building the native extension for aarch64 (minutes the first time)" \
    build_cross_packages || exit 1
  [[ -d $CROSS/site ]] || run_logged "installing what it needs, for aarch64" fill_cross_site || exit 1
}

cross_python() {
  PYTHONPATH=$CROSS/packages:$CROSS/site PYTHONDONTWRITEBYTECODE=1 QEMU_CPU=${QEMU_CPU:-neoverse-n1} "$CROSS/bin/python" "$@"
}

run_cross_tests() {
  [[ ${1:-} == aarch64 ]] || die "--arch ${1:-}: tests run on this machine, and with --arch aarch64 in an emulator"
  shift
  ensure_cross_packages
  cd "$QUIRE_ROOT"
  if (($#)); then
    cross_python -m pytest "$@"
    return
  fi
  cross_python -m pytest "${CROSS_TESTS[@]}"
  QUIRE_TEST_AARCH64=all "$VENV_PYTHON" -m pytest tests/test_aarch64.py
}
