"""Tools, environments and agents that reply to the policy between two turns: the user's interface and its runtime.

Everything here runs in an executor, a process that can be killed, so that user code can neither hang nor end a rollout.
Imports neither torch nor Ray.
"""
