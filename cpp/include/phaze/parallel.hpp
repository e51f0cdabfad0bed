// Static partition of an index range over threads. Each index is computed by exactly one thread
// and writes only its own output, so results are bit-identical for any thread count.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace phaze {

// Calls body(begin, end) on disjoint ranges that cover [0, count). At most `threads` threads run,
// and none is started for fewer than `grain` indices. If the system refuses a thread, the calling
// thread computes that range itself.
//
// A body may throw. Every other range still runs to its end; then the exception of the lowest range
// is thrown on the calling thread, regardless of the order in time. Throws std::bad_alloc if there
// is no memory for the list of ranges.
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
  std::vector<std::exception_ptr> thrown(workers);
  const auto run = [&](std::size_t worker) noexcept {
    // The first exception of a thread allocates per-thread data of the C++ runtime, which aborts if
    // there is no memory. This call triggers that allocation now, while there is memory.
    static_cast<void>(std::current_exception());
    const std::size_t begin = std::min(count, worker * share);
    try {
      body(begin, std::min(count, begin + share));
    } catch (...) {
      thrown[worker] = std::current_exception();
    }
  };
  std::vector<std::thread> pool;
  pool.reserve(workers - 1);
  for (std::size_t worker = 1; worker < workers; ++worker) {
    bool started = false;
    try {
      pool.emplace_back(run, worker);
      started = true;
    } catch (const std::system_error&) {  // no thread
    } catch (const std::bad_alloc&) {     // no memory for one
    }
    if (!started) run(worker);
  }
  run(0);
  for (std::thread& thread : pool) thread.join();
  for (const std::exception_ptr& error : thrown) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace phaze
