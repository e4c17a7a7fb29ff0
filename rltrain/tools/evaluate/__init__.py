"""``rltrain evaluate``: scores of a model on data, with confidence intervals.

`statistics` has pure functions over arrays; `request` parses the arguments; `models` finds the models of ``model=``;
`evaluation` generates and scores by the trainer's validation; `results` stores finished parts on disk; `report` and
`page` show the results. It imports `rltrain.run` and the layers below.
"""
