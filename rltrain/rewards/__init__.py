"""Rewards: scorers by data source, and a pool of killable processes that runs them."""
