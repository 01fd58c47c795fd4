import pytest

from jpaged.errors import ConfigError
from jpaged.execution.kv_cache import DeviceMemory, MemoryNeeds, size_pool

GIB = 1 << 30
NEEDS = MemoryNeeds(weight_bytes=4 * GIB, step_bytes=1 * GIB, page_bytes=1 << 20)


def size(
    total_gib: float,
    fraction: float = 0.5,
    num_pages: int | None = None,
    max_num_seqs: int = 64,
    free_gib: float | None = None,
) -> int:
    return size_pool(
        NEEDS,
        memory=DeviceMemory(int(total_gib * GIB), int((total_gib if free_gib is None else free_gib) * GIB)),
        fraction=fraction,
        pages_per_seq=512,
        max_num_seqs=max_num_seqs,
        num_pages=num_pages,
    )


def test_the_pool_takes_its_share_of_what_is_left_rounded_coarsely():
    assert size(25) == 10240  # half of 20 GiB is 10240 pages of 1 MiB
    assert size(25.9) == 10240  # slightly other memory: the same shape, the same compiled programs
    assert size(25, free_gib=17) == 10240  # what other programs take does not matter while there is enough
    assert size(25, free_gib=14) == 4096  # half of the 9 GiB that are free beside the rest
    assert size(16) == 5120


def test_no_more_than_all_rows_can_use():
    assert size(1000, max_num_seqs=4) == 4 * 512


def test_too_little_memory_shows_the_sum_and_what_to_change():
    with pytest.raises(ConfigError) as caught:
        size(5.5)
    assert str(caught.value) == (
        "free memory 5.50 GiB - weights 4.00 GiB - step 1.00 GiB = 0.50 GiB; 0.5 of it holds 256 pages of 1048576"
        " bytes, and one sequence of the longest length needs 512; lower max_model_len, raise kv_memory_fraction,"
        " or free memory"
    )


def test_a_given_size_is_taken_or_refused_with_the_largest_that_fits():
    assert size(6, num_pages=1000) == 1000
    with pytest.raises(ConfigError, match=r"1025 pages .* lower num_pages to at most 1024"):
        size(6, num_pages=1025)


def test_weights_that_do_not_fit_are_refused_too():
    with pytest.raises(ConfigError, match=r"= -1\.00 GiB"):
        size(4)
