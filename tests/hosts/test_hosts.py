"""The hosts of these tests are what they promise."""


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
