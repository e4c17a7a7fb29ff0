"""``rltrain evaluate``: what a model is worth on data, with intervals.

`statistics` are pure functions over answers; `request` reads the words, `models` what ``model=`` names; `evaluation`
answers and scores by the trainer's own validation; `kept` holds what is finished on disk; `report` and `picture` show
it. It imports `rltrain.run` and what stands below.
"""
