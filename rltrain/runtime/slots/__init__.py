"""Killable processes for functions that may not terminate, such as reward functions and tools.

A `Slot` (slot.py) is one such process, held by a reward worker, a rollout worker or a program. It runs a `Service`,
which creates a function from a name and names it in messages. For example, a user's tool ``search(arguments)`` in
tools.py is called like this:

    from functools import partial

    from rltrain.common.plugin import load_plugin
    from rltrain.runtime.slots.limits import Limits
    from rltrain.runtime.slots.service import Service
    from rltrain.runtime.slots.slot import Slot

    service = Service(partial(load_plugin, "my.tools"), "the tool", "my.timeout_s", "my.memory_limit_mb")
    with Slot(service, Limits(timeout_s=5.0, memory_mb=4096)) as slot:
        slot.prepare("tools.py:search")  # imports it, outside of any deadline; ConfigError if that fails
        outcome = slot.call("tools.py:search", {"query": "capital of France"})
        if outcome.status == "ok":
            text = outcome.value
        else:  # timeout, crashed or rejected
            text = outcome.error
        log = slot.take_printed()

- Arguments are sent as pickles, and results are returned as JSON: texts, numbers, lists and dicts. Even if a function
  compromises its process, this side only parses text. A result that is not JSON, or is longer than 1 MiB as JSON, is
  "rejected".
- A function may be ``async``. Then `Slot.call_all` runs several calls concurrently, each with a separate deadline.
- A process that hangs, dies or runs out of memory is replaced, with all its descendants. A function's state in memory
  is then lost (`Slot.pid` has changed), so the holder of a conversation sends its state with every call.
- After SIGKILL or SIGTERM, which may come from outside, the call is repeated once. So are, one by one, the concurrent
  calls of an ``async`` function in a lost process. So a call runs at most twice, and the first run may have done all
  its work. For a tool that must not run twice, set `Service.may_repeat` to False; then such calls fail.
- A slot is used from one thread, and ends with it. Concurrent calls of several slots need a thread for each.

Code that a model wrote is run by `run_program` (program.py), from a function in a slot: a separate interpreter per
program, without network and files (jail.py), whose results the slot's function returns.

Imports only the standard library and rltrain/common, neither torch nor Ray nor NumPy, because each process imports it.
"""
