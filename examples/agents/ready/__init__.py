"""Ready-made tools and environments, named by module: ``function_tool_path=rltrain.agents.ready.calculator``.

A module of a tool defines one public function, or a class. Nothing here depends on the run; rows are only the
dictionary that an environment gets. The files are examples/agents/ready in a checkout, which rltrain/agents/ready links
to, and in a wheel a part of the package.
"""
