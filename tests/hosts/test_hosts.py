"""The hosts of these tests are what they promise."""

# Answers every datagram; sends ten at once, prints how many come back and the seconds of the first.
ECHO = """
import socket
line = socket.socket(type=socket.SOCK_DGRAM)
line.bind(("", 7))
print("ready", flush=True)
while True:
    line.sendto(*line.recvfrom(99))
"""
CALL = """
import socket, time
line = socket.socket(type=socket.SOCK_DGRAM)
line.settimeout({patience})
times, start = [], time.monotonic()
for number in range({number}):
    line.sendto(b"%d" % number, ("{address}", 7))
while len(times) < {number}:
    try:
        line.recv(99)
    except OSError:
        break
    times.append(time.monotonic() - start)
print(len(times), min(times, default=0))
"""


def answers(host, other, number=1, patience=0.5):
    """How many of ``number`` datagrams come back, and the seconds that the first takes."""
    text = CALL.format(address=other.address, number=number, patience=patience)
    came, seconds = host.check(f"python -IS - <<'END'\n{text}\nEND").split()
    return int(came), float(seconds)


def listen(host):
    host.start(f"exec python -IS - <<'END'\n{ECHO}\nEND").wait_for("ready")


def test_a_host_has_its_own_name_address_files_and_processes(network):
    first, second = network(2)
    assert second.check("hostname").strip() == "host2"
    assert second.check("hostname -I").split() == ["172.17.0.1", "192.0.2.2"]
    assert "src 192.0.2.2" in second.check(f"ip route get {first.address}")
    first.check("touch /tmp/mine ~/mine /dev/shm/mine")
    assert second.run("ls /tmp/mine ~/mine /dev/shm/mine").returncode == 2
    assert (first.own / "tmp/mine").exists()
    first.check(f"echo seen > {first.shared}/ours")
    assert (second.shared / "ours").read_text() == second.check(f"cat {second.shared}/ours") == "seen\n"
    job = first.start("sleep 100")
    assert first.pids("sleep 100")
    assert not second.pids("sleep 100")
    first.kill("sleep 100")
    assert job.wait() == 137


def test_a_cable_is_pulled_and_a_host_switched_off(network):
    first, second = network(2)
    second.check("echo kept > /tmp/file")
    listen(second)
    before = second.traffic()
    assert answers(first, second, patience=10)[0] == 1
    assert second.traffic() > before
    second.cut()
    assert answers(first, second)[0] == 0
    second.mend()
    assert answers(first, second, patience=10)[0] == 1
    job = second.start("sleep 100")
    second.power_off()
    assert job.wait(10)
    assert answers(first, second)[0] == 0
    second.boot()
    assert second.check("cat /tmp/file") == "kept\n"
    assert not second.pids("sleep 100")
    listen(second)
    assert answers(first, second, patience=10)[0] == 1


def test_a_bad_wire_is_slow_and_loses_some(network):
    first, second = network(2, delay_ms=50, loss=0.1)
    listen(second)
    answers(first, second, patience=5)  # finds the other's card
    # No more at once than the buffers of a busy machine hold.
    came, seconds = answers(first, second, 100, patience=3)
    assert 0.1 <= seconds < 3
    assert 60 < came < 97  # of 100 that pass it twice: 81
    first.wire(delay_ms=0)
    assert answers(first, second, 100, patience=10)[0] == 100
