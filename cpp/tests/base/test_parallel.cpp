#include <atomic>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "phaze/parallel.hpp"

namespace {

void each_index_once() {
  for (const std::size_t count : {0UL, 1UL, 2UL, 7UL, 1000UL}) {
    for (const int threads : {-1, 0, 1, 2, 3, 16}) {
      for (const std::size_t grain : {0UL, 1UL, 3UL, 5000UL}) {
        std::vector<std::atomic<int>> seen(count);
        phaze::parallel_for(count, threads, grain, [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) seen[i].fetch_add(1);
        });
        for (const auto& times : seen) CHECK(times.load() == 1);
      }
    }
  }
}

// The exception of 70 indices, if the indices from `first` on run out of memory and those from
// `second` on fail otherwise.
std::string thrown_by(int threads, std::size_t first, std::size_t second, std::atomic<int>* seen) {
  try {
    phaze::parallel_for(70, threads, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        seen->fetch_add(1);
        if (i >= second) throw std::runtime_error("broken at " + std::to_string(i));
        if (i >= first) throw std::bad_alloc();
      }
    });
  } catch (const std::bad_alloc&) {
    return "no memory";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

void the_lowest_range_is_heard() {
  std::atomic<int> seen = 0;
  for (const int threads : {1, 2, 7}) {
    for (int again = 0; again < 50; ++again) {
      CHECK(thrown_by(threads, 70, 70, &seen) == "nothing");
      CHECK(thrown_by(threads, 0, 35, &seen) == "no memory");
      CHECK(thrown_by(threads, 35, 60, &seen) == "no memory");
      CHECK(thrown_by(threads, 69, 70, &seen) == "no memory");
      CHECK(thrown_by(threads, 70, 0, &seen) == "broken at 0");
      CHECK(thrown_by(threads, 70, 69, &seen) == "broken at 69");
    }
  }
  CHECK(thrown_by(7, 70, 15, &seen) == "broken at 15");  // and 20, 30, ... are not
}

// A range that throws ends there; the others run to their end.
void other_shares_are_done() {
  for (const int threads : {2, 7}) {
    std::atomic<int> seen = 0;
    CHECK(thrown_by(threads, 70, 69, &seen) == "broken at 69");
    CHECK(seen == 70);
    seen = 0;
    CHECK(thrown_by(threads, 70, 70 - 70 / threads, &seen) != "nothing");
    CHECK(seen == 70 - 70 / threads + 1);
  }
}

}  // namespace

int main() {
  each_index_once();
  the_lowest_range_is_heard();
  other_shares_are_done();
  return phaze::test::report("parallel");
}
