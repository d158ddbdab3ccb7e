# shellcheck shell=bash
# Sourced by `test`, after bootstrap.sh: tests with a native extension that is built with sanitizers.
#
#   run_sanitizers [KIND] [PYTEST ARGUMENT...]     KIND is address (with undefined behaviour) or thread; default: both
#
# The extension of each kind is built in a folder of its own in the virtual environment, and installed into a package
# folder there that otherwise has links to the repository. PYTHONPATH puts it in front, so that the tests and all
# processes that they start import it. Python itself is not instrumented, so it has to be started with the sanitizer's
# library, and with libstdc++, whose __cxa_throw AddressSanitizer looks for when it starts.

SANITIZED_TESTS_address=(tests/kernels tests/engine_core/kv_tiers)
SANITIZED_TESTS_thread=(
  tests/kernels/test_{thread_pool,page_pool,page_map,radix_tree,hot_prefixes,kv_memory,kv_survival,truncate}.py
  tests/kernels/test_{attention_split,drafts,token_constraints,sampler}.py
  tests/engine_core/{transport,kv_tiers} tests/engine_core/test_{disk_tier,process}.py tests/protocol/test_sockets.py
  # The sanitizer's own memory is beyond the limit of address space, and a fork that starts threads is beyond TSan.
  -k "not limit_of_address_space and not killed_with_its_supervisor"
)

# Not detect_leaks: Python keeps objects until the process ends, and every one would be reported.
SANITIZER_OPTIONS_address="detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:print_stacktrace=1"
# The accesses of libraries that are not instrumented are ignored: TSan knows only half of their synchronization.
# Python's subprocess forks while threads run, and only executes another program then.
SANITIZER_OPTIONS_thread="ignore_noninstrumented_modules=1:die_after_fork=0:second_deadlock_stack=1"

sanitizer_library() {
  local name=libasan.so path
  [[ $1 == address ]] || name=libtsan.so
  path=$(g++ -print-file-name="$name" 2>/dev/null) && [[ $path == /* ]] ||
    die "--sanitize $1 needs g++ with $name; install it with apt-get install g++"
  printf '%s\n' "$path"
}

build_sanitized() {
  local kind=$1 folder=$2 entry
  cmake -G Ninja -S "$QUIRE_ROOT" -B "$folder/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_COMPILER=gcc \
    -DCMAKE_CXX_COMPILER=g++ -DPython_EXECUTABLE="$VENV_PYTHON" -DQUIRE_SANITIZE="$kind" &&
    cmake --build "$folder/build" || return
  rm -rf "$folder/packages"
  mkdir -p "$folder/packages/quire/kernels"
  for entry in protocol frontend engine_core; do
    ln -s "$QUIRE_ROOT/$entry" "$folder/packages/quire/$entry"
  done
  for entry in "$QUIRE_ROOT"/kernels/*; do
    [[ $entry == */_native.*.so ]] || ln -s "$entry" "$folder/packages/quire/kernels/"
  done
  cmake --install "$folder/build" --prefix "$folder/packages"
}

# Fails if a test fails, and if any process wrote a report, even one that no test noticed.
run_sanitized() {
  local kind=$1 library reports folder=$QUIRE_VENV/quire-sanitize-$1 failed=0 launcher=()
  shift
  library=$(sanitizer_library "$kind") || exit 1
  PATH=$QUIRE_VENV/bin:$PATH with_lock run_logged "building the native extension with the $kind sanitizer (minutes the first time)" \
    build_sanitized "$kind" "$folder" || exit 1
  reports=$(mktemp -d)
  if (($# == 0)); then
    local -n tests=SANITIZED_TESTS_$kind
    set -- -n 2 --dist loadfile "${tests[@]}"
  fi
  # GCC's TSan before 14 cannot start where the kernel randomizes more than 28 bits of addresses.
  ! setarch -R true 2>/dev/null || launcher=(setarch -R)
  local -n options=SANITIZER_OPTIONS_$kind
  say "pytest $* (with the $kind sanitizer)"
  env PYTHONPATH="$folder/packages" LD_PRELOAD="$library $(g++ -print-file-name=libstdc++.so.6)" \
    {A,UB,T}SAN_OPTIONS="$options:log_path=$reports/report" \
    "${launcher[@]}" "$QUIRE_VENV/bin/pytest" -p no:faulthandler "$@" || failed=1
  if compgen -G "$reports/*" >/dev/null; then
    cat "$reports"/* >&2
    say "the $kind sanitizer wrote $(compgen -G "$reports/*" | wc -l) reports, shown above"
    failed=1
  fi
  rm -rf "$reports"
  return "$failed"
}

run_sanitizers() {
  local kinds=(address thread) kind failed=()
  if [[ ${1:-} == address || ${1:-} == thread ]]; then
    kinds=("$1")
    shift
  fi
  cd "$QUIRE_ROOT"
  for kind in "${kinds[@]}"; do
    run_sanitized "$kind" "$@" || failed+=("$kind")
  done
  ((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
}
