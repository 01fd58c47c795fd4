// Runs independent units of work on a thread pool, which is XLA's own; the calling thread takes part.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace jpaged {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Calls body(unit) once for every unit in [0, units), in any order; returns when all have returned. body must not throw.
// The caller never waits for a unit that nobody has begun, so a busy pool cannot block it.
template <class Pool, class Body>
void parallel_for(Pool& pool, int64_t units, const Body& body) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t threads = std::min<int64_t>(units, pool.num_threads());
  if (threads <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) body(unit);
    return;
  }
  auto progress = std::make_shared<Progress>();
  // A helper that comes late finds no unit left and never touches body, which may be gone by then.
  auto help = [progress, units, &body] {
    for (int64_t unit; (unit = progress->next.fetch_add(1, std::memory_order_relaxed)) < units;) {
      body(unit);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < threads; ++i) {
    auto helper = help;
    pool.Schedule(std::move(helper));
  }
  help();
  for (int spins = 0; progress->done.load(std::memory_order_acquire) < units; ++spins) {
    if (spins < 4096) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace jpaged
