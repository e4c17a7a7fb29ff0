"""``rltrain resolution``: the bounds of pixels at which a model with images answers best.

`request` reads the words, `settings` says which bounds are tried and what an image costs in each; `race` is pure: which
of them cannot win; `search` answers, by what `rltrain.tools.evaluate` has; `report` shows what was found.
"""
