"""Trajectories of several turns: tool calls in a turn of the policy, and the tokens between two turns."""
