"""Functions that the trainer cannot trust to end, in processes that can be killed: reward functions, tools.

A `Slot` (slot.py) is one such process, which anybody may hold: a reward worker, a rollout worker, a program. It knows
nothing of scores. What it runs is a `Service`: how a name becomes a function, and what messages call that function.
A tool of the user's own, say ``search(arguments)`` in tools.py, is called so:

    from functools import partial

    from rltrain.base.plugin import load_plugin
    from rltrain.slots.limits import Limits
    from rltrain.slots.service import Service
    from rltrain.slots.slot import Slot

    service = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb")
    with Slot(service, Limits(timeout_s=5.0, memory_mb=4096)) as slot:
        slot.prepare("tools.py:search")  # imports it, outside of any deadline; ConfigError where that fails
        outcome = slot.call("tools.py:search", {"query": "capital of France"})
        if outcome.status == "ok":
            text = outcome.value
        else:  # timeout, crashed or rejected
            text = outcome.error
        log = slot.take_printed()

- Arguments go there as pickles, and results come back as JSON: texts, numbers, lists and dicts. Whatever a function
  does to its process, this side only ever parses text. A result that is not JSON, or is longer than 1 MiB as such, is
  "rejected".
- A function may be ``async``. Then `Slot.call_all` has several calls under way at once, each with its own deadline.
- A process that hangs, dies or runs out of memory is replaced, with all that it has started. What a function kept in
  its memory is gone then (`Slot.pid` has changed), so whoever holds a conversation gives its state with every call.
- After a signal that somebody else may have sent (SIGKILL, SIGTERM) the call is made once more, and so are, one by
  one, those of an ``async`` function that were under way in a process that was lost. So a call is made twice at most,
  and the first time may have done all its work. For a tool that must not do it twice there is `Service.may_repeat`:
  with False such calls fail.
- A slot is used from one thread, and ends with it. Calls of several slots at once need a thread for each.

Code that a model wrote is run by `run_program` (program.py), from a function in a slot: an interpreter of its own per
program, without network and files (jail.py), whose results a slot's function hands on.

Imports: the standard library and rltrain/base. Neither torch nor Ray nor NumPy, as each process begins with it.
"""
