// Searches that Ctrl-C interrupts.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "arrays.hpp"
#include "phaze/layer_schedule.hpp"

namespace phaze::bindings {

// Ctrl-C is noticed while kernels run without the GIL: the calling thread polls for signals at most
// every 50 ms and sets a flag for the others.
struct Signals {
  std::thread::id caller = std::this_thread::get_id();
  std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
  std::atomic<bool> raised = false;
};

inline bool interrupted(void* context) {
  auto* signals = static_cast<Signals*>(context);
  if (signals->raised) return true;
  if (std::this_thread::get_id() != signals->caller) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now - signals->last < std::chrono::milliseconds(50)) return false;
  signals->last = now;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) signals->raised = true;
  return signals->raised;
}

// Calls solve(limits, threads) without the GIL; Ctrl-C interrupts it.
template <typename Solve>
void interruptible(std::int64_t max_nodes, double max_seconds, int threads, const Solve& solve) {
  if (max_nodes < 0) throw InvalidInput("max_nodes: a negative number is not accepted");
  if (!(max_seconds >= 0.0)) {
    throw InvalidInput("max_seconds: expected a number of seconds, zero or more");
  }
  const int workers = checked_threads(threads);
  Signals signals;
  const SearchLimits limits{max_nodes, max_seconds, &interrupted, &signals};
  {
    const py::gil_scoped_release release;
    solve(limits, workers);
  }
  if (signals.raised) throw py::error_already_set();
}

}  // namespace phaze::bindings
