// Large pages for large arrays.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jpaged {

// Asks for huge pages for a large array that has not been written yet, if the system has any to give: KV pages lie 4 KiB
// here and 4 KiB there, and looking up each one's address took a quarter of the time to read them.
inline void prefer_huge_pages([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes,
                              [[maybe_unused]] bool is_written = false) {
#if defined(__linux__)
  constexpr size_t kHugePage = size_t{2} << 20, kSmall = size_t{16} << 20;
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; older systems refuse it
#endif
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (bytes < kSmall || begin >= end) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  if (is_written) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
#endif
}

// The same for an array that others have written: it is moved, once, when it is first seen.
inline void move_to_huge_pages(const void* data, size_t bytes) {
  static std::atomic<const void*> seen[256];
  for (std::atomic<const void*>& place : seen) {
    const void* known = place.load(std::memory_order_relaxed);
    if (known == nullptr && place.compare_exchange_strong(known, data)) {
      prefer_huge_pages(data, bytes, /*is_written=*/true);
      return;
    }
    if (known == data) return;
  }
}

}  // namespace jpaged
