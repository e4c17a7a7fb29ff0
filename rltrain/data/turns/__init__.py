"""Conversations of several turns: the calls that a turn of the policy holds, and what stands between two turns."""
