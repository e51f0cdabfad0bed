// Static partition of an index range over threads. Each index is computed by exactly one thread
// and writes only its own output, so results are bit-identical for any thread count.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace phaze {

// Calls body(begin, end) on disjoint ranges that cover [0, count). At most `threads` threads run,
// and none is started for fewer than `grain` indices. `body` must not throw. If the system
// refuses a thread, the calling thread does that share itself.
template <typename Body>
void parallel_for(std::size_t count, int threads, std::size_t grain, const Body& body) {
  const std::size_t most = grain == 0 ? count : (count + grain - 1) / grain;
  const std::size_t workers =
      std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), most);
  if (workers <= 1) {
    if (count > 0) body(std::size_t{0}, count);
    return;
  }
  const std::size_t share = (count + workers - 1) / workers;
  std::vector<std::thread> pool;
  pool.reserve(workers - 1);
  for (std::size_t w = 1; w < workers; ++w) {
    const std::size_t begin = std::min(count, w * share);
    const std::size_t end = std::min(count, begin + share);
    try {
      pool.emplace_back([&body, begin, end] { body(begin, end); });
    } catch (const std::system_error&) {
      body(begin, end);
    }
  }
  body(std::size_t{0}, std::min(count, share));
  for (std::thread& worker : pool) worker.join();
}

}  // namespace phaze
