"""A tool and an environment that show images, and the settings of a run with them over the tiny vision models."""

from pathlib import Path

from tests.tiny_vision import VISION_TOKENS
from tests.trainer.steps import ACTOR

TURNS = "actor_rollout_ref__rollout__multi_turn__"
# What tools say stands in a message of the user, and a turn ends with <eos>.
CHAT = (
    "{% for message in messages %}{% set own = message['role'] == 'assistant' %}"
    "{{ '<assistant>' if own else '<user>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<eos>' if own }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Every turn of some length is a call.
OWN = '''
from PIL import Image


def parse(text, schemas):
    return [{"name": "look", "arguments": {"number": len(text)}}] if len(text) > 2 else []


class Room:
    def look(self, number: int):
        """Look.

        Args:
            number: Of what.
        """
        image = Image.new("RGB", (40 + 30 * (number % 3), 60), (40 * (number % 7), 90, 10))
        return [image, "<|image_pad|>2", image][: 1 + 2 * (number % 2)], 0.5


class Walk:
    def __init__(self):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        image = Image.new("RGB", (60, 40 + 30 * (len(text) % 3)), (40 * (len(text) % 7), 90, 10))
        parts = [{"type": "text", "text": "1+"}, {"type": "image", "image": image}, {"type": "text", "text": "=?"}]
        return [{"role": "user", "content": parts}], 0.5, self.turns == 3
'''


def seeing_run(folder: Path, family: str, who: str, code: str = OWN) -> dict[str, object]:
    """Return the changes to `small_run` with which ``who``, a class in ``code``, replies to turns."""
    (folder / "own.py").write_text(code)
    placeholder = VISION_TOKENS[2] if family == "internvl" else "".join(VISION_TOKENS[each] for each in (0, 2, 1))
    (folder / "chat.jinja").write_text(CHAT.replace("PLACEHOLDER", placeholder))
    run = {
        "data__max_prompt_length": 48,
        "data__max_response_length": 150,
        ACTOR + "ppo_max_token_len_per_gpu": 400,
        TURNS + "environment": f"{folder}/own.py:{who}",
        TURNS + "max_assistant_turns": 4,
        "actor_rollout_ref__model__custom_chat_template": folder / "chat.jinja",
    }
    return run | ({TURNS + "format": f"{folder}/own.py:parse"} if who == "Room" else {})
