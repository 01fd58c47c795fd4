"""What dtype "auto" means on a CPU."""

import pytest

from jpaged.engine.dtype_probe import decide, probe_dtype


@pytest.mark.parametrize(
    ("bfloat16_seconds", "float32_seconds", "has_bfloat16", "chosen"),
    [
        (1.0, 2.0, True, "bfloat16"),
        (1.2, 1.0, True, "bfloat16"),  # too close to leave what the processor is made for
        (1.4, 1.0, True, "float32"),
        (2.0, 1.0, False, "float32"),
        (1.0, 1.2, False, "float32"),
        (1.0, 1.4, False, "bfloat16"),
    ],
)
def test_only_a_clear_margin_overrules_the_processor(
    bfloat16_seconds: float, float32_seconds: float, has_bfloat16: bool, chosen: str
) -> None:
    assert decide(bfloat16_seconds, float32_seconds, has_bfloat16=has_bfloat16) == chosen


def test_the_probe_runs_with_xla_alone() -> None:
    assert probe_dtype(None) in ("bfloat16", "float32")
