"""Tools, environments and agents, which reply to the policy between turns: the user's interface and its runtime.

Everything here runs in an executor, a process that can be killed, so that user code can neither hang nor end a rollout.
Imports neither torch nor Ray.
"""
