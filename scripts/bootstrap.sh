# shellcheck shell=bash
# Sourced by `serve` and `test`: makes a virtual environment hold an up-to-date Quire.
#
#   ensure_quire            system packages, virtual environment, native build, editable install
#   ensure_extra NAME       the requirements of one extra of pyproject.toml, on top
#   ensure_runnable         a Quire that runs, from a wheel if there is one, which takes no build
#
# Each step leaves a stamp in the virtual environment once it is complete, holding a hash of all it depends on. A matching
# stamp means nothing to do, so a second run costs milliseconds; an interrupted step left none and is done again.

QUIRE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
QUIRE_VENV=${QUIRE_VENV:-$QUIRE_ROOT/.venv}
[[ $QUIRE_VENV == /* ]] || QUIRE_VENV=$PWD/$QUIRE_VENV
VENV_PYTHON=$QUIRE_VENV/bin/python
LLVM_VERSION=22
DISTRIBUTION=$(sed -n 's/^name = "\(.*\)"$/\1/p' "$QUIRE_ROOT/pyproject.toml")
WHEEL_NAME=${DISTRIBUTION//[-.]/_}

say() { printf 'quire: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# run_logged MESSAGE COMMAND...: says what it does and how long it took; shows the end of the log when it fails.
run_logged() {
  local message=$1 log=$QUIRE_VENV.log began=$SECONDS
  shift
  say "$message ..."
  if ! "$@" >"$log" 2>&1 9>&-; then
    tail -n 40 "$log" >&2
    say "failed after $((SECONDS - began)) s: $message (whole log: $log)"
    return 1
  fi
  say "done in $((SECONDS - began)) s"
}

# ---- system packages ------------------------------------------------------------------------------------------------

python_is_fit() {
  "$1" - <<'P' 2>/dev/null
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(0 if sys.version_info >= (3, 11) and os.path.exists(header) else 1)
P
}

# Without headers it can run Quire, and not build it.
python_runs() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# find_python [TEST]: the Python to build with: $QUIRE_PYTHON, or the first on PATH that is 3.11 or newer and has its headers.
find_python() {
  local name is_fit=${1:-python_is_fit}
  for name in ${QUIRE_PYTHON:+"$QUIRE_PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && "$is_fit" "$name"; then
      command -v "$name"
      return
    fi
  done
  return 1
}

# Debian package names of what is missing, one a line. Files are tested, not packages: they may come from elsewhere.
missing_packages() {
  local llvm=/usr/lib/llvm-$LLVM_VERSION
  find_python >/dev/null || printf '%s\n' python3 python3-dev python3-venv
  command -v g++ >/dev/null || command -v clang++ >/dev/null || echo g++
  [[ -e $llvm/lib/cmake/mlir/MLIRConfig.cmake ]] || echo libmlir-$LLVM_VERSION-dev
  [[ -e $llvm/bin/mlir-tblgen ]] || echo mlir-$LLVM_VERSION-tools
  [[ -e $llvm/lib/cmake/llvm/LLVMConfig.cmake && -e $llvm/lib/libLLVMSupport.a ]] || echo llvm-$LLVM_VERSION-dev
  [[ -e /usr/include/zlib.h ]] || echo zlib1g-dev
}

# True when apt can install every package named, or has no lists to tell.
apt_has() {
  local name
  compgen -G '/var/lib/apt/lists/*Packages*' >/dev/null || return 0
  for name in "$@"; do
    apt-cache show "$name" >/dev/null 2>&1 || return 1
  done
}

# The one line that installs the packages named; where the release has no LLVM this new, LLVM's own archive comes first.
apt_line() {
  local sudo="" line
  ((EUID == 0)) || sudo="sudo "
  line="${sudo}apt-get update && "
  apt_has "$@" || line="curl -fsSLO https://apt.llvm.org/llvm.sh && ${sudo}bash llvm.sh $LLVM_VERSION && "
  printf '%s\n' "$line${sudo}apt-get install -y --no-install-recommends $*"
}

ensure_system_packages() {
  local packages
  [[ -z ${QUIRE_PYTHON:-} ]] || python_is_fit "$QUIRE_PYTHON" ||
    die "QUIRE_PYTHON=$QUIRE_PYTHON is not a Python 3.11 or newer with headers (Python.h) and the venv module"
  mapfile -t packages < <(missing_packages)
  ((${#packages[@]})) || return 0
  command -v apt-get >/dev/null ||
    die "missing, by Debian's names: ${packages[*]}. Install their equivalents (MLIR and LLVM $LLVM_VERSION under" \
      "/usr/lib/llvm-$LLVM_VERSION; Python 3.11 or newer with headers), then run this again"
  export DEBIAN_FRONTEND=noninteractive
  ((EUID != 0)) || run_logged "fetching the package lists" apt-get update || say "continuing with the lists at hand"
  if ((EUID != 0)) || ! apt_has "${packages[@]}"; then
    say "these system packages are missing: ${packages[*]}; install them with this line, then run this again:"
    say "    $(apt_line "${packages[@]}")"
    exit 1
  fi
  run_logged "installing system packages: ${packages[*]}" \
    apt-get install -y --no-install-recommends "${packages[@]}" || exit 1
  mapfile -t packages < <(missing_packages)
  ((${#packages[@]} == 0)) || missing_after_install "${packages[@]}"
}

missing_after_install() {
  [[ $* != *python3* ]] || die "the newest Python found, $(python3 --version 2>&1), is too old or has no headers: Quire needs" \
    "Python 3.11 or newer with headers; install one and name it, for example QUIRE_PYTHON=/usr/bin/python3.11"
  die "still missing after the installation: $*"
}

# What another build, maybe in another clone, has compiled already is not compiled again.
ensure_ccache() {
  command -v ccache >/dev/null && return
  ((EUID == 0)) && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  run_logged "installing ccache, which spares later builds" apt-get install -y --no-install-recommends ccache
}

# The browser that the tests of the page drive; nothing else needs it.
ensure_chromium() {
  command -v chromium >/dev/null && return
  ((EUID == 0)) && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  run_logged "installing chromium for the tests of the page" apt-get install -y --no-install-recommends chromium
}

# ---- virtual environment and installation ---------------------------------------------------------------------------

ensure_venv() {
  local python
  # A moved virtual environment is of no use: its commands name the folder it was made in.
  if grep -qsF "$QUIRE_VENV/bin" "$QUIRE_VENV/bin/pip" &&
    "$VENV_PYTHON" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    return
  fi
  if [[ -d $QUIRE_VENV && -n $(ls -A "$QUIRE_VENV") && ! -e $QUIRE_VENV/pyvenv.cfg ]]; then
    die "$QUIRE_VENV exists and is not a virtual environment; move it away or set QUIRE_VENV to another folder"
  fi
  python=$(find_python) || die "no Python 3.11 or newer with headers found"
  run_logged "creating a virtual environment with $python" "$python" -m venv --clear "$QUIRE_VENV" || exit 1
}

# requirements TABLE [EXTRA]: the strings of build-system.requires, or of one extra.
requirements() {
  "$VENV_PYTHON" - "$QUIRE_ROOT/pyproject.toml" "$@" <<'P'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)
extra = sys.argv[2:]
names = project["project"]["optional-dependencies"][extra[0]] if extra else project["build-system"]["requires"]
print("\n".join(names))
P
}

pip_install() { "$VENV_PYTHON" -m pip install --disable-pip-version-check "$@"; }

# Everything the installation depends on. Python files are not part of it: the packages are links to their folders.
fingerprint() {
  cd "$QUIRE_ROOT" || exit 1
  {
    printf '%s\n' "$QUIRE_ROOT" "$QUIRE_VENV" "$(compgen -G 'kernels/_native.*')"
    cat "$QUIRE_VENV/pyvenv.cfg" pyproject.toml CMakeLists.txt 2>/dev/null
    find kernels/native -type f -print0 | LC_ALL=C sort -z | xargs -0 cat
  } | sha256sum
}

# The packages as links in the environment, where Python, editors and type checkers all find them.
link_packages() {
  local name site
  site=$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/quire/lora"
  for name in protocol frontend engine_core kernels; do
    ln -sfnT "$QUIRE_ROOT/$name" "$site/quire/$name"
  done
  ln -sfT "$QUIRE_ROOT/frontend/namespace.py" "$site/quire/__init__.py"
  ln -sfT "$QUIRE_ROOT/frontend/vllm/lora_request_module.py" "$site/quire/lora/request.py"
  ln -sfT "$QUIRE_ROOT/frontend/py.typed" "$site/quire/py.typed"
}

# The import hook that an editable install leaves: the links do its work.
remove_import_hook() { "$VENV_PYTHON" -c 'import pathlib, sysconfig
for hook in pathlib.Path(sysconfig.get_path("purelib")).glob("_editable*_quire*.*"): hook.unlink()'; }

# A Quire that was installed when its distribution had another name: it owns the same files.
uninstall_other_names() {
  local names
  mapfile -t names < <("$VENV_PYTHON" - "$DISTRIBUTION" <<'P'
import sys
from importlib.metadata import distributions
for found in distributions():
    script = "quire = quire.frontend.cli:main" in (found.read_text("entry_points.txt") or "")
    if script and found.name != sys.argv[1]:
        print(found.name)
P
  )
  ((${#names[@]} == 0)) || run_logged "removing ${names[*]}, as Quire was named" \
    "$VENV_PYTHON" -m pip uninstall --disable-pip-version-check -y "${names[@]}" || exit 1
}

# with_lock FUNCTION...: one installation at a time into one virtual environment; others wait.
with_lock() {
  mkdir -p "$(dirname "$QUIRE_VENV")"
  (
    flock -n 9 || {
      say "another run is installing into $QUIRE_VENV; waiting for it"
      flock 9
    }
    "$@"
  ) 9>"$QUIRE_VENV.lock"
}

stamp_matches() { [[ -x $VENV_PYTHON && -f $QUIRE_VENV/.stamp-$1 && $(<"$QUIRE_VENV/.stamp-$1") == "$2" ]]; }

write_stamp() { printf '%s\n' "$2" >"$QUIRE_VENV/.stamp-$1.new" && mv "$QUIRE_VENV/.stamp-$1.new" "$QUIRE_VENV/.stamp-$1"; }

install_quire() {
  local needs
  stamp_matches quire "$(fingerprint)" && return
  ensure_system_packages
  ensure_ccache || say "building without ccache"
  ensure_venv
  mapfile -t needs < <(requirements)
  run_logged "installing the build tools: cmake ninja ${needs[*]}" pip_install cmake ninja "${needs[@]}" || exit 1
  uninstall_other_names
  link_packages
  # The build folder stays in the virtual environment, so that a change rebuilds only what it touches; a build in
  # isolation would see another CMake and nanobind each time.
  PATH=$QUIRE_VENV/bin:$PATH run_logged "building and installing Quire (a few minutes the first time)" \
    pip_install --no-build-isolation --config-settings build-dir="$QUIRE_VENV/quire-build" -e "$QUIRE_ROOT" || exit 1
  remove_import_hook
  write_stamp quire "$(fingerprint)"
  say "the command is $QUIRE_VENV/bin/quire"
}

install_extra() {
  local needs hash
  mapfile -t needs < <(requirements "$1")
  hash=$({ cat "$QUIRE_VENV/pyvenv.cfg" && printf '%s\n' "${needs[@]}"; } | sha256sum)
  stamp_matches "extra-$1" "$hash" && return
  run_logged "installing the extra '$1': ${needs[*]}" pip_install "${needs[@]}" || return 1
  write_stamp "extra-$1" "$hash"
}

ensure_quire() { stamp_matches quire "$(fingerprint)" || with_lock install_quire; }
ensure_extra() { with_lock install_extra "$1"; }

# ---- from a wheel ---------------------------------------------------------------------------------------------------

# A hash of all that is in a wheel. `build_wheel` leaves it beside those that it makes.
sources() {
  cd "$QUIRE_ROOT" || exit 1
  find pyproject.toml CMakeLists.txt protocol frontend engine_core kernels -type f ! -name '*.py[co]' ! -name '_native.*' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
}

# find_wheel PYTHON: $QUIRE_WHEEL, a file or an address; or the wheel in dist/ for this Python, made of these very sources.
find_wheel() {
  local dist=$QUIRE_ROOT/dist tag
  if [[ -n ${QUIRE_WHEEL:-} ]]; then
    printf '%s\n' "$QUIRE_WHEEL"
    return
  fi
  [[ -f $dist/sources.sha256 && $(<"$dist/sources.sha256") == "$(sources)" ]] || return 1
  tag=$("$1" -c 'import sys; print("cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3")')
  compgen -G "$dist/$WHEEL_NAME-*-$tag-*_$(uname -m).whl"
}

install_wheel() {
  local wheel=$1 python=$2 stamp=$3
  stamp_matches wheel "$stamp" && return
  run_logged "creating a virtual environment with $python" "$python" -m venv --clear "$QUIRE_VENV" || exit 1
  run_logged "installing $wheel" pip_install "$wheel" || exit 1
  write_stamp wheel "$stamp"
  say "the command is $QUIRE_VENV/bin/quire"
}

# In an environment of its own beside $QUIRE_VENV, which is left to what is built here.
ensure_runnable() {
  local python wheel
  stamp_matches quire "$(fingerprint)" && [[ -z ${QUIRE_WHEEL:-} ]] && return
  if python=$(find_python python_runs) && wheel=$(find_wheel "$python"); then
    QUIRE_VENV+=-wheel
    VENV_PYTHON=$QUIRE_VENV/bin/python
    with_lock install_wheel "$wheel" "$python" "$(stat -c '%n %s %Y' "$wheel" 2>/dev/null || printf '%s\n' "$wheel") $python"
    return
  fi
  ensure_quire
}
