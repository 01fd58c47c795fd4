"""One tiny model with a tokenizer, and one server of it for all tests that need nothing special."""

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jpaged.client import Client
from jpaged.engine.tokenizer import BYTE_OF_LETTER
from jpaged.v1.inference_pb2_grpc import InferenceStub
from tests.fakes.tiny_models import TINY_LLAMA, write_random_checkpoint
from tests.serving.server_process import MAX_MESSAGE_BYTES, MODEL_NAME, SMALL, ServerProcess, wait_until_idle

LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}{{ ending or '' }}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("served") / "model"
    write_random_checkpoint(TINY_LLAMA | {"max_position_embeddings": 4096}, path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Byte-level, without merges: letters, and in two halves of three tokens each the characters é and 🙂, so that
    random tokens often make a character of two tokens. Ids 112..127 of the model mean nothing to it."""
    letters = [bytes([byte]) for byte in range(ord("a"), ord("z") + 1)]
    halves = [letter + b"\xc3" for letter in letters] + [b"\xa9" + letter for letter in letters]
    others = [b" ", b"\xf0\x9f", b"\x99\x82", b"\xc3", b"\xa9"]
    tokens = ["<unk>", "<s>", "</s>", *(_spell(token) for token in letters + halves + others)]
    tokens += [f"<reserved{place}>" for place in range(112 - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in tokens if token.startswith("<")])
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _spell(token: bytes) -> str:
    return "".join(LETTER_OF_BYTE[byte] for byte in token)


@pytest.fixture(scope="session")
def shared_server(model_dir) -> Iterator[ServerProcess]:
    limits = ("--max-message-bytes", str(MAX_MESSAGE_BYTES), "--metrics-port", "0", "--model-name", MODEL_NAME)
    with ServerProcess(model_dir, *SMALL, *limits) as server:
        server.wait_until_serving()
        yield server


@pytest.fixture
def server(shared_server) -> Iterator[ServerProcess]:
    """A server that others use too; afterwards it must still answer, with every page back and nothing compiled."""
    yield shared_server
    with Client(shared_server.address) as client:
        assert wait_until_idle(client).compilations_after_ready == 0
        assert client.health() == "SERVING"
    assert shared_server.process.poll() is None
    assert "Traceback" not in shared_server.log


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
def channel(server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel) -> InferenceStub:
    return InferenceStub(channel)
