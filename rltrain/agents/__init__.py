"""Who answers the policy between two turns: tools, environments, agents. What a user writes, and what runs it.

Everything here runs in a host, a process that can be killed, so that nothing of a user's hangs or ends a rollout.
Neither torch nor Ray is imported.
"""
