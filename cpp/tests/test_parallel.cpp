#include <atomic>
#include <cstddef>
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

}  // namespace

int main() {
  each_index_once();
  return phaze::test::report("parallel");
}
