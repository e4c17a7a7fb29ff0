import gzip
import zipfile

import pytest

from rltrain.tools.collect import collect, main


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    ray = tmp_path / "ray" / "session_1" / "logs"
    for path, text in {
        folder
        / "config.yaml": "trainer:\n  device: cpu\n  kwargs:\n    api_key: sk-123\n    tokens: 4\n    password: ''\n",
        folder / "config.1.yaml": "hub_token: abc\n",
        folder / "env.json": '{\n "torch": "2",\n "wandb_api_key": "xyz-4711",\n "num_tokens": 12,\n '
        f'"ray_logs": "{ray}"\n}}',
        folder / "train.log": f"12:00 Ray's logs: {tmp_path}/gone\n12:01 Ray's logs: {tmp_path}/home/.ray/logs\n",
        tmp_path / "home" / ".ray" / "logs" / "auth_token": "token-of-ray",
        folder / "metrics.jsonl": '{"step": 1}\n',
        folder / "reward.log": "asked with xyz-4711 of http://u:pw@h and {'PRIVATE_KEY': 'k-0815-x'}; k-0815-x failed",
        tmp_path / "id_rsa": "key of the user",
        folder / "logs" / "rank_00000.log": "a" * 100 + "the end",
        folder / "incidents" / "step_3" / "batch.txt": "nan",
        folder / "samples" / "train" / "1.parquet": "P" * 5000,
        folder / "global_step_1" / "manifest.json": "{}",
        folder / "global_step_1" / "actor" / "weights": "big",
        ray / "raylet.err": "ray says",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # Links lead out of the folder.
    (folder / "logs" / "rank_00001.log").symlink_to(tmp_path / "id_rsa")
    (folder / "incidents" / "step_4").symlink_to(tmp_path, target_is_directory=True)
    (ray / "raylet.out").symlink_to(tmp_path / "id_rsa")
    return folder


def read(archive):
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def test_a_report_has_all_but_weights_and_secrets(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(run)]) == 0
    assert "run-report.zip: 11 files" in capsys.readouterr().out
    found = read("run-report.zip")
    assert set(found) == {
        "config.yaml", "config.1.yaml", "env.json", "train.log", "metrics.jsonl", "reward.log", "logs/rank_00000.log",
        "incidents/step_3/batch.txt", "samples/train/1.parquet", "global_step_1/manifest.json", "ray/raylet.err",
    }  # fmt: skip
    text = "".join(found.values())
    secrets = ("sk-123", "abc", "xyz", "pw@h", "k-0815", "key of the user", "token-of-ray")
    assert not any(secret in text for secret in secrets)
    assert '"num_tokens": 12' in text
    assert "device: cpu" in found["config.yaml"]
    assert "password: ''" in found["config.yaml"]


def test_secrets_are_masked_in_every_encoding_and_form(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN_PROD", "letters")
    block = 'a:\n  private_key: |\n    BEGIN KEY\n    "q"uoted\n\n    end\n  password: correcthorse\n  device: cpu\n'
    (run / "config.2.yaml").write_text(block)
    said = 'asked correcthorse and letters, BEGIN KEY, {"x": "\\"q\\"uoted"}, %22q%22uoted; good\n'
    for number, code in enumerate(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]):
        (run / "logs" / f"{number}.log").write_bytes(f"é {said}".encode(code))
    (run / "logs" / "old.log.gz").write_bytes(gzip.compress(said.encode()))
    (run / "incidents" / "step_3" / "batch.pt").write_bytes(b"\x80letters\xff")
    names = collect(run, tmp_path / "x.zip", most_of_a_file=400)
    found = read(tmp_path / "x.zip")
    text = "".join(found.values())
    for secret in ("correcthorse", "letters", "BEGIN KEY", "uoted"):
        assert secret not in text
    assert "device: cpu" in found["config.2.yaml"]
    assert "good" in found["logs/4.log"]
    assert not {f"logs/{number}.log" for number in range(4)} & set(names), "wide encodings are left out"
    assert not {"logs/old.log.gz", "incidents/step_3/batch.pt"} & set(names)
    left_out = capsys.readouterr().err
    assert "logs/old.log.gz cannot be read as text" in left_out
    assert "incidents/step_3/batch.pt holds a secret" in left_out


def test_big_files_are_cut_and_the_archive_is_bounded(run, tmp_path):
    collect(run, tmp_path / "x.zip", most_bytes=2000, most_of_a_file=60)
    found = read(tmp_path / "x.zip")
    assert found["logs/rank_00000.log"] == "[47 bytes left out]\n" + "a" * 53 + "the end"
    assert "samples/train/1.parquet" not in found
    assert "ray/raylet.err" in found  # small ones behind it still fit


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([])
