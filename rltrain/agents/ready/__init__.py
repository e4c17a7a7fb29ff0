"""Tools and environments to name in a run, each by its module: ``function_tool_path=rltrain.agents.ready.calculator``.

A module of a tool defines one public function, or a class. Nothing here knows of the run or of rows beyond the
dictionary that an environment is begun with.
"""
