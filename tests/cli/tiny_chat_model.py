"""A tiny model that can chat: random weights, a byte-level tokenizer and a chat template."""

import json
from pathlib import Path

from tests.engine.tokenizer_builds import byte_level_backend
from tests.fakes.tiny_models import TINY_LLAMA, write_random_checkpoint

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def write_tiny_chat_model(target_dir: Path) -> Path:
    """Returns the directory."""
    backend = byte_level_backend()
    eos = backend.token_to_id("</s>")
    config = TINY_LLAMA | {"vocab_size": backend.get_vocab_size(), "bos_token_id": None, "eos_token_id": eos}
    write_random_checkpoint(config, target_dir)
    backend.save(str(target_dir / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (target_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    return target_dir
