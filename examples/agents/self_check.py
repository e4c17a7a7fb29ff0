"""An agent written for OpenAI's client (`pip install openai`): the policy answers, and checks its answer once.

    actor_rollout_ref.rollout.agent.default_agent_loop=examples/agents/self_check.py:agent

It returns no score, so the reward function judges the last turn as it does without an agent. Not run on hardware yet.
"""

import openai

CHECK = "Check every step of your answer, and give the final answer again, corrected if need be."


async def agent(chat, row, seed):
    """chat.messages is the row's prompt; every request repeats what was said so far."""
    messages = list(chat.messages)
    async with openai.AsyncOpenAI(**chat.endpoint) as client:
        first = await client.chat.completions.create(model="policy", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": CHECK}]
        await client.chat.completions.create(model="policy", messages=messages)
