"""A hostile launch script cannot harm the machine."""

import os
import socket
import tempfile
from uuid import uuid4

import pytest

from rltrain.tools.port.jail import _write
from rltrain.tools.port.shell import expected_variables, record

LAUNCH = "python3 -m verl.trainer.main_ppo data.seed=1"


def calls(tmp_path, text, *arguments, **options):
    script = tmp_path / "run.sh"
    script.write_text(text)
    return [list(call.words) for call in record(script, arguments, **options).calls]


def test_files_are_neither_written_nor_removed_nor_read(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    text = f"""
    rm -rf {tmp_path} / ; echo gone > {precious}; echo new > {tmp_path}/new; cp /bin/sed {tmp_path}/sed
    {LAUNCH} read="$(cat {precious} /etc/passwd /proc/self/environ 2>/dev/null)" pid=$PPID
    """
    [launch] = calls(tmp_path, text)
    assert launch[-2:] == ["read=", "pid=1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "run.sh"]
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("way", ["/../{}", "/bin/../../{}", "/./../{}"])
def test_a_name_in_a_comment_leads_to_no_file_outside(tmp_path, way):
    victim = tmp_path / "python3"
    victim.write_text("mine")
    # The jail's folder lies in the temporary folder.
    name = way.format(os.path.relpath(victim, tempfile.gettempdir()))
    assert calls(tmp_path, f"# see {name}\n{LAUNCH}")[0][-1] == "data.seed=1"
    assert victim.read_text() == "mine"
    root = tmp_path / "root"
    root.mkdir()
    for inside in ("/../python3", "/bin/../../python3", "python3"):
        with pytest.raises(ValueError, match="not a path in the jail"):
            _write(str(root), inside, b"theirs")
    assert victim.read_text() == "mine"


def test_a_link_beside_the_script_shows_no_file(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (tmp_path / "key").write_text("KEY=secret")
    (folder / "x.env").symlink_to(tmp_path / "key")
    assert calls(folder, f"source ./x.env; {LAUNCH} key=$KEY")[-1][-1] in ("key=", "key=__KEY__")


def test_there_is_no_network(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"exec 3<>/dev/tcp/127.0.0.1/{port} && {LAUNCH} open=1\ncurl http://x; {LAUNCH} end=1"
        # An `exec` that fails ends bash, so the second launch comes from a script of its own.
        found = calls(tmp_path, f"bash -c '{text.splitlines()[0]}'\n{text.splitlines()[1]}")
    assert [words[-1] for words in found] == ["http://x", "end=1"]


def test_no_process_of_the_machine_is_reached(tmp_path):
    [launch] = calls(tmp_path, f"{LAUNCH} shell=$$; for pid in 1 $PPID {os.getpid()} -1; do builtin kill -9 $pid; done")
    # Process ids begin anew, so those of the machine have no names there; this process goes on.
    assert int(launch[-1].partition("=")[2]) < 10


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "attack",
    [
        "while true; do :; done",
        ":(){ :|:& };:\nwhile true; do :; done",
        "x=0123456789; while true; do x=$x$x; done",
        "while true; do seq 1 100000000 > /tmp/$RANDOM; done",
        "sleep 1000; tail -f /dev/null < /dev/stdin; cat",
        "trap '' TERM INT; while true; do :; done",
    ],
)
def test_a_script_without_end_is_ended(tmp_path, attack):
    # An argument of the script, by which its processes are found: other jails may run on this machine.
    mark = f"mark-{uuid4()}"
    assert calls(tmp_path, f"{LAUNCH}\n{attack}", mark, most_seconds=2)[0][2] == "verl.trainer.main_ppo"
    assert not [entry for entry in os.scandir("/proc") if entry.name.isdigit() and _has_argument(entry.path, mark)]


def _has_argument(folder, argument):
    try:
        with open(f"{folder}/cmdline", "rb") as file:
            return argument.encode() in file.read()
    except OSError:
        return False


def test_programs_are_recorded_and_not_run(tmp_path):
    text = """
    pip install verl; /opt/conda/bin/python3 -c 'print(1)'; env A=1 nohup python x.py & wait
    exec unknown_tool_never_heard_of
    """
    found = calls(tmp_path, text)
    assert ["pip", "install", "verl"] in found
    assert ["python3", "-c", "print(1)"] in found
    assert ["python", "x.py"] in found


def test_a_script_goes_on_where_something_is_missing(tmp_path):
    text = f"""
    set -euo pipefail
    source /no/such/env.sh
    cd /no/such/folder
    conda activate x
    [ -d /no/such/data ] || exit 1
    {LAUNCH} $1
    """
    assert calls(tmp_path, text, "a=1")[-1][-1] == "a=1"


def test_variables_without_a_value_are_found():
    text = """
    A=1; for b in x; do :; done; read -r C; export D=2
    echo $A $b $C $D ${E:-1} ${F:=2} $G ${H} "$HOME/${I[@]}" # $J
    [ -z "$K" ] && K=3; echo $((L * 2)) ${M%.*} '$N'
    """
    assert expected_variables(text) == ["G", "H", "I", "M", "N", "L"]
