"""``rltrain resolution``: the bounds of pixels at which a model with images answers best.

`request` reads the arguments, `settings` lists the bounds to try and their image tokens, `search` evaluates them.
"""
