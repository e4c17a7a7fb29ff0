"""Wherever the driver waits, a save under way is looked at."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rltrain.config.load import load_config
from rltrain.run import start as starting
from rltrain.run.checkpoints.resume import Start


class Reached(Exception):
    pass


def test_a_save_is_looked_at_while_scorers_are_waited_for(tmp_path, monkeypatch):
    waits, looked = {}, []

    def check_room(*_):
        raise Reached

    saver = SimpleNamespace(on_wait=lambda: looked.append("save"), check_room=check_room)
    sizes = {"num_parameters": 1, "trained_parameters": 1}
    ppo = SimpleNamespace(model_sizes=sizes, actor=None, critic=None, reference=None, validation=None)
    group = SimpleNamespace(world=1)
    for name in ("share", "reserve", "free", "look_at_nodes", "refuse", "_environment", "try_collectives"):
        monkeypatch.setattr(starting, name, lambda *_: None)
    monkeypatch.setattr(starting, "verified", lambda start, *_: start)
    monkeypatch.setattr(starting, "owes_validation", lambda *_: False)
    monkeypatch.setattr(starting, "start_pool", lambda *given: waits.update(pool=given[-1]))
    group.start = group.kill = lambda *_: None
    monkeypatch.setattr(starting, "WorkerGroup", lambda *given: waits.update(group=given[5]) or group)
    monkeypatch.setattr(starting, "make_trainer", lambda *_, **__: ppo)
    monkeypatch.setattr(starting, "Saver", lambda *_: saver)
    rows = SimpleNamespace(without_pictures=lambda: None, identity=lambda: "rows:1")
    data = SimpleNamespace(rows={"train": rows}, prompts={})
    passes = SimpleNamespace(trains=True)
    plan = SimpleNamespace(num_devices=1, num_reward_workers=1, total_steps=1, steps_per_epoch=1, passes=passes)
    stop, folder = (
        SimpleNamespace(raise_if_asked=lambda: looked.append("stop"), at_once=True),
        SimpleNamespace(path=tmp_path),
    )
    loaded = load_config(["trainer.device=cpu"])
    with pytest.raises(Reached), ExitStack() as closing:
        starting.start_run(starting.Ready(loaded, plan, data, folder, Start(), Start), stop, None, closing, None)
    for wait in waits.values():
        wait()
    assert looked == ["save", "stop"] * 2
