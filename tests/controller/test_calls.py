"""Which objects of a call stay in the store."""

from inspect import isfunction

from rltrain.controller.calls import bind
from rltrain.workers import roles


def test_what_stays_in_the_store_follows_from_the_signature():
    methods = {
        f"{role}.{name}": bind(method).num_objects
        for role, protocol in vars(roles).items()
        if isinstance(protocol, type) and protocol.__module__ == roles.__name__
        for name, method in vars(protocol).items()
        if isfunction(method) and not name.startswith("_")
    }
    two = {"Rollout.generate", "Rollout.load_answers"}
    one = {
        "Actor.log_probs",
        "Actor.ref_log_probs",
        "Critic.values",
        "Frozen.log_probs",
        "Judge.replies",
        "Advantages.advantages",
        "Advantages.spread_over_turns",
        "Rollout.take_finished",
        "Actor.write",
        "Critic.write",
        "Reference.write",
    }
    assert {name for name, number in methods.items() if number == 2} == two
    assert {name for name, number in methods.items() if number == 1} == one
