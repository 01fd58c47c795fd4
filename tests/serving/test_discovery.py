"""What a server tells of itself: reflection, information, metrics."""

import urllib.request

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families

from jpaged.client import Client
from jpaged.params import SamplingParams
from jpaged.request import TokensPrompt
from jpaged.v1 import inference_pb2 as pb
from tests.fakes.tiny_models import tiny_buckets
from tests.serving.server_process import MODEL_NAME, ServerProcess

PROMPT: TokensPrompt = {"prompt_token_ids": [3, 4, 5]}
GAUGES = {
    *("jpaged_num_requests_running", "jpaged_num_requests_waiting", "jpaged_kv_cache_usage_ratio"),
    *("jpaged_kv_pages_free", "jpaged_kv_pages_used", "jpaged_kv_pages_cached", "jpaged_compilations_after_ready"),
    *("jpaged_kv_pages_pinned", "jpaged_host_tier_pages"),
}
COUNTERS = {
    *("jpaged_prompt_tokens", "jpaged_cached_tokens", "jpaged_generation_tokens"),
    *("jpaged_preemptions", "jpaged_request_success"),
    *("jpaged_prefix_cache_queries_tokens", "jpaged_prefix_cache_hits_tokens"),
}
HISTOGRAMS = {
    *("jpaged_time_to_first_token_seconds", "jpaged_inter_token_latency_seconds", "jpaged_request_queue_seconds"),
    *("jpaged_request_prefill_seconds", "jpaged_request_decode_seconds", "jpaged_step_seconds"),
    *("jpaged_step_host_seconds", "jpaged_step_gap_seconds", "jpaged_step_tokens"),
}


def test_reflection_lists_and_describes_the_services(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {
        "jpaged.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    service = DescriptorPool(database).FindServiceByName("jpaged.v1.Inference")
    assert set(service.methods_by_name) == {
        *("Generate", "GenerateStream", "Tokenize", "Detokenize", "GetModelInfo", "GetServerInfo", "Abort"),
        *("PinPrefix", "UnpinPrefix", "FlushPrefixCache"),
    }
    method = service.methods_by_name["GenerateStream"]
    assert (method.input_type.full_name, method.output_type.full_name) == (
        "jpaged.v1.GenerateRequest",
        "jpaged.v1.GenerateStreamResponse",
    )
    sampling = method.input_type.fields_by_name["sampling"].message_type
    assert sampling is not None
    assert {field.name: field.number for field in sampling.fields} == {
        field.name: field.number for field in pb.SamplingParams.DESCRIPTOR.fields
    }


def test_the_model_is_described(client):
    info = client.model_info()
    assert (info.model, info.architecture, info.dtype) == (MODEL_NAME, "LlamaForCausalLM", "float32")
    assert (info.vocabulary_size, info.max_model_len, list(info.eos_token_ids)) == (128, 4096, [2])
    assert info.has_tokenizer and info.has_chat_template


def test_the_server_counts_what_it_does(client):
    before = client.server_info()
    assert (before.page_size_tokens, before.pages_total, before.buckets) == (4, 600, tiny_buckets())
    assert (before.max_num_seqs, before.max_num_batched_tokens) == (8, 16)
    assert before.state == pb.SERVER_STATE_READY and before.ready_seconds > 0
    stream = client.stream(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    during = client.server_info()
    assert (
        during.rows_running == 1
        and 0 < during.pages_used == during.pages_total - during.pages_free - during.pages_cached
    )
    assert len(list(stream)) > 1
    after = client.server_info()
    # Three prompt tokens make one step; what the last token would have started is at most one more.
    assert 500 <= after.steps - before.steps <= 501
    assert after.uptime_seconds > before.uptime_seconds


@pytest.fixture
def metrics(shared_server: ServerProcess):
    """metrics(): sample name and labels -> value, as the server says now."""
    url = shared_server.wait_for_log(r"metrics on (\S+)")[0][1]

    def read() -> dict[tuple[str, ...], float]:
        with urllib.request.urlopen(url) as page:
            everything = text_string_to_metric_families(page.read().decode())
            families = [family for family in everything if not family.name.endswith("_created")]
        for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
            assert {family.name for family in families if family.type == kind} == names
        return {
            (sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples
        }

    return read


def test_metrics_add_up(server, client, metrics):
    [free] = client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)).outputs
    before = metrics()
    stops = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(free.token_ids[0],))
    lengths = [5, 7, 1]
    for length in lengths:
        client.generate(PROMPT, SamplingParams(max_tokens=length, ignore_eos=True))
    assert client.generate(PROMPT, stops).usage.generated_tokens == 1
    # Neither a refused nor an aborted request counts as finished.
    with pytest.raises(grpc.RpcError):
        client.generate({"prompt_token_ids": []})
    stream = client.stream(PROMPT, SamplingParams(max_tokens=2000, ignore_eos=True), request_id="measured")
    next(stream)
    assert metrics()["jpaged_num_requests_running",] == 1
    assert client.abort("measured")
    after = metrics()
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}
    assert change["jpaged_prompt_tokens_total",] == 4 * 3
    assert change["jpaged_cached_tokens_total",] == 0
    assert change["jpaged_generation_tokens_total",] == sum(lengths) + 1
    assert change["jpaged_request_success_total", "length"] == 3
    assert change["jpaged_request_success_total", "stop"] == 1
    assert change["jpaged_preemptions_total", "recompute"] == 0
    for name in ("time_to_first_token", "request_queue", "request_prefill", "request_decode"):
        assert change[f"jpaged_{name}_seconds_count",] == 4
        assert change[f"jpaged_{name}_seconds_sum",] >= 0
    assert change["jpaged_inter_token_latency_seconds_count",] >= sum(lengths) - len(lengths)
    steps = change["jpaged_step_tokens_count",]
    assert steps == change["jpaged_step_seconds_count",] == change["jpaged_step_host_seconds_count",]
    assert steps >= sum(lengths) + 1
    assert change["jpaged_step_tokens_sum",] == steps + 5 * (3 - 1)  # prompts of three tokens; one token elsewhere
    assert sum(after[f"jpaged_kv_pages_{state}",] for state in ("free", "used", "cached")) == 600
    assert after["jpaged_kv_cache_usage_ratio",] == after["jpaged_kv_pages_used",] / 600
    assert (after["jpaged_kv_pages_pinned",], after["jpaged_compilations_after_ready",]) == (0, 0)


def test_text_becomes_tokens_and_back(client: Client, stub):
    assert client.detokenize(client.tokenize("né")) == "né"
    assert client.tokenize("") == []
    assert list(stub.Tokenize(pb.TokenizeRequest(text="a")).token_ids) == [3]
    assert client.detokenize([1, 3]) == "a"
    assert client.detokenize([1, 3], skip_special_tokens=False) == "<s>a"
